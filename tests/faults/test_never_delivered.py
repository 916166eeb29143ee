"""A row that a worker completes in the moment in which its slot is given up is never seen: not whole, and not in parts."""

from __future__ import annotations

import functools
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.remote.loop_backend import RenewingBackend
from envfleet.slots.layout import FAULT, QUARANTINED

CORES = pytest.mark.parametrize("core", ["compiled", "python"])
TEXT = pytest.mark.parametrize("text", [True, False], ids=["text", "arrays"])
PROCESSES = pytest.mark.parametrize("backend", ["pipe", "shm"])


class Numbered(gym.Env[Any, Any]):
    """Both parts of an observation say the step: one is an array, the other an object. It can be told to fail in reset."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, text: bool, refuse: str = "") -> None:
        self.refuse = Path(refuse)
        second = gym.spaces.Text(100) if text else gym.spaces.Box(0, 100, (2,), np.int64)
        self.observation_space = gym.spaces.Dict({"array": gym.spaces.Box(0, 100, (3,), np.int64), "second": second})
        self.text, self.now = text, 0

    def observe(self) -> dict[str, Any]:
        return {"array": np.full(3, self.now), "second": str(self.now) if self.text else np.full(2, self.now)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.refuse.is_file():
            word = self.refuse.read_text()
            while word == "hold" and self.refuse.is_file():
                pass
            self.refuse.unlink(missing_ok=True)
            if word == "die":
                os._exit(3)
            if word != "hold":
                raise RuntimeError("told to fail")
        self.now = 0
        return self.observe(), {}

    def step(self, action: int) -> Any:
        if action:
            os._exit(3)
        self.now += 1
        return self.observe(), 1.0, False, False, {}


def finish_unseen(fleet: ef.Fleet, go_on: Callable[[], Any] | None = None) -> None:
    """Send the only slot and wait until its row is complete, but do not let the fleet take the report."""
    backend: Any = fleet._backend
    before = fleet.slab.head["busy_ns"].copy()
    fleet.send([0]) if go_on is None else go_on()
    if getattr(backend, "by_value", False):
        assert select.select([backend._workers[0].channel.sock], [], [], 20)[0], "no report"
        return
    deadline = time.monotonic() + 20
    while (fleet.slab.head["busy_ns"] == before).any():  # what a life writes last
        assert time.monotonic() < deadline, "the row was never completed"


def reported(fleet: ef.Fleet) -> None:
    """Wait until the worker has reported the row."""
    backend: Any = fleet._backend
    while backend._workers[0].doing()[0] >= 0:
        pass


def looks_too_early(fleet: ef.Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look at what is complete finds nothing, as one that comes a moment too early."""
    backend, real = fleet._backend, fleet._backend.wait

    def once(at_least: int, timeout_s: float) -> None:
        monkeypatch.setattr(backend, "wait", real)

    monkeypatch.setattr(backend, "wait", once)


def told(batch: ef.Batch, kind: str = "final_obs") -> tuple[int, int]:
    """Of which step the two parts of a row's observation are."""
    obs = getattr(batch, kind)
    second = obs["second"][0]
    return int(obs["array"][0][0]), int(second if isinstance(second, str) else second[0])


def leave_ruins(fleet: ef.Fleet) -> None:
    """What a worker that was killed while it wrote, or while it rebuilt the slot, may have left in the row."""
    for name in fleet.slab.names("obs", "final_obs"):
        fleet.slab.arrays[name][0] = 77
    fleet.slab.head["step"][0] = fleet.slab.head["length"][0] = 66


