"""Several backends in one fleet: the same rows, ownership, refusals, collection."""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.core.fleet import Fleet
from envfleet.envs.probe import Counting, Mixed, Tasked
from envfleet.errors import BadArgument, FleetClosed, SlotBusy, SpacesDiffer
from envfleet.rollout import Collector
from envfleet.testing import record
from envfleet.testing.conformance import CHECKS
from tests.support.joined import EVERY, NUM_SLOTS, JoinedStart, joined
from tests.support.rollout_envs import Frozen, Walk
from tests.support.ways import MovingShm

SOME = [(Mixed, "reset", None), (Mixed, "wait", 3), ("CartPole-v1", "reset", 1)]
EVERY_WAY = list(itertools.product(("CartPole-v1", Mixed), ("reset", "wait"), (None, 1, 3)))


@pytest.mark.parametrize(
    ("env", "on_end", "at_least"), [pytest.param(*way, marks=() if way in SOME else pytest.mark.full) for way in EVERY_WAY]
)
@pytest.mark.usefixtures("no_leaks")
def test_the_same_bytes_as_one_serial_fleet(env: Any, on_end: Any, at_least: int | None) -> None:
    with ef.make(env, NUM_SLOTS, backend="serial", on_end=on_end) as fleet:
        wanted = record(fleet, 60, seed=7).digest()
    with joined(env, on_end=on_end) as fleet:
        assert record(fleet, 60, seed=7, at_least=at_least).digest() == wanted


#: The first two compare bytes over many worker counts; the tests around this do so over many parts.
PARAMS = [pytest.param(check, marks=pytest.mark.full if check in CHECKS[:2] else (), id=check.__name__) for check in CHECKS]


@pytest.mark.parametrize("check", PARAMS)
def test_a_joined_fleet_passes_the_check(check: Any) -> None:
    check(JoinedStart())


def test_many_agents_in_several_parts() -> None:
    pytest.importorskip("pettingzoo", reason="pip install 'envfleet[agents]'")
    from envfleet.envs.crowd import Crowd

    with ef.make(Crowd, NUM_SLOTS, backend="serial", with_state=True) as fleet:
        wanted = record(fleet, 30, seed=7).digest()
    with joined(Crowd, with_state=True) as fleet:
        assert record(fleet, 30, seed=7, at_least=2).digest() == wanted


def test_native_parts_and_their_snapshots() -> None:
    parts = [(3, "native", {"num_workers": 1}), (3, "native", {"num_workers": 2})]
    with ef.make("CartPole-v1", 6, backend="native") as fleet:
        wanted = record(fleet, 60, seed=7).digest()
    with joined("CartPole-v1", parts) as fleet:
        assert record(fleet, 60, seed=7).digest() == wanted
        before = fleet.snapshot([4, 1])
        rows = [fleet.step(np.ones(6, np.int64)).obs[[4, 1]] for _ in range(5)]
        fleet.restore(before, [2, 3])  # across the parts
        again = [fleet.step(np.ones(6, np.int64)).obs[[2, 3]] for _ in range(5)]
        assert all(np.array_equal(one, other) for one, other in zip(rows, again))
    with joined("CartPole-v1", [(1, "serial", {}), (1, "thread", {})]) as fleet:
        fleet.reset(seed=0)
        with pytest.raises(BadArgument, match="cannot copy environments"):
            fleet.snapshot()


def test_parts_that_know_tasks_already_are_told_the_new_ones() -> None:
    fleets = [ef.make(Tasked, count, backend=backend, **own) for count, backend, own in EVERY]
    for fleet in fleets[1::2]:
        fleet.reset(seed=0, tasks=[100 + slot for slot in range(len(fleet))])
        fleet.step([0] * len(fleet))
    tasks = [1000 + slot for slot in range(NUM_SLOTS)]
    with ef.join(fleets) as fleet:
        batch = fleet.reset(seed=1, tasks=tasks)
        assert [info["task"] for info in batch.info] == tasks
        assert batch.episode.tolist() == [0] * NUM_SLOTS and batch.seed.tolist() == list(range(1, 1 + NUM_SLOTS))
        for _ in range(4):
            batch = fleet.step([0] * NUM_SLOTS)
            assert [fleet.task_value(task) for task in batch.task] == tasks and batch.obs[:, 0].tolist() == tasks


