"""A last observation that the parent cannot read is one fault: the next env of the slot has nothing to do with it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest

import envfleet as ef
from envfleet.errors import EnvFailed
from envfleet.slots.layout import FAULT


def _explode() -> None:
    raise RuntimeError("cannot be unpickled here")


class Bomb:
    """Pickles well, and does not come back."""

    def __reduce__(self) -> Any:
        return _explode, ()


class LastWords(gym.Env[Any, Any]):
    """Its first episode ends with an observation that cannot be unpickled; later ones last."""

    observation_space = gym.spaces.Text(100)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return "begun", {}

    def step(self, action: int) -> Any:
        return (Bomb(), 0.0, True, False, {}) if action else ("on", 1.0, False, False, {})


@pytest.mark.parametrize("compiled", ["1", "0"])
@pytest.mark.parametrize("backend", ["pipe", "shm"])
def test_it_is_one_fault(backend: str, compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    with ef.make([LastWords] * 2, backend=backend, num_workers=1, on_fault="restart", max_restarts=2) as fleet:
        fleet.reset(seed=1)
        assert fleet.step([0, 1]).status.tolist() == [0, FAULT]
        for _ in range(3):
            batch = fleet.step([0, 0])
            assert batch.status.tolist() == [0, 0]
            assert list(batch.obs) == ["on", "on"]
        assert len(fleet.faults) == 1


@pytest.mark.parametrize("backend", ["pipe", "shm"])
def test_where_faults_are_raised_a_reset_mends_it(backend: str) -> None:
    with ef.make([LastWords] * 2, backend=backend, num_workers=1, on_fault="raise") as fleet:
        fleet.reset(seed=1)
        with pytest.raises(EnvFailed):
            fleet.step([0, 1])
        fleet.recv()
        assert list(fleet.reset(seed=2).obs) == ["begun", "begun"]
        assert fleet.step([0, 0]).status.tolist() == [0, 0]
