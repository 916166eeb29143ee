"""The slot life where envs misbehave: what they raise and return never becomes silence or wrong data."""

from __future__ import annotations

import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Counting, Waiting
from envfleet.errors import EnvFailed, FaultError
from envfleet.slots.layout import FAULT
from envfleet.testing import record
from tests.support.ways import WAYS, starter

EVERY = pytest.mark.parametrize("way", WAYS)


class Odd(BaseException):
    """Not an Exception."""


class Raises(Counting):
    """Raises `error` in the given phase, in step at the third."""

    def __init__(self, phase: str, error: Any) -> None:
        super().__init__(limit=10)
        self.phase, self.error = phase, error
        if phase == "init":
            raise error

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.phase == "reset":
            raise self.error
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        result = super().step(action)
        if self.phase == "step" and self.count == 3:
            raise self.error
        return result

    def look(self) -> Any:
        raise self.error


ERRORS = [StopIteration("out of data"), Odd("odd"), SystemExit(3), GeneratorExit()]


@EVERY
@pytest.mark.parametrize("phase", ["init", "reset", "step", "call"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_is_raised_is_a_fault(way: str, phase: str, error: Any) -> None:
    """Invariant 4. StopIteration (an env whose dataset ran out) must not pass for a finished step."""
    with pytest.raises(FaultError) as raised:
        with starter(way)([Counting, lambda: Raises(phase, error)], num_workers=2) as fleet:
            fleet.reset(seed=0)
            for step in range(3):
                assert fleet.step([0, 0]).obs[:, 0].tolist() == [step + 1.0] * 2
            fleet.call("look", slots=[1])
    assert raised.value.slot == 1 and raised.value.phase == phase
    assert type(error).__name__ in str(raised.value)


class Multiline(Counting):
    def step(self, action: Any) -> Any:
        error = ValueError("first line\nsecond line")
        error.add_note("a note")
        raise error


def test_the_cause_begins_with_the_exceptions_type() -> None:
    with pytest.raises(EnvFailed) as raised, ef.make(Multiline, 1, backend="serial") as fleet:
        fleet.reset()
        fleet.step([0])
    assert raised.value.fault.cause.startswith("ValueError: first line")


class BadReturn(Counting):
    """Returns something wrong at its third step."""

    def __init__(self, what: str) -> None:
        super().__init__(limit=10)
        self.what = what

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.count != 3:
            return obs, reward, terminated, truncated, {"mask": np.zeros(2, np.int8)}
        return {
            "shape": (np.zeros(2), reward, terminated, truncated, info),
            "dtype": (np.array([1j]), reward, terminated, truncated, info),
            "reward": (obs, "many", terminated, truncated, info),
            "info": (obs, reward, terminated, truncated, None),
            "short": (obs, reward, terminated, info),
            "column": (obs, reward, terminated, truncated, {"mask": np.zeros(5, np.int8)}),
            "unpicklable": (obs, reward, terminated, truncated, {"lock": threading.Lock()}),
        }[self.what]


@EVERY
@pytest.mark.parametrize("what", ["shape", "dtype", "reward", "info", "short", "column", "unpicklable"])
def test_a_bad_result_leaves_the_last_good_row(way: str, what: str) -> None:
    """The fault row's final_obs is the last good observation, whatever part of the result was bad."""
    if what == "unpicklable" and way not in ("pipe", "shm"):
        pytest.skip("nothing is pickled here")
    columns = {"mask": gym.spaces.MultiBinary(2)}
    with starter(way)(lambda: BadReturn(what), 2, 1, on_fault="restart", columns=columns) as fleet:
        fleet.reset(seed=0)
        fleet.step([0, 0])
        fleet.step([0, 0])
        batch = fleet.step([0, 0])
        assert batch.status.tolist() == [FAULT, FAULT] and not batch.scored.any()
        assert batch.final_obs[:, 0].tolist() == [2.0, 2.0] and batch.length.tolist() == [2, 2]
        assert batch.obs[:, 0].tolist() == [0.0, 0.0] and batch.ep_return.tolist() == [2.0, 2.0]
        assert fleet.step([0, 0]).obs[:, 0].tolist() == [1.0, 1.0]


class AsyncCounting:
    """`async def` reset and step, without being a Gymnasium env."""

    def __init__(self) -> None:
        self.inner = Counting(limit=3)
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space

    async def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.inner.reset(seed=seed, options=options)

    async def step(self, action: Any) -> Any:
        return self.inner.step(action)

    async def close(self) -> None:
        self.inner.close()


def test_async_envs_run_on_aio_and_are_refused_elsewhere_with_advice() -> None:
    with ef.make(AsyncCounting, 50, backend="aio") as fleet:
        fleet.reset(seed=0)
        assert [fleet.step([0] * 50).obs[7, 0] for _ in range(4)] == [1.0, 2.0, 0.0, 1.0]
    for way in ("serial", "thread", "pipe"):
        with pytest.raises(EnvFailed, match='run this env with backend="aio"'):
            with starter(way)(AsyncCounting, 1, 1) as fleet:
                fleet.reset()


class Slow(Counting):
    """2 ms a step, 4 ms a reset; every second reward is not plain, which the compiled life leaves to Python."""

    def __init__(self) -> None:
        super().__init__(limit=5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        time.sleep(0.004)
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        time.sleep(0.002)
        obs, reward, *rest = super().step(action)
        return obs, np.array(reward) if self.count % 2 else reward, *rest


@EVERY
@pytest.mark.parametrize("compiled", ["1", "0"])
def test_every_row_tells_how_long_its_env_worked(way: str, compiled: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    with starter(way)([Slow, Counting], num_workers=2) as fleet:
        first = fleet.reset(seed=0)._field("step_ns")
        busy = fleet.slab.busy_ns.copy()
        assert first[0] >= 4_000_000 and first[1] > 0 and busy.tolist() == first.tolist()
        ends = 0
        for _ in range(12):
            batch = fleet.step([0, 0])
            took = batch._field("step_ns")
            ends += int(batch.ended[0])
            assert took[0] >= 2_000_000 + 4_000_000 * batch.ended[0] and took[1] > 0
            busy += took
            assert fleet.slab.busy_ns.tolist() == busy.tolist()
        assert ends == 2


def test_measurements_are_not_data() -> None:
    """Two fleets that differ in nothing but their speed make the same stream."""

    def digest(env: Any) -> str:
        with ef.make(env, 2, backend="serial") as fleet:
            return record(fleet, num_steps=8, seed=1).digest()

    assert digest(lambda: Waiting(step_s=0.0, limit=5)) == digest(lambda: Waiting(step_s=0.001, limit=5))
