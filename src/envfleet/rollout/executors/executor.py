"""The engine that collects rollouts over environment clients, and its names for threads and for an event loop.

A collection is a coroutine on an event loop, with `concurrency` tasks that run one rollout after another. A rollout needs at most
one thread at a time, so that a pool of as many threads is enough. A rollout in which nothing can be awaited
runs on one thread from its reset to its end, which saves two thread switches a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self, Unpack

from envfleet.errors import BadArgument, ClientFailed, FleetClosed, RolloutsFailed
from envfleet.rollout.episodes.episode import Rollout, Rollouts
from envfleet.rollout.executors.client_episode import (
    ClientEpisode,
    Job,
    OnLoop,
    Rules,
    Stop,
    Stopped,
    collect_on_thread,
    is_async,
)
from envfleet.rollout.executors.executor_options import ExecutorOptions, JobOptions, OneJobOptions, RuleOptions
from envfleet.rollout.executors.shared_policies import BatchedPolicy
from envfleet.rollout.executors.throttle import Throttle
from envfleet.util.daemon_pool import DaemonPool
from envfleet.util.loop_thread import LoopThread, wait_on

Names = Sequence[str] | None

#: How long a collection that is given up waits for the rollouts that still run.
_GIVE_UP_S = 5.0


def make_jobs(
    clients: Sequence[Any],
    agent_fn: Any,
    max_steps: int = 1000,
    env_names: Names = None,
    seeds: Sequence[int] | None = None,
    tasks: Sequence[Any] | None = None,
    reset_kwargs: Sequence[dict[str, Any]] | None = None,
) -> list[Job]:
    """One job per client, checked before any starts; `agent_fn` is one agent, or a list with one each."""
    clients = list(clients)
    agents = list(agent_fn) if isinstance(agent_fn, (list, tuple)) else [agent_fn] * len(clients)
    given = {"agents": agents, "env_names": env_names, "seeds": seeds, "tasks": tasks, "reset_kwargs": reset_kwargs}
    for name, values in given.items():
        if values is not None and len(values) != len(clients):
            raise BadArgument(f"{len(clients)} clients but {len(values)} {name}: give one per client")
    if max_steps < 1:
        raise BadArgument(f"max_steps must be at least 1, got {max_steps}")
    for index, agent in enumerate(agents):
        if not callable(agent):
            raise BadArgument(f"agent {index} is not callable: {agent!r}; needed: agent_fn(obs, done) -> action")
    stop = Stop()  # one for all: giving up a collection ends every rollout of it
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


def listed(options: Mapping[str, Any]) -> Any:
    """The options of one rollout (`seed`, `task`, `reset_kwargs`) as those of several."""
    return {name if name == "reset_kwargs" else f"{name}s": [value] for name, value in options.items()}


class RolloutExecutor:
    """What the thread, async and process executors share: the rules of a rollout, order, errors, cancelling."""

    executor: Any  # the pool: a concurrent.futures.Executor whose `shutdown` is bounded
    inline_agent = False

    def __init__(
        self, concurrency: int, *, max_rate: float | None = None, max_in_flight: int | None = None, **rules: Unpack[RuleOptions]
    ) -> None:
        self.rules = Rules(**rules)
        self.concurrency = concurrency  # how many rollouts run at once
        self._throttle = Throttle(max_rate, max_in_flight)
        self._running = Throttle(max_in_flight=concurrency, key=lambda client: None)
        self._in_use = Throttle(max_in_flight=1, key=id)  # a client listed twice has one episode at a time
        self._loop = LoopThread()
        self._closed = False

    def run(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Unpack[JobOptions]
    ) -> Rollouts:
        """One rollout per client, in submission order; `seeds`, `tasks`, `reset_kwargs`: one per client."""
        jobs = make_jobs(clients, agent_fn, max_steps, env_names, **options)
        return self._in_order(jobs, list(self._completed(jobs)))

    def run_iter(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Unpack[JobOptions]
    ) -> Iterator[Rollout]:
        """Yield rollouts as they complete; `rollout.episode` is the position of its client.

        With on_error="raise" failures are raised after the last one.
        """
        return self._streamed(make_jobs(clients, agent_fn, max_steps, env_names, **options))

    def _streamed(self, jobs: Sequence[Job]) -> Iterator[Rollout]:
        failed = Rollouts()
        for rollout in self._completed(jobs):
            if rollout.failed and self.rules.on_error == "raise":
                failed.append(rollout)
            else:
                yield rollout
        self._checked(failed)

    def _in_order(self, jobs: Sequence[Job], completed: Sequence[Rollout]) -> Rollouts:
        """All rollouts in submission order; every one is finished before any error."""
        by_index = {rollout.episode: rollout for rollout in completed}
        return self._checked(Rollouts(by_index[job.index] for job in jobs))

    def _checked(self, rollouts: Rollouts) -> Rollouts:
        """Raise what on_error="raise" asks for, with everything collected inside; else pass it on."""
        failed = rollouts.failures
        if failed and self.rules.on_error == "raise":
            raise RolloutsFailed(rollouts, failed) from failed[0].error
        return rollouts

    def _completed(self, jobs: Sequence[Job]) -> Iterator[Rollout]:
        """Collect on the executor's own loop, seen from sync code."""
        self._check_open()
        done: SimpleQueue[Rollout | None] = SimpleQueue()
        ended, collection = False, None
        try:
            collection = self._loop.submit(self._collect(jobs, done.put))
            while (rollout := done.get()) is not None:
                yield rollout
            ended = True
        finally:  # also when the caller stops iterating, or on Ctrl-C: no rollout keeps running
            if not ended and jobs:
                jobs[0].stop.wanted = True  # also for a collection that was interrupted while it was submitted
            if not ended and collection is not None:
                collection.cancel()
                with suppress(Empty):
                    while done.get(timeout=_GIVE_UP_S) is not None:
                        pass

    def _check_open(self) -> None:
        if self._closed:
            raise FleetClosed("the executor")

    async def _collect(self, jobs: Sequence[Job], done: Callable[[Rollout | None], None]) -> None:
        """Run jobs on the running loop; `done` gets each rollout as it completes, and None at the end."""
        place = OnLoop(self.executor, self.inline_agent)
        waiting = iter(jobs)

        async def work(episode_over: Callable[[], None]) -> None:
            async with self._running.request_async(None):
                while not jobs[0].stop.wanted and (job := next(waiting, None)) is not None:
                    rollout = await self._run(job, place)
                    episode_over()
                    done(rollout)

        try:
            with policy_places(jobs, self.concurrency) as episode_over:
                tasks = [work(episode_over) for _ in range(min(len(jobs), self.concurrency))]
                await asyncio.gather(*tasks, return_exceptions=True)  # so that it waits for all when it is cancelled
        finally:
            for job in waiting:  # given up
                done(_lost(job, Stopped("the collection was given up")))
            done(None)

    async def _run(self, job: Job, place: OnLoop) -> Rollout:
        """Run one job; there is always a record of it."""
        try:
            async with self._in_use.request_async(job.client):
                if self._can_await(job):
                    return await ClientEpisode(job, self.rules, self._throttle, place).collect()
                return await self._finished(job, self._start(job, asyncio.get_running_loop()))
        except BaseException as error:  # also KeyboardInterrupt: raised in a task, it would end the loop
            job.stop.wanted |= isinstance(error, asyncio.CancelledError)
            return _lost(job, error)

    def _can_await(self, job: Job) -> bool:
        client_async = is_async(getattr(job.client, "step", None)) or is_async(getattr(job.client, "reset", None))
        factory_async = job.from_factory and not isinstance(job.client, type) and is_async(job.client)
        return client_async or factory_async or is_async(job.agent)

    def _start(self, job: Job, loop: asyncio.AbstractEventLoop) -> Future[Rollout]:
        """Start a rollout in which nothing can be awaited: here on one thread of the pool."""
        bridge = partial(wait_on, loop)
        return self.executor.submit(collect_on_thread, job, self.rules, self._throttle, bridge)  # type: ignore[no-any-return]

    async def _finished(self, job: Job, call: Future[Rollout]) -> Rollout:
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            # The client is given back when its thread has left it: at its next step, unless that never returns.
            job.stop.wanted = True
            await asyncio.wait([asyncio.wrap_future(call)], timeout=_GIVE_UP_S)
            raise

    def shutdown(self, wait: bool = True, timeout_s: float | None = None, timeout: float | None = None) -> bool:
        """Accept no more work and, with `wait`, join threads and processes; True when all have ended.

        Limited by the timeout; may be called twice.
        """
        self._closed = True
        limit = timeout_s if timeout_s is not None else timeout
        ended: bool = self.executor.shutdown(wait=wait, cancel_futures=True, timeout=limit)
        return self._loop.close(5.0 if limit is None else limit) and ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown(wait=True, timeout_s=None if exception[0] is None else 5.0)


