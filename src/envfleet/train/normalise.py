"""Running statistics of observations and returns, frozen while a segment is collected and learned from."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.networks.actor_critic import ActorCritic
from envfleet.networks.features import Inputs

EPSILON = 1e-8


class RunningMoments:
    """Mean and variance of a stream of batches, merged exactly (Chan's parallel formula), in float64."""

    def __init__(self, size: int) -> None:
        self.count = 0.0
        self.mean = np.zeros(size)
        self.var = np.ones(size)

    def update(self, rows: NDArray[Any]) -> None:
        """Take in rows [k, size]; rows that are not finite are left out."""
        rows = rows.astype(np.float64, copy=False)
        good = np.isfinite(rows).all(axis=1)
        rows = rows if good.all() else rows[good]
        if not len(rows):
            return
        count, mean, var = float(len(rows)), rows.mean(axis=0), rows.var(axis=0)
        total = self.count + count
        gap = mean - self.mean
        spread = (self.var * self.count if self.count else 0.0) + var * count
        self.var = (spread + gap**2 * self.count * count / total) / total
        self.mean = self.mean + gap * count / total
        self.count = total

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {"count": self.count, "mean": self.mean.copy(), "var": self.var.copy()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        self.count = float(state["count"])
        self.mean, self.var = np.array(state["mean"]), np.array(state["var"])


class ObservationNormaliser(RunningMoments):
    """Shifts and scales the flat part of the inputs to mean 0, variance 1, and clips. Pictures pass untouched.

    The statistics change between segments only, so that an action is scored under the inputs it was chosen under.
    """

    def __init__(self, size: int, clip: float = 10.0) -> None:
        super().__init__(size)
        self.clip = np.float32(clip)
        self._refresh()

    @classmethod
    def of(cls, net: ActorCritic, wanted: bool) -> ObservationNormaliser | None:
        """The normaliser of a network's inputs, if one is wanted and there is a flat part."""
        return cls(net.features.vector_size) if wanted and net.features.vector_size else None

    def __call__(self, inputs: Inputs) -> Inputs:
        """Normalise inputs with any leading axes."""
        if "vector" not in inputs or not self.count:
            return inputs
        scaled = (inputs["vector"] - self._shift) * self._scale
        return {**inputs, "vector": np.clip(scaled, -self.clip, self.clip)}

    def take(self, inputs: Inputs) -> None:
        """Take in the observations of a segment."""
        if "vector" in inputs:
            self.update(inputs["vector"].reshape(-1, self.mean.size))
            self._refresh()

    def _refresh(self) -> None:
        self._shift = self.mean.astype(np.float32)
        self._scale = (1.0 / np.sqrt(self.var + EPSILON)).astype(np.float32)

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        super().load(state)
        self._refresh()


class RewardNormaliser(RunningMoments):
    """Divides rewards by the running standard deviation of the discounted return, so that values stay near one."""

    def __init__(self, num_slots: int, gamma: float, clip: float = 10.0) -> None:
        super().__init__(1)
        self.gamma, self.clip = gamma, clip
        self.running = np.zeros(num_slots)  # discounted return so far, per slot

    def __call__(
        self, reward: NDArray[np.float64], ended: NDArray[np.bool_], filled: NDArray[np.bool_] | None = None
    ) -> NDArray[np.float64]:
        """Take in rewards [T, B] of a segment and return them scaled; rows that are not `filled` are no rewards."""
        returns = np.empty_like(reward)
        for t in range(len(reward)):
            running = self.running * self.gamma + reward[t]
            returns[t] = running
            running = np.where(ended[t], 0.0, running)
            self.running = running if filled is None else np.where(filled[t], running, self.running)
        self.update((returns if filled is None else returns[filled]).reshape(-1, 1))
        scaled = reward / np.sqrt(self.var[0] + EPSILON)
        clipped: NDArray[np.float64] = np.clip(scaled, -self.clip, self.clip)
        return clipped

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {**super().state(), "running": self.running.copy()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        super().load(state)
        self.running = np.array(state["running"])
