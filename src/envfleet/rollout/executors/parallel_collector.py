"""`ParallelRolloutCollector`: one name for thread, async and process execution, with statistics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self, Unpack

from envfleet.errors import BadArgument
from envfleet.rollout.episodes.episode import Rollout, Rollouts
from envfleet.rollout.executors.executor import (
    AsyncParallelExecutor,
    Names,
    ParallelEnvironmentExecutor,
    RolloutExecutor,
    checked_workers,
)
from envfleet.rollout.executors.executor_options import ExecutorOptions, JobOptions
from envfleet.rollout.executors.process_executor import ProcessParallelExecutor
from envfleet.rollout.stats import Stats

ExecutionMode = Literal["thread", "async", "process"]
_EXECUTORS: dict[str, type[RolloutExecutor]] = {
    "thread": ParallelEnvironmentExecutor,
    "async": AsyncParallelExecutor,
    "process": ProcessParallelExecutor,
}


class ParallelRolloutCollector:
    """Collect one rollout per client and their statistics.

    Args:
        execution_mode: "thread" (clients that wait: servers, sockets), "async" (`async def` clients, many
            at once) or "process" (agents and environments that compute: give factories).
        num_workers: rollouts that run at once; `max_workers` is the same.
        rules: `on_error`, `max_retries`, `max_rate` and the others of `ParallelEnvironmentExecutor`.

    Example:
        >>> import gymnasium as gym
        >>> clients = [gym.make("CartPole-v1") for _ in range(2)]
        >>> with ParallelRolloutCollector(execution_mode="thread", num_workers=2) as collector:
        ...     rollouts, stats = collector.collect_with_stats(clients, lambda obs, done: 0, max_steps=50)
        >>> stats.num_episodes
        2
    """

    def __init__(
        self,
        execution_mode: ExecutionMode = "thread",
        num_workers: int = 8,
        *,
        max_workers: int | None = None,
        **rules: Unpack[ExecutorOptions],
    ) -> None:
        self.execution_mode = execution_mode
        if execution_mode not in _EXECUTORS:
            raise BadArgument(f"execution_mode must be 'thread', 'async' or 'process', got {execution_mode!r}")
        count = checked_workers(num_workers, max_workers=max_workers)
        self.executor = _EXECUTORS[execution_mode](count, **rules)

    def collect(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Unpack[JobOptions]
    ) -> Rollouts:
        """One rollout per client, in submission order."""
        return self.executor.run(clients, agent_fn, max_steps, env_names, **options)

    def collect_with_stats(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Unpack[JobOptions]
    ) -> tuple[Rollouts, Stats]:
        """The same with the statistics of these rollouts; `stats.verdict` says where the time went, and what to do."""
        began = time.perf_counter()
        rollouts = self.collect(clients, agent_fn, max_steps, env_names, **options)
        num_workers = min(self.executor.concurrency, len(rollouts))
        return rollouts, Stats.of(rollouts, time.perf_counter() - began, num_workers)

    def iter_rollouts(
        self, clients: Sequence[Any], agent_fn: Any, max_steps: int = 1000, env_names: Names = None, **options: Unpack[JobOptions]
    ) -> Iterator[Rollout]:
        """Yield rollouts as they complete."""
        return self.executor.run_iter(clients, agent_fn, max_steps, env_names, **options)

    def shutdown(self, wait: bool = True, timeout_s: float | None = None) -> bool:
        """End threads and processes; bounded and idempotent."""
        return self.executor.shutdown(wait=wait, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.executor.__exit__(*exception)
