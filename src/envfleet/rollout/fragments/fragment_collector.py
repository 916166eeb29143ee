"""`FragmentCollector`: segments whose policy acts in the workers."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import Any, Self

import gymnasium as gym
import numpy as np

from envfleet.core.batch import Batch
from envfleet.core.construct import make
from envfleet.core.fleet_options import EnvLike
from envfleet.errors import BadArgument, FaultError, RolloutError
from envfleet.faults.failure import Failure, Fault
from envfleet.rollout.fragments.fragment_env import Fragment, FragmentEnv, Order, Raised
from envfleet.rollout.ledger import Ledger
from envfleet.rollout.segments.join_segments import join_segments, lost_segment
from envfleet.rollout.segments.segment import Ints, Segment
from envfleet.rollout.stats import Stats, StatsBuilder
from envfleet.slots.factories import env_name, pickled
from envfleet.slots.layout import READY
from envfleet.tasks.task_source import TaskSource
from envfleet.util.machine import usable_cpus
from envfleet.util.trees import tree_map

#: What of `**options` is for the fleets in the workers; everything else is for the fleet of the workers.
_INNER = ("env_kwargs", "wrappers", "columns", "observation_mode", "on_fault", "max_restarts", "with_state", "debug")


class FragmentCollector:
    """Collect [T, B] segments with a copy of the policy in every worker: two messages per worker and segment, however many steps it has.

    For links where a message per step is too slow, above all to workers on a Ray cluster. The segments are those of
    `Collector.segment` for the same seed, where the policy's answer to a row does not depend on the rows beside it.

    The policy travels by value, at first and whenever it has changed. One that remembers something of running episodes, or has random
    numbers of its own, needs a method `arrive(rng, before)`: it is called on every new copy, with random numbers of its worker and the copy
    that it replaces (None at first). The networks of `envfleet.networks` have it. Without it, draw from `ask.uniform` and `ask.rng`.

    A worker that is lost, or overruns `fragment_timeout_s`, is started again: the episodes that ran in it have failed, and its rows of that segment
    have `scored` False. A fault of one environment is a fault of its slot alone.

    Args:
        env: what `envfleet.make` takes, except what a batch engine or a server runs.
        policy: as for `Collector`; may be replaced between two segments.
        num_envs: slots in all; they are spread over the workers.
        backend: where the workers are: "pipe", "shm", "ray"; "serial" and "thread" are for tests.
        num_workers: how many (default: the CPUs of this process).
        worker_backend: what steps the environments in a worker: "serial" or "native".
        seed: of the run.
        tasks: a callable number → task, or a sequence. A `TaskSource` decides in the parent, and is refused.
        max_steps: cut episodes off after so many steps.
        random_actions: ignore the policy.
        fragment_timeout_s: how long a segment may take.
        options: `env_kwargs`, `wrappers`, `columns`, `observation_mode`, `on_fault` (here "restart" unless you say "raise"), `max_restarts`,
            `with_state` and `debug` are for the environments. Other options of `make` (`resources`, `ray_address`, `start_method` …) are for the workers.

    Example:
        >>> with FragmentCollector("CartPole-v1", lambda obs: (obs[:, 2] > 0).astype(int), num_envs=4, backend="serial", num_workers=2) as collector:
        ...     segment = collector.segment(16)
        >>> segment.obs.shape, collector.ledger.started >= 4
        ((16, 4, 4), True)
    """

    def __init__(
        self,
        env: EnvLike,
        policy: Any = None,
        num_envs: int | None = None,
        *,
        backend: Any = "pipe",
        num_workers: int | None = None,
        worker_backend: Any = "serial",
        seed: int = 0,
        tasks: Any = None,
        max_steps: int | None = None,
        random_actions: bool = False,
        fragment_timeout_s: float = 600.0,
        **options: Any,
    ) -> None:
        if policy is None and not random_actions:
            raise BadArgument("give a policy, or random_actions=True")
        if isinstance(tasks, TaskSource):
            why = "a TaskSource decides in the parent, episode by episode"
            raise BadArgument(f"tasks: {why}: use Collector, or give a callable number → task")
        count = len(env) if isinstance(env, (list, tuple)) else 1 if num_envs is None else num_envs
        num_workers = usable_cpus() if num_workers is None else num_workers
        for name, value in (("num_envs", count), ("num_workers", num_workers)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadArgument(f"{name}={value!r}: give a whole number from 1 up")
        num_workers = min(num_workers, count)
        inner = {
            "on_fault": "restart",
            **{name: options.pop(name) for name in _INNER if name in options},
            "backend": worker_backend,
        }
        self.policy, self.seed, self.num_envs = None if random_actions else policy, seed, count
        self.env_name = env_name(env[0] if isinstance(env, (list, tuple)) else env)
        self.faults: list[Fault] = []  # of environments; `fleet.faults` has those of workers
        self.workers = [_Worker(slots) for slots in np.array_split(np.arange(count), num_workers)]
        self._stats = StatsBuilder()
        self._tasks: list[Any] = []  # by id
        self._task_ids: dict[bytes, int] = {}
        self._number = 0  # segments so far
        self._seconds = 0.0
        about = {"seed": seed, "tasks": tasks, "max_steps": max_steps}
        parts = [functools.partial(FragmentEnv, *_share(env, worker.slots, count), inner, about) for worker in self.workers]
        if backend not in ("serial", "thread"):
            options["num_workers"] = num_workers
        # One slot of this fleet is one worker.
        self.fleet = make(parts, backend=backend, on_fault="restart", step_timeout_s=fragment_timeout_s, **options)
        try:
            self.fleet.reset()
            spaces = self.fleet.call("spaces", slots=self.fleet.runnable()[:1])[0]
        except BaseException:
            self.fleet.close()
            raise
        self.single_observation_space: gym.Space[Any] = spaces[0]
        self.single_action_space: gym.Space[Any] = spaces[1]

    def segment(self, num_steps: int) -> Segment:
        """The next `num_steps` steps of every slot as [T, B] arrays; episodes go on from segment to segment."""
        if isinstance(num_steps, bool) or not isinstance(num_steps, (int, np.integer)) or num_steps < 1:
            raise BadArgument(f"num_steps={num_steps!r}: give a whole number from 1 up")
        blob, began = pickled(self.policy, "the policy"), time.perf_counter()
        try:
            self.fleet.drop()  # what a call has left that was interrupted
            self.fleet.send([worker.order(self._number, num_steps, blob) for worker in self.workers])
            segment = self._joined(self.fleet.recv(), blob)
        except BaseException:
            # What the workers have collected meanwhile is lost or unknown: their episodes are not continued.
            for worker in self.workers:
                worker.begin_anew()
            raise
        finally:
            self._number += 1
            self._seconds += time.perf_counter() - began
        self._count(segment)
        return segment

    def _joined(self, batch: Batch, policy: bytes) -> Segment:
        """The segment of what the workers have sent. The first error of a policy or an environment is raised."""
        found = [batch.final_obs[row] if status == READY else None for row, status in enumerate(batch.status.tolist())]
        for worker, value in zip(self.workers, found):
            if value is None:
                worker.replace(self._reason(worker))
        for worker, value in zip(self.workers, found):
            if isinstance(value, Raised):
                raise self._error(worker, value.failure)
        if not (good := [fragment for fragment in found if fragment is not None]):
            last = self.fleet.faults[-1]
            raise RolloutError(f"every worker was lost, so there is nothing to return; the last one: {last}") from last.error()
        parts = []
        for worker, fragment in zip(self.workers, found):
            if fragment is None:
                parts.append(worker.lost(good[0].segment))
                worker.begin_anew()
            else:
                worker.take(fragment, policy)
                self.faults += fragment.faults
                parts.append(self._with_own_tasks(fragment))
        if sum(fragment.num_quarantined for fragment in good) == self.num_envs:
            raise RolloutError(
                f"every slot is quarantined, so nothing can be collected any more; the last one: {self.faults[-1]}"
            )
        return join_segments(parts)

    def _error(self, worker: _Worker, failure: Failure) -> BaseException:
        error = failure.exception
        if isinstance(error, FaultError):  # it has the number of the slot in the worker
            fault = dataclasses.replace(error.fault, slot=int(worker.slots[0]) + error.fault.slot)
            self.faults.append(fault)
            return fault.error()
        return error

    def _reason(self, worker: _Worker) -> str:
        number = self.workers.index(worker)
        kinds = [f"{fault.kind} in {fault.phase}" for fault in self.fleet.faults if fault.slot == number]
        return kinds[-1] if kinds else "lost"

    def _with_own_tasks(self, fragment: Fragment) -> Segment:
        """The segment with the task ids of this collector instead of the worker's."""
        segment = fragment.segment
        ids = np.full(max(fragment.tasks, default=-1) + 2, -1)  # the last one is for -1, no task
        for theirs, value in fragment.tasks.items():
            blob = pickled(value, "the task")
            if blob not in self._task_ids:
                self._task_ids[blob] = len(self._tasks)
                self._tasks.append(value)
            ids[theirs] = self._task_ids[blob]
        segment.task = ids[segment.task]
        return segment

    def task_value(self, task: int) -> Any:
        """The task behind an id of `segment.task` (None for -1)."""
        return None if task < 0 else self._tasks[task]

    def _count(self, segment: Segment) -> None:
        for (t, b), episode_return, length in zip(segment.end_index.tolist(), segment.end_return, segment.end_length):
            if segment.scored[t, b]:
                self._stats.count(self.env_name, float(episode_return), int(length))

    @property
    def ledger(self) -> Ledger:
        """Every started episode, counted once: those of all workers, also of workers that were lost."""
        return sum((worker.ledger for worker in self.workers), Ledger())

    def stats(self) -> Stats:
        """Statistics of all episodes that ended."""
        return self._stats.stats(self._seconds or None)

    def close(self) -> None:
        """End the workers. Idempotent."""
        self.fleet.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


