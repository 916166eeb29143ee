"""A reset in two halves: begun here, received when it is wanted."""

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.backends.worker_handle import WorkerHandle
from envfleet.errors import BadArgument, SlotBusy
from envfleet.testing.conformance import Start
from envfleet.workers.shared_memory import Pulse
from tests.support.ways import WAYS


class Told(gym.Env):
    """Says which option it was reset with."""

    observation_space = gym.spaces.Discrete(100)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return (options or {}).get("say", 0), {}

    def step(self, action):
        return 0, 0.0, False, False, {}


@pytest.mark.parametrize("way", ["serial", "thread", "aio", "pipe", "shm"])
def test_it_gives_what_reset_gives(way):
    backend, options = WAYS[way]
    with Start(backend, **options)("CartPole-v1", 4) as fleet:
        whole = fleet.reset(seed=3)
        fleet.send_reset(seed=3, slots=[0, 2])
        with pytest.raises(SlotBusy):
            fleet.send_reset(slots=[2, 3])
        halves = fleet.recv()
        assert halves.slots.tolist() == [0, 2]
        assert np.array_equal(halves.obs, whole.obs[[0, 2]])
        fleet.send_reset([7, None], slots=[3, 1])
        assert fleet.recv([1, 3]).seed.tolist()[1] == 7


def test_options_for_each_slot():
    with ef.make(Told, num_envs=4, backend="serial") as fleet:
        assert fleet.reset(options={"say": 9}).obs.tolist() == [9, 9, 9, 9]
        fleet.send_reset(slots=[3, 0], options=[{"say": 5}, None])
        assert fleet.recv().obs.tolist() == [0, 5]
        with pytest.raises(BadArgument, match="options"):
            fleet.send_reset(options=[{}])


def test_all_slots_of_an_ordinary_fleet_can_run():
    with ef.make("CartPole-v1", num_envs=3, backend="serial") as fleet:
        assert fleet.runnable().tolist() == [0, 1, 2]


def test_who_is_to_blame_for_a_lost_process():
    pulses = Pulse.local(3)
    handle = WorkerHandle(0, [4, 5, 6], pulses, None)
    assert handle.last_seen() == (-1, "idle") and handle.doing()[0] == -1
    pulses[1].enter(5, "step")
    assert handle.last_seen() == (5, "step")
    pulses[2].enter(6, "step")
    assert handle.last_seen() == (-1, "step"), "two were in a call: nobody knows which"
    assert handle.doing()[:2] == (5, "step"), "the one that has taken longest"
    handle.rest()
    assert handle.last_seen() == (-1, "idle")