def _lost(job: Job, error: BaseException) -> Rollout:
    rollout = Rollout(env_name=job.env_name, seed=job.seed, task=job.task, episode=job.index)
    message = f"the rollout was lost: {type(error).__name__}: {error}"
    rollout.error = ClientFailed(message, env_name=job.env_name, phase="run")
    rollout.error.__cause__ = error
    return rollout


@contextmanager
def policy_places(jobs: Sequence[Job], concurrency: int) -> Iterator[Callable[[], None]]:
    """Count the episodes that can ask a batched policy, before the first one starts; returns what to call at each end.

    If each episode were counted when it starts, the first batches would have size one.
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


class ParallelEnvironmentExecutor(RolloutExecutor):
    """Collect rollouts from environment clients on threads.

    A client is anything with `reset()` and `step(action)`, sync or `async def`, in Gymnasium's, old gym's or
    OpenEnv's format; a callable that returns one is a factory: it is called per rollout, and its client closed.

    Args:
        num_workers: rollouts that run at once, one thread each; `max_workers` is the same.
        on_error: "raise" lets all others finish, then raises `RolloutsFailed` with them inside; "skip"
            returns failed rollouts with their `error`; "retry" starts a failed rollout again, up to
            `max_retries` times.
        max_retries, backoff_s, max_backoff_s, jitter: pauses before retries, doubling, spread by ± jitter.
        max_rate, max_in_flight: limits on requests per server (or per client without an address).
        rollout_timeout_s: checked between steps.
        check_actions: refuse actions outside the client's `action_space`, when it has one.

    Example:
        >>> import gymnasium as gym
        >>> with ParallelEnvironmentExecutor(num_workers=2) as executor:
        ...     clients = [gym.make("CartPole-v1") for _ in range(2)]
        ...     rollouts = executor.collect_rollouts(clients, lambda obs, done: 1, max_steps=20)
        >>> [rollout.env_name for rollout in rollouts]
        ['env_0', 'env_1']
    """

    def __init__(self, num_workers: int = 8, *, max_workers: int | None = None, **rules: Unpack[ExecutorOptions]) -> None:
        self.num_workers = self.max_workers = num_workers if max_workers is None else max_workers
        self.executor = DaemonPool(self.num_workers, "envfleet-rollout")
        super().__init__(self.num_workers, **rules)

    def collect_rollout(
        self, client: Any, agent_fn: Any, max_steps: int = 1000, env_name: str = "env_0", **options: Unpack[OneJobOptions]
    ) -> Rollout:
        """Collect one rollout on the calling thread (so that it can itself be submitted to `.executor`)."""
        (job,) = make_jobs([client], agent_fn, max_steps, [env_name], **listed(options))
        with policy_places([job], 1), self._in_use.request(client):
            rollout = collect_on_thread(job, self.rules, self._throttle, self._loop.wait_for)
        if rollout.error is not None and self.rules.on_error == "raise":
            rollout.error.rollouts = Rollouts([rollout])  # type: ignore[attr-defined]
            raise rollout.error
        return rollout

    collect_rollouts = RolloutExecutor.run
    iter_rollouts = RolloutExecutor.run_iter


class AsyncParallelExecutor(RolloutExecutor):
    """Collect rollouts on an event loop: thousands of waiting clients cost no thread each.

    `await collect_rollouts(...)` runs on the caller's loop, `run(...)` and `run_iter(...)` on one of its own, so that they
    work from sync code. Clients and agents that are not `async def` run on the executor's own threads, as many as
    `num_workers` (`max_concurrency` is the same). `inline_agent=True` calls a sync agent on the loop itself, which saves
    a thread switch; such an agent must never block. The other arguments are those of `ParallelEnvironmentExecutor`.

    Example:
        >>> class Client:
        ...     async def reset(self): return 0
        ...     async def step(self, action): return 0, 1.0, True, False, {}
        >>> with AsyncParallelExecutor(num_workers=4) as executor:
        ...     rollouts = executor.run([Client() for _ in range(8)], lambda obs, done: 0)
        >>> sum(rollout.episode_return for rollout in rollouts)
        8.0
    """

    def __init__(
        self,
        num_workers: int = 64,
        inline_agent: bool = False,
        *,
        max_concurrency: int | None = None,
        **rules: Unpack[ExecutorOptions],
    ) -> None:
        self.num_workers = self.max_concurrency = num_workers if max_concurrency is None else max_concurrency
        self.executor = DaemonPool(self.num_workers, "envfleet-rollout")
        super().__init__(self.num_workers, **rules)
        self.inline_agent = inline_agent

    async def collect_rollout(
        self, client: Any, agent_fn: Any, max_steps: int = 1000, env_name: str = "env_0", **options: Unpack[OneJobOptions]
    ) -> Rollout:
        """Collect one rollout on the running loop."""
        return (await self.collect_rollouts([client], agent_fn, max_steps, [env_name], **listed(options)))[0]

    async def collect_rollouts(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Unpack[JobOptions]
    ) -> Rollouts:
        """As `run`, on the running loop."""
        jobs = make_jobs(clients, agent_fn, max_steps, env_names, **options)
        return self._in_order(jobs, [rollout async for rollout in self._completed_here(jobs)])

    async def iter_rollouts(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Unpack[JobOptions]
    ) -> AsyncIterator[Rollout]:
        """As `run_iter`, on the running loop."""
        failed = Rollouts()
        async for rollout in self._completed_here(make_jobs(clients, agent_fn, max_steps, env_names, **options)):
            if rollout.failed and self.rules.on_error == "raise":
                failed.append(rollout)
            else:
                yield rollout
        self._checked(failed)

    async def _completed_here(self, jobs: Sequence[Job]) -> AsyncIterator[Rollout]:
        """Collect on the caller's loop."""
        self._check_open()
        done: asyncio.Queue[Rollout | None] = asyncio.Queue()
        collection = asyncio.ensure_future(self._collect(jobs, done.put_nowait))
        try:
            while (rollout := await done.get()) is not None:
                yield rollout
        finally:
            collection.cancel()
            await asyncio.wait([collection])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.__exit__, *exception)
