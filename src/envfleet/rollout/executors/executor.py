"""The engine that collects rollouts over environment clients, and its names for threads and for an event loop.

A collection is a coroutine on an event loop, with `concurrency` tasks that run one rollout after another. A rollout needs at most
one thread at a time, so that a pool of as many threads is enough. A rollout in which nothing can be awaited
runs on one thread from its reset to its end, which saves two thread switches a step.

Rollouts that the caller has not taken yet are bounded: a task starts the next one only if there is room. A call that does not
return is given up: a coroutine is cancelled, a process is killed; a thread is replaced, and its client is not used until it returns.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self, Unpack

import numpy as np

from envfleet.core.arguments import refuse_unknown
from envfleet.errors import BadArgument, ClientFailed, FleetClosed, LedgerWarning, RolloutFailed, RolloutsFailed
from envfleet.rollout.episodes.episode import Rollout, Rollouts
from envfleet.rollout.executors.addresses import client_or_factory
from envfleet.rollout.executors.client_episode import (
    ClientEpisode,
    Job,
    OnLoop,
    OnThread,
    Rules,
    Stop,
    Stopped,
    is_async,
    new_rollout,
    on_this_thread,
    too_late,
    with_retries,
)
from envfleet.rollout.executors.executor_options import ExecutorOptions, JobOptions, OneJobOptions, RuleOptions
from envfleet.rollout.executors.shared_policies import BatchedPolicy
from envfleet.rollout.executors.throttle import Throttle
from envfleet.util.daemon_pool import DaemonPool
from envfleet.util.loop_thread import LoopThread, wait_on

Names = Sequence[str] | None

#: How long a collection that is given up waits for the rollouts that still run, each until its next step.
_GIVE_UP_S = 2.0
#: After `rollout_timeout_s` a rollout may end by itself for so long, between two of its steps; then it is given up.
GRACE_S = 0.25
#: Rollouts that may be started and not taken, beyond those that can run.
SPARE = 4
#: In a rollout: the ids of the executors that run it.
_inside: ContextVar[frozenset[int]] = ContextVar("envfleet_inside_rollout", default=frozenset())


def make_jobs(
    clients: Sequence[Any],
    agent_fn: Any,
    max_steps: int = 1000,
    env_names: Names = None,
    seeds: Sequence[int] | None = None,
    tasks: Sequence[Any] | None = None,
    reset_kwargs: Sequence[dict[str, Any]] | None = None,
    is_async: bool = False,
    **unknown: Any,
) -> list[Job]:
    """One job per client, checked before any starts; `agent_fn` is one agent, or a list with one each."""
    refuse_unknown("collect_rollouts", unknown, ["max_steps", "env_names", *JobOptions.__annotations__])
    if isinstance(clients, (str, bytes, Mapping)) or not hasattr(clients, "__iter__"):
        raise BadArgument(
            f"clients={clients!r}: give a list with one client, factory or address for each rollout, e.g. [address] * 8"
        )
    clients = [client_or_factory(client, index, is_async) for index, client in enumerate(clients)]
    agents = list(agent_fn) if isinstance(agent_fn, (list, tuple)) else [agent_fn] * len(clients)
    given = {"agents": agents, "env_names": env_names, "seeds": seeds, "tasks": tasks, "reset_kwargs": reset_kwargs}
    for name, values in given.items():
        if values is not None and len(values) != len(clients):
            raise BadArgument(f"{len(clients)} clients but {len(values)} {name}: give one per client")
    checked_count("max_steps", max_steps)
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
        refuse_unknown(
            type(self).__name__, set(rules) - set(Rules.__annotations__), ["num_workers", *ExecutorOptions.__annotations__]
        )
        self.rules = Rules(**rules)
        self.concurrency = concurrency  # how many rollouts run at once
        self._throttle = Throttle(max_rate, max_in_flight)
        self._running = Throttle(max_in_flight=concurrency, key=lambda client: None)
        self._in_use = Throttle(max_in_flight=1, key=id)  # a client listed twice has one episode at a time
        self._stuck: dict[int, Future[Any]] = {}  # by the id of a client that is still in a call that was given up
        self._loop = LoopThread()
        self._closed = False

    def run(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Unpack[JobOptions]
    ) -> Rollouts:
        """One rollout per client, in submission order; `seeds`, `tasks`, `reset_kwargs`: one per client."""
        jobs = self._jobs(clients, agent_fn, max_steps, env_names, **options)
        return self._in_order(jobs, list(self._completed(jobs)))

    def run_iter(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Unpack[JobOptions]
    ) -> Iterator[Rollout]:
        """Yield rollouts as they complete; `rollout.episode` is the position of its client.

        With on_error="raise" failures are raised after the last one.
        """
        return self._streamed(self._jobs(clients, agent_fn, max_steps, env_names, **options))

    def _jobs(self, *args: Any, **options: Any) -> list[Job]:
        return make_jobs(*args, **options)

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
        room = asyncio.Semaphore(self.concurrency + SPARE)
        ended, collection = False, None
        try:
            loop = self._loop.loop
            collection = self._loop.submit(self._collect(jobs, done.put, room))
            while (rollout := done.get()) is not None:
                with suppress(RuntimeError):  # the executor was shut down: what is left comes as failures
                    loop.call_soon_threadsafe(room.release)
                yield self._told(rollout)
            ended = True
        finally:  # also when the caller stops iterating, or on Ctrl-C: no rollout keeps running
            if not ended and jobs:
                jobs[0].stop.wanted = True  # also for a collection that was interrupted while it was submitted
            if not ended and collection is not None:
                collection.cancel()
                with suppress(Empty):
                    while done.get(timeout=2 * _GIVE_UP_S) is not None:
                        pass

    def _check_open(self) -> None:
        if self._closed:
            raise FleetClosed("the executor")
        if id(self) in _inside.get():
            raise BadArgument(
                "a rollout of this executor starts another collection on it, which could wait forever for a free worker: "
                "use another executor there"
            )

    def _told(self, rollout: Rollout) -> Rollout:
        """Warn of what a caller who looks at the numbers only would not see."""
        if rollout.failed and self.rules.on_error == "retry":
            message = (
                f"a rollout failed in all of its {rollout.attempts} attempts, and is returned with its error: {rollout.error}"
            )
            warnings.warn(message, LedgerWarning, stacklevel=4)
        elif not np.isfinite(rollout.episode_return):
            step = int(np.flatnonzero(~np.isfinite(rollout.rewards))[0])
            message = f"environment {rollout.env_name!r} gave the reward {rollout.rewards[step]} at step {step}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        return rollout

    async def _collect(self, jobs: Sequence[Job], done: Callable[[Rollout | None], None], room: asyncio.Semaphore) -> None:
        """Run jobs on the running loop; `done` gets each rollout as it completes, and None at the end.

        The caller releases `room` for each rollout it takes.
        """
        place = OnLoop(self.executor, self.inline_agent, self._note_stuck)
        waiting = deque(jobs)
        num_tasks = min(len(jobs), self.concurrency)

        async def work(policy: PolicyPlaces) -> None:
            _inside.set(_inside.get() | {id(self)})
            while waiting and not jobs[0].stop.wanted:
                if room.locked():
                    with policy.one_less():  # its batches do not wait for this task
                        await room.acquire()
                else:
                    await room.acquire()
                async with self._running.request_async(None):
                    if waiting:
                        done(await self._run(waiting.popleft(), place))
            policy.leave()

        try:
            with PolicyPlaces(jobs, num_tasks) as policy:
                tasks = [work(policy) for _ in range(num_tasks)]
                await asyncio.gather(*tasks, return_exceptions=True)  # so that it waits for all when it is cancelled
        finally:
            for job in waiting:  # given up
                done(lost(job, Stopped("the collection was given up")))
            done(None)

    async def _run(self, job: Job, place: OnLoop) -> Rollout:
        """Run one job; there is always a record of it."""
        try:
            if job.from_factory:
                return await with_retries(job, self.rules, partial(self._attempt, job, place), asyncio.sleep)
            async with self._in_use.request_async(job.client):
                return await with_retries(job, self.rules, partial(self._attempt, job, place), asyncio.sleep)
        except BaseException as error:  # also KeyboardInterrupt: raised in a task, it would end the loop
            job.stop.wanted |= isinstance(error, asyncio.CancelledError)
            return lost(job, error)

    def _can_await(self, job: Job) -> bool:
        client_async = is_async(getattr(job.client, "step", None)) or is_async(getattr(job.client, "reset", None))
        factory_async = job.from_factory and not isinstance(job.client, type) and is_async(job.client)
        return client_async or factory_async or is_async(job.agent)

    async def _attempt(self, job: Job, place: OnLoop) -> Rollout:
        """One attempt, on the loop or on a thread, that ends in time."""
        limit_s, loop = self.rules.rollout_timeout_s, asyncio.get_running_loop()
        # A factory builds another client each time: a build that hangs concerns no other rollout.
        if not job.from_factory and (stuck := self._stuck.get(id(job.client))) is not None:
            await asyncio.wait([asyncio.wrap_future(stuck)], timeout=limit_s)
            if not stuck.done():
                return failed(
                    job, too_late(job, limit_s, -1, "its client is still in a call of an earlier rollout, which was given up")
                )
        call: Any  # a task of this loop, or a call on a thread
        waiter: asyncio.Future[Rollout]
        if self._can_await(job):
            episode = ClientEpisode(job, self.rules, self._throttle, place)
            call = waiter = loop.create_task(episode.play())
        else:
            episode = ClientEpisode(job, self.rules, self._throttle, OnThread(partial(wait_on, loop)))
            call = self.executor.submit(copy_context().run, episode.play_here)
            waiter = asyncio.wrap_future(call)
        try:
            while not waiter.done():
                left_s = None if limit_s is None else limit_s + GRACE_S - episode.age_s
                if left_s is not None and left_s <= 0:
                    await self._give_up(job, episode, call, waiter, 0.0)
                    return episode.given_up(too_late(job, limit_s, len(episode.rollout)))
                await asyncio.wait([waiter], timeout=left_s)
            return waiter.result()
        except asyncio.CancelledError:
            # The client is given back when its thread has left it: at its next step, unless that never returns.
            job.stop.wanted = True
            await self._give_up(job, episode, call, waiter, _GIVE_UP_S)
            raise

    async def _give_up(self, job: Job, episode: ClientEpisode, call: Any, waiter: asyncio.Future[Rollout], wait_s: float) -> None:
        """End an attempt, or leave it alone if it cannot be ended."""
        episode.unwanted = True
        if isinstance(call, asyncio.Task):
            call.cancel()
            wait_s = _GIVE_UP_S
        if wait_s and not waiter.done():
            await asyncio.wait([waiter], timeout=wait_s)
        if waiter.done() or call.cancel():
            return
        if episode.thread is not None and not isinstance(call, asyncio.Task):
            self.executor.replace(episode.thread)
        if not job.from_factory:
            end: Future[Any] = Future()
            call.add_done_callback(lambda _: end.set_result(None))
            self._note_stuck(job.client, end)

    def _note_stuck(self, client: Any, end: Future[Any]) -> None:
        """A client is in a call that was given up: it is used again only after the call's end."""
        key = id(client)  # the call keeps the client alive
        self._stuck[key] = end
        end.add_done_callback(lambda _: self._stuck.pop(key, None))

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


