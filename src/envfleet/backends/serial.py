"""serial: every slot in the caller's thread, one after another. The reference for all others, and the fastest for cheap envs.

Deadlines cannot be enforced here: an env that hangs blocks the caller's own call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from envfleet.backends.local import Described, LocalBackend
from envfleet.faults.failure import Failure, Loss
from envfleet.slots import compiled_core
from envfleet.slots.factories import Recipe
from envfleet.slots.layout import Layout
from envfleet.slots.slab import Slab, Slots
from envfleet.slots.slot_life import drive, unwatched


class SerialBackend(LocalBackend):
    """Steps at `submit`; `wait` only hands over what is done."""

    name = "serial"
    has_deadlines = False

    def __init__(self) -> None:
        super().__init__()
        self._runner: Any = None
        self._sided: list[tuple[int, int, int]] = []  # (slot, turn, whether broken) with something beside their rows

    def start(self, recipe: Recipe) -> dict[int, Described]:
        """Build the envs here."""
        self._make_lives(recipe)
        self.worker_of = np.zeros(recipe.num_slots, np.int64)
        for life in self.lives:
            drive(life, life.build(), unwatched)
        return {life.slot: self._described(life) for life in self.lives}

    def attach(self, layout: Layout) -> Slab:
        """Rows on the heap, driven by the compiled life where there is one."""
        slab = super().attach(layout)
        compiled = compiled_core.load()
        if compiled is not None:
            lives = dict(enumerate(self.lives))
            self._runner = compiled_core.make_runner(compiled, slab, lives, unwatched, interruptible=True)
            self._runner.set_board((self.given, self.done, self.info, self.final_info, self._sided))
        return slab

    def submit(self, slots: Slots) -> None:
        """Step the slots now."""
        if self._runner is not None:
            self._runner.run(np.ascontiguousarray(slots))
            return
        for slot in slots.tolist():
            life = self.lives[slot]
            self.given[slot] = life.turn = int(self.given[slot] + np.uint32(1))
            drive(life, life.advance(), unwatched)
            self._finish(slot, life.turn)

    def round(self, slots: Slots, timeout_s: float) -> bool:
        """Step all slots now."""
        if self._runner is None:
            return super().round(slots, timeout_s)
        if self._runner.run(slots):
            return True
        self.settle()
        return False

    def settle(self) -> None:
        """Take over what was left beside rows. A slot that was given a turn and did not finish it was interrupted."""
        self._take_sided()
        for slot in np.flatnonzero(self.given != self.done).tolist():
            self._finish(slot, int(self.given[slot]), broken=True)

    def _take_sided(self) -> None:
        while self._sided:
            slot, turn, broken = self._sided[0]
            self._finish(slot, turn, bool(broken))
            del self._sided[0]

    def wait(self, at_least: int, timeout_s: float) -> None:
        """Everything submitted is done already."""
        self.settle()

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Close the envs."""
        problems = self._close_lives()
        self._runner = None
        return problems
