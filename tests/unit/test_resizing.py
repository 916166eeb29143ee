"""`fleet.resize`: another number of workers, the same rows."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.backends.env_copy import try_packed
from envfleet.backends.pipe import PipeBackend
from envfleet.backends.resizing import balanced
from envfleet.errors import BadArgument, SlotBusy
from envfleet.slots.layout import QUARANTINED, READY
from envfleet.workers.channel import ParentChannel
from tests.support.scripted_backend import ScriptedBackend


def with_pid(env: Any) -> Any:
    env.unwrapped.get_pid = os.getpid
    return env


@pytest.mark.parametrize("on_end", ["reset", "wait"])
@pytest.mark.parametrize("core", ["compiled", "python"])
def test_rows_are_those_of_serial_whatever_the_number_of_workers(on_end: Any, core: str, monkeypatch: Any, no_leaks: Any) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if core == "compiled" else "0")
    random = np.random.default_rng(1)
    with (
        ef.make("gridnavi", 7, backend="serial", on_end=on_end) as one,
        ef.make("gridnavi", 7, backend="pipe", num_workers=2, on_end=on_end) as many,
    ):
        for fleet in (one, many):
            fleet.reset(seed=3, tasks=[(4, 4)] * 7)
        for step in range(120):
            if step % 20 == 10:
                wanted = int(random.integers(1, 8))
                many.resize(num_workers=wanted)
                assert (
                    many.plan.num_workers == wanted == len(many._backend._workers) == len(set(many._backend.worker_of.tolist()))
                )
            if step % 30 == 15:
                for fleet in (one, many):
                    fleet.assign([1, 5], tasks=[(3, 4), (4, 1)], seeds=[step, step + 1])
            actions = random.integers(5, size=7)
            left, right = one.step(actions), many.step(actions)
            for name in (
                "obs",
                "final_obs",
                "reward",
                "terminated",
                "truncated",
                "scored",
                "episode",
                "step",
                "length",
                "ep_return",
                "seed",
            ):
                assert getattr(left, name).tobytes() == getattr(right, name).tobytes(), (name, step)
            assert left.info == right.info


def test_workers_that_are_not_needed_end_and_a_lost_slot_moves_too(no_leaks: Any) -> None:
    with ef.make("CartPole-v1", 6, backend="pipe", num_workers=3, on_fault="restart", wrappers=[with_pid]) as fleet:
        fleet.reset(seed=0)
        pids = fleet.call("get_pid")
        os.kill(pids[5], signal.SIGKILL)
        fleet._backend._keeper.exit_code(pids[5], 10.0)
        fleet._backend.wait(1, 0.0)
        fleet.resize(num_workers=1)
        batch = fleet.step([0] * 6)
        assert batch.status.tolist() == [0, 0, 0, 0, 2, 2] and {fault.slot for fault in fleet.faults} == {4, 5}
        assert set(fleet.call("get_pid")) == {pids[0]}
        for pid in set(pids) - {pids[0]}:
            assert fleet._backend._keeper.exit_code(pid, 10.0) is not None


class Uncopyable(gym.Env[Any, Any]):
    observation_space = gym.spaces.Discrete(1000)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.count, self.file = 0, open(os.devnull)  # noqa: SIM115 - an env that holds what no copy can have

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.count = 0
        return 0, {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.count, 0.0, False, False, {}


def test_what_cannot_be_copied_is_refused_and_nothing_changes() -> None:
    with ef.make(Uncopyable, 4, backend="pipe", num_workers=2) as fleet:
        fleet.reset(seed=0)
        fleet.step([0] * 4)
        with pytest.raises(BadArgument, match=r"slot \d cannot be copied to another worker .* nothing was changed"):
            fleet.resize(num_workers=1)
        assert fleet.plan.num_workers == 2 and fleet.step([0] * 4).obs.tolist() == [2] * 4


def test_what_makes_no_sense_is_refused() -> None:
    with ef.make("CartPole-v1", 2, backend="pipe") as fleet:
        fleet.reset(seed=0)
        for wrong in (0, 3, True, "2", 1.0):
            with pytest.raises(BadArgument, match="from 1 to 2"):
                fleet.resize(wrong)  # type: ignore[arg-type]
        fleet.send([0, 1])
        with pytest.raises(SlotBusy):
            fleet.resize(1)
        fleet.recv()
    with ef.make("CartPole-v1", 2, backend="serial") as fleet, pytest.raises(BadArgument, match="needs backend 'pipe' or 'ray'"):
        fleet.resize(1)


def test_shares_are_even_and_few_slots_move() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        slots, before, after = int(random.integers(1, 20)), int(random.integers(1, 6)), int(random.integers(1, 6))
        if after > slots or before > slots:
            continue
        old = np.sort(np.arange(slots) % before)
        new = balanced(old, after)
        counts = np.bincount(new, minlength=after)
        assert counts.max() - counts.min() <= 1 and len(counts) == after
        kept = np.bincount(old, minlength=after)[:after]
        assert np.count_nonzero(new != old) == slots - np.minimum(np.sort(kept)[::-1], np.sort(counts)[::-1]).sum()


def killed(fleet: ef.Fleet, worker: int) -> None:
    """The process of a worker ends, and the fleet knows it."""
    handle = fleet._backend.workers[worker]
    pid = handle.pid
    os.kill(pid, signal.SIGKILL)
    fleet._backend.keeper.exit_code(pid, 10.0)
    while handle.alive:
        fleet._backend.poll(0.05)


@pytest.mark.parametrize(("lost", "wanted"), [(0, 2), (0, 1), (1, 2)])
def test_a_lost_worker_that_is_to_get_slots_is_started_again(lost: int, wanted: int, no_leaks: Any) -> None:
    with ef.make("CartPole-v1", 6, backend="pipe", num_workers=3, start_method="fork", on_fault="restart") as fleet:
        fleet.reset(seed=0)
        killed(fleet, lost)
        fleet.resize(wanted)
        assert fleet.plan.num_workers == wanted
        assert np.flatnonzero(fleet.step([0] * 6).status).tolist() == [2 * lost, 2 * lost + 1]


def rows(fleet: ef.Fleet) -> list[bytes]:
    return [fleet.step([0, 1] * 3).obs.tobytes() for _ in range(5)]


#: Where Ctrl-C comes: at which call of what.
MOMENTS = [(ParentChannel, "_send_one"), (PipeBackend, "replies"), (PipeBackend, "wait_for_ends"), (PipeBackend, "launch")]


@pytest.mark.parametrize("at", range(0, 8, 3))
@pytest.mark.parametrize(("kind", "name"), MOMENTS, ids=lambda value: getattr(value, "__name__", value))
def test_after_an_interrupt_rows_are_the_same_and_it_can_be_resized_again(
    kind: Any, name: str, at: int, monkeypatch: Any, no_leaks: Any
) -> None:
    real, calls = getattr(kind, name), itertools.count()

    def interrupted(*args: Any) -> Any:
        if next(calls) == at:
            raise KeyboardInterrupt
        return real(*args)

    with ef.make("CartPole-v1", 6, backend="serial") as one:
        one.reset(seed=0)
        wanted = rows(one) + rows(one) + rows(one)
    with ef.make("CartPole-v1", 6, backend="pipe", num_workers=3, start_method="fork") as fleet:
        fleet.reset(seed=0)
        found = rows(fleet)
        monkeypatch.setattr(kind, name, interrupted)
        for number in (5, 2, 4):
            with contextlib.suppress(KeyboardInterrupt):
                fleet.resize(number)
        monkeypatch.undo()
        fleet.resize(3)
        found += rows(fleet)
        fleet.resize(4)
        assert found + rows(fleet) == wanted and not fleet.faults
        assert fleet.plan.num_workers == len(fleet._backend.workers) == 4


def test_an_answer_to_an_interrupted_question_is_not_taken_for_one_to_the_next(monkeypatch: Any) -> None:
    with ef.make("CartPole-v1", 4, backend="pipe", num_workers=2, start_method="fork") as fleet:
        backend = fleet._backend
        fleet.reset(seed=0)
        monkeypatch.setattr(PipeBackend, "replies", lambda *_: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            backend.ask([1], "__apply__", [(try_packed,)], backend.worker_of, 10.0)
        monkeypatch.undo()
        while not backend._replies:
            backend.poll(0.05)
        assert [*backend.ask([3], "__apply__", [(try_packed,)], backend.worker_of, 10.0)] == [3]


def test_slots_that_get_a_place_begin_an_episode_and_no_fault_is_made_up(no_leaks: Any) -> None:
    """A worker has no place for a while, as one on Ray, and then has one."""
    with ef.make("CartPole-v1", 4, backend="pipe", num_workers=2, start_method="fork", on_fault="restart") as fleet:
        fleet.reset(seed=0)
        killed(fleet, 1)
        fleet._backend.placings.append((1, "has no place"))
        for _ in range(3):
            assert fleet.step([0] * 4).status.tolist() == [READY, READY, QUARANTINED, QUARANTINED]
        before = len(fleet.faults)
        fleet._backend.placings.append((1, ""))
        batch = fleet.step([0] * 4)
        assert batch.status.tolist() == [READY] * 4 and batch.step.tolist() == [3, 3, -1, -1]
        assert batch.scored.tolist() == [True, True, False, False] and batch.episode.tolist() == [0, 0, 1, 1]
        assert fleet.step([0] * 4).scored.all() and len(fleet.faults) == before and not len(fleet.quarantined)


class Placed(ScriptedBackend):
    """Slots whose worker has no place yet have no deadline."""

    placed = False

    def has_deadline(self, slot: int) -> bool:
        return self.placed


def test_the_time_before_a_worker_has_its_place_is_no_silence() -> None:
    backend = Placed()
    limits = {"step_timeout_s": 2.0, "reset_timeout_s": 2.0, "init_timeout_s": 2.0}
    with ef.make("CartPole-v1", 2, backend=backend, on_fault="restart", **limits) as fleet:
        fleet.reset(seed=0)
        backend.hold = True
        fleet.send([0, 0])

        def num_faults_after(seconds: float) -> int:
            for pulse in backend.pulses:
                pulse.enter(-1, "idle")
            for _ in range(int(seconds / 0.2)):
                backend.pass_time(0.2)
                fleet._supervisor.look(force=True)
            return len(fleet.faults)

        assert num_faults_after(60.0) == 0
        backend.placed = True
        assert num_faults_after(1.0) == 0
        assert num_faults_after(5.0) > 0


def own_class(step: int) -> type[gym.Env[Any, Any]]:
    """A class that no worker can import, as those of a script are."""

    class Mine(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-1e9, 1e9, (1,))
        action_space = gym.spaces.Discrete(2)
        x = 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.x = int(self.np_random.integers(5))
            return np.full(1, self.x, np.float32), {}

        def step(self, action: Any) -> Any:
            self.x += step * int(action)
            return np.full(1, self.x, np.float32), 0.0, self.x > 20, False, {}

    return Mine


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
def test_environments_of_a_script_can_be_moved(start_method: str, no_leaks: Any) -> None:
    envs = [own_class(step) for step in range(1, 6)]
    with ef.make(envs, backend="serial") as one, ef.make(envs, backend="pipe", num_workers=1, start_method=start_method) as many:
        for fleet in (one, many):
            fleet.reset(seed=0)
        for num_workers in (2, 5, 1, 3):
            many.resize(num_workers)
            for _ in range(7):
                left, right = one.step([1] * 5), many.step([1] * 5)
                assert left.obs.tobytes() == right.obs.tobytes() and left.episode.tolist() == right.episode.tolist()
        assert many.faults == []
