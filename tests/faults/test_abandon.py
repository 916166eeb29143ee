"""`fleet.abandon`: slots that are given up come back to the caller at once, and nothing of what they did is seen."""

from __future__ import annotations

import asyncio
import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Counting, Faulty
from envfleet.errors import EnvAbandoned
from envfleet.slots.layout import FAULT
from tests.support.ways import SharingPipe

CORES = pytest.mark.parametrize("core", ["compiled", "python"])
PROCESSES = pytest.mark.parametrize("backend", ["pipe", "shm", "shm and parent", "pipe and threads"])


def stuck_fleet(backend: str, tmp_path: Path, num_workers: int, **options: Any) -> ef.Fleet:
    """Four slots; slot 1 hangs at its second step, until it is rebuilt."""
    bad = functools.partial(Faulty, "step", "hang", at=2, limit=100, once_file=str(tmp_path / "hung"))
    good = functools.partial(Counting, 100)
    more: dict[str, Any] = {"start_method": "fork", "num_workers": num_workers}
    if backend == "shm and parent":
        backend, more = "shm", {**more, "isolate": False}
    kind: Any = SharingPipe(num_workers) if backend == "pipe and threads" else backend
    more = more if isinstance(kind, str) and kind in ("pipe", "shm") else {}
    if kind in ("thread", "aio"):
        more = {"num_workers": num_workers}
    return ef.make([good, bad, good, good], backend=kind, **more, **options)


def send_until_stuck(fleet: ef.Fleet, tmp_path: Path) -> Any:
    fleet.reset(seed=0)
    fleet.step([0] * 4)
    fleet.send([0] * 4)
    while not (tmp_path / "hung").exists():
        fleet.ready()
    return time.monotonic()


