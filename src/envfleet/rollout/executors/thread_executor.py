"""Rollouts over environment clients on threads; what the thread, async and process executors share."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future
from concurrent.futures import wait as wait_futures
from contextlib import contextmanager
from typing import Any, Self

from envfleet.errors import BadArgument, FleetClosed
from envfleet.rollout.episodes.episode import Rollout, Rollouts
from envfleet.rollout.executors.client_episode import Job, OnError, Rules, drive, rollout_steps
from envfleet.rollout.executors.shared_policies import BatchedPolicy
from envfleet.rollout.executors.throttle import Throttle
from envfleet.rollout.rollout_errors import ClientFailed, RolloutsFailed
from envfleet.util.daemon_pool import DaemonPool
from envfleet.util.loop_thread import LoopThread


def make_jobs(
    clients: Sequence[Any],
    agent_fn: Any,
    max_steps: int = 1000,
    env_names: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    tasks: Sequence[Any] | None = None,
    reset_kwargs: Sequence[dict[str, Any]] | None = None,
) -> list[Job]:
    """One job per client, checked before any starts; `agent_fn` is one agent, or a list with one each."""
    clients = list(clients)
    agents = list(agent_fn) if isinstance(agent_fn, (list, tuple)) else [agent_fn] * len(clients)
    given = {
        "agents": agents,
        "env_names": env_names,
        "seeds": seeds,
        "tasks": tasks,
        "reset_kwargs": reset_kwargs,
    }
    for name, values in given.items():
        if values is not None and len(values) != len(clients):
            raise BadArgument(f"{len(clients)} clients but {len(values)} {name}: give one per client")
    if max_steps < 1:
        raise BadArgument(f"max_steps must be at least 1, got {max_steps}")
    for index, agent in enumerate(agents):
        if not callable(agent):
            raise BadArgument(f"agent {index} is not callable: {agent!r}; needed: agent_fn(obs, done) -> action")
    stop = threading.Event()  # one for all: giving up a collection ends every rollout of it
    return [
        Job(
            client=client,
            agent=agent,
            max_steps=max_steps,
            env_name=env_names[index] if env_names is not None else f"env_{index}",
            index=index,
            seed=None if seeds is None else int(seeds[index]),
            task=None if tasks is None else tasks[index],
            reset_kwargs={} if reset_kwargs is None else dict(reset_kwargs[index]),
            stop=stop,
        )
        for index, (client, agent) in enumerate(zip(clients, agents))
    ]


def listed(options: dict[str, Any]) -> dict[str, list[Any]]:
    """The options of one rollout (`seed`, `task`, `reset_kwargs`) as those of several.

    Example:
        >>> listed({"seed": 3, "reset_kwargs": {"map": 1}})
        {'seeds': [3], 'reset_kwargs': [{'map': 1}]}
    """
    return {name if name == "reset_kwargs" else f"{name}s": [value] for name, value in options.items()}


class JobRunner(ABC):
    """What all executors share: rules, order, errors, giving up; a subclass says where one job runs."""

    executor: Executor

    def __init__(
        self,
        *,
        on_error: OnError = "raise",
        max_retries: int = 3,
        backoff_s: float = 0.1,
        max_backoff_s: float = 5.0,
        jitter: float = 0.5,
        max_rate: float | None = None,
        max_in_flight: int | None = None,
        rollout_timeout_s: float | None = None,
        check_actions: bool = True,
    ) -> None:
        self.rules = Rules(
            on_error=on_error,
            max_retries=max_retries,
            backoff_s=backoff_s,
            max_backoff_s=max_backoff_s,
            jitter=jitter,
            rollout_timeout_s=rollout_timeout_s,
            check_actions=check_actions,
            throttle=Throttle(max_rate, max_in_flight),
        )
        self._closed = False

    @property
    @abstractmethod
    def concurrency(self) -> int:
        """How many rollouts run at once."""

    @abstractmethod
    def submit_job(self, job: Job) -> Future[Rollout]:
        """Start one rollout; the future gets its record, failed or not."""

    def run(
        self,
        clients: Sequence[Any],
        agent_fn: Any,
        max_steps: int = 1000,
        env_names: Sequence[str] | None = None,
        **options: Any,
    ) -> Rollouts:
        """One rollout per client, in submission order; `seeds`, `tasks`, `reset_kwargs`: one per client."""
        return self.run_jobs(make_jobs(clients, agent_fn, max_steps, env_names, **options))

    def run_iter(
        self,
        clients: Sequence[Any],
        agent_fn: Any,
        max_steps: int = 1000,
        env_names: Sequence[str] | None = None,
        **options: Any,
    ) -> Iterator[Rollout]:
        """Yield rollouts as they complete; `rollout.episode` is the position of its client."""
        return self.iter_jobs(make_jobs(clients, agent_fn, max_steps, env_names, **options))

    def run_jobs(self, jobs: Sequence[Job]) -> Rollouts:
        """Run jobs and return their rollouts in submission order; every one is finished before any error."""
        done: dict[int, Rollout] = {rollout.episode: rollout for rollout in self._completed(jobs)}
        return self.checked(Rollouts(done[job.index] for job in jobs))

    def iter_jobs(self, jobs: Sequence[Job]) -> Iterator[Rollout]:
        """Yield rollouts as they complete; with on_error="raise" failures are raised after the last one."""
        failed = Rollouts()
        for rollout in self._completed(jobs):
            if rollout.failed and self.rules.on_error == "raise":
                failed.append(rollout)
            else:
                yield rollout
        self.checked(failed)

    def checked(self, rollouts: Rollouts) -> Rollouts:
        """Raise what on_error="raise" asks for, with everything collected inside; else pass it on."""
        failed = rollouts.failures
        if failed and self.rules.on_error == "raise":
            raise RolloutsFailed(rollouts, failed) from failed[0].error
        return rollouts

    def _completed(self, jobs: Sequence[Job]) -> Iterator[Rollout]:
        if self._closed:
            raise FleetClosed("the executor")
        pending: dict[Future[Rollout], Job] = {}
        with policy_places(jobs, self.concurrency) as episode_over:
            try:
                for job in jobs:
                    pending[self.submit_job(job)] = job
                while pending:
                    for future in wait_futures(pending, return_when=FIRST_COMPLETED).done:
                        job = pending.pop(future)
                        episode_over()
                        yield self._outcome(job, future)
            finally:  # also when the caller stops iterating, or on Ctrl-C: nothing goes on unseen
                if pending:
                    jobs[0].stop.set()
                    for future in pending:
                        future.cancel()
                    wait_futures([future for future in pending if not future.cancelled()], timeout=5.0)

    def _outcome(self, job: Job, future: Future[Rollout]) -> Rollout:
        try:
            return future.result()
        except (Exception, CancelledError) as error:
            failed = Rollout(env_name=job.env_name, seed=job.seed, task=job.task, episode=job.index)
            message = f"the rollout was lost: {type(error).__name__}: {error}"
            failed.error = ClientFailed(message, env_name=job.env_name, phase="run")
            failed.error.__cause__ = error
            return failed

    def shutdown(self, wait: bool = True, timeout_s: float | None = None, timeout: float | None = None) -> bool:
        """Take no more work and, with `wait`, join; bounded by the timeout, and fine to call twice."""
        self._closed = True
        limit = timeout_s if timeout_s is not None else timeout
        return self._end(wait, limit)

    @abstractmethod
    def _end(self, wait: bool, timeout_s: float | None) -> bool:
        """Release threads and processes; True when all are gone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown(wait=True, timeout_s=None if exception[0] is None else 5.0)


