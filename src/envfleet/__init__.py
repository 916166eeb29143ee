"""Run many reinforcement-learning environments at once, on one small supervised core.

Importing this module does nothing but define names: every public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "make": "making",
    "make_vec": "making",
    "Fleet": "fleet",
    "KEEP": "book",
    "Batch": "batch",
    "Slab": "slab",
    "Layout": "layout",
    "Plan": "plan",
    "Fault": "supervise.faults",
    "ParallelEnv": "adapters.plain",
    "ParallelEnvSharedMemory": "adapters.plain",
    "VectorizedEnvs": "adapters.plain",
    "FleetVectorEnv": "adapters.gymnasium",
    "FlattenMultiAgentWrapper": "adapters.flatten",
    "AgentGroup": "groups",
    "AgentsAsBatch": "adapters.agents",
    "AsyncPettingZooVecEnv": "adapters.agents",
    "episode_seed": "seeding",
    "PPOConfig": "train",
    "PPOTrainer": "train",
    **dict.fromkeys(
        (
            "AgentFailed",
            "AsyncParallelExecutor",
            "BatchedPolicy",
            "Collector",
            "Ledger",
            "ParallelEnvironmentExecutor",
            "ParallelRolloutCollector",
            "Rollout",
            "Rollouts",
            "RolloutFailed",
            "RolloutsFailed",
            "Segment",
            "Stats",
            "ThreadSafeAgent",
        ),
        "rollout",
    ),
    **dict.fromkeys(
        ("AsyncEnvClient", "CapacityReached", "HttpEnvClient", "OpenEnvGymnasiumWrapper", "serve"), "remote"
    ),
    **dict.fromkeys(
        (
            "FleetError",
            "BadArgument",
            "NotPicklable",
            "SpacesDiffer",
            "BackendMissing",
            "SlotBusy",
            "ResetNeeded",
            "FleetClosed",
            "RecvTimeout",
            "FaultError",
            "EnvFailed",
            "EnvTimeout",
            "KeeperLost",
            "WorkerLost",
        ),
        "errors",
    ),
}

__all__ = ["__version__", *_WHERE]

if TYPE_CHECKING:
    from envfleet.adapters.agents import AgentsAsBatch as AgentsAsBatch
    from envfleet.adapters.agents import AsyncPettingZooVecEnv as AsyncPettingZooVecEnv
    from envfleet.adapters.flatten import FlattenMultiAgentWrapper as FlattenMultiAgentWrapper
    from envfleet.adapters.gymnasium import FleetVectorEnv as FleetVectorEnv
    from envfleet.adapters.plain import ParallelEnv as ParallelEnv
    from envfleet.adapters.plain import ParallelEnvSharedMemory as ParallelEnvSharedMemory
    from envfleet.adapters.plain import VectorizedEnvs as VectorizedEnvs
    from envfleet.batch import Batch as Batch
    from envfleet.book import KEEP as KEEP
    from envfleet.errors import BackendMissing as BackendMissing
    from envfleet.errors import BadArgument as BadArgument
    from envfleet.errors import EnvFailed as EnvFailed
    from envfleet.errors import EnvTimeout as EnvTimeout
    from envfleet.errors import FaultError as FaultError
    from envfleet.errors import FleetClosed as FleetClosed
    from envfleet.errors import FleetError as FleetError
    from envfleet.errors import KeeperLost as KeeperLost
    from envfleet.errors import NotPicklable as NotPicklable
    from envfleet.errors import RecvTimeout as RecvTimeout
    from envfleet.errors import ResetNeeded as ResetNeeded
    from envfleet.errors import SlotBusy as SlotBusy
    from envfleet.errors import SpacesDiffer as SpacesDiffer
    from envfleet.errors import WorkerLost as WorkerLost
    from envfleet.fleet import Fleet as Fleet
    from envfleet.groups import AgentGroup as AgentGroup
    from envfleet.layout import Layout as Layout
    from envfleet.making import make as make
    from envfleet.making import make_vec as make_vec
    from envfleet.plan import Plan as Plan
    from envfleet.seeding import episode_seed as episode_seed
    from envfleet.slab import Slab as Slab
    from envfleet.supervise.faults import Fault as Fault


#: Parts one reaches as attributes, without importing them first.
_PARTS = ("adapters", "envs", "remote", "rollout", "testing", "train")


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"envfleet.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'envfleet' has no attribute {name!r}")

    value = getattr(importlib.import_module(f"envfleet.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