def test_joined_fleets_can_be_joined() -> None:
    with ef.make(Mixed, 6, backend="serial") as fleet:
        wanted = record(fleet, 30, seed=2).digest()
    inner = joined(Mixed, [(1, "serial", {}), (2, "pipe", {"num_workers": 1, "start_method": "fork"})])
    with ef.join([ef.make(Mixed, 3, backend="thread"), inner]) as fleet:
        assert record(fleet, 30, seed=2, at_least=2).digest() == wanted


@pytest.mark.parametrize("at_least", [None, 2])
def test_slots_of_a_part_that_move_between_workers(at_least: int | None) -> None:
    with ef.make("CartPole-v1", 6, backend="serial") as fleet:
        wanted = record(fleet, 100, seed=3).digest()
    moving = MovingShm(2)
    with ef.join([ef.make("CartPole-v1", 2, backend="serial"), ef.make("CartPole-v1", 4, backend=moving)]) as fleet:
        assert record(fleet, 100, seed=3, at_least=at_least).digest() == wanted
        fleet._backend.settle()
        assert fleet._backend.worker_of[2:].tolist() == (moving.worker_of + 1).tolist()


def test_faults_from_before_are_taken_over() -> None:
    """A slot that could not be built is built at the first reset; its fault has the slot's new number."""
    failed: list[int] = []

    def fails_once() -> Any:
        if not failed:
            failed.append(1)
            raise RuntimeError("not yet")
        return Counting()

    one = ef.make(Counting, 2, backend="serial", on_fault="restart")
    two = ef.make([Counting, fails_once], backend="thread", num_workers=1, on_fault="restart")
    assert [fault.slot for fault in two.faults] == [1]
    with ef.join([one, two]) as fleet:
        assert [(fault.slot, fault.phase) for fault in fleet.faults] == [(3, "init")]
        assert fleet.reset(seed=0).status.tolist() == [0] * 4 and fleet.step([0] * 4).reward.tolist() == [1.0] * 4


# -- ownership ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_leaks")
def test_the_given_fleets_are_closed_and_the_joined_one_closes_their_parts() -> None:
    with (
        ef.make("CartPole-v1", 2, backend="pipe", num_workers=1, start_method="fork") as one,
        ef.make("CartPole-v1", 1, backend="thread") as two,
    ):
        fleet = ef.join([one, two])
        for use in (one.reset, two.ready, lambda: one.send([0, 0]), lambda: ef.join([two])):
            with pytest.raises(FleetClosed, match=r"joined with others .* use the fleet that envfleet\.join gave"):
                use()
        one.close()  # closes nothing: it is not its own any more
        assert fleet.reset(seed=0).obs.shape == (3, 4)
        assert str(fleet.plan) == "joined, 2 workers, 3 slots: pipe (slots 0 to 1, 1 worker), thread (slots 2 to 2, 1 worker)"
    assert fleet.step([0, 1, 0]).reward.tolist() == [1.0] * 3  # the ends of the given fleets' blocks changed nothing
    fleet.close()
    with pytest.raises(FleetClosed):
        fleet.reset()
    dropped = joined("CartPole-v1")
    dropped.reset(seed=0)
    del dropped
    gc.collect()


