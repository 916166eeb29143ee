"""The types of what executors take, so that type checkers find a wrong name or value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from envfleet.rollout.executors.client_episode import OnError


class RuleOptions(TypedDict, total=False):
    """The fields of `Rules`."""

    on_error: OnError
    max_retries: int
    backoff_s: float
    max_backoff_s: float
    jitter: float
    rollout_timeout_s: float | None
    check_actions: bool


class ExecutorOptions(RuleOptions, total=False):
    """Options of every executor."""

    max_rate: float | None
    max_in_flight: int | None


class JobOptions(TypedDict, total=False):
    """What may differ from rollout to rollout: one value per client."""

    seeds: Sequence[int] | None
    tasks: Sequence[Any] | None
    reset_kwargs: Sequence[dict[str, Any]] | None


class OneJobOptions(TypedDict, total=False):
    """The same for one rollout."""

    seed: int | None
    task: Any
    reset_kwargs: dict[str, Any]
