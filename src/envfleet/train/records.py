"""What a run has done, and what its calls return."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.train.evaluate import Evaluation

RECENT = 100  # episodes that the shown return and length are the mean of


@dataclass(frozen=True)
class UpdateResult:
    """One rollout and one update."""

    update: int
    num_steps: int  # environment steps so far
    n_completed_episodes: int  # episodes that ended in this rollout
    returns: list[float]  # of those episodes
    lengths: list[int]
    losses: dict[str, float]
    sps: float  # environment steps per second, collecting and learning together
    collect_s: float
    learn_s: float


@dataclass
class TrainResult:
    """A whole call of `train`."""

    num_steps: int
    num_updates: int
    n_completed_episodes: int
    returns: list[float]  # of the most recent episodes
    wall_s: float
    sps: float
    stopped: bool
    evaluation: Evaluation | None = None
    out: Path | None = None
    report: Path | None = None

    @property
    def mean_return(self) -> float:
        """Mean return of the most recent episodes; NaN when none has ended."""
        return float(np.mean(self.returns)) if self.returns else float("nan")


@dataclass
class Counters:
    """What a run has done so far; stored in checkpoints."""

    update: int = 0
    num_steps: int = 0
    num_episodes: int = 0
    wall_s: float = 0.0
    collect_s: float = 0.0
    learn_s: float = 0.0
    best: float = float("-inf")
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        values = {spec.name: getattr(self, spec.name) for spec in dataclasses.fields(self)}
        return {**values, "returns": list(self.returns), "lengths": list(self.lengths)}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        for name, value in state.items():
            setattr(self, name, deque(value, maxlen=RECENT) if name in ("returns", "lengths") else value)
