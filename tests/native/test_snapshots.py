"""Snapshots: an environment that was put back goes on exactly as it would have."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, TimeLimit

import envfleet as ef
from envfleet.envs.native_classic import NativeCartPole, NativePendulum
from envfleet.envs.registry import NATIVE
from envfleet.errors import BadArgument, ResetNeeded, SlotBusy
from tests.support.native_probes import NativeCounting, NativeFaulty, probe

FIELDS = ("obs", "reward", "terminated", "truncated", "length", "ep_return", "seed", "task", "scored", "status")


def play(fleet: ef.Fleet, actions: list[Any]) -> list[tuple[np.ndarray, ...]]:
    rows = []
    for action in actions:
        batch = fleet.step(action)
        rows.append((*(getattr(batch, name).copy() for name in FIELDS), np.array(batch.final_obs[batch.ended])))
    return rows


def same(one: list[tuple[np.ndarray, ...]], other: list[tuple[np.ndarray, ...]]) -> bool:
    return all(np.array_equal(a, b) for x, y in zip(one, other) for a, b in zip(x, y))


def drawn(fleet: ef.Fleet, count: int, seed: int) -> list[Any]:
    space = fleet.action_space
    space.seed(seed)
    return [space.sample() for _ in range(count)]


@pytest.mark.parametrize("name", sorted(NATIVE))
@pytest.mark.parametrize(("workers", "on_end"), [(1, "reset"), (2, "reset"), (1, "wait"), (3, "wait")])
def test_what_was_restored_goes_on_as_before(name: str, workers: int, on_end: Any, no_leaks: None) -> None:
    with ef.make(name, 12, backend="native", num_workers=workers, on_end=on_end) as fleet:
        fleet.reset(seed=3)
        actions = drawn(fleet, 160, 1)
        play(fleet, actions[:57])
        fleet.assign([4, 7], seeds=[1234, 99])  # pending for the next reset, so a part of the snapshot
        snapshot = fleet.snapshot()
        wanted = play(fleet, actions[57:])
        play(fleet, actions[:31])
        batch = fleet.restore(snapshot)
        assert not batch.scored.any() and not batch.ended.any() and (batch.reward == 0).all()
        assert same(wanted, play(fleet, actions[57:]))


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_one_environment_branches_into_many(name: str) -> None:
    with ef.make(name, 64, backend="native") as fleet:
        fleet.reset(seed=5)
        actions = drawn(fleet, 20, 2)
        play(fleet, actions[:9])
        before = fleet.step(actions[9])
        batch = fleet.restore(fleet.snapshot([5]))
        assert np.array_equal(batch.obs, np.repeat(before.obs[5:6], 64, axis=0))
        for action in actions[10:]:
            batch = fleet.step(np.repeat(np.asarray(action)[5:6], 64, axis=0))
            for field in FIELDS:
                values = getattr(batch, field)
                assert (values == values[:1]).all(), field
        assert len(set(zip(batch.slots.tolist(), batch.episode.tolist()))) == 64  # identities stay unique


def test_a_snapshot_goes_to_other_slots_and_to_another_fleet() -> None:
    with ef.make("CartPole-v1", 6, backend="native") as fleet, ef.make("CartPole-v1", 2, backend="native") as other:
        fleet.reset(seed=1)
        other.reset(seed=90)
        actions = drawn(fleet, 60, 3)
        play(fleet, actions[:20])
        snapshot = fleet.snapshot([4, 1])
        rows = play(fleet, actions[20:])
        other.restore(snapshot, [1, 0])  # in the order given
        got = play(other, [action[[1, 4]] for action in actions[20:]])
        for ours, theirs in zip(rows, got):
            assert np.array_equal(ours[0][[1, 4]], theirs[0])


def test_the_episode_is_a_new_one_and_counters_go_on() -> None:
    with ef.make("CartPole-v1", 2, backend="native") as fleet:
        fleet.reset(seed=1)
        for _ in range(5):
            before = fleet.step([0, 1])
        batch = fleet.restore(fleet.snapshot())
        assert (batch.episode == before.episode + 1).all()
        assert (batch.length == before.length).all() and (batch.ep_return == before.ep_return).all()


def test_time_limits_go_on_too() -> None:
    with ef.make("CartPole-v1", 1, backend="native", env_kwargs={"max_episode_steps": 8}) as fleet:
        fleet.reset(seed=1)
        for i in range(5):
            fleet.step([i % 2])
        snapshot = fleet.snapshot()
        for _ in range(2):
            fleet.restore(snapshot)
            ends = [bool(fleet.step([i % 2]).truncated[0]) for i in range(3)]
            assert ends == [False, False, True]


def test_what_cannot_be_done_is_refused() -> None:
    with ef.make("CartPole-v1", 3, backend="native") as fleet, ef.make("CartPole-v1", 2, backend="serial") as plain:
        with pytest.raises(ResetNeeded):
            fleet.snapshot()
        fleet.reset(seed=0)
        plain.reset(seed=0)
        with pytest.raises(BadArgument, match="backend 'serial' cannot copy"):
            plain.snapshot()
        pair = fleet.snapshot([0, 1])
        with pytest.raises(BadArgument, match="does not fit 3 slots"):
            fleet.restore(pair)
        fleet.send([0, 1, 0])
        with pytest.raises(SlotBusy):
            fleet.restore(pair, [0, 1])
        fleet.recv()
        fleet.restore(pair, [0, 2])
        assert fleet.step([0, 0, 0]).scored.all()


def test_rows_of_a_restore_are_those_of_their_slots() -> None:
    with ef.make("CartPole-v1", 4, backend="native") as fleet:
        fleet.reset(seed=0)
        for slots in ([3, 2, 1, 0], [1, 3, 2], [0, 2, 1, 3]):
            snapshot = fleet.snapshot(slots)
            batch = fleet.restore(snapshot, slots)
            assert batch.slots.tolist() == sorted(slots)
            assert np.array_equal(batch.obs, snapshot.obs[np.argsort(slots), 0])


@pytest.mark.parametrize("known", [[], [(4, 4)], [(4, 4), (2, 0)]])
def test_tasks_go_with_a_snapshot_to_another_fleet(known: list[Any]) -> None:
    with ef.make("gridnavi", 2, backend="native") as fleet, ef.make("gridnavi", 2, backend="native") as other:
        fleet.reset(seed=0, tasks=[(2, 0), (3, 3)])
        fleet.assign([1], tasks=[(0, 4)])  # of its next episode
        other.reset(seed=5, tasks=(known * 2)[:2] or None)
        batch = other.restore(fleet.snapshot())
        assert [other.task_value(task) for task in batch.task.tolist()] == [(2, 0), (3, 3)]
        for _ in range(16):
            batch = other.step([0, 0])
        assert [other.task_value(task) for task in batch.task.tolist()] == [(2, 0), (0, 4)] == list(other.call("task"))


def test_actions_after_a_restore_are_those_that_are_sent() -> None:
    """The snapshot was taken after actions of another dtype than the space's; this fleet has never had such."""
    with ef.make(probe("Shifted"), 2, backend="native") as fleet, ef.make(probe("Shifted"), 2, backend="native") as other:
        fleet.reset(seed=0)
        other.reset(seed=0)
        fleet.step(np.array([1, 2], np.int32))
        other.restore(fleet.snapshot())
        assert other.step(np.array([2, 3])).obs.tolist() == [2, 3]


