"""`FragmentCollector`: segments whose policy acts in the workers."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import time
from typing import Any, Self

import numpy as np

from envfleet.core.batch import Batch
from envfleet.core.construct import is_remote, make
from envfleet.core.engine_choice import engine_of
from envfleet.core.fleet_options import EnvLike
from envfleet.envs.registry import native_version
from envfleet.errors import BadArgument, FaultError, RolloutError, SpacesDiffer
from envfleet.faults.failure import Failure, Fault
from envfleet.rollout.fragments.fragment_env import Fragment, FragmentEnv, Left, Order, Raised
from envfleet.rollout.ledger import Ledger
from envfleet.rollout.policy_protocol import RandomPolicy, checked_policy
from envfleet.rollout.segments.collect_segments import LEFT
from envfleet.rollout.segments.join_segments import join_segments, lost_segment
from envfleet.rollout.segments.segment import Ints, Segment
from envfleet.rollout.stats import Stats, StatsBuilder
from envfleet.slots.factories import env_name, factories_for, pickled
from envfleet.slots.layout import READY, same_rows
from envfleet.tasks.task_source import TaskSource
from envfleet.util.machine import usable_cpus
from envfleet.util.trees import tree_map

#: What of `**options` is for the fleets in the workers; everything else is for the fleet of the workers.
_INNER = ("env_kwargs", "wrappers", "columns", "observation_mode", "on_fault", "max_restarts", "with_state", "debug")
_BACKENDS = ("pipe", "shm", "ray", "serial", "thread")


class FragmentCollector:
    """Collect [T, B] segments with a copy of the policy in every worker: two messages per worker and segment, however many steps it has.

    For links where a message per step is too slow, above all to workers on a Ray cluster. The segments are those of
    `Collector.segment` for the same seed, where the policy's answer to a row does not depend on the rows beside it.

    The policy travels by value, at first and whenever it has changed. One that remembers something of running episodes, or has random
    numbers of its own, needs a method `arrive(rng, before)`: it is called on every new copy, with random numbers of its worker and the copy
    that it replaces (None if that is of another class). The networks of `envfleet.networks` have it. Without it, draw from `ask.uniform` and `ask.rng`.

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
        inner = {name: options.pop(name) for name in _INNER if name in options}
        count = _checked(env, num_envs, inner, (backend, worker_backend), fragment_timeout_s, options)
        num_workers = usable_cpus() if num_workers is None else num_workers
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise BadArgument(f"num_workers={num_workers!r}: give a whole number from 1 up")
        inner = {"on_fault": "restart", **inner, "backend": worker_backend}
        self.policy: Any = None if random_actions else checked_policy(policy)
        self.seed, self.num_envs = seed, count
        listed: Any = env if isinstance(env, (list, tuple)) else ()
        self.env_name = env_name(listed[0] if listed else env)
        self.faults: list[Fault] = []  # of environments; `fleet.faults` has those of workers
        shares = np.array_split(np.arange(count), min(num_workers, count))
        self.workers = [_Worker(slots, np.zeros(len(slots), np.int64)) for slots in shares]
        self._is_open = False  # a call runs, or did not return: nobody got what its workers have collected
        self._stats = StatsBuilder()
        self._tasks: list[bytes] = []  # pickled, by id
        self._task_ids: dict[bytes, int] = {}
        self._number = 0  # segments so far
        self._seconds = 0.0
        about = {"seed": seed, "tasks": tasks, "max_steps": max_steps}
        parts = [
            functools.partial(
                FragmentEnv, list(listed[s[0] : s[-1] + 1]) if listed else env, (int(s[0]), len(s), count), inner, about
            )
            for s in shares
        ]
        options["init_timeout_s"] = options.get("init_timeout_s", 120.0) * len(shares[0])  # a worker builds so many
        self._start(parts, {"backend": backend, "step_timeout_s": fragment_timeout_s, **options}, inner)
        if random_actions:
            self.policy = RandomPolicy(self.single_action_space)

    def _start(self, parts: list[Any], options: dict[str, Any], inner: dict[str, Any]) -> None:
        """Make the fleet whose slots are the workers; what a worker could not build, or refused, is raised."""
        if options["backend"] in ("serial", "thread"):  # as between processes, workers must not share an object
            parts = [pickle.loads(pickled(part, "the environment factory")) for part in parts]
        else:
            options["num_workers"] = len(parts)
        try:
            self.fleet = make(parts, on_fault="restart", **options)
            self._begin(inner)
        except BaseException as error:
            if hasattr(self, "fleet"):
                self.fleet.close()
            if isinstance(error, FaultError) and error.fault.failure is not None:
                found = self._error(error.fault.slot, error.fault.failure)
                raise found from found.__cause__
            raise

    def _begin(self, inner: dict[str, Any]) -> None:
        """Begin with workers whose environments have the same spaces."""
        self.fleet.reset()
        there = self.fleet.runnable().tolist()
        if self.fleet.faults and (inner["on_fault"] == "raise" or not there):
            raise self.fleet.faults[0].error()
        about = dict(zip(there, self.fleet.call("spaces", slots=there)))
        first = about[there[0]]
        self.single_observation_space, self.single_action_space, _ = first
        for worker, other in about.items():
            for name, one, two in zip(("observation_space", "action_space", "agents"), first, other):
                if one != two and not (inner.get("observation_mode") == "different" and one is first[0] and same_rows(one, two)):
                    slots = self.workers[there[0]].slots[0], self.workers[worker].slots[0]
                    raise SpacesDiffer(f"slot {slots[1]} has {name} {two}, but slot {slots[0]} has {one}", name)

    def segment(self, num_steps: int) -> Segment:
        """The next `num_steps` steps of every slot as [T, B] arrays; episodes go on from segment to segment."""
        if isinstance(num_steps, bool) or not isinstance(num_steps, (int, np.integer)) or num_steps < 1:
            raise BadArgument(f"num_steps={num_steps!r}: give a whole number from 1 up")
        hint = "The policy acts in the workers: create it at the first call, or use Collector, whose policy stays here."
        blob, began = pickled(checked_policy(self.policy), "the policy", hint), time.perf_counter()
        if self._is_open:
            for worker in self.workers:
                worker.begin_anew()
        # An exception may come at any line from here on. Only the last line says that the workers' episodes go on.
        self._is_open, self._number = True, self._number + 1
        try:
            self.fleet.drop()  # what a call has left that was interrupted
            self.fleet.send([worker.order(self._number, int(num_steps), blob) for worker in self.workers])
            segment, workers = self._joined(self.fleet.recv(), blob)
        finally:
            self._seconds += time.perf_counter() - began
        self._count(segment)
        self.workers, self._is_open = workers, False
        return segment

    def _joined(self, batch: Batch, policy: bytes) -> tuple[Segment, list[_Worker]]:
        """The segment of what the workers have sent, and the workers after it. The first error of a policy or an environment is raised."""
        found = [batch.final_obs[row] if status == READY else None for row, status in enumerate(batch.status.tolist())]
        before = self.workers
        self.workers = [old.replaced(self._reason(k)) if new is None else old for k, (old, new) in enumerate(zip(before, found))]
        for number, value in enumerate(found):
            if isinstance(value, Raised):
                raise self._error(number, value.failure)
        good = [fragment for fragment in found if fragment is not None]
        if not good:
            last = self.fleet.faults[-1]
            raise RolloutError(f"every worker was lost, so there is nothing to return; the last one: {last}") from last.error()
        faults = [self._own(number, fault) for number, part in enumerate(found) if part is not None for fault in part.faults]
        num_gone = sum(len(before[number].slots) for number in self.fleet.quarantined.tolist())
        if num_gone + sum(fragment.num_quarantined for fragment in good) == self.num_envs:
            last = [*self.fleet.faults, *self.faults, *faults][-1]
            raise RolloutError(f"every slot is quarantined, so nothing can be collected any more; the last one: {last}")
        like = good[0].segment
        segment = join_segments([old.lost(like) if new is None else self._with_own_tasks(new) for old, new in zip(before, found)])
        self.faults += faults
        return segment, [old if new is None else old.after(new, policy) for old, new in zip(self.workers, found)]

    def _own(self, number: int, fault: Fault) -> Fault:
        """A fault in a worker, with the number of the slot in the run."""
        return dataclasses.replace(fault, slot=int(self.workers[number].slots[0]) + fault.slot, worker=number)

    def _error(self, number: int, failure: Failure) -> BaseException:
        error = failure.exception
        return self._own(number, error.fault).error() if isinstance(error, FaultError) else error

    def _reason(self, number: int) -> str:
        kinds = [f"{fault.kind} in {fault.phase}" for fault in self.fleet.faults if fault.slot == number]
        return kinds[-1] if kinds else "lost"

    def _with_own_tasks(self, fragment: Fragment) -> Segment:
        """The segment with the task ids of this collector instead of the worker's."""
        segment = fragment.segment
        ids = np.full(max(fragment.tasks, default=-1) + 2, -1)  # the last one is for -1, no task
        for theirs, value in fragment.tasks.items():
            blob = pickled(value, "the task")
            if blob not in self._task_ids:
                self._tasks.append(blob)  # first: this may be interrupted
                self._task_ids[blob] = len(self._tasks) - 1
            ids[theirs] = self._task_ids[blob]
        segment.task = ids[segment.task]
        return segment

    def task_value(self, task: int) -> Any:
        """The task behind an id of `segment.task` (None for -1)."""
        return None if task < 0 else pickle.loads(self._tasks[task])

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


