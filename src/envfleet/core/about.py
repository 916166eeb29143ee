"""What a fleet tells of itself."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from envfleet.backends.base import Backend
from envfleet.core.plan import Plan
from envfleet.core.supervisor import Supervisor
from envfleet.faults.failure import Fault
from envfleet.slots.slab import Slots


class About:
    """The spaces of whole batches, and how the slots are."""

    num_envs: int
    plan: Plan
    single_observation_space: gym.Space[Any]
    single_action_space: gym.Space[Any]
    _all: Slots
    _backend: Backend
    _supervisor: Supervisor

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The space of `batch.obs` for all slots."""
        return batch_space(self.single_observation_space, self.num_envs)

    @property
    def action_space(self) -> gym.Space[Any]:
        """The space of the actions for all slots."""
        return batch_space(self.single_action_space, self.num_envs)

    @property
    def on_end(self) -> str:
        """What happens at an episode's end: "reset" or "wait"."""
        return self._backend.recipe.on_end

    @property
    def faults(self) -> list[Fault]:
        """Every fault so far, oldest first."""
        return self._supervisor.faults

    @property
    def quarantined(self) -> Slots:
        """Slots that were given up."""
        return np.flatnonzero(self._supervisor.quarantined)

    def runnable(self) -> Slots:
        """Slots that can run at once: not quarantined, and no more than remote servers have sessions for right now."""
        able = self._backend.runnable()
        return np.setdiff1d(self._all if able is None else able, self.quarantined)

    def __len__(self) -> int:
        return self.num_envs

    def __repr__(self) -> str:
        return f"Fleet({self._backend.recipe.name}, num_envs={self.num_envs}, {self.plan})"
