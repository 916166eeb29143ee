"""Rollouts over environment clients on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from typing import Any, Self

from envfleet.errors import FleetClosed
from envfleet.rollout.episodes.episode import Rollout, Rollouts
from envfleet.rollout.executors.client_episode import Job, Threads, drive, drive_async, is_async, rollout_steps
from envfleet.rollout.executors.shared_policies import BatchedPolicy
from envfleet.rollout.executors.thread_calls import Handover
from envfleet.rollout.executors.thread_executor import JobRunner, listed, make_jobs, policy_places
from envfleet.util.daemon_pool import DaemonPool
from envfleet.util.loop_thread import LoopThread


class AsyncParallelExecutor(JobRunner):
    """Collect rollouts on an event loop: thousands of waiting clients cost no thread each.

    `await collect_rollouts(...)` runs on the caller's loop, `run(...)` and `run_iter(...)` on one of its own, so that they
    work from sync code. Clients and agents that are not `async def` run on the executor's own threads, as many as
    `max_concurrency`; quick calls share a hop to a thread and back. `inline_agent=True` calls a sync agent on the loop
    itself, which saves that hop; such an agent must never block. The other arguments are those of
    `ParallelEnvironmentExecutor`.

    Example:
        >>> class Client:
        ...     async def reset(self): return 0
        ...     async def step(self, action): return 0, 1.0, True, False, {}
        >>> with AsyncParallelExecutor(max_concurrency=4) as executor:
        ...     rollouts = executor.run([Client() for _ in range(8)], lambda obs, done: 0)
        >>> sum(rollout.episode_return for rollout in rollouts)
        8.0
    """

    def __init__(self, max_concurrency: int = 64, inline_agent: bool = False, **rules: Any) -> None:
        super().__init__(**rules)
        self.max_concurrency = max_concurrency
        self.executor: DaemonPool = DaemonPool(max_concurrency, "envfleet-rollout")
        self._loop = LoopThread()
        self.inline_agent = inline_agent
        # Places, threads and locks belong to one loop each: the caller's may be another one every time.
        self._places: dict[asyncio.AbstractEventLoop, _Place] = {}

    @property
    def concurrency(self) -> int:
        """How many rollouts run at once."""
        return self.max_concurrency

    async def collect_rollout(
        self, client: Any, agent_fn: Any, max_steps: int = 1000, env_name: str = "env_0", **options: Any
    ) -> Rollout:
        """Collect one rollout on the running loop."""
        return (await self.collect_rollouts([client], agent_fn, max_steps, [env_name], **listed(options)))[0]

    async def collect_rollouts(
        self,
        clients: Sequence[Any],
        agent_fn: Any,
        max_steps: int = 1000,
        env_names: Sequence[str] | None = None,
        **options: Any,
    ) -> Rollouts:
        """One rollout per client, in submission order; `seeds`, `tasks`, `reset_kwargs`: one per client."""
        jobs = make_jobs(clients, agent_fn, max_steps, env_names, **options)
        done = {rollout.episode: rollout async for rollout in self._completed_here(jobs)}
        return self.checked(Rollouts(done[job.index] for job in jobs))

    async def iter_rollouts(
        self,
        clients: Sequence[Any],
        agent_fn: Any,
        max_steps: int = 1000,
        env_names: Sequence[str] | None = None,
        **options: Any,
    ) -> AsyncIterator[Rollout]:
        """Yield rollouts as they complete; with on_error="raise" failures are raised after the last one."""
        failed = Rollouts()
        async for rollout in self._completed_here(make_jobs(clients, agent_fn, max_steps, env_names, **options)):
            if rollout.failed and self.rules.on_error == "raise":
                failed.append(rollout)
            else:
                yield rollout
        self.checked(failed)

    def submit_job(self, job: Job) -> Future[Rollout]:
        """Start one rollout on the executor's own loop."""
        return self._loop.submit(self._run_job(job))

    async def _completed_here(self, jobs: Sequence[Job]) -> AsyncIterator[Rollout]:
        if self._closed:
            raise FleetClosed("the executor")
        tasks = {asyncio.ensure_future(self._run_job(job)) for job in jobs}
        with policy_places(jobs, self.concurrency) as episode_over:
            try:
                for next_done in asyncio.as_completed(tasks):
                    rollout = await next_done
                    episode_over()
                    yield rollout
            finally:
                if jobs:
                    jobs[0].stop.set()  # episodes on threads end at their next step
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_job(self, job: Job) -> Rollout:
        loop = asyncio.get_running_loop()
        place = self._places.get(loop)
        if place is None:
            self._places = {other: there for other, there in self._places.items() if not other.is_closed()}
            place = self._places[loop] = _Place(self.max_concurrency, self.executor, self.inline_agent)
        steps = rollout_steps(job, self.rules)
        async with place.gate, _HeldClient(place.busy, id(job.client)):
            if self._blocking(job):
                # Nothing here can be awaited: the whole episode on one thread saves two hops a step.
                def bridge(awaitable: Any) -> Any:
                    return asyncio.run_coroutine_threadsafe(_await(awaitable), loop).result()

                return await loop.run_in_executor(self.executor, lambda: drive(steps, self.rules.throttle, bridge))
            return await drive_async(steps, self.rules.throttle, place.threads)

    @staticmethod
    def _blocking(job: Job) -> bool:
        client_async = is_async(getattr(job.client, "step", None)) or is_async(getattr(job.client, "reset", None))
        factory_async = job.from_factory and not isinstance(job.client, type) and is_async(job.client)
        agent_async = is_async(job.agent) or isinstance(job.agent, BatchedPolicy)
        return not (client_async or factory_async or agent_async)

    def _end(self, wait: bool, timeout_s: float | None) -> bool:
        ended = self.executor.shutdown(wait=wait, cancel_futures=True, timeout=timeout_s)
        return self._loop.close(5.0 if timeout_s is None else timeout_s) and ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.__exit__, *exception)


class _Place:
    """What the rollouts on one event loop share."""

    def __init__(self, max_concurrency: int, pool: DaemonPool, inline_agent: bool) -> None:
        self.gate = asyncio.Semaphore(max_concurrency)
        self.threads = Threads(client=Handover(pool), agent=None if inline_agent else Handover(pool))
        self.busy: dict[int, tuple[asyncio.Lock, int]] = {}


class _HeldClient:
    """One episode at a time per client object on this loop."""

    def __init__(self, busy: dict[int, tuple[asyncio.Lock, int]], key: int) -> None:
        self._busy, self._key = busy, key

    async def __aenter__(self) -> None:
        lock, users = self._busy.get(self._key, (asyncio.Lock(), 0))
        self._busy[self._key] = (lock, users + 1)
        await lock.acquire()

    async def __aexit__(self, *exception: object) -> None:
        lock, users = self._busy[self._key]
        lock.release()
        if users == 1:
            del self._busy[self._key]
        else:
            self._busy[self._key] = (lock, users - 1)


async def _await(awaitable: Any) -> Any:
    return await awaitable
