"""A worker whose end is noticed in the middle of a send: no later process may work on what it was to be sent."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Counting
from envfleet.slots import compiled_core
from envfleet.testing import alive, wait_until

WAYS = {"pipe": ("pipe", {}), "shm": ("shm", {}), "shm parent": ("shm", {"isolate": False, "num_workers": 2})}


def die_while_sending(fleet: ef.Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next submit finds that worker 0 has ended, after it has begun and before it hands anything over."""
    backend: Any = fleet._backend
    settle, worker = backend.settle, backend._workers[0]

    def settle_late() -> None:
        monkeypatch.setattr(backend, "settle", settle)
        os.kill(pid := worker.pid, signal.SIGKILL)
        assert wait_until(lambda: not alive(pid))
        settle()
        while not backend.losses:
            backend._poll(0.01)

    monkeypatch.setattr(backend, "settle", settle_late)
    if backend.name == "shm":
        backend._all_told = False  # else it hands over without a look: the end is then noticed afterwards


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("on_fault", ["raise", "restart"])
@pytest.mark.parametrize("way", WAYS)
def test_a_turn_that_was_never_handed_over_is_not_worked_on_later(way, on_fault, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(compiled_core, "load", lambda: None)
    backend, options = WAYS[way]
    with ef.make(lambda: Counting(5), 3, backend=backend, on_fault=on_fault, start_method="fork", **options) as fleet:
        for seed in (100, 200, 300):
            before = fleet.reset(seed=seed)
            assert before.seed.tolist() == [seed, seed + 1, seed + 2]
            die_while_sending(fleet, monkeypatch)
            if on_fault == "raise":
                with pytest.raises(ef.errors.WorkerLost):
                    fleet.step([0, 0, 0])
                if fleet.is_out.any():
                    fleet.recv()
            else:
                assert fleet.step([0, 0, 0]).faulted[0]
            after = fleet.reset(seed=seed + 50)
            assert after.seed.tolist() == [seed + 50, seed + 51, seed + 52]
            assert (after.step == -1).all() and not after.scored.any()
            grown = after.episode - before.episode
            assert np.isin(grown, [1] if on_fault == "raise" else [1, 2]).all(), grown
