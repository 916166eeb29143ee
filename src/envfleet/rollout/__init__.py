"""Episode and segment records, executors, collector, statistics, ledger, datasets.

Names are imported when first used: a thread executor does not pay for pyarrow.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "Answer": "policy_protocol",
    "Ask": "policy_protocol",
    "Collector": "collector",
    "Ledger": "ledger",
    "RandomPolicy": "policy_protocol",
    "Verdict": "timing",
    "AgentFailed": "rollout_errors",
    "AsyncParallelExecutor": "executors.async_executor",
    "BatchedPolicy": "executors.shared_policies",
    "ClientFailed": "rollout_errors",
    "DatasetBusy": "rollout_errors",
    "DatasetDamaged": "rollout_errors",
    "DatasetError": "rollout_errors",
    "DatasetFull": "rollout_errors",
    "DatasetWriter": "datasets.parquet",
    "EnvStats": "stats",
    "LatencyHistogram": "stats",
    "LedgerWarning": "rollout_errors",
    "ParallelEnvironmentExecutor": "executors.executor",
    "ParallelRolloutCollector": "executors.parallel_collector",
    "ProcessParallelExecutor": "executors.process_executor",
    "Rollout": "episodes.episode",
    "RolloutError": "rollout_errors",
    "RolloutFailed": "rollout_errors",
    "Rollouts": "episodes.episode",
    "RolloutsFailed": "rollout_errors",
    "Segment": "segments.segment",
    "Stats": "stats",
    "StatsBuilder": "stats",
    "ThreadSafeAgent": "executors.shared_policies",
    "Throttle": "executors.throttle",
    "iter_rollouts": "datasets.open_dataset",
    "WorkerDied": "executors.process_executor",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
