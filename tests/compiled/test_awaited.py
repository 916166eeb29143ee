"""Envs with `async def` reset and step: the same bytes as their ordinary twins on `serial`, compiled life or not."""

from __future__ import annotations

import asyncio
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Counting, Mixed, Tasked
from envfleet.slots import compiled_core
from envfleet.testing import record, wait_until
from tests.support.odd_results import ACCEPTED, REFUSED, Odd

LIVES = pytest.mark.parametrize(
    "compiled",
    [
        pytest.param("1", id="compiled", marks=pytest.mark.skipif(compiled_core.load() is None, reason=compiled_core.status())),
        pytest.param("0", id="python"),
    ],
)


class Awaited:
    """An ordinary env behind coroutines that really wait, some longer than others."""

    def __init__(self, make: Any) -> None:
        self.inner = make()
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space
        self.turn = 0

    async def _pause(self) -> None:
        self.turn += 1
        await asyncio.sleep(0.0003 * (self.turn % 3))

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        await self._pause()
        return self.inner.reset(seed=seed, options=options)

    async def step(self, action: Any) -> Any:
        await self._pause()
        return self.inner.step(action)

    async def close(self) -> None:
        self.inner.close()


class Telling(Counting):
    """Says something on some steps only, also on its last."""

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return *rest, {"count": self.count} if self.count in (2, 4) else info


def digest(backend: str, make: Any, steps: int = 8, ahead: dict[str, Any] | None = None) -> str:
    """What three slots give in so many steps, as one hash."""
    with ef.make(make, 3, backend=backend) as fleet:
        if ahead:
            fleet.assign(range(3), **ahead)
        return record(fleet, steps, seed=3).digest()


ENVS = {
    "plain": lambda: Counting(7),
    "reused": lambda: Counting(7, reuse=True),
    "infos": lambda: Telling(4),
    "registered": lambda: gym.make("CartPole-v1"),
    "box actions": lambda: gym.make("Pendulum-v1", max_episode_steps=20),
    "integers": lambda: gym.make("FrozenLake-v1"),
    "nested spaces": Mixed,
}


@LIVES
@pytest.mark.parametrize("on_end", ["reset", "wait"])
@pytest.mark.parametrize("name", ENVS)
def test_awaited_envs_write_the_bytes_of_ordinary_ones(name: str, on_end: str, compiled: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    with ef.make(ENVS[name], 3, backend="serial", on_end=on_end) as fleet:
        expected = record(fleet, 60, seed=3).digest()
    for at_least in (None, 1):
        with ef.make(lambda: Awaited(ENVS[name]), 3, backend="aio", on_end=on_end) as fleet:
            assert record(fleet, 60, seed=3, at_least=at_least).digest() == expected, at_least


@LIVES
def test_tasks_and_seeds_reach_awaited_resets(compiled: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    ahead: dict[str, Any] = {"tasks": [1, 2, None], "seeds": [7, None, 9]}
    assert digest("aio", lambda: Awaited(Tasked), 40, ahead) == digest("serial", Tasked, 40, ahead)


@LIVES
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_is_accepted_when_awaited(name: str, compiled: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    make = lambda: Odd(ACCEPTED[name])
    assert digest("aio", lambda: Awaited(make)) == digest("serial", make)


@LIVES
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_when_awaited(name: str, compiled: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    change, words = REFUSED[name]
    with ef.make(
        [lambda: Awaited(lambda: Odd(change)), lambda: Awaited(lambda: Counting(100))], backend="aio", on_fault="raise"
    ) as fleet:
        fleet.reset(seed=0)
        for _ in range(4):
            fleet.step([0, 0])
        with pytest.raises(ef.EnvFailed) as caught:
            fleet.step([0, 0])
        assert caught.value.slot == 0 and words in str(caught.value)
        assert fleet.recv().obs[:, 0].tolist() == [5.0]  # the other slot's row is there


class Falls(Awaited):
    """Raises, or cancels itself, at a step of its choice; once per process."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__(lambda: Counting(6))
        self.error = error

    async def step(self, action: Any) -> Any:
        if self.inner.count == 3 and not fallen:
            fallen.append(self)
            raise self.error("down")
        return await super().step(action)


fallen: list[Any] = []


@LIVES
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, asyncio.CancelledError, SystemExit, StopAsyncIteration])
def test_whatever_an_awaited_step_raises_is_a_fault_of_its_slot(
    error: type[BaseException], compiled: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    fallen.clear()
    makes = [lambda: Falls(error), lambda: Awaited(lambda: Counting(6))]
    with ef.make(makes, backend="aio", on_fault="restart") as fleet:
        fleet.reset(seed=0)
        rows = [fleet.step([0, 0]) for _ in range(20)]
        assert [fault.slot for fault in fleet.faults] == [0]
        assert fleet.faults[0].phase == "step" and error.__name__ in fleet.faults[0].cause + fleet.faults[0].traceback
        assert sum(int(row.faulted[0]) for row in rows) == 1
        assert [row.obs[1, 0] for row in rows[:7]] == [1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 1.0]
        assert rows[-1].obs[0, 0] > 0


class Hangs(Awaited):
    """Never returns from its third step, and does not mind being cancelled: it waits once more."""

    async def step(self, action: Any) -> Any:
        if self.inner.count == 2:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)
                late.append(self)
        return await super().step(action)


late: list[Any] = []


@LIVES
def test_what_a_given_up_step_returns_later_is_not_written(compiled: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    late.clear()
    makes = [lambda: Hangs(Counting), lambda: Awaited(lambda: Counting(100))]
    with ef.make(makes, backend="aio", on_fault="restart", step_timeout_s=0.3) as fleet:
        fleet.reset(seed=0)
        for _ in range(3):
            batch = fleet.step([0, 0])
        assert fleet.quarantined.tolist() == [0] and bool(batch.faulted[0])
        fleet.step([0, 0])  # its first row told of the cut; from here on there is nothing to tell
        head = fleet.slab.head[0].copy()
        assert wait_until(lambda: bool(late))
        for _ in range(10):
            batch = fleet.step([0, 0])
        assert batch.obs[1, 0] == 14.0
        assert fleet.slab.head[0].tobytes() == head.tobytes()


@LIVES
def test_calls_between_steps_see_the_env_and_go_on(compiled: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    with ef.make(lambda: Awaited(lambda: Counting(9)), 4, backend="aio") as fleet:
        fleet.reset(seed=0)
        for step in range(1, 6):
            batch = fleet.step([0] * 4)
            assert batch.obs[:, 0].tolist() == [float(step)] * 4
            assert [env.count for env in fleet.get_attr("inner")] == [step] * 4
            busy = fleet.slab.busy_ns.copy()
        assert (busy > 0).all() and (batch._field("step_ns") > 0).all()


@LIVES
def test_closing_in_the_middle_of_awaited_steps_ends_them(compiled: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    fleet = ef.make(lambda: Awaited(Counting), 32, backend="aio")
    fleet.reset(seed=0)
    for _ in range(5):
        fleet.send(np.zeros(32, int))
        slots = fleet.recv(at_least=4).slots
        fleet.send(np.zeros(len(slots), int), slots)
        fleet.recv()
    fleet.send(np.zeros(32, int))
    thread = fleet._backend._thread
    fleet.close()
    assert not thread.is_alive()