class _Worker:
    """What the parent knows of a worker: its slots, and how it left them."""

    def __init__(self, slots: Ints) -> None:
        self.slots = slots
        self._last: Fragment | None = None  # also of a process that was replaced
        self._begin: Ints | None = np.zeros(len(slots), np.int64)  # episodes to begin with, where those that ran do not go on
        self._policy: bytes | None = None  # the one it has
        self._before, self._here = Ledger(), Ledger()  # of the processes that were replaced, and of the one that is there

    @property
    def ledger(self) -> Ledger:
        """The episodes of this worker, in all its processes."""
        return self._before + self._here

    def order(self, number: int, num_steps: int, policy: bytes) -> Order:
        """What it is to do next."""
        return Order(number, num_steps, None if policy == self._policy else policy, self._begin)

    def take(self, fragment: Fragment, policy: bytes) -> None:
        """It has done it."""
        if self._last is not None and fragment.process != self._last.process:
            self.replace("lost")  # in a call that was interrupted
        here = Ledger()
        here.load(fragment.ledger)
        self._last, self._here, self._begin, self._policy = fragment, here, None, policy

    def begin_anew(self) -> None:
        """The episodes that run are not continued, and nobody knows what the worker has got."""
        if self._begin is None and self._last is not None:
            self._begin = self._last.episode + 1
        self._policy = None

    def replace(self, reason: str) -> None:
        """Its process was lost, and what ran in it."""
        before = self.ledger
        for _ in range(before.in_flight):
            before.fail(reason)
        self._before, self._here = before, Ledger()

    def lost(self, like: Segment) -> Segment:
        """The segment that says that its process was lost while it was collected."""
        last, count = self._last, len(self.slots)
        if last is None:
            obs = tree_map(lambda leaf: np.zeros((count, *leaf.shape[1:]), leaf.dtype), like.bootstrap_obs)
            none = np.zeros(count, np.int64)
            return lost_segment(like, obs, none.astype(np.bool_), none.astype(float), none, none)
        running = np.full(count, self._begin is None)
        return lost_segment(like, last.segment.bootstrap_obs, running, last.ep_return, last.length, last.episode)


def _share(env: Any, slots: Ints, total: int) -> tuple[Any, tuple[int, int, int]]:
    """What a worker makes: its environments, and (first slot, slots, slots of the run)."""
    first, count = int(slots[0]), len(slots)
    return list(env[first : first + count]) if isinstance(env, (list, tuple)) else env, (first, count, total)
