"""A joined fleet whose workers and parts die: slots of what was hit are faults, all others have the same bytes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Faulty
from envfleet.errors import KeeperLost, WorkerLost
from envfleet.rollout import Collector
from envfleet.slots.layout import FAULT, QUARANTINED, READY
from envfleet.testing import Stream, alive, wait_until
from tests.chaos.inside import keeper_pid, worker_pids
from tests.support.joined import joined
from tests.support.rollout_envs import Walk

pytestmark = pytest.mark.usefixtures("no_leaks")
#: Slots 0 to 3 in two processes, 4 and 5 in this one, 6 to 9 in two processes of another keeper.
PARTS = (
    (4, "shm", {"num_workers": 2, "start_method": "fork"}),
    (2, "thread", {}),
    (4, "pipe", {"num_workers": 2, "start_method": "fork"}),
)
SLOTS, STEPS, HIT_AT = 10, 50, 20


class Run:
    """Steps of CartPole: the rows of each slot as a hash, and every status."""

    def __init__(self, fleet: Any, hit: Any = None, at_least: int | None = None) -> None:
        self.stream, self.status = Stream(), []
        random = np.random.default_rng(0)
        self.stream.add(fleet.reset(seed=0))
        for step in range(STEPS):
            actions = random.integers(2, size=SLOTS)
            if step == HIT_AT and hit is not None:
                hit(fleet)
            fleet.send(actions)
            status, received = np.full(SLOTS, 255), 0
            while received < SLOTS:
                batch = fleet.recv(at_least=min(at_least or SLOTS, SLOTS - received))
                self.stream.add(batch)
                status[batch.slots] = batch.status
                received += len(batch)
            assert (status != 255).all()
            self.status.append(status)

    def statuses(self, slot: int) -> list[int]:
        return [int(status[slot]) for status in self.status]


@pytest.fixture(scope="module")
def undisturbed() -> Run:
    with ef.make("CartPole-v1", SLOTS, backend="serial") as fleet:
        return Run(fleet)


def assert_only_hit(run: Run, undisturbed: Run, hit: set[int]) -> None:
    for slot in range(SLOTS):
        if slot in hit:
            assert set(run.statuses(slot)) != {READY}
        else:
            assert set(run.statuses(slot)) == {READY}
            assert run.stream.slot_digest(slot) == undisturbed.stream.slot_digest(slot)


@pytest.mark.parametrize(
    ("worker", "hit", "at_least"),
    [
        (1, {2, 3}, None),
        (5, {8, 9}, 1),
        pytest.param(1, {2, 3}, 1, marks=pytest.mark.full),
        pytest.param(5, {8, 9}, None, marks=pytest.mark.full),
    ],
)
def test_a_worker_that_is_killed(undisturbed: Run, worker: int, hit: set[int], at_least: int | None) -> None:
    with joined("CartPole-v1", PARTS, on_fault="restart") as fleet:
        run = Run(fleet, lambda fleet: os.kill(worker_pids(fleet)[worker], signal.SIGKILL), at_least)
        faults = fleet.faults
    assert_only_hit(run, undisturbed, hit)
    assert {fault.slot for fault in faults} == hit and {fault.worker for fault in faults} == {worker}
    for slot in hit:
        assert run.statuses(slot).count(FAULT) == 1 and run.statuses(slot)[-1] == READY


def kill_keeper(fleet: Any, part: int) -> None:
    pid = keeper_pid(type("Part", (), {"_backend": fleet._backend.parts[part].backend}))
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(pid))


@pytest.mark.parametrize(
    ("part", "hit", "at_least"),
    [
        (0, {0, 1, 2, 3}, None),
        (2, {6, 7, 8, 9}, 1),
        pytest.param(0, {0, 1, 2, 3}, 1, marks=pytest.mark.full),
        pytest.param(2, {6, 7, 8, 9}, None, marks=pytest.mark.full),
    ],
)
def test_a_part_whose_keeper_is_killed(undisturbed: Run, part: int, hit: set[int], at_least: int | None) -> None:
    """Its slots are quarantined for good; the last row of each names its episode as cut off."""
    with joined("CartPole-v1", PARTS, on_fault="restart") as fleet:
        run = Run(fleet, lambda fleet: kill_keeper(fleet, part), at_least)
        assert set(fleet.quarantined.tolist()) == hit and set(fleet.runnable().tolist()) == set(range(SLOTS)) - hit
        assert sorted(fault.slot for fault in fleet.faults) == sorted(hit)  # one each
        assert all(fault.kind == "lost" and "a part of this fleet, is gone" in fault.cause for fault in fleet.faults)
        begun = time.monotonic()
        fleet.close()
        assert time.monotonic() - begun < 10  # a bound against hanging
    assert_only_hit(run, undisturbed, hit)
    for slot in hit:
        assert set(run.statuses(slot)[HIT_AT + 1 :]) == {QUARANTINED}


@pytest.mark.parametrize("part", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_keeper_that_is_killed_while_slots_are_out(part: int) -> None:
    envs: list[Any] = [lambda: Faulty("step", "hang", at=2)] * 4 + [lambda: Faulty("step", "none", at=10**9)] * 2
    with joined([*envs, *envs[:4]], PARTS, on_fault="restart", step_timeout_s=60.0) as fleet:
        fleet.reset(seed=0)
        fleet.step([0] * SLOTS)
        fleet.send([0] * SLOTS)
        kill_keeper(fleet, part)
        first = fleet._backend.parts[part].first
        lost = fleet.recv(slots=range(first, first + 4), timeout_s=30.0)
        assert lost.status.tolist() == [QUARANTINED] * 4 and lost.truncated.all() and lost.step.tolist() == [1] * 4
        assert fleet.recv(slots=[4, 5]).status.tolist() == [READY] * 2
        with pytest.warns(RuntimeWarning, match="while closing"):  # the other part's envs hang
            fleet.close(0.5)


def test_a_call_to_a_part_that_is_gone_says_so() -> None:
    with joined("CartPole-v1", PARTS) as fleet:
        fleet.reset(seed=0)
        kill_keeper(fleet, 0)
        with pytest.raises(WorkerLost, match="a part of this fleet, is gone"):
            fleet.call("spec")
        assert len(fleet.call("spec", slots=[4, 9])) == 2
        with pytest.raises(WorkerLost):
            fleet.send([0] * SLOTS)  # on_fault="raise": refused before any slot is sent
        fleet.send([0] * 6, range(4, 10))
        assert fleet.recv().slots.tolist() == list(range(4, 10))
        with pytest.raises(WorkerLost):
            fleet.reset(seed=1)
        assert fleet.reset(seed=1, slots=[5, 8]).slots.tolist() == [5, 8]


def test_a_fleet_whose_parts_are_all_gone_is_broken() -> None:
    with joined("CartPole-v1", (PARTS[0], PARTS[2]), on_fault="restart") as fleet:
        fleet.reset(seed=0)
        kill_keeper(fleet, 0)
        kill_keeper(fleet, 1)
        with pytest.raises(KeeperLost):
            for _ in range(3):
                fleet.step([0] * 8)


def test_deadlines_are_those_of_the_parts() -> None:
    def slow() -> Any:
        return Faulty("step", "hang", at=1)

    fork = {"num_workers": 1, "start_method": "fork"}
    parts = [(1, "pipe", {**fork, "step_timeout_s": 0.5}), (1, "shm", {**fork, "step_timeout_s": 1.0}), (1, "serial", {})]
    with joined([slow, slow, lambda: Faulty("step", "none", at=10**9)], parts, on_fault="restart", max_restarts=0) as fleet:
        fleet.reset(seed=0)
        batch = fleet.step([0] * 3)
        assert batch.status.tolist() == [QUARANTINED, QUARANTINED, READY]
        assert [fault.cause for fault in fleet.faults] == [
            "step took longer than step_timeout_s=0.5",
            "step took longer than step_timeout_s=1",
        ]


def test_a_collector_goes_on_without_a_part_that_is_lost() -> None:
    """Every ticket gives the same as on one serial fleet, also those that were begun in the part that died."""

    def episodes(fleet: Any, hit: Any = None) -> list[Any]:
        collector = Collector(fleet, random_actions=True, seed=3, mode="async", at_least=1, timing=False)
        found = []
        for rollout in collector.episodes(60):
            if len(found) == 10 and hit is not None:
                hit(fleet)
            found.append((rollout.episode, rollout.seed, rollout.observations.tobytes(), rollout.actions.tobytes()))
        assert collector.ledger.lost == 0
        return found

    with ef.make(Walk, SLOTS, backend="serial") as fleet:
        wanted = episodes(fleet)
    with joined(Walk, PARTS, on_fault="restart") as fleet:
        assert episodes(fleet, lambda fleet: kill_keeper(fleet, 2)) == wanted
        assert set(fleet.quarantined.tolist()) <= {6, 7, 8, 9} and fleet.faults