def failed(job: Job, error: RolloutFailed, cause: BaseException | None = None) -> Rollout:
    """The record of a rollout of which nothing is known but its error."""
    rollout = new_rollout(job)
    rollout.error, error.__cause__ = error, cause
    return rollout


def lost(job: Job, cause: BaseException) -> Rollout:
    """The record of a rollout that something else than its client or agent has ended."""
    message = f"the rollout was lost: {type(cause).__name__}: {cause}"
    return failed(job, ClientFailed(message, env_name=job.env_name, phase="run"), cause)


def checked_count(name: str, value: Any) -> int:
    """A count that was given as the argument `name`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise BadArgument(f"{name}={value!r}: give a whole number, 1 or more")
    return int(value)


def checked_workers(num_workers: Any, **aliases: Any) -> int:
    """The number of workers; an alias that is given takes precedence.

    Example:
        >>> checked_workers(8, max_workers=None), checked_workers(8, max_workers=2)
        (8, 2)
    """
    given = [(name, value) for name, value in aliases.items() if value is not None]
    return checked_count(*(given[0] if given else ("num_workers", num_workers)))


class PolicyPlaces:
    """How many tasks can ask the batched policy that all jobs share, counted before the first one starts.

    If each task were counted when it starts, the first batches would have size one.
    """

    def __init__(self, jobs: Sequence[Job], count: int) -> None:
        agents = {id(job.agent): job.agent for job in jobs}
        agent = next(iter(agents.values()), None)
        self._policy = agent if len(agents) == 1 and isinstance(agent, BatchedPolicy) else None
        self._count = count

    def __enter__(self) -> Self:
        if self._policy is not None:
            for _ in range(self._count):
                self._policy.enter()
        return self

    def __exit__(self, *exception: object) -> None:
        while self._count:
            self.leave()

    def leave(self) -> None:
        """One task less."""
        self._count -= 1
        if self._policy is not None:
            self._policy.leave()

    @contextmanager
    def one_less(self) -> Iterator[None]:
        """One task less for the time of this block."""
        self.leave()
        try:
            yield
        finally:
            self._count += 1
            if self._policy is not None:
                self._policy.enter()


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
        rollout_timeout_s: a rollout that takes longer has failed with `RolloutTimeout`, also one that is stuck in a call.
            A thread cannot be ended: it is replaced, and its client is not used before that call returns.
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
        self.num_workers = self.max_workers = checked_workers(num_workers, max_workers=max_workers)
        super().__init__(self.num_workers, **rules)
        self.executor = DaemonPool(self.num_workers, "envfleet-rollout")

    def collect_rollout(
        self, client: Any, agent_fn: Any, max_steps: int = 1000, env_name: str = "env_0", **options: Unpack[OneJobOptions]
    ) -> Rollout:
        """Collect one rollout on the calling thread (so that it can itself be submitted to `.executor`).

        With `rollout_timeout_s` it runs on a thread of its own, which can be given up.
        """
        (job,) = make_jobs([client], agent_fn, max_steps, [env_name], **listed(options))
        if self.rules.rollout_timeout_s is None:
            wait([stuck] if (stuck := self._stuck.get(id(client))) is not None else [])
            with PolicyPlaces([job], 1), self._in_use.request(job.client):
                rollout = self._told(on_this_thread(with_retries(job, self.rules, partial(self._here, job), _sleep)))
        else:
            self.executor.grow()
            try:
                (rollout,) = self._completed([job])
            finally:
                self.executor.grow(-1)
        if rollout.error is not None and self.rules.on_error == "raise":
            rollout.error.rollouts = Rollouts([rollout])  # type: ignore[attr-defined]
            raise rollout.error
        return rollout

    def _here(self, job: Job) -> Awaitable[Rollout]:
        return ClientEpisode(job, self.rules, self._throttle, OnThread(self._loop.wait_for)).play()

    collect_rollouts = RolloutExecutor.run
    iter_rollouts = RolloutExecutor.run_iter


async def _sleep(seconds: float) -> None:
    time.sleep(seconds)


class AsyncParallelExecutor(RolloutExecutor):
    """Collect rollouts on an event loop: thousands of waiting clients cost no thread each.

    `await collect_rollouts(...)` runs on the caller's loop, `run(...)` and `run_iter(...)` on one of its own, so that they
    work from sync code. Clients and agents that are not `async def` run on the executor's own threads, as many as
    `num_workers` (`max_workers` and `max_concurrency` are the same). `inline_agent=True` calls a sync agent on the loop itself, which saves
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
        max_workers: int | None = None,
        **rules: Unpack[ExecutorOptions],
    ) -> None:
        count = checked_workers(num_workers, max_concurrency=max_concurrency, max_workers=max_workers)
        self.num_workers = self.max_workers = self.max_concurrency = count
        super().__init__(count, **rules)
        self.executor = DaemonPool(count, "envfleet-rollout")
        self.inline_agent = inline_agent

    def _jobs(self, *args: Any, **options: Any) -> list[Job]:
        return make_jobs(*args, **{**options, "is_async": True})

    async def collect_rollout(
        self, client: Any, agent_fn: Any, max_steps: int = 1000, env_name: str = "env_0", **options: Unpack[OneJobOptions]
    ) -> Rollout:
        """Collect one rollout on the running loop."""
        return (await self.collect_rollouts([client], agent_fn, max_steps, [env_name], **listed(options)))[0]

    async def collect_rollouts(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Unpack[JobOptions]
    ) -> Rollouts:
        """As `run`, on the running loop."""
        jobs = self._jobs(clients, agent_fn, max_steps, env_names, **options)
        return self._in_order(jobs, [rollout async for rollout in self._completed_here(jobs)])

    async def iter_rollouts(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Unpack[JobOptions]
    ) -> AsyncIterator[Rollout]:
        """As `run_iter`, on the running loop."""
        failed = Rollouts()
        async for rollout in self._completed_here(self._jobs(clients, agent_fn, max_steps, env_names, **options)):
            if rollout.failed and self.rules.on_error == "raise":
                failed.append(rollout)
            else:
                yield rollout
        self._checked(failed)

    async def _completed_here(self, jobs: Sequence[Job]) -> AsyncIterator[Rollout]:
        """Collect on the caller's loop."""
        self._check_open()
        done: asyncio.Queue[Rollout | None] = asyncio.Queue()
        room = asyncio.Semaphore(self.concurrency + SPARE)
        collection = asyncio.ensure_future(self._collect(jobs, done.put_nowait, room))
        try:
            while (rollout := await done.get()) is not None:
                room.release()
                yield self._told(rollout)
        finally:
            collection.cancel()
            await asyncio.wait([collection])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.__exit__, *exception)
