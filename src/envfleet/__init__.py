"""Run many reinforcement-learning environments at once, on one small supervised core.

Importing this module does nothing but define names: every public name is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_WHERE = {
    "make": "core.construct",
    "make_vec": "adapters.gymnasium",
    "Fleet": "core.fleet",
    "KEEP": "core.slot_table",
    "Batch": "core.batch",
    "Slab": "slots.slab",
    "Layout": "slots.layout",
    "Plan": "core.plan",
    "Fault": "faults.failure",
    "ParallelEnv": "adapters.classic",
    "ParallelEnvSharedMemory": "adapters.classic",
    "VectorizedEnvs": "adapters.classic",
    "FleetVectorEnv": "adapters.gymnasium",
    "FlattenMultiAgentWrapper": "adapters.flatten",
    "AgentGroup": "multiagent.groups",
    "AgentsAsBatch": "adapters.agents",
    "AsyncPettingZooVecEnv": "adapters.agents",
    "episode_seed": "util.seeding",
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
    from envfleet.adapters.classic import ParallelEnv as ParallelEnv
    from envfleet.adapters.classic import ParallelEnvSharedMemory as ParallelEnvSharedMemory
    from envfleet.adapters.classic import VectorizedEnvs as VectorizedEnvs
    from envfleet.adapters.flatten import FlattenMultiAgentWrapper as FlattenMultiAgentWrapper
    from envfleet.adapters.gymnasium import FleetVectorEnv as FleetVectorEnv
    from envfleet.adapters.gymnasium import make_vec as make_vec
    from envfleet.core.batch import Batch as Batch
    from envfleet.core.construct import make as make
    from envfleet.core.fleet import Fleet as Fleet
    from envfleet.core.plan import Plan as Plan
    from envfleet.core.slot_table import KEEP as KEEP
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
    from envfleet.faults.failure import Fault as Fault
    from envfleet.multiagent.groups import AgentGroup as AgentGroup
    from envfleet.slots.layout import Layout as Layout
    from envfleet.slots.slab import Slab as Slab
    from envfleet.util.seeding import episode_seed as episode_seed


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