def test_an_interrupt_while_joining_leaves_the_fleets_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Fleet._hand_over, itertools.count()

    def interrupted(self: Fleet) -> None:
        real(self)
        if next(calls) == 1:
            raise KeyboardInterrupt

    fleets = [ef.make("CartPole-v1", 2, backend="pipe", num_workers=1, start_method="fork") for _ in range(2)]
    monkeypatch.setattr(Fleet, "_hand_over", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ef.join(fleets)
    gc.collect()  # the joined fleet that was not returned
    for fleet in fleets:
        assert fleet.reset(seed=0).obs.shape == (2, 4)
    with ef.join(fleets) as fleet:
        assert fleet.reset(seed=0).obs.shape == (4, 4)


def test_what_does_not_fit_is_refused_by_name_and_stays_usable() -> None:
    def pole(**options: Any) -> ef.Fleet:
        return ef.make("CartPole-v1", 2, **{"backend": "serial", **options})

    with pole() as first, pole() as busy:
        busy.reset(seed=0)
        busy.send([0, 1])
        with pytest.raises(SlotBusy, match=r"slots \[0, 1\] .* fleets\[1\]"):
            ef.join([first, busy])
        busy.recv()
        cases: list[tuple[Any, type[Exception], str]] = [
            (ef.make(Counting, 2, backend="thread"), SpacesDiffer, r"fleets\[1\] \(thread\) has observation_space"),
            (pole(columns={"x": ef.make("CartPole-v1", 1, backend="serial").single_action_space}), SpacesDiffer, "has columns"),
            (pole(on_end="wait"), BadArgument, r"on_end='wait', but fleets\[0\] \(serial\) has on_end='reset'"),
            (pole(on_fault="restart"), BadArgument, "on_fault='restart'"),
            (pole(max_restarts=9), BadArgument, "max_restarts=9"),
            (ef.make("CartPole-v1", 2, backend="vector"), BadArgument, "batch engine"),
        ]
        for other, kind, words in cases:
            with other, pytest.raises(kind, match=words):
                ef.join([first, other])
        for wrong, words in (([], "at least one"), ([first, first], "twice"), ([first, 3], "int, not a Fleet")):
            with pytest.raises(BadArgument, match=words):
                ef.join(wrong)  # type: ignore[arg-type]
        with ef.join([first, busy]) as fleet:
            assert fleet.reset(seed=0).obs.shape == (4, 4)


# -- collection -----------------------------------------------------------------------------------------------------


class SlowWalk(Walk):
    """Walk that waits in every step."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s

    def step(self, action: Any) -> Any:
        time.sleep(self.step_s)
        return super().step(action)


def _episodes(fleet: ef.Fleet, count: int) -> tuple[list[Any], list[int]]:
    """What the tickets gave, and how many episodes every slot completed."""
    with fleet:
        collector = Collector(fleet, random_actions=True, seed=5, mode="async", at_least=1, timing=False)
        found = [(r.episode, r.seed, r.observations.tobytes(), r.actions.tobytes()) for r in collector.episodes(count)]
        return found, fleet.slab.started.tolist()


def test_a_fast_part_gets_more_episodes_and_tickets_give_the_same() -> None:
    """The slow part's env waits a hundred times longer in each step; what a ticket gives does not depend on who runs it."""
    slow = ef.make(lambda: SlowWalk(0.02), 2, backend="thread")
    fast = ef.make(lambda: SlowWalk(0.0002), 2, backend="pipe", num_workers=1, start_method="fork")
    found, started = _episodes(ef.join([slow, fast]), 40)
    wanted, _ = _episodes(ef.make(Walk, 4, backend="serial"), 40)
    assert found == wanted and len(found) == 40
    assert sum(started[2:]) > sum(started[:2])


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_segments_are_those_of_one_serial_fleet(mode: Any) -> None:
    def segments(fleet: ef.Fleet) -> list[Any]:
        with fleet:
            collector = Collector(fleet, Frozen(), seed=2, mode=mode)
            return [collector.segment(17) for _ in range(3)]

    ours, theirs = segments(joined(Walk)), segments(ef.make(Walk, NUM_SLOTS, backend="serial"))
    for one, other in zip(ours, theirs):
        for name in ("obs", "action", "reward", "terminated", "scored", "bootstrap_obs", "episode", "final_obs", "end_return"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


def test_one_fleet_may_be_given_without_a_list() -> None:
    with ef.join(ef.make(Counting, 2, backend="serial")) as fleet:
        assert len(fleet.reset(seed=0).obs) == 2
