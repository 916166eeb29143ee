"""TorchRL's own checks on a fleet: every kind of space that TorchRL has a spec for, on several backends."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

import torchrl.collectors as collectors  # noqa: E402
from torchrl.envs.utils import check_env_specs  # noqa: E402

from envfleet.adapters.torchrl import FleetEnv  # noqa: E402
from envfleet.errors import BadArgument  # noqa: E402

Collector = getattr(collectors, "SyncDataCollector", None) or collectors.Collector  # the name changed in TorchRL 0.14

BOX = spaces.Box(-1, 1, (2,), np.float32)
NESTED = spaces.Dict(a=BOX, inner=spaces.Dict(bits=spaces.MultiBinary(3), pixels=spaces.Box(0, 255, (2, 2), np.uint8)))
OBSERVATIONS = {
    "box": BOX,
    "discrete": spaces.Discrete(5, start=2),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
    "multibinary": spaces.MultiBinary(4),
    "dict": NESTED,
    "tuple": spaces.Tuple([BOX, spaces.Discrete(2)]),
    "tuple in dict": spaces.Dict(both=spaces.Tuple([BOX, spaces.Discrete(2)])),
}
ACTIONS = {
    "box": BOX,
    "box without axes": spaces.Box(-1, 1, (), np.float32),
    "integer box": spaces.Box(0, 5, (3,), np.int32),
    "discrete": spaces.Discrete(3),
    "discrete from 5": spaces.Discrete(3, start=5),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
    "multidiscrete of two axes": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multidiscrete from 1": spaces.MultiDiscrete([2, 3], start=[1, 1]),
    "multibinary": spaces.MultiBinary(4),
    # Names that the observation has too.
    "dict": spaces.Dict(a=BOX, inner=spaces.Dict(bits=spaces.MultiBinary(3), turn=spaces.Discrete(3))),
    "tuple": spaces.Tuple([BOX, spaces.Discrete(2)]),
}


class Sampled(gym.Env):
    """Observations drawn from a space; an action outside the action space is an error."""

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        shaped = np.asarray(action, self.action_space.dtype) if self.action_space.shape == () else action
        assert self.action_space.contains(shaped), f"{action} is not in {self.action_space}"
        self.time += 1
        return self.observation_space.sample(), 1.0, False, self.time >= 4, {}


def env_of(observation, action, backend):
    return FleetEnv(lambda: Sampled(observation, action), num_envs=3, backend=backend)


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_check_env_specs_on_every_observation_space(name):
    env = env_of(OBSERVATIONS[name], BOX, "serial")
    env.set_seed(0)
    check_env_specs(env)
    env.close()


@pytest.mark.parametrize("name", ACTIONS)
def test_check_env_specs_on_every_action_space(name):
    env = env_of(NESTED, ACTIONS[name], "serial")
    env.set_seed(0)
    check_env_specs(env)
    assert env.rollout(9, break_when_any_done=False).shape == (3, 9)
    env.close()


@pytest.mark.parametrize("backend", ["thread", "pipe", "shm"])
@pytest.mark.parametrize("action", ["dict", "tuple"])
def test_check_env_specs_on_backends_with_workers(backend, action):
    env = env_of(OBSERVATIONS["tuple in dict"], ACTIONS[action], backend)
    env.set_seed(0)
    check_env_specs(env)
    env.close()


class Recorder(gym.Env):
    """Shows the action it was given."""

    action_space = spaces.Dict(steer=spaces.Box(-1, 1, (2,), np.float32), gear=spaces.Discrete(3, start=1))
    observation_space = spaces.Dict(steer=spaces.Box(-1, 1, (2,), np.float32), gear=spaces.Discrete(4))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"steer": np.zeros(2, np.float32), "gear": 0}, {}

    def step(self, action):
        return {"steer": action["steer"].copy(), "gear": int(action["gear"])}, 0.0, False, False, {}


@pytest.mark.parametrize("backend", ["serial", "shm"])
def test_each_part_of_a_dict_action_reaches_its_environment(backend):
    env = FleetEnv(Recorder, num_envs=2, backend=backend)
    assert set(env.action_keys) == {("action", "steer"), ("action", "gear")}
    rollout = env.rollout(5)
    np.testing.assert_array_equal(rollout["next", "steer"].numpy(), rollout["action", "steer"].numpy())
    np.testing.assert_array_equal(rollout["next", "gear"].numpy(), rollout["action", "gear"].numpy() + 1)
    env.close()


@pytest.mark.parametrize("backend", ["serial", "shm"])
def test_a_collector_runs_over_dict_actions_and_observations(backend):
    env = env_of(NESTED, ACTIONS["dict"], backend)
    collector = Collector(env, policy=None, frames_per_batch=30, total_frames=60)
    batches = [batch.clone() for batch in collector]
    assert [batch.numel() for batch in batches] == [30, 30]
    assert batches[0]["action", "inner", "bits"].shape == (3, 10, 3)
    assert batches[0]["next", "truncated"].sum() == 3 * 2  # episodes of 4 steps
    collector.shutdown()


def test_spaces_and_names_without_a_place_in_torchrl_are_refused():
    with pytest.raises(BadArgument, match="no spec for Text"):
        env_of(spaces.Dict(say=spaces.Text(5)), BOX, "serial")
    with pytest.raises(BadArgument, match=r"\['reward'\]"):
        env_of(spaces.Dict(reward=BOX), BOX, "serial")