@CORES
@PROCESSES
def test_a_stuck_slot_is_given_up_and_can_be_reset(
    backend: str, core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    with stuck_fleet(backend, tmp_path, 4) as fleet:
        send_until_stuck(fleet, tmp_path)
        others = fleet.recv([0, 2, 3])
        (fault,) = fleet.abandon([1])
        assert (fault.slot, fault.kind, fault.phase, fault.step) == (1, "abandoned", "step", 1)
        assert not fleet.is_out.any() and others.step.tolist() == [1, 1, 1]
        batch = fleet.reset(seed=9, slots=[1])
        assert (batch.status[0], batch.step[0], batch.seed[0]) == (0, -1, 10)
        batch = fleet.step([0] * 4)
        assert batch.step.tolist() == [2, 0, 2, 2] and not (batch.status == FAULT).any()
        assert len(fleet.quarantined) == 0


@PROCESSES
def test_slots_that_share_the_worker_are_fault_rows(backend: str, tmp_path: Path) -> None:
    with stuck_fleet(backend, tmp_path, 2 if backend == "shm and parent" else 1, on_fault="restart") as fleet:
        send_until_stuck(fleet, tmp_path)
        worker = fleet._backend.worker_of
        sharing = {slot for slot in (0, 2, 3) if worker[slot] == worker[1]}
        fleet.abandon([1])
        batch = fleet.recv()
        assert batch.slots.tolist() == [0, 2, 3]
        faulty = set(batch.slots[batch.status == FAULT].tolist())
        assert faulty <= sharing and batch.step.tolist() == [1, 1, 1]
        assert faulty >= {2, 3} or backend not in ("pipe", "shm")  # a worker steps its slots one after another
        again = fleet.reset(slots=[1])
        assert again.step.tolist() == [-1]
        assert fleet.step([0] * 4).step[1] == 0


def test_a_slot_sent_without_a_reset_says_that_it_was_abandoned(tmp_path: Path) -> None:
    with stuck_fleet("pipe", tmp_path, 4) as fleet:
        send_until_stuck(fleet, tmp_path)
        fleet.abandon()
        with pytest.raises(EnvAbandoned, match=r"slot 1 was abandoned in step .*reset the slot"):
            fleet.send([0], slots=[1])
    with stuck_fleet("pipe", tmp_path, 4, on_fault="restart") as fleet:
        fleet.reset(seed=0)
        fleet.send([0] * 4)
        fleet.abandon([2])
        fleet.recv()
        fleet.send([0], slots=[2])
        batch = fleet.recv()
        assert batch.status.tolist() == [FAULT] or batch.step.tolist() == [1]  # lost, or step 0 was complete and only dropped


@CORES
@pytest.mark.parametrize("backend", ["pipe", "shm"])
def test_its_fault_row_tells_the_last_delivered_observation(
    backend: str, core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    with stuck_fleet(backend, tmp_path, 4, on_fault="restart") as fleet:
        fleet.reset(seed=0)
        delivered = fleet.step([0] * 4)
        fleet.send([0] * 4)
        fleet.recv([0, 2, 3])
        fleet.abandon([1])
        fleet.slab.obs[1] = -7  # what a worker that was killed while it wrote may have left
        fleet.send([0], slots=[1])
        batch = fleet.recv()
        assert (batch.status[0], batch.step[0], batch.scored[0]) == (FAULT, 1, False)
        assert np.array_equal(batch.final_obs[0], delivered.obs[1])


@CORES
@pytest.mark.parametrize("backend", ["thread", "aio"])
def test_a_thread_is_left_behind_and_its_slot_quarantined(
    backend: str, core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    fleet = stuck_fleet(backend, tmp_path, 4, on_fault="restart")
    send_until_stuck(fleet, tmp_path)
    fleet.recv([0, 2, 3])
    fleet.abandon([1])
    assert fleet.quarantined.tolist() == [1] and not fleet.is_out.any()
    assert fleet.step([0] * 4).step[[0, 2, 3]].tolist() == [2, 2, 2]
    with pytest.warns(RuntimeWarning, match="still stuck"):
        fleet.close(0.2)


def test_a_slot_behind_a_stuck_one_of_the_same_thread_is_not_begun_any_more(tmp_path: Path) -> None:
    fleet = stuck_fleet("thread", tmp_path, 1, on_fault="restart")
    send_until_stuck(fleet, tmp_path)
    fleet.abandon([2])
    assert fleet.is_out.tolist() == [True, True, False, True]
    fleet.abandon([1])
    assert fleet.recv([0, 3]).step.tolist() == [1, 1]
    assert fleet.quarantined.tolist() == [1, 2]
    with pytest.warns(RuntimeWarning, match="still stuck"):
        fleet.close(0.2)


def test_an_awaited_call_is_cancelled() -> None:
    class Waits(Counting):
        async def reset(self, **options: Any) -> Any:
            return super().reset(**options)

        async def step(self, action: Any) -> Any:
            if action == 1:
                await asyncio.sleep(1e6)
            return super().step(action)

    with ef.make([Waits] * 3, backend="aio", on_fault="restart") as fleet:
        fleet.reset(seed=0)
        fleet.send([0, 1, 0])
        fleet.recv([0, 2])
        fleet.abandon([1])
        assert not fleet.is_out.any()


@pytest.mark.parametrize("backend", ["serial", "thread", "aio", "pipe", "shm"])
def test_rows_that_are_complete_are_dropped_and_idle_slots_are_left_alone(backend: str) -> None:
    with ef.make(functools.partial(Counting, 100), 3, backend=backend) as fleet:
        fleet.reset(seed=0)
        fleet.send([0, 0], slots=[0, 1])
        while fleet.ready().tolist() != [0, 1]:
            pass
        assert fleet.abandon() == [] and not fleet.is_out.any()
        batch = fleet.step([0] * 3)
        assert batch.step.tolist() == [1, 1, 0]  # the env has stepped; its row is what was dropped
        assert np.array_equal(fleet.reset(seed=0).step, [-1, -1, -1])
