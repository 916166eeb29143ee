"""When slots move: the mover beside a pretended machine, and real fleets whose machine is pretended to be busy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.autotune.auto import Probe, _moves_below
from envfleet.backends import slot_mover
from envfleet.backends.slot_mover import LOOK_S, QUIET_S, Mover
from envfleet.util.machine import Load


class Machine:
    """A clock and a load that tests set."""

    def __init__(self, free: float = 2.0) -> None:
        self.now, self.free, self.blind = 100.0, free, False

    def clock(self) -> float:
        return self.now

    def look(self, own_s: float = 0.0) -> Load | None:
        return None if self.blind else Load(2, self.free)


class Pretended:
    """A backend of four slots, two of them in the parent from the start."""

    def __init__(self, refused: tuple[int, ...] = ()) -> None:
        self.notes: list[str] = []
        self.here = np.array([False, False, True, True])
        self.refused, self.asked = refused, 0

    def cpu_s(self) -> float:
        return 0.0

    def resident(self) -> Any:
        return self.here.copy()

    def moved(self) -> Any:
        return self.here & np.array([True, True, False, False])

    def move_in(self, slots: list[int]) -> dict[int, str]:
        self.asked += len(slots)
        self.here[[slot for slot in slots if slot not in self.refused]] = True
        return {slot: "it is EzPickle" for slot in slots if slot in self.refused}

    def move_back(self, slots: list[int]) -> dict[int, str]:
        self.here[slots] = False
        return {}


def run(mover: Mover, backend: Pretended, machine: Machine, seconds: float, free: Any = (0, 1, 2, 3)) -> None:
    end = machine.now + seconds
    while machine.now < end - 1e-9:
        machine.now += 0.05
        mover.mind(backend, lambda: np.array(free, np.int64))


def made(machine: Machine) -> Mover:
    return Mover(2, machine, machine.clock)  # type: ignore[arg-type]


def test_in_when_busy_for_two_looks_and_back_when_quiet_for_long() -> None:
    machine, backend = Machine(), Pretended()
    mover = made(machine)
    run(mover, backend, machine, 10)
    assert not backend.notes and not backend.moved().any()
    machine.free = 0.6
    run(mover, backend, machine, 3 * LOOK_S)
    assert backend.here.all() and len(backend.notes) == 1
    assert "4 of 4 slots are in this process" in backend.notes[0] and "0.6 of 2 CPUs" in backend.notes[0]
    machine.free = 1.9
    run(mover, backend, machine, QUIET_S - 0.5)
    assert backend.here.all()
    run(mover, backend, machine, 2.0)
    assert not backend.moved().any() and backend.notes[1].startswith("after ") and "back" in backend.notes[1]


def test_it_does_not_flap() -> None:
    machine, backend = Machine(), Pretended()
    mover = made(machine)
    for _ in range(200):  # busy and quiet by turns, six seconds each
        machine.free = 2.0 - machine.free
        run(mover, backend, machine, 6)
    assert len(backend.notes) < 6, backend.notes


def test_one_busy_look_long_pauses_and_blindness_move_nothing() -> None:
    machine, backend = Machine(0.0), Pretended()
    mover = made(machine)
    for _ in range(20):
        run(mover, backend, machine, LOOK_S)  # one look
        machine.now += 5  # the caller does something else
    machine.blind = True
    run(mover, backend, machine, 20)
    assert not backend.notes


def test_slots_that_are_out_are_moved_when_they_come_back_and_refusals_are_remembered() -> None:
    machine, backend = Machine(0.0), Pretended(refused=(1,))
    mover = made(machine)
    run(mover, backend, machine, 2, free=(1,))
    assert not backend.notes and backend.asked == 1
    run(mover, backend, machine, 2)
    assert backend.asked == 2 and "3 of 4 slots" in backend.notes[0] and "EzPickle" in backend.notes[0]


def test_a_choice_that_cannot_be_mended_is_told() -> None:
    machine, backend = Machine(0.0), Pretended(refused=(0, 1))
    run(made(machine), backend, machine, 2)
    (note,) = backend.notes
    assert "one process would be faster, but no slot can be moved (it is EzPickle)" in note


def test_only_cheap_envs_of_fleets_that_may_step_here_are_moved() -> None:
    cheap, dear = Probe(10e-6, 10e-6, 16), Probe(350e-6, 350e-6, 16)
    assert [_moves_below(cheap, slots, 2, None) for slots in (8, 64)] == [2, 2]
    assert _moves_below(dear, 64, 2, None) == 0 and _moves_below(cheap, 64, 2, num_workers=2) == 0
    assert _moves_below(cheap, 64, 8, None) < 4  # with many free CPUs left, workers are better


@pytest.fixture
def busy(tmp_path: Path, monkeypatch: Any) -> Machine:
    """Machine whose load fleets see; its clock is the real one."""
    machine = Machine(2.0)
    monkeypatch.setenv("ENVFLEET_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(slot_mover, "CpuWatch", lambda: machine)
    monkeypatch.setattr(slot_mover, "LOOK_S", 0.02)
    monkeypatch.setattr(slot_mover, "CALM_LOOK_S", 0.02)
    monkeypatch.setattr(slot_mover, "QUIET_S", 0.1)
    monkeypatch.setattr("envfleet.autotune.auto.current_load", lambda: None)
    monkeypatch.setattr("envfleet.autotune.auto.usable_cpus", lambda: 2)
    monkeypatch.setattr("envfleet.backends.processes.usable_cpus", lambda: 2)
    return machine


def test_an_auto_fleet_moves_and_says_so(busy: Machine) -> None:
    with ef.make("CartPole-v1", 64) as fleet:
        fleet.reset(seed=0)
        backend: Any = fleet._backend
        assert fleet.plan.backend == "shm" and "CPUs are free" not in str(fleet.plan)
        for free, here in ((0.3, True), (2.0, False)):
            busy.free = free
            for _ in range(200_000):
                fleet.step(np.zeros(64, np.int64))
                if backend.resident().all() == here and backend._mover._told:
                    break
            assert backend.resident().all() == here and backend.moved().any() == here
            assert ("64 of 64 slots are in this process" if here else "back in the workers") in str(fleet.plan)
        assert len(fleet.plan.notes) == 2


@pytest.mark.parametrize("options", [{"isolate": True}, {"on_fault": "restart"}])
def test_fleets_that_are_to_be_isolated_never_move(options: dict[str, Any], busy: Machine) -> None:
    busy.free = 0.0
    with ef.make("CartPole-v1", 64, **options) as fleet:
        assert fleet.plan.backend == "shm"
        assert fleet._backend._mover is None  # type: ignore[attr-defined]


def test_a_fleet_that_was_asked_for_never_moves() -> None:
    with ef.make("CartPole-v1", 4, backend="shm", isolate=False) as fleet:
        assert fleet._backend._mover is None and not fleet.plan.notes  # type: ignore[attr-defined]
