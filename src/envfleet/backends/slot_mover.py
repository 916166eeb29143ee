"""When slots move between workers and the parent: into it when others take the cores, back when these are free again.

For cheap envs a worker that waits for a core costs more than it saves: 8 CartPoles in two processes beside two busy loops
make 0.4 of the steps that one process makes. `auto` would not have chosen workers there; moving corrects this.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from envfleet.slots.slab import Slots
from envfleet.util.machine import CpuWatch, Load

#: Between two looks at the machine. A look costs 0.5 to 1.2 ms (small files, most of them of cgroups).
LOOK_S = 0.25
#: The same once the slots have been moved in: there is little CPU time then, and no hurry to go back.
CALM_LOOK_S = 1.0
#: A measurement over a longer pause (the caller did other things) is not used.
STALE_S = 2.0
#: How long the machine must be quiet before slots are moved back the first time; twice as long each time after.
QUIET_S = 5.0
#: Moving delays the caller: some slots at a time, for at most about this long between two batches.
AT_ONCE, SPEND_S = 8, 0.1
#: A worker that has not answered is left alone for so long.
PAUSE_S = 2.0


class Movable(Protocol):
    """What the mover needs of a backend."""

    notes: list[str]

    def cpu_s(self) -> float:
        """CPU seconds used by all processes of the fleet."""

    def resident(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[slot]: whether the parent steps it."""

    def moved(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """[slot]: whether it was moved into the parent."""

    def move_in(self, slots: list[int]) -> dict[int, str]:
        """Into the parent; why not, of those that cannot be."""

    def move_back(self, slots: list[int]) -> dict[int, str]:
        """Back to their workers; why not, of those that cannot be."""


class Mover:
    """Decides where the slots of one fleet should be. `below`: with fewer free CPUs than this, in the parent."""

    def __init__(self, below: int, watch: CpuWatch | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.below = below
        self.wants_in = False
        self._watch, self._clock = watch or CpuWatch(), clock
        self._began = self._at = self._next = clock()
        self._again = 0.0  # not to try before
        self._cpu_s = 0.0
        self._busy_looks, self._quiet_s, self._patience_s = 0, 0.0, QUIET_S
        self._refused: dict[int, str] = {}  # slots that cannot be moved, and why: not asked again
        self._why = ""
        self._told = True  # the notes say where the slots are

    def mind(self, backend: Movable, free: Callable[[], Slots]) -> None:
        """Look at the machine if it is time, then move what is in the wrong place."""
        now = self._clock()
        if now >= self._next:
            self._look(now, backend.cpu_s())
        if self._told or now < self._again:
            return
        left = self._misplaced(backend)
        ready = [slot for slot in free().tolist() if left[slot]]
        move = backend.move_in if self.wants_in else backend.move_back
        while ready and self._clock() - now < SPEND_S:
            some, ready = ready[:AT_ONCE], ready[AT_ONCE:]
            self._refused.update(refused := move(some))
            if not refused and self._misplaced(backend)[some].all():  # no answer: its worker is, for example, in a long reset
                self._again = self._clock() + PAUSE_S
                return
        if not self._misplaced(backend).any():
            self._tell(backend)

    def _misplaced(self, backend: Movable) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        wrong = ~backend.resident() if self.wants_in else backend.moved()
        wrong[list(self._refused)] = False
        return wrong

    def _look(self, now: float, cpu_s: float) -> None:
        gap_s, own_s = now - self._at, cpu_s - self._cpu_s
        self._at, self._next, self._cpu_s = now, now + (CALM_LOOK_S if self.wants_in else LOOK_S), cpu_s
        load = self._watch.look(own_s)
        if load is None or gap_s > STALE_S:
            self._busy_looks, self._quiet_s = 0, 0.0
            return
        is_busy = load.whole < self.below
        self._busy_looks = self._busy_looks + 1 if is_busy else 0
        self._quiet_s = 0.0 if is_busy else self._quiet_s + gap_s
        if not self.wants_in and self._busy_looks >= 2:
            self._change(True, load)
        elif self.wants_in and self._quiet_s >= self._patience_s:
            self._patience_s *= 2
            self._change(False, load)

    def _change(self, wants_in: bool, load: Load) -> None:
        self.wants_in, self._told = wants_in, False
        self._why = f"{load.free:.1f} of {load.cpus} CPUs are free"

    def _tell(self, backend: Movable) -> None:
        """One line for the plan."""
        self._told = True
        after = f"after {self._clock() - self._began:.0f} s"
        here, moved = backend.resident(), int(backend.moved().sum())
        if not self.wants_in:
            line = f"{after} back in the workers, the machine is quiet ({self._why})"
        elif moved:
            line = f"{after} {int(here.sum())} of {len(here)} slots are in this process, the machine is busy ({self._why})"
        else:
            line = f"{after} the machine is busy ({self._why}): one process would be faster, but no slot can be moved"
        if self._refused and self.wants_in:
            line += f" ({next(iter(self._refused.values()))})"
        backend.notes.append(line)
