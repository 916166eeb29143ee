"""serial: every slot in the caller's thread, one after another. The oracle of all others, and the fastest for cheap envs.

Deadlines cannot be enforced here: a stuck env is the caller's own stuck call.
"""

from __future__ import annotations

import numpy as np

from envfleet.backends.base import Finished, Loss
from envfleet.backends.local import Described, LocalBackend
from envfleet.recipe import Recipe
from envfleet.slab import Slots
from envfleet.slot import drive
from envfleet.supervise.faults import Failure


class SerialBackend(LocalBackend):
    """Steps at `submit`; `wait` only hands over what is done."""

    name = "serial"
    has_deadlines = False

    def start(self, recipe: Recipe) -> dict[int, Described]:
        """Build the envs here."""
        self._make_lives(recipe)
        self.worker_of = np.zeros(recipe.num_slots, np.int64)
        self._done: list[int] = []
        for life in self.lives:
            drive(life, life.build(), _nobody_watches)
        return {life.slot: self._described(life) for life in self.lives}

    def submit(self, slots: Slots) -> None:
        """Step the slots now."""
        for slot in slots.tolist():
            life = self.lives[slot]
            drive(life, life.advance(), _nobody_watches)
            self._done.append(slot)

    def wait(self, at_least: int, timeout_s: float) -> Finished:
        """Everything submitted is done already."""
        done, self._done = self._done, []
        return self._finish(done)

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Close the envs."""
        return self._close_lives()


def _nobody_watches(slot: int, phase: str) -> None:
    return None