def end_worker(fleet: ef.Fleet, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the worker, whose row is complete but not taken in yet."""
    if how == "abandon":
        looks_too_early(fleet, monkeypatch)
        fleet.abandon([0])
    elif how == "timeout":
        fleet._supervisor._end_call(0, "step", "step took longer than it may")
    else:
        backend: Any = fleet._backend
        os.kill(backend._workers[0].pid, signal.SIGKILL)
        while not fleet.faults and not len(fleet.ready()):
            pass


def is_whole(batch: ef.Batch, steps: int) -> bool:
    """Whether every part of a fault row tells the transition after so many steps."""
    head = (int(batch.step[0]), int(batch.length[0]), int(batch.ep_return[0]))
    return told(batch) == (steps, steps) and head == (steps, steps, steps)


@CORES
@PROCESSES
@TEXT
@pytest.mark.parametrize("how", ["abandon", "timeout", "kill"])
def test_a_reset_that_fails_after_it_tells_a_whole_row(
    how: str, backend: str, text: bool, core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    refuse = tmp_path / "refuse"
    make = functools.partial(Numbered, text, str(refuse))
    with ef.make([make], backend=backend, num_workers=1, on_fault="restart") as fleet:
        fleet.reset(seed=1)
        fleet.step([0])
        finish_unseen(fleet)
        end_worker(fleet, how, monkeypatch)
        known = fleet.faults[-1].step if fleet.faults else 2  # 1: as it was delivered; 2: the row was found complete after all
        fleet.abandon([0])
        if fleet.faults:  # else its end was not noticed yet, and the row is the caller's
            leave_ruins(fleet)
        refuse.touch()
        batch = fleet.reset(seed=3)
        assert batch.status.tolist() == [FAULT] and not refuse.exists() and fleet.faults[-1].phase == "reset"
        assert known in (1, 2) and is_whole(batch, known) and fleet.faults[-1].step == known
        assert told(batch, "obs") == (0, 0)
        assert told(fleet.step([0]), "obs") == (1, 1)


@CORES
@PROCESSES
@TEXT
def test_a_row_that_was_complete_when_its_worker_was_ended_is_received(
    backend: str, text: bool, core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    with ef.make([functools.partial(Numbered, text)], backend=backend, num_workers=1, on_fault="restart") as fleet:
        fleet.reset(seed=1)
        fleet.step([0])
        finish_unseen(fleet)
        reported(fleet)
        end_worker(fleet, "timeout", monkeypatch)
        (fault,) = fleet.faults
        batch = fleet.recv()
        assert (batch.status[0], batch.step[0], fault.kind, fault.step) == (0, 1, "timeout", 2)
        assert told(batch, "obs") == (2, 2)
        batch = fleet.step([0])
        assert batch.status.tolist() == [FAULT] and is_whole(batch, 2) and len(fleet.faults) == 1


@CORES
@TEXT
def test_a_slot_that_is_rebuilt_in_this_process_tells_a_whole_row(
    text: bool, core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    refuse = tmp_path / "refuse"
    make = functools.partial(Numbered, text, str(refuse))
    with ef.make([make], backend=RenewingBackend(), on_fault="restart") as fleet:
        fleet.reset(seed=1)
        fleet.step([0])
        finish_unseen(fleet)
        end_worker(fleet, "abandon", monkeypatch)
        leave_ruins(fleet)
        refuse.touch()
        batch = fleet.reset(seed=3)
        assert batch.status.tolist() == [FAULT] and not refuse.exists()
        assert is_whole(batch, 1) and told(batch, "obs") == (0, 0)


@CORES
@TEXT
@pytest.mark.parametrize("backend", ["thread", "aio"])
def test_a_thread_that_finishes_just_then_leaves_a_row_that_is_no_transition(
    backend: str, text: bool, core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    with ef.make([functools.partial(Numbered, text)], backend=backend, on_fault="restart") as fleet:
        fleet.reset(seed=1)
        fleet.step([0])
        finish_unseen(fleet)
        end_worker(fleet, "abandon", monkeypatch)
        (fault,) = fleet.faults
        batch = fleet.reset(seed=3)
        assert (batch.status[0], batch.scored[0], batch.reward[0], fault.step) == (QUARANTINED, False, 0.0, 1)


@CORES
@PROCESSES
@TEXT
def test_after_a_fault_row_that_was_dropped_the_next_one_tells_the_episode_it_began(
    backend: str, text: bool, core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    refuse = tmp_path / "refuse"
    make = functools.partial(Numbered, text, str(refuse))
    with ef.make([make], backend=backend, num_workers=1, on_fault="restart") as fleet:
        fleet.reset(seed=1)
        fleet.step([0])
        fleet.send([1])
        while not len(fleet.ready()):
            pass
        assert fleet.abandon([0]) == []  # the fault row was complete: it is dropped, and the new env stays
        refuse.write_text("die")
        batch = fleet.reset(seed=3)
        assert [fault.phase for fault in fleet.faults] == ["step", "reset"]
        assert batch.status.tolist() == [FAULT] and is_whole(batch, 0) and batch.episode.tolist() == [1]


@CORES
@PROCESSES
@TEXT
def test_a_fault_row_whose_worker_is_ended_before_it_is_seen_is_still_a_fault_row(
    backend: str, text: bool, core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    hold = tmp_path / "hold"
    make = functools.partial(Numbered, text, str(hold))
    with ef.make([make], backend=backend, num_workers=1, on_fault="restart") as fleet:
        fleet.reset(seed=1)
        fleet.step([0])
        hold.write_text("hold")
        fleet.send([1])
        turn = fleet._table.given[0]
        while fleet._table.given[0] == turn:
            assert not len(fleet.ready())
        finish_unseen(fleet, hold.unlink)  # the env is built again
        reported(fleet)
        end_worker(fleet, "timeout", monkeypatch)
        batch = fleet.recv()
        assert batch.status.tolist() == [FAULT] and is_whole(batch, 1) and told(batch, "obs") == (0, 0)
        assert [fault.kind for fault in fleet.faults] == ["lost", "timeout"]
        batch = fleet.step([0])
        assert batch.status.tolist() == [FAULT] and is_whole(batch, 0) and len(fleet.faults) == 2
