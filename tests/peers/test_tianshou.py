"""A fleet as a Tianshou vector environment. Where Tianshou is not installed, the interface alone is tested."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import envfleet as ef
from envfleet.errors import BadArgument, FleetClosed, FleetError, SlotBusy

HAS_TIANSHOU = importlib.util.find_spec("tianshou") is not None
needs_tianshou = pytest.mark.skipif(not HAS_TIANSHOU, reason="tianshou is not installed: pip install 'envfleet[tianshou]'")


class Corridor(gym.Env):
    """Walk to the right `size` times; observations are numbers or a dict."""

    action_space = spaces.Discrete(2)

    def __init__(self, size=4, nested=False):
        self.size, self.nested = size, nested
        place = spaces.Box(0, 100, (1,), np.float32)
        self.observation_space = spaces.Dict(place=place, noise=spaces.Box(0, 1, (2,), np.float64)) if nested else place

    def see(self):
        place = np.array([self.place], np.float32)
        return {"place": place, "noise": self.np_random.random(2)} if self.nested else place

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = (options or {}).get("place", 0)
        return self.see(), {"began": self.place}

    def step(self, action):
        assert self.place < self.size, "stepped after the end"
        self.place = max(0, self.place + (1 if action else -1))
        return self.see(), float(action), self.place == self.size, False, {"place": self.place}


@pytest.fixture
def FleetVectorEnv(monkeypatch):
    """The class; above a stand-in for Tianshou's base class if Tianshou is missing."""
    if not HAS_TIANSHOU:
        stand_in = types.ModuleType("tianshou.env")
        stand_in.BaseVectorEnv = type("BaseVectorEnv", (), {})
        monkeypatch.setitem(sys.modules, "tianshou", types.ModuleType("tianshou"))
        monkeypatch.setitem(sys.modules, "tianshou.env", stand_in)
        monkeypatch.delitem(sys.modules, "envfleet.adapters.tianshou", raising=False)
    module = importlib.import_module("envfleet.adapters.tianshou")
    if not HAS_TIANSHOU:
        monkeypatch.setitem(sys.modules, "envfleet.adapters.tianshou", module)  # so that it is removed afterwards
    return module.FleetVectorEnv


@pytest.mark.parametrize("backend", ["serial", "shm"])
def test_steps_and_resets_some_environments_in_the_order_given(FleetVectorEnv, backend):
    envs = FleetVectorEnv([lambda n=n: Corridor(n) for n in (2, 3, 4)], backend=backend)
    assert len(envs) == envs.env_num == 3 and not envs.is_async
    obs, info = envs.reset(options={"place": 1})
    assert obs.tolist() == [[1], [1], [1]] and [one["began"] for one in info] == [1, 1, 1]
    obs, reward, terminated, truncated, info = envs.step(np.array([1, 0]), id=[2, 0])
    assert obs.tolist() == [[2], [0]] and reward.tolist() == [1, 0]
    assert [one["env_id"] for one in info] == [2, 0] and [one["place"] for one in info] == [2, 0]
    obs, _, terminated, truncated, _ = envs.step(np.array([1, 1, 1]))
    assert obs.tolist() == [[1], [2], [3]] and not terminated.any() and not truncated.any()
    obs, _, terminated, _, _ = envs.step([1, 1, 1])
    assert terminated.tolist() == [True, True, True] and obs.tolist() == [[2], [3], [4]]  # the last ones, not the next
    obs, info = envs.reset([2, 0])
    assert obs.tolist() == [[0], [0]] and len(info) == 2
    envs.close()
    assert envs.is_closed
    with pytest.raises(FleetClosed):
        envs.step([1, 1, 1])


def test_dict_observations_are_arrays_of_dicts(FleetVectorEnv):
    envs = FleetVectorEnv(lambda: Corridor(nested=True), num_envs=2, backend="serial")
    obs, _ = envs.reset(seed=3)
    assert obs.dtype == object and obs.shape == (2,)
    np.testing.assert_array_equal(obs[0]["noise"], obs[1]["noise"])  # reset(seed=) gives all the same seed, as Tianshou does
    assert envs.seed(3) == [[3], [4]]
    obs = envs.step(np.array([1, 1]))[0]
    assert obs[0]["place"].tolist() == [1] and not np.array_equal(obs[0]["noise"], obs[1]["noise"])
    envs.close()


def test_an_interrupted_reset_is_not_taken_for_a_step(FleetVectorEnv):
    envs = FleetVectorEnv(Corridor, num_envs=2, wait_num=1, backend="serial")
    envs.reset()
    envs.fleet.send_reset()  # what a reset that was interrupted leaves behind
    with pytest.raises(SlotBusy, match="their reset was interrupted"):
        envs.step(None)
    assert envs.reset()[0].tolist() == [[0], [0]]
    envs.close()


class Slow(Corridor):
    """Waits in `step` until the file is there."""

    def __init__(self, path=None):
        super().__init__()
        self.path = path

    def step(self, action):
        while self.path is not None and not self.path.exists():
            pass
        return super().step(action)


