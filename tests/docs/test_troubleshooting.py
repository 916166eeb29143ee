"""The texts of docs/troubleshooting.md are what users really see: each is provoked here."""

from __future__ import annotations

import threading
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Counting, Faulty, Waiting
from envfleet.rollout import FragmentCollector
from envfleet.tasks import TaskSource

PAGE = (Path(__file__).parents[2] / "docs/troubleshooting.md").read_text()
LOCK = threading.Lock()
capturing = lambda: (LOCK, Counting())[1]


class ThreeActions(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = gym.spaces.Discrete(3)


class WrongShape(Counting):
    def reset(self, **kwargs):
        return np.zeros(3), {}


class AsyncStep(Counting):
    async def step(self, action):
        return super().step(action)


class SlowInit(Counting):
    def __init__(self) -> None:
        super().__init__()
        threading.Event().wait(2)


def stepped(first, second=Counting, actions=(0, 0), **options):
    """Two slots, reset and stepped once."""
    with ef.make([first, second], **{"backend": "serial", **options}) as fleet:
        fleet.reset(seed=0)
        fleet.step(list(actions))


def faulty(*fault, **options):
    stepped(Counting, lambda: Faulty(*fault), backend="shm", num_workers=2, **options)


def sent_twice():
    with ef.make(Counting, 2, backend="serial") as fleet:
        fleet.reset()
        fleet.send([0, 0])
        fleet.send([0, 0])


def never_reset():
    with ef.make(Counting, 2, backend="serial") as fleet:
        fleet.step([0, 0])


def used_after_close():
    fleet = ef.make(Counting, 2, backend="serial")
    fleet.close()
    fleet.reset()


def received_too_early():
    with ef.make(lambda: Waiting(0.5), 2, backend="thread") as fleet:
        fleet.reset()
        fleet.send([0, 0])
        fleet.recv(timeout_s=0.05)


def joined_and_used():
    given = [ef.make(Counting, 2, backend="serial")]
    with ef.join(given):
        given[0].reset()


def joined_busy():
    with ef.make(Counting, 2, backend="serial") as idle, ef.make(Counting, 2, backend="serial") as fleet:
        fleet.reset()
        fleet.send([0, 0])
        ef.join([idle, fleet])


def joined_unequal():
    with ef.make(Counting, backend="serial") as one, ef.make(Counting, backend="thread", on_fault="restart") as other:
        ef.join([one, other])


def extra_missing():
    raise ef.MissingExtra("tianshou", extra="tianshou")


CASES = {
    "captured": lambda: ef.make(capturing, 2, backend="shm"),
    "object": lambda: ef.make(Counting(), 2),
    "kwargs": lambda: ef.make(Counting, 2, env_kwargs={"limit": 3}),
    "spaces": lambda: ef.make([Counting, ThreeActions], backend="serial"),
    "curriculum": lambda: FragmentCollector(Counting, random_actions=True, tasks=TaskSource([1, 2])),
    "deadline": lambda: FragmentCollector(Counting, random_actions=True, step_timeout_s=1.0),
    "choices": lambda: ef.make(Counting, 2, backend="dask"),
    "init": lambda: ef.make([Counting, lambda: Faulty("init", "raise")], backend="serial"),
    "slow init": lambda: ef.make(SlowInit, 1, backend="thread", init_timeout_s=0.2),
    "missing": extra_missing,
    "reset needed": never_reset,
    "busy": sent_twice,
    "count": lambda: stepped(Counting, actions=[0]),
    "dtype": lambda: stepped(Counting, actions=["left", "right"]),
    "recv": received_too_early,
    "closed": used_after_close,
    "joined": joined_and_used,
    "joined busy": joined_busy,
    "joined unequal": joined_unequal,
    "length": lambda: stepped(lambda: Faulty("step", "bad", 1)),
    "shape": lambda: stepped(WrongShape),
    "async": lambda: stepped(AsyncStep),
    "unpicklable": lambda: faulty("step", "unpicklable", 1),
    "raised": lambda: faulty("step", "raise", 1),
    "exit": lambda: faulty("step", "exit", 1),
    "killed": lambda: faulty("step", "kill", 1),
    "timeout": lambda: faulty("step", "hang", 1, step_timeout_s=0.3),
}


@pytest.mark.parametrize("name", CASES)
def test_the_page_has_the_text_users_see(name):
    with pytest.raises(ef.FleetError) as caught:
        CASES[name]()
    said = str(caught.value).splitlines()[0]
    # The address of a fault differs from case to case; the page gives one example, and each cause.
    text = caught.value.fault.cause if isinstance(caught.value, ef.FaultError) else said
    assert f"`{text}`" in PAGE or f": {text}`" in PAGE, said


def test_the_page_has_the_address_of_a_fault_and_the_text_of_a_sharer():
    with pytest.raises(ef.EnvFailed) as caught:
        faulty("step", "raise", 1)
    assert str(caught.value).partition("RuntimeError")[0] in PAGE
    envs = [lambda: Faulty("step", "exit", 1), Counting]
    with ef.make(envs, num_workers=1, backend="shm", on_fault="restart") as fleet:
        fleet.reset(seed=0)
        fleet.step([0, 0])
        assert f"`{fleet.faults[1].cause}`" in PAGE, fleet.faults[1].cause