@dataclasses.dataclass(eq=False)
class _Worker:
    """What the parent knows of a worker: its slots, and how it left them."""

    slots: Ints
    begin: Ints | None  # episodes to begin with, where those that ran do not go on
    policy: bytes | None = None  # the one it has
    left: Left | None = None  # by its last fragment, also that of a process that was replaced
    before: Ledger = dataclasses.field(default_factory=Ledger)  # of the processes that were replaced
    here: Ledger = dataclasses.field(default_factory=Ledger)  # of the one that is there
    used: int = 0  # episodes of this process that ended in segments that the caller got
    num_faults: int = 0  # of this process
    num_steps: int = 1  # of the last order

    @property
    def ledger(self) -> Ledger:
        """The episodes of this worker, in all its processes."""
        ledger = self.before + self.here
        ledger.drop(LEFT, nobodys := self.here.used - self.used)
        ledger.used -= nobodys
        return ledger

    @property
    def episode(self) -> Ints:
        """[slot] the episode that runs, or is begun with."""
        return self.left.episode if self.begin is None and self.left is not None else self.begin  # type: ignore[return-value]

    @property
    def _next(self) -> Ints:
        """[slot] where to begin if that does not go on. After a second time behind all that may have been played: one of it may end every process."""
        return self.episode + (1 if self.begin is None else self.num_steps)

    def order(self, number: int, num_steps: int, policy: bytes) -> Order:
        """What it is to do next."""
        self.num_steps, process = num_steps, b"" if self.left is None else self.left.process
        return Order(number, num_steps, None if policy == self.policy else policy, self.begin, process, self.num_faults)

    def after(self, fragment: Fragment, policy: bytes) -> _Worker:
        """The worker that has done it."""
        segment, known = fragment.segment, self
        if self.left is not None and self.left.process != fragment.left.process:
            known = self.replaced("lost")  # in a call that was interrupted
        used = known.used + int(segment.scored[tuple(segment.end_index.T)].sum())
        num_faults = known.num_faults + len(fragment.faults)
        return _Worker(self.slots, None, policy, fragment.left, known.before, fragment.ledger, used, num_faults)

    def begin_anew(self) -> None:
        """The episodes that run are not continued, and nobody knows what the worker has got."""
        self.begin, self.policy = self._next, None

    def replaced(self, reason: str) -> _Worker:
        """The worker whose process was lost, and what ran in it."""
        before = self.ledger
        for _ in range(before.in_flight):
            before.fail(reason)
        return _Worker(self.slots, self._next, left=self.left, before=before)

    def lost(self, like: Segment) -> Segment:
        """The segment that says that its process was lost while it was collected."""
        none, left = np.zeros(len(self.slots), np.int64), self.left
        if left is None:
            obs = tree_map(lambda leaf: np.zeros((len(none), *leaf.shape[1:]), leaf.dtype), like.bootstrap_obs)
            left = Left(b"", obs, none.astype(np.bool_), none, none, none.astype(float))
        return lost_segment(like, left.obs, left.running & (self.begin is None), left.ep_return, left.length, self.episode)


def _checked(
    env: Any, num_envs: int | None, inner: dict[str, Any], backends: tuple[Any, Any], timeout_s: float, options: dict[str, Any]
) -> int:
    """Refuse what does not go with workers that collect; the number of slots."""
    for name, value, choices in zip(("backend", "worker_backend"), backends, (_BACKENDS, ("serial", "native"))):
        if not isinstance(value, str) or value not in choices:
            raise BadArgument(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise BadArgument(f"fragment_timeout_s={timeout_s!r}: give seconds above 0")
    for name in sorted({"on_end", "step_timeout_s", "reset_timeout_s"} & options.keys()):
        raise BadArgument(f"{name} does not go with whole segments: leave it out (fragment_timeout_s is the limit of a segment)")
    kwargs = inner.get("env_kwargs")
    if not is_remote(env):
        env, kwargs = native_version(env, kwargs) if backends[1] == "native" else (env, kwargs)
        factories, _ = factories_for(env, num_envs, kwargs, ())
        if engine_of(factories, backends[1]) is None:
            return len(factories)
    raise BadArgument(f"{env!r}: a batch engine or a server runs it, not these workers: use Collector with a fleet of make()")