@pytest.mark.parametrize("waits", [{"wait_num": 2}, {"timeout": 0.05}])
def test_asynchronous_steps_return_what_is_done(FleetVectorEnv, waits, tmp_path):
    go = tmp_path / "go"
    envs = FleetVectorEnv([Slow, lambda: Slow(go), Slow], **waits, backend="thread")
    assert envs.is_async
    envs.reset()
    seen = set()
    while seen != {0, 2}:
        *_, info = envs.step(np.ones(3, int) if not seen else None)
        seen |= {one["env_id"] for one in info}
    assert envs.waiting_id == [1] and envs.ready_id == [0, 2]
    with pytest.raises(SlotBusy):
        envs.step([1], id=[1])
    with pytest.raises(SlotBusy):
        envs.reset([1])
    go.touch()
    obs, *_, info = envs.step(None)
    assert obs.tolist() == [[1]] and info[0]["env_id"] == 1
    with pytest.raises(FleetError, match="nothing was sent"):
        envs.step(None)
    envs.step([1, 1, 1])
    assert envs.reset()[0].tolist() == [[0], [0], [0]]  # what still ran is waited for
    envs.close()


def test_attributes_of_the_environments(FleetVectorEnv):
    envs = FleetVectorEnv([lambda n=n: Corridor(n) for n in (5, 6, 7)], backend="serial")
    assert envs.get_env_attr("size") == [5, 6, 7] and envs.get_env_attr("size", 1) == [6]
    envs.set_env_attr("size", 9, [0, 2])
    assert envs.get_env_attr("size") == [9, 6, 9]
    assert envs.get_env_attr("action_space") == [spaces.Discrete(2)] * 3
    envs.seed(1)
    first = [space.sample() for _ in range(20) for space in envs.get_env_attr("action_space")]
    envs.seed(1)
    assert first == [space.sample() for _ in range(20) for space in envs.get_env_attr("action_space")]
    envs.close()


def test_a_fault_is_a_row_that_says_so(FleetVectorEnv):
    envs = FleetVectorEnv([Corridor, lambda: Failing()], backend="serial", on_fault="restart")
    envs.reset()
    _, reward, terminated, truncated, info = envs.step([1, 1])
    assert truncated.tolist() == [False, True] and not terminated.any()
    assert "envfleet.fault" not in info[0] and info[1]["envfleet.fault"] is True
    envs.close()


class Failing(Corridor):
    def step(self, action):
        raise RuntimeError("no more")


def test_what_cannot_work_is_refused(FleetVectorEnv):
    with pytest.raises(BadArgument, match="wait_num=3"):
        FleetVectorEnv(Corridor, 3, num_envs=2, backend="serial")
    with pytest.raises(BadArgument, match="timeout=0"):
        FleetVectorEnv(Corridor, timeout=0, num_envs=2, backend="serial")
    with ef.make(Corridor, 2, backend="serial") as fleet, pytest.raises(BadArgument, match='on_end="wait"'):
        FleetVectorEnv(fleet)
    envs = FleetVectorEnv(Corridor, num_envs=2, backend="serial")
    envs.reset()
    with pytest.raises(BadArgument, match="action=None"):
        envs.step(None)
    envs.close()


# -- Tianshou itself ----------------------------------------------------------------------------------------------


def to_the_right(space):
    from tianshou.algorithm.algorithm_base import Policy
    from tianshou.data import Batch

    class Right(Policy):
        def forward(self, batch, state=None, **kwargs):
            state = np.zeros((len(batch.obs), 1)) if state is None else state  # AsyncCollector needs policies with one
            return Batch(act=np.ones(len(batch.obs), int), state=state)

    return Right(action_space=space)


@needs_tianshou
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("backend", ["serial", "shm"])
def test_a_collector_collects_what_it_collects_from_tianshous_own_envs(FleetVectorEnv, backend, nested):
    from tianshou.data import Collector, VectorReplayBuffer
    from tianshou.env import DummyVectorEnv

    fns = [lambda n=n: Corridor(n, nested) for n in (2, 3, 5)]
    kept = []
    for envs in (DummyVectorEnv(fns), FleetVectorEnv(fns, backend=backend)):
        envs.seed(7)
        collector = Collector(to_the_right(envs.action_space[0]), envs, VectorReplayBuffer(300, 3))
        collector.reset()
        result = [collector.collect(n_step=30), collector.collect(n_episode=4)]
        batch, _ = collector.buffer.sample(0)
        obs = batch.obs.noise if nested else batch.obs
        following = batch.obs_next.place if nested else batch.obs_next
        kept.append((obs, following, batch.rew, batch.terminated, [one.n_collected_episodes for one in result]))
        envs.close()
    for theirs, ours in zip(*kept):
        np.testing.assert_array_equal(theirs, ours)


@needs_tianshou
@pytest.mark.parametrize("waits", [{"wait_num": 2}, {"wait_num": 1}, {"timeout": 0.01}])
def test_an_async_collector_runs_over_it(FleetVectorEnv, waits):
    from tianshou.data import AsyncCollector, VectorReplayBuffer

    envs = FleetVectorEnv([lambda n=n: Corridor(n) for n in (2, 3, 4, 5)], **waits, backend="shm", num_workers=2)
    collector = AsyncCollector(to_the_right(envs.action_space[0]), envs, VectorReplayBuffer(400, 4))
    collector.reset()
    assert collector.collect(n_episode=8).n_collected_episodes >= 8
    assert collector.collect(n_step=40).n_collected_steps >= 40
    collector.reset()  # with environments still stepping
    assert collector.collect(n_episode=4).n_collected_episodes >= 4
    batch, _ = collector.buffer.sample(0)
    # Every transition goes one to the right, and none goes over an end.
    np.testing.assert_array_equal(batch.obs_next, batch.obs + 1)
    envs.close()
