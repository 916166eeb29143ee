"""Episode and segment records, executors, collector, statistics, ledger, datasets.

Names are imported when first used: a thread executor does not pay for pyarrow.
"""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = {
    "Answer": "asking",
    "Ask": "asking",
    "Collector": "collector",
    "Ledger": "ledger",
    "RandomPolicy": "asking",
    "Verdict": "clock",
    "AgentFailed": "errors",
    "AsyncParallelExecutor": "aio",
    "BatchedPolicy": "policy",
    "ClientFailed": "errors",
    "DatasetBusy": "errors",
    "DatasetDamaged": "errors",
    "DatasetError": "errors",
    "DatasetFull": "errors",
    "DatasetWriter": "parquet",
    "EnvStats": "stats",
    "LatencyHistogram": "stats",
    "LedgerWarning": "errors",
    "ParallelEnvironmentExecutor": "executors",
    "ParallelRolloutCollector": "parallel",
    "ProcessParallelExecutor": "processes",
    "Rollout": "episode",
    "RolloutError": "errors",
    "RolloutFailed": "errors",
    "Rollouts": "episode",
    "RolloutsFailed": "errors",
    "Segment": "segment",
    "Stats": "stats",
    "StatsBuilder": "stats",
    "ThreadSafeAgent": "policy",
    "Throttle": "throttle",
    "iter_rollouts": "datasets",
    "WorkerDied": "processes",
}
__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
