"""PPO over a fleet: configuration, advantage, update, loop, checkpoints, loggers, video and report.

Names are imported when they are first used, so that `import envfleet.train` needs no PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "PPOConfig": "config",
    "PPOTrainer": "trainer",
    "TrainResult": "trainer",
    "UpdateResult": "trainer",
    "Evaluation": "evaluate",
    "Agent": "agent",
    "load_agent": "agent",
    "TeamAgent": "agent",
    "TeamEvaluation": "evaluate",
    "Learner": "update",
    "gae": "advantage",
    "RunExists": "train_errors",
    "DeviceMissing": "train_errors",
    "RunBusy": "train_errors",
    "CheckpointError": "train_errors",
    "CheckpointDamaged": "train_errors",
    "TrainingStopped": "train_errors",
}

__all__ = list(_WHERE)

if TYPE_CHECKING:
    from envfleet.train.advantage import gae as gae
    from envfleet.train.agent import Agent as Agent
    from envfleet.train.agent import TeamAgent as TeamAgent
    from envfleet.train.agent import load_agent as load_agent
    from envfleet.train.config import PPOConfig as PPOConfig
    from envfleet.train.evaluate import Evaluation as Evaluation
    from envfleet.train.evaluate import TeamEvaluation as TeamEvaluation
    from envfleet.train.train_errors import CheckpointDamaged as CheckpointDamaged
    from envfleet.train.train_errors import CheckpointError as CheckpointError
    from envfleet.train.train_errors import DeviceMissing as DeviceMissing
    from envfleet.train.train_errors import RunBusy as RunBusy
    from envfleet.train.train_errors import RunExists as RunExists
    from envfleet.train.train_errors import TrainingStopped as TrainingStopped
    from envfleet.train.trainer import PPOTrainer as PPOTrainer
    from envfleet.train.trainer import TrainResult as TrainResult
    from envfleet.train.trainer import UpdateResult as UpdateResult
    from envfleet.train.update import Learner as Learner


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'envfleet.train' has no attribute {name!r}")
    from envfleet.errors import BackendMissing

    try:
        module = importlib.import_module(f"envfleet.train.{_WHERE[name]}")
    except ModuleNotFoundError as missing:
        if missing.name in ("torch", "yaml"):
            raise BackendMissing(str(missing.name), extra="train") from missing
        raise
    value = getattr(module, name)
    globals()[name] = value
    return value
