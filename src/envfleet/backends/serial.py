"""serial: every slot in the caller's thread, one after another. The oracle of all others, and the fastest for cheap envs.

Deadlines cannot be enforced here: a stuck env is the caller's own stuck call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from envfleet import native
from envfleet.backends.base import Finished, Loss
from envfleet.backends.local import Described, LocalBackend
from envfleet.layout import Layout
from envfleet.recipe import Recipe
from envfleet.slab import Slab, Slots
from envfleet.slot import drive
from envfleet.supervise.faults import Failure


class SerialBackend(LocalBackend):
    """Steps at `submit`; `wait` only hands over what is done."""

    name = "serial"
    has_deadlines = False

    def __init__(self) -> None:
        super().__init__()
        self._runner: Any = None
        self._done: list[int] = []
        self._sided: list[int] | None = []  # of the done: those with something beside their rows; None: unknown

    def start(self, recipe: Recipe) -> dict[int, Described]:
        """Build the envs here."""
        self._make_lives(recipe)
        self.worker_of = np.zeros(recipe.num_slots, np.int64)
        for life in self.lives:
            drive(life, life.build(), _nobody_watches)
        return {life.slot: self._described(life) for life in self.lives}

    def attach(self, layout: Layout) -> Slab:
        """Rows on the heap, driven by the compiled life where there is one."""
        slab = super().attach(layout)
        compiled = native.load()
        if compiled is not None:
            self._runner = native.make_runner(compiled, slab, dict(enumerate(self.lives)), _nobody_watches)
        return slab

    def submit(self, slots: Slots) -> None:
        """Step the slots now."""
        if self._runner is not None:
            sided = self._runner.run(np.ascontiguousarray(slots))
            self._done += slots.tolist()
            if sided and self._sided is not None:
                self._sided += sided
            return
        self._sided = None
        for slot in slots.tolist():
            life = self.lives[slot]
            drive(life, life.advance(), _nobody_watches)
            self._done.append(slot)

    def round(self, slots: Slots, timeout_s: float) -> Finished | None:
        """Step all slots now; nothing to hand over when none has anything beside its row."""
        if self._runner is None or self._done or self.info or self.final_info:
            return super().round(slots, timeout_s)
        self.handed_over = False
        sided = self._runner.run(slots)
        return self._finish(slots.tolist(), sided) if sided else None

    def wait(self, at_least: int, timeout_s: float) -> Finished:
        """Everything submitted is done already."""
        done, self._done = self._done, []
        sided, self._sided = self._sided, []
        return self._finish(done, sided)

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Close the envs."""
        problems = self._close_lives()
        self._runner = None
        return problems


def _nobody_watches(slot: int, phase: str) -> None:
    return None
