"""send, recv, assign, call: what the fleet promises beyond what conformance checks."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Counting, Faulty, Tasked
from envfleet.errors import BadArgument, EnvTimeout, NotPicklable, RecvTimeout, SpacesDiffer, WorkerLost
from envfleet.slots.layout import FAULT, LOUD, QUARANTINED, READY
from envfleet.testing import Held, leaks_since
from tests.support.scripted_backend import Fate, ScriptedBackend
from tests.support.ways import WAYS, starter

EVERY = pytest.mark.parametrize("way", WAYS)


class Talker(Counting):
    """Answers slowly, or dies answering."""

    def slow(self, word: str, seconds: float, die: bool) -> str:
        if die:
            os._exit(3)
        time.sleep(seconds)
        return word


@pytest.mark.parametrize("way", ["pipe", "shm"])
def test_an_answer_left_behind_is_not_the_next_calls(way: str) -> None:
    """Slot 0 dies in a call while slot 1 is still answering it: slot 1's late answer must not pass for another's."""
    with starter(way)(Talker, 2, 2) as fleet:
        fleet.reset(seed=0)
        fleet._backend.call([0, 1], "call", "slow", [("a", 0.0, True), ("b", 0.3, False)], {}, True)
        with pytest.raises(WorkerLost):
            fleet.set_attr("x", [1, 2])
        fleet.reset(seed=0)
        assert fleet.call("slow", "c", 0.0, False) == ("c", "c")


@EVERY
def test_recv_without_time_takes_what_is_there(way: str) -> None:
    with starter(way)(Counting, 2, 2) as fleet:
        fleet.reset(seed=0)
        fleet.send([0, 0])
        while len(fleet.ready()) < 2:
            continue
        assert fleet.recv(timeout_s=0.0).slots.tolist() == [0, 1]
        fleet.send([0], [1])
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                assert fleet.recv(timeout_s=0.0).slots.tolist() == [1]
                break
            except RecvTimeout as late:
                assert late.slots == [1]


def test_recv_timeout_loses_nothing() -> None:
    backend = ScriptedBackend(script=lambda slot, nth: Fate(after_s=5.0 if nth == 1 and slot == 1 else 0.0))
    with ef.make(Counting, 2, backend=backend) as fleet:
        fleet.reset(seed=0)
        fleet.send([0, 0])
        with pytest.raises(RecvTimeout, match=r"slots \[1\]"):
            fleet.recv(timeout_s=1.0)
        assert fleet.ready().tolist() == [0]
        assert fleet.recv().slots.tolist() == [0, 1] and backend.now() == pytest.approx(5.0, abs=0.1)


def test_stale_views_are_loud_in_debug_mode() -> None:
    """A `copy=False` row of a slot that was sent again is poisoned; rows of other slots stay."""
    envs = [lambda: Counting(limit=2), lambda: Counting(limit=9), lambda: Counting(limit=2)]
    for way in ("serial", "shm"):
        with starter(way)(envs, num_workers=2, debug=True) as fleet:
            fleet.reset(seed=0)
            fleet.step([0] * 3)
            view = fleet.step([0] * 3, copy=False)
            assert view.final_obs[:, 0].tolist() == [2.0, 0.0, 2.0]
            fleet.send([0], [2])
            assert view.obs[:, 0].tolist() == [0.0, 2.0, LOUD] and view.final_obs[:, 0].tolist() == [2.0, 0.0, LOUD]
            assert view.reward.tolist() == [1.0, 1.0, LOUD]
            fleet.recv()
            kept = fleet.step([0] * 3)
            fleet.step([0] * 3)
            assert LOUD not in kept.obs, "a copy is the caller's own"


def test_actions_outside_the_space_are_named_in_debug_mode() -> None:
    with ef.make(Counting, 2, backend="serial", debug=True) as fleet:
        fleet.reset(seed=0)
        with pytest.raises(BadArgument, match="action 7 of slot 1"):
            fleet.step([0, 7])


def test_assign_while_out_takes_effect_at_the_reset_after_the_next_send() -> None:
    backend = ScriptedBackend()
    with ef.make(Tasked, 1, backend=backend) as fleet:
        fleet.reset(seed=0, tasks=[1])
        backend.hold = True
        fleet.send([0])
        fleet.assign([0], tasks=[2], seeds=[5])
        backend.hold = False
        backend.finish(0)
        batch = fleet.recv()
        assert backend.touched == []
        while not batch.ended.any():
            batch = fleet.step([0])
        again = fleet.step([0]) if batch.info[0]["task"] == 1 else batch
        while not again.ended.any():
            again = fleet.step([0])
        assert again.info[0]["task"] == 2


def test_a_stalled_slot_takes_its_worker_down_and_names_the_sharers() -> None:
    """Invariant 4 on the virtual clock: the deadline ends it, sharers say whom they shared with, others go on."""
    backend = ScriptedBackend(num_workers=2)
    with ef.make(Counting, 4, backend=backend, on_fault="restart", step_timeout_s=7.0) as fleet:
        fleet.reset(seed=0)
        backend.hold = True
        fleet.send([0] * 4)
        backend.stall(0)
        backend.finish(2)
        backend.finish(3)
        assert fleet.recv(at_least=2).slots.tolist() == [2, 3] and backend.now() == 0.0
        backend.hold = False
        batch = fleet.recv()
        assert batch.status.tolist() == [FAULT, FAULT] and 7.0 < backend.now() < 8.0
        kinds = [(fault.slot, fault.kind, fault.shared_with) for fault in fleet.faults]
        assert kinds == [(0, "timeout", None), (1, "lost", 0)]


def test_quarantine_after_the_budget_and_credit_after_an_episode() -> None:
    """3 restarts without a completed episode, backoff 0.1 s doubling; a completed episode clears the count."""
    backend = ScriptedBackend(script=lambda slot, nth: Fate("die") if nth else Fate())
    with ef.make(Counting, 1, backend=backend, on_fault="restart") as fleet:
        fleet.reset(seed=0)
        batch = fleet.step([0])
        assert batch.status.tolist() == [QUARANTINED] and len(fleet.faults) == 4
        assert backend.now() == pytest.approx(0.1 + 0.2 + 0.4, abs=0.05)
        for _ in range(3):
            again = fleet.step([0])
            assert again.status.tolist() == [QUARANTINED] and not again.scored.any()


@pytest.mark.parametrize("way", ["thread", "pipe", "shm", "aio"])
def test_episodes_ran_exactly_their_task(way: str, episodes: int = 40) -> None:
    """8 slots x 3 tasks: assign changes tasks as they run, the env reports what it ran."""
    rng = np.random.default_rng(0)
    with starter(way)(Tasked, 8, 3) as fleet:
        tasks: list[Any] = [10, 20, 30]
        now = [tasks[i % 3] for i in range(8)]
        fleet.reset(seed=0, tasks=now)
        coming, done = list(now), np.zeros(8, int)
        while done.min() < episodes:
            chosen = rng.integers(0, 8)
            coming[chosen] = tasks[rng.integers(0, 3)]
            fleet.assign([chosen], tasks=[coming[chosen]])
            batch = fleet.step([0] * 8)
            for slot in range(8):
                seen = batch.final_obs[slot, 0] if batch.ended[slot] else batch.obs[slot, 0]
                assert seen == now[slot] == fleet.task_value(batch.task[slot])
                if batch.ended[slot]:
                    now[slot] = coming[slot]
                    done[slot] += 1
                    assert batch.obs[slot, 0] == now[slot] == batch.info[slot]["task"]


@pytest.mark.full
@EVERY
def test_full_tasked_episodes(way: str) -> None:
    test_episodes_ran_exactly_their_task(way, episodes=1000)


def cycles(way: str, count: int) -> None:
    starter(way)("CartPole-v1", 3, 2).close()
    before = Held.now()
    for i in range(count):
        fleet = starter(way)("CartPole-v1", 3, 2)
        fleet.reset(seed=i)
        if i % 2:
            fleet.send([0, 0, 0])
        fleet.close()
        del fleet
    assert leaks_since(before) == {}


@EVERY
def test_cycles_leave_nothing(way: str) -> None:
    """Invariant 7: descriptors, threads, processes and shared memory are back to the start."""
    cycles(way, 8)


@pytest.mark.full
@EVERY
def test_two_hundred_cycles_leave_nothing(way: str) -> None:
    cycles(way, 200)


@pytest.mark.parametrize("way", WAYS)
def test_a_make_that_fails_leaves_nothing(way: str) -> None:
    starter(way)(Counting, 2, 2).close()
    before = Held.now()
    other = lambda: gym.make("CartPole-v1")
    with pytest.raises(SpacesDiffer, match="slot 1"):
        starter(way)([Counting, other], num_workers=2)
    with pytest.raises(ef.EnvFailed):
        starter(way)([Counting, lambda: Faulty("init", "raise")], num_workers=2)
    assert leaks_since(before) == {}


@pytest.mark.parametrize("way", ["pipe", "shm"])
def test_what_cannot_be_pickled_is_named_before_any_process_starts(way: str) -> None:
    import threading

    lock = threading.Lock()
    before = Held.now()
    with pytest.raises(NotPicklable, match="lock"):
        starter(way)(lambda: (lock, Counting())[1], 2, 2)
    assert leaks_since(before, 0.0) == {}


def test_a_factory_that_hangs_while_it_is_loaded_is_a_timeout() -> None:
    """Invariant 4: the deadline of the constructor begins before the factory is unpickled."""
    with pytest.raises((EnvTimeout, WorkerLost)):
        ef.make(HangsOnLoad(), 1, backend="pipe", start_method="fork", init_timeout_s=0.5).close()


class HangsOnLoad:
    def __call__(self) -> Any:
        return Counting()

    def __reduce__(self) -> Any:
        return time.sleep, (1000,)


def test_ready_rows_only(way: str = "serial") -> None:
    with starter(way)(Counting, 3, 1) as fleet:
        fleet.reset(seed=0)
        batch = fleet.step([0, 0, 0])
        assert batch.status.tolist() == [READY] * 3 and "Batch(3 rows" in repr(batch)
        with pytest.raises(AttributeError):
            batch.obs = None


class Says(gym.Env[Any, Any]):
    """Observes how often it was stepped, as text."""

    observation_space = gym.spaces.Text(20)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return "0", {}

    def step(self, action: int) -> Any:
        self.count += 1
        return str(self.count), 0.0, False, False, {}


@pytest.mark.parametrize("backend", ["serial", "thread", "pipe", "shm"])
def test_text_observations_are_new_in_every_step_without_a_copy(backend: str) -> None:
    with ef.make(Says, 3, backend=backend) as fleet:
        fleet.reset(seed=0)
        for i in range(1, 5):
            assert list(fleet.step([0, 0, 0], copy=False).obs) == [str(i)] * 3
