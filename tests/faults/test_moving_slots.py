"""Slots that move between workers and the parent: the rows are the same bytes, and an exception leaves one owner."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.catch import PixelCatch
from envfleet.envs.probe import Counting, Tasked
from envfleet.envs.tmaze import TMaze
from envfleet.testing import Actions, Held, Stream, leaks_since, record, wait_until
from tests.support.ways import MovingShm

ENVS: dict[str, Any] = {
    "CartPole-v1": "CartPole-v1",
    "FrozenLake-v1": "FrozenLake-v1",
    "Taxi-v4": "Taxi-v4",
    "Pendulum-v1": "Pendulum-v1",
    "Blackjack-v1": "Blackjack-v1",
    "catch": PixelCatch,
    "tmaze": TMaze,
}


@pytest.mark.parametrize("on_end", ["reset", "wait"])
@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("env", ENVS)
def test_rows_are_the_same_bytes(env: str, isolate: bool, on_end: str, no_leaks: None) -> None:
    steps = 200 if env == "Taxi-v4" else 1000  # a large table: 20 ms a move
    with ef.make(ENVS[env], 5, backend="serial", on_end=on_end) as fleet:
        expected = record(fleet, steps, seed=3).digest()
    backend = MovingShm(2, isolate=isolate)
    with ef.make(ENVS[env], 5, backend=backend, on_end=on_end) as fleet:
        assert record(fleet, steps, seed=3).digest() == expected
        assert not backend.refused and backend.num_moves > steps // 20, backend.num_moves


def test_rows_are_the_same_when_slots_go_their_own_ways() -> None:
    with ef.make("CartPole-v1", 6, backend="serial") as fleet:
        expected = record(fleet, 1500, seed=1, at_least=2).digest()
    with ef.make("CartPole-v1", 6, backend=MovingShm(3)) as fleet:
        assert record(fleet, 1500, seed=1, at_least=2).digest() == expected


def tasks_and_calls(fleet: ef.Fleet) -> str:
    stream = Stream()
    actions = Actions(fleet.single_action_space, fleet.num_envs, 0)
    stream.add(fleet.reset(seed=4, tasks=[*range(fleet.num_envs)], options={"x": 1}))
    for i in range(600):
        stream.add(fleet.step(actions.of(range(fleet.num_envs))))
        if i % 7 == 0:
            fleet.assign([i % fleet.num_envs], tasks=[i], seeds=[i])
        if i % 50 == 0:
            assert len(fleet.call("action_space")) == fleet.num_envs
            stream.add(fleet.reset(seed=i, slots=[1, 2], options={"x": i}))
    return stream.digest()


def test_tasks_seeds_options_and_calls_find_a_slot_where_it_is() -> None:
    digests = []
    for backend in ("serial", MovingShm(2, chance=0.2), MovingShm(2, isolate=False, chance=0.2)):
        with ef.make(Tasked, 4, backend=backend) as fleet:
            digests.append(tasks_and_calls(fleet))
    assert len(set(digests)) == 1


class Interrupt(Exception):
    pass


def interrupted(*_: Any) -> None:
    raise Interrupt


@pytest.mark.parametrize("isolate", [True, False])
def test_an_interrupt_inside_a_move_leaves_one_owner(isolate: bool, no_leaks: None) -> None:
    backend = MovingShm(2, isolate=isolate, chance=0.0)
    with ef.make("CartPole-v1", 4, backend="serial") as fleet:
        expected = record(fleet, 300, seed=2).digest()
    before = signal.signal(signal.SIGALRM, interrupted)
    hits = 0
    try:
        with ef.make("CartPole-v1", 4, backend=backend) as fleet:
            stream, actions = Stream(), Actions(fleet.single_action_space, 4, 2)
            stream.add(fleet.reset(seed=2))
            for i in range(300):
                stream.add(fleet.step(actions.of(range(4))))
                for move, slots in ((backend.move_in, ~backend.resident()), (backend.move_back, backend.moved())):
                    try:
                        signal.setitimer(signal.ITIMER_REAL, 20e-6 + 1.1e-5 * i)
                        move(np.flatnonzero(slots).tolist())
                        signal.setitimer(signal.ITIMER_REAL, 0)
                    except Interrupt:
                        hits += 1
                        fleet._inside = True  # as when it comes through `step`, which calls the mover
            assert stream.digest() == expected
            assert not fleet.faults and hits > 50, hits
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("when", ["before", "after", "asked", "back"])
def test_a_worker_that_dies_takes_only_what_is_there(when: str, no_leaks: None) -> None:
    backend = ShmBackendForTests(1)
    with ef.make("CartPole-v1", 4, backend=backend, on_fault="restart") as fleet:
        fleet.reset(seed=0)
        fleet.step([0] * 4)
        if when != "before":
            assert backend.move_in([0, 1]) == {}
        if when == "back":
            assert backend.move_back([0]) == {}
        pid = backend._workers[0].pid
        os.kill(pid, signal.SIGSTOP if when == "asked" else signal.SIGKILL)
        if when == "asked":
            backend.move_in([2], timeout_s=0.05)  # no answer: it stays
            assert backend.moved().tolist() == [True, True, False, False]
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not os.path.exists(f"/proc/{pid}") or _is_zombie(pid))
        if when == "before":
            backend.move_in([0, 1], timeout_s=0.5)
        here = backend.resident().copy()
        assert here.tolist() == {"before": [False] * 4, "back": [False, True, False, False]}.get(when, [True, True, False, False])
        batch = fleet.step([0] * 4)
        assert (batch.step[here] == 1).all() and (batch.status[~here] != 0).all(), batch.status
        for _ in range(30):
            batch = fleet.step([0] * 4)
        assert (batch.status == 0).all()
        assert backend.move_back(np.flatnonzero(backend.moved()).tolist()) == {}
        assert not backend.resident().any() and (fleet.step([0] * 4).status == 0).all()


def _is_zombie(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


class ShmBackendForTests(MovingShm):
    """Moves only when it is told to."""

    def shake(self) -> None:
        return None


def test_what_cannot_be_copied_stays_and_says_why() -> None:
    backend = ShmBackendForTests(1)
    with ef.make("Ant-v5", 1, backend=backend) as fleet:
        fleet.reset(seed=0)
        assert "EzPickle" in backend.move_in([0])[0] and not backend.moved().any()
    backend = ShmBackendForTests(1)
    with ef.make(lambda: Counting(), 2, backend=backend) as fleet:
        fleet.reset(seed=0)
        assert backend.move_in([1]) == {} and backend.moved().tolist() == [False, True]
        fleet.set_attr("limit", [7, 8])
        assert fleet.get_attr("limit") == (7, 8)
        assert backend.move_back([1]) == {} and fleet.get_attr("limit") == (7, 8)


def test_faults_and_closing_with_slots_in_both_places() -> None:
    before = Held.now()
    for i in range(6):
        backend = ShmBackendForTests(2, isolate=bool(i % 2))
        with ef.make("CartPole-v1", 4, backend=backend) as fleet:
            fleet.reset(seed=i)
            assert backend.move_in([0]) == {}
            if i % 3:
                fleet.step([0] * 4)
                backend.move_back([0] if i % 3 == 1 else [])
            else:
                fleet.send([0] * 4)
        del fleet, backend
    assert leaks_since(before) == {}


def test_an_idle_parent_share_changes_nothing() -> None:
    backend = ShmBackendForTests(2)
    with ef.make("CartPole-v1", 4, backend=backend) as fleet:
        fleet.reset(seed=0)
        assert backend._runner is None and backend.num_workers == fleet.plan.num_workers == 2
        backend.move_in([3])
        assert backend._runner is not None and not backend.has_deadline(3) and backend.has_deadline(0)
        backend.move_back([3])
        assert backend._runner is None


class Optioned(Counting):
    """Tells the options of its last reset."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As `Counting`, with the options in the info."""
        obs, _ = super().reset(seed=seed)
        return obs, {"options": options}


@pytest.mark.parametrize("begins", ["in its worker", "in the parent"])
def test_options_of_a_reset_that_was_never_sent_do_not_wait_where_the_slot_was(
    begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = MovingShm(2, chance=0.0)
    with ef.make([Optioned] * 2, backend=backend) as fleet:
        fleet.reset(seed=0)
        there, back = backend.move_in, backend.move_back
        if begins == "in the parent":
            assert there([0]) == {}
            there, back = back, there
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(fleet, "_submit", _interrupts)
            fleet.reset(options={"level": 5})
        assert there([0]) == {}
        batch = fleet.step(np.zeros_like(fleet.action_space.sample()))
        assert back([0]) == {}
        while not batch.terminated.any() and not batch.truncated.any():
            batch = fleet.step(np.zeros_like(fleet.action_space.sample()))
        assert [batch.info[slot]["options"] for slot in range(2)] == [None, None]


def _interrupts(*_: Any) -> None:
    raise KeyboardInterrupt
