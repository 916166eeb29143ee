"""A fleet as a TorchRL environment."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

import torchrl.collectors as collectors  # noqa: E402
from torchrl.envs.utils import check_env_specs  # noqa: E402

import envfleet as ef  # noqa: E402
from envfleet.adapters.torchrl import FleetEnv  # noqa: E402
from envfleet.errors import BadArgument  # noqa: E402

Collector = getattr(collectors, "SyncDataCollector", None) or collectors.Collector  # the name changed in TorchRL 0.14


class Nested(gym.Env):
    observation_space = gym.spaces.Dict(
        position=gym.spaces.Box(-100, 100, (2,), np.float32), picture=gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)
    )
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.see(), {}

    def see(self):
        return {"position": np.full(2, self.time, np.float32), "picture": np.full((4, 4, 3), self.time, np.uint8)}

    def step(self, action):
        self.time += 1
        return self.see(), 1.0, False, self.time == 4, {}


@pytest.mark.parametrize(
    ("env", "backend"), [("CartPole-v1", "serial"), ("CartPole-v1", "shm"), ("Pendulum-v1", "serial"), (Nested, "serial")]
)
def test_specs_are_right(env, backend):
    fleet = FleetEnv(env, num_envs=3, backend=backend)
    fleet.set_seed(0)
    check_env_specs(fleet)
    fleet.close()


def test_rollout_resets_only_what_ended_and_keeps_the_last_observation():
    env = FleetEnv(Nested, num_envs=2, backend="serial")
    rollout = env.rollout(10, break_when_any_done=False)
    times = rollout["position"][..., 0]
    assert times[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert rollout["next", "position"][0, :, 0].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert rollout["next", "truncated"][0, :, 0].nonzero().ravel().tolist() == [3, 7]
    assert not rollout["next", "terminated"].any()
    env.close()


def test_same_data_as_the_fleet_itself():
    env = FleetEnv("CartPole-v1", num_envs=2, backend="serial")
    env.set_seed(5)
    rollout = env.rollout(30, break_when_any_done=False)
    with ef.make("CartPole-v1", 2, backend="serial", on_end="wait") as fleet:
        observation = fleet.reset(seed=5).obs
        for t in range(int(rollout["next", "done"].any(0).ravel().int().argmax())):
            np.testing.assert_array_equal(rollout["observation"][:, t].numpy(), observation)
            observation = fleet.step(rollout["action"][:, t].numpy()).obs
    env.close()


def test_a_torchrl_collector_gets_the_frames_it_asks_for():
    env = FleetEnv("CartPole-v1", num_envs=4, backend="serial")
    collector = Collector(env, policy=None, frames_per_batch=64, total_frames=128)
    batches = [batch.clone() for batch in collector]
    assert [batch.numel() for batch in batches] == [64, 64]
    collector.shutdown()


def test_a_fleet_that_resets_by_itself_is_refused():
    with ef.make("CartPole-v1", 2, backend="serial") as fleet, pytest.raises(BadArgument, match='on_end="wait"'):
        FleetEnv(fleet)
