"""Rollouts over environment clients on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from envfleet.rollout.episodes.episode import Rollout, Rollouts
from envfleet.rollout.executors.client_episode import Job
from envfleet.rollout.executors.executor import Names, RolloutExecutor, listed, make_jobs
from envfleet.util.daemon_pool import DaemonPool


class AsyncParallelExecutor(RolloutExecutor):
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
        self.executor = DaemonPool(max_concurrency, "envfleet-rollout")
        super().__init__(max_concurrency, **rules)
        self.max_concurrency = max_concurrency
        self.inline_agent = inline_agent

    async def collect_rollout(
        self, client: Any, agent_fn: Any, max_steps: int = 1000, env_name: str = "env_0", **options: Any
    ) -> Rollout:
        """Collect one rollout on the running loop."""
        return (await self.collect_rollouts([client], agent_fn, max_steps, [env_name], **listed(options)))[0]

    async def collect_rollouts(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Any
    ) -> Rollouts:
        """One rollout per client, in submission order; `seeds`, `tasks`, `reset_kwargs`: one per client."""
        jobs = make_jobs(clients, agent_fn, max_steps, env_names, **options)
        return self._in_order(jobs, [rollout async for rollout in self._completed_here(jobs)])

    async def iter_rollouts(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Any
    ) -> AsyncIterator[Rollout]:
        """Yield rollouts as they complete; with on_error="raise" failures are raised after the last one."""
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