def test_a_restored_row_is_no_fault() -> None:
    faulty = functools.partial(NativeFaulty, at=2)
    with ef.make(faulty, 1, backend="native", on_fault="restart") as fleet:
        fleet.reset(seed=0)
        assert [bool(fleet.step([0]).faulted[0]) for _ in range(2)] == [False, True]
        assert not fleet.restore(fleet.snapshot()).faulted.any()


def test_what_was_assigned_to_a_slot_that_was_out_belongs_to_the_snapshot() -> None:
    with ef.make(NativeCounting, 2, backend="native") as fleet:
        fleet.reset(seed=0)
        fleet.send([0, 0])
        fleet.assign([0], seeds=[77])
        fleet.recv()
        fleet.restore(fleet.snapshot([0]))
        for _ in range(4):
            batch = fleet.step([0, 0])
        assert batch.ended.all() and fleet.step([0, 0]).seed.tolist() == [77, 77]


def test_every_time_limit_goes_on() -> None:
    with ef.make(lambda: TimeLimit(TimeLimit(NativeCartPole(), 9), 7), 1, backend="native") as fleet:
        fleet.reset(seed=0)
        for i in range(3):
            fleet.step([i % 2])
        snapshot = fleet.snapshot()
        fleet.reset(seed=0)
        for i in range(6):
            fleet.step([i % 2])
        fleet.restore(snapshot)
        assert [bool(fleet.step([i % 2]).truncated[0]) for i in range(3, 7)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (functools.partial(NativePendulum, g=1.0), NativePendulum, r"Pendulum-v1\(g=1.0\), and slot 0 has Pendulum-v1\(g=10.0\)"),
        (NativeCounting, NativeFaulty, "snapshot of Counting.*slot 0 has Faulty"),
        (probe("Doubles"), probe("Floats"), "snapshot of Doubles.*slot 0 has Floats"),
    ],
)
def test_a_snapshot_of_another_environment_is_refused_and_changes_nothing(one: Any, other: Any, said: str) -> None:
    # The same name for both, as two lambdas of a user have it.
    with ef.make(lambda: one(), 1, backend="native") as source, ef.make(lambda: other(), 1, backend="native") as fleet:
        source.reset(seed=0)
        before = fleet.reset(seed=0)
        with pytest.raises(BadArgument, match=said):
            fleet.restore(source.snapshot())
        assert np.array_equal(fleet.restore(fleet.snapshot()).obs, before.obs)


def test_a_fleet_of_several_environments_has_snapshots_too() -> None:
    kinds = [probe("Counting"), probe("Tasked"), probe("Big")]  # of different sizes
    with ef.make(kinds, backend="native") as fleet:
        fleet.reset(seed=0)
        snapshot = fleet.snapshot()
        fleet.step([0, 0, 0])
        assert fleet.restore(snapshot).step.tolist() == [-1, -1, -1]
        with pytest.raises(BadArgument, match="slot 2 has Big"):
            fleet.restore(snapshot, [2, 1, 0])


def test_what_a_wrapper_remembers_is_not_lost_silently() -> None:
    with ef.make(lambda: FrameStackObservation(NativeCartPole(), 2), 1, backend="native") as fleet:
        fleet.reset(seed=0)
        with pytest.raises(BadArgument, match="slot 0 has FrameStackObservation around its environment"):
            fleet.snapshot()