@contextmanager
def policy_places(jobs: Sequence[Job], concurrency: int) -> Iterator[Any]:
    """Tell a batched policy how many episodes can ask at once, before the first of them starts.

    Counting each episode only when it starts would send the first few off in batches of one.
    """
    agents = {id(job.agent): job.agent for job in jobs if isinstance(job.agent, BatchedPolicy)}
    if len(agents) != 1 or not all(isinstance(job.agent, BatchedPolicy) for job in jobs):
        yield lambda: None
        return
    (policy,) = agents.values()
    left, places = len(jobs), min(len(jobs), concurrency)
    for _ in range(places):
        policy.enter()

    def episode_over() -> None:
        nonlocal left, places
        left -= 1
        if left < places:
            places -= 1
            policy.leave()

    try:
        yield episode_over
    finally:
        for _ in range(places):
            policy.leave()


class ClientLocks:
    """One episode at a time per client object: a client listed twice is not stepped by two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, tuple[threading.Lock, int]] = {}

    @contextmanager
    def hold(self, client: Any) -> Iterator[None]:
        """Wait until no other episode uses this client."""
        key = id(client)
        with self._lock:
            lock, users = self._held.get(key, (threading.Lock(), 0))
            self._held[key] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, users = self._held[key]
                if users == 1:
                    del self._held[key]
                else:
                    self._held[key] = (lock, users - 1)


class ParallelEnvironmentExecutor(JobRunner):
    """Collect rollouts from environment clients on threads.

    A client is anything with `reset()` and `step(action)`, sync or `async def`, in Gymnasium's, old gym's or
    OpenEnv's dialect; a callable that returns one is a factory and is called (and closed) per rollout.

    Args:
        max_workers: rollouts that run at once, one thread each.
        on_error: "raise" lets all others finish, then raises `RolloutsFailed` with them inside; "skip"
            returns failed rollouts with their `error`; "retry" begins a failed rollout again, up to
            `max_retries` times.
        max_retries, backoff_s, max_backoff_s, jitter: pauses before retries, doubling, spread by ± jitter.
        max_rate, max_in_flight: limits on requests per server (or per client that shows no address).
        rollout_timeout_s: checked between steps.
        check_actions: refuse actions outside the client's `action_space`, when it has one.

    Example:
        >>> import gymnasium as gym
        >>> with ParallelEnvironmentExecutor(max_workers=2) as executor:
        ...     clients = [gym.make("CartPole-v1") for _ in range(2)]
        ...     rollouts = executor.collect_rollouts(clients, lambda obs, done: 1, max_steps=20)
        >>> [rollout.env_name for rollout in rollouts]
        ['env_0', 'env_1']
    """

    def __init__(self, max_workers: int = 8, **rules: Any) -> None:
        super().__init__(**rules)
        self.max_workers = max_workers
        self.executor: DaemonPool = DaemonPool(max_workers, "envfleet-rollout")
        self._loop = LoopThread()
        self._locks = ClientLocks()

    @property
    def concurrency(self) -> int:
        """How many rollouts run at once."""
        return self.max_workers

    def collect_rollout(
        self, client: Any, agent_fn: Any, max_steps: int = 1000, env_name: str = "env_0", **options: Any
    ) -> Rollout:
        """Collect one rollout on the calling thread (so that it can itself be submitted to `.executor`)."""
        (job,) = make_jobs([client], agent_fn, max_steps, [env_name], **listed(options))
        with policy_places([job], 1):
            rollout = self._run_job(job)
        if rollout.error is not None and self.rules.on_error == "raise":
            rollout.error.rollouts = Rollouts([rollout])  # type: ignore[attr-defined]
            raise rollout.error
        return rollout

    collect_rollouts = JobRunner.run
    iter_rollouts = JobRunner.run_iter

    def submit_job(self, job: Job) -> Future[Rollout]:
        """Start one rollout on a thread."""
        return self.executor.submit(self._run_job, job)

    def _run_job(self, job: Job) -> Rollout:
        with self._locks.hold(job.client):
            return drive(rollout_steps(job, self.rules), self.rules.throttle, self._loop.wait_for)

    def _end(self, wait: bool, timeout_s: float | None) -> bool:
        ended = self.executor.shutdown(wait=wait, cancel_futures=True, timeout=timeout_s)
        return self._loop.close(5.0 if timeout_s is None else timeout_s) and ended
