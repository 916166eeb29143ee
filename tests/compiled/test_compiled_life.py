"""The compiled life against its Python twin: byte-equal on every result an env may return, good or bad."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

import envfleet as ef
from envfleet.envs.probe import Counting, Mixed, Tasked
from envfleet.slots import compiled_core
from envfleet.testing import record
from tests.support.odd_results import ACCEPTED, REFUSED, Odd

pytestmark = pytest.mark.skipif(compiled_core.load() is None, reason=f"compiled core: {compiled_core.status()}")


@pytest.fixture(params=["1", "0"], ids=["compiled", "python"])
def life(request: Any, monkeypatch: Any) -> str:
    monkeypatch.setenv("ENVFLEET_COMPILED", request.param)
    return str(request.param)


def both(monkeypatch: Any, run: Any) -> tuple[Any, Any]:
    out = []
    for value in ("1", "0"):
        monkeypatch.setenv("ENVFLEET_COMPILED", value)
        out.append(run())
    return out[0], out[1]


class Limited(gym.Wrapper[Any, Any, Any, Any]):
    """A wrapper of the user's own: never absorbed."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward * 2, terminated, truncated, {**info, "seen": True}


ENVS = {
    "plain": lambda: Counting(7),
    "reused": lambda: Counting(7, reuse=True),
    "registered": lambda: gym.make("CartPole-v1"),
    "time limit": lambda: TimeLimit(Counting(100), 5),
    "two limits": lambda: TimeLimit(TimeLimit(Counting(100), 9), 5),
    "all three": lambda: TimeLimit(OrderEnforcing(PassiveEnvChecker(Counting(100))), 6),
    "own wrapper outside": lambda: Limited(TimeLimit(Counting(100), 6)),
    "own wrapper inside": lambda: TimeLimit(OrderEnforcing(Limited(Counting(100))), 6),
    "nested spaces": Mixed,
    "tasks": Tasked,
    "integers": lambda: gym.make("FrozenLake-v1"),
    "box actions": lambda: gym.make("Pendulum-v1"),
}


@pytest.mark.parametrize("on_end", ["reset", "wait"])
@pytest.mark.parametrize("name", ENVS)
def test_the_twins_write_the_same_bytes(name: str, on_end: str, monkeypatch: Any) -> None:
    def run() -> Any:
        with ef.make(ENVS[name], 3, backend="serial", on_end=on_end) as fleet:
            fleet.assign(range(3), tasks=[1, 2, None] if name == "tasks" else None)
            return record(fleet, 120, seed=3).digest()

    compiled, python = both(monkeypatch, run)
    assert compiled == python


def test_absorbed_wrappers_count_as_if_they_had_been_called(life: str) -> None:
    make = lambda: TimeLimit(OrderEnforcing(PassiveEnvChecker(Counting(100))), 6)
    with ef.make(make, 2, backend="serial") as fleet:
        fleet.reset(seed=0)
        for step in range(1, 16):
            batch = fleet.step([0, 0], copy=True)
            assert fleet.get_attr("_elapsed_steps") == (step % 6, step % 6)
            assert batch.truncated.tolist() == [step % 6 == 0] * 2
        fleet.set_attr("_max_episode_steps", 3)
        fleet.reset()
        ends = [bool(fleet.step([0, 0]).truncated[0]) for _ in range(6)]
        assert ends == [False, False, True, False, False, True]


def test_the_checker_still_checks(life: str) -> None:
    class Careless(Counting):
        def step(self, action: Any) -> Any:
            return (*super().step(action)[:2], 0, 0, {})  # flags that are no bools: Gymnasium's checker says so, once

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with ef.make(lambda: PassiveEnvChecker(Careless()), 1, backend="serial") as fleet:
            fleet.reset(seed=0)
            for _ in range(4):
                fleet.step([0])
    assert len([w for w in seen if "terminated" in str(w.message)]) == 1, [str(w.message) for w in seen]


@pytest.mark.parametrize("backend", ["serial", "shm"])
@pytest.mark.parametrize("name", ACCEPTED)
def test_what_gymnasium_accepts_is_accepted(name: str, backend: str, monkeypatch: Any) -> None:
    options: dict[str, Any] = {"num_workers": 1, "start_method": "fork"} if backend == "shm" else {}

    def run() -> Any:
        with ef.make(lambda: Odd(ACCEPTED[name]), 2, backend=backend, **options) as fleet:
            return record(fleet, 12, seed=0).digest()

    compiled, python = both(monkeypatch, run)
    assert compiled == python


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_a_fault_that_says_what_was_wrong(name: str, life: str) -> None:
    change, words = REFUSED[name]
    with ef.make([lambda: Counting(100), lambda: Odd(change)], backend="serial") as fleet:
        fleet.reset(seed=0)
        with pytest.raises(ef.EnvFailed) as caught:
            for _ in range(6):
                fleet.step([0, 0])
        assert words in str(caught.value)
        assert (caught.value.slot, caught.value.phase, caught.value.step) == (1, "step", 4)
        assert fleet.reset(seed=1).status.tolist() == [0, 0]


def test_a_reset_that_returns_nonsense_is_a_fault_of_reset(life: str) -> None:
    class BadReset(Counting):
        def __init__(self) -> None:
            super().__init__(limit=3)
            self.resets = 0

        def reset(self, **kwargs: Any) -> Any:
            self.resets += 1
            return super().reset(**kwargs) if self.resets < 3 else 7

    with ef.make(BadReset, 1, backend="serial") as fleet:
        fleet.reset(seed=0)
        with pytest.raises(ef.EnvFailed, match=r"reset\(\) returned int, not \(obs, info\)") as caught:
            for _ in range(7):
                fleet.step([0])
        assert caught.value.phase == "reset"


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.float16, np.float32, np.float64, np.bool_])
def test_observations_of_every_dtype(dtype: Any, monkeypatch: Any) -> None:
    class Typed(Counting):
        def __init__(self) -> None:
            super().__init__(limit=4)
            high = 1 if dtype in (np.bool_,) else 100
            self.observation_space = spaces.Box(0, high, (2, 3), dtype)

        def _obs(self) -> Any:
            return np.full((2, 3), self.count % 2).astype(dtype)

    def run() -> Any:
        with ef.make(Typed, 2, backend="serial") as fleet:
            return record(fleet, 20, seed=0).digest()

    compiled, python = both(monkeypatch, run)
    assert compiled == python


def test_an_env_that_interrupts_lets_the_interrupt_through(life: str) -> None:
    class Interrupting(Counting):
        def step(self, action: Any) -> Any:
            if self.count == 3:
                raise KeyboardInterrupt
            return super().step(action)

    with ef.make(Interrupting, 2, backend="serial") as fleet:
        fleet.reset(seed=0)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(5):
                fleet.step([0, 0])
        assert fleet.reset(seed=0).obs.ravel().tolist() == [0.0, 0.0]
        assert fleet.step([0, 0]).reward.tolist() == [1.0, 1.0]
