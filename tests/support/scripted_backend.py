"""scripted: a backend for tests. The test says which slot finishes, stalls or dies, and when.

Real slot lives run in this process, driven by a virtual clock: nothing sleeps, and the same script takes the same way
every time. Workers are modelled as the process backends have them: each drives its slots one after another, a stalled
slot holds up those behind it, and a worker that dies takes all its slots' envs with it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from envfleet.backends.base import spread
from envfleet.backends.local import Described, LocalBackend
from envfleet.faults.failure import Failure, Loss
from envfleet.slots.factories import Recipe
from envfleet.slots.layout import REBUILD, RESET
from envfleet.slots.slab import Slots
from envfleet.slots.slot_life import drive, unwatched
from envfleet.workers.shared_memory import _PHASE_NUMBERS, Pulse


@dataclasses.dataclass(frozen=True)
class Fate:
    """What becomes of one submission of a slot: "finish", "stall" (for good) or "die" (its worker), `after_s` seconds in."""

    then: str = "finish"
    after_s: float = 0.0
    exit_code: int = -9


Script = Callable[[int, int], Fate] | Mapping[int, Sequence[Fate]]


@dataclasses.dataclass
class _Job:
    slot: int
    fate: Fate
    at: float | None = None  # when its fate comes; None: not begun, or stalled
    begun: bool = False
    row: bytes = b""


class _VirtualPulse(Pulse):
    """A pulse whose time is the backend's."""

    def __init__(self, words: Any, now: Callable[[], float]) -> None:
        super().__init__(words)
        self._now = now

    def enter(self, slot: int, phase: str) -> None:
        """As `Pulse.enter`, on the virtual clock."""
        self.words[:3] = slot, _PHASE_NUMBERS[phase], round(self._now() * 1e9)


class ScriptedBackend(LocalBackend):
    """Slots whose fate the test decides.

    `script(slot, n)` gives the fate of the slot's n-th submission (resets count), or a mapping gives a list of fates per
    slot; what the script does not mention finishes at once, or, with `hold=True`, stays out until the test calls
    `finish`, `stall` or `die`. By default every slot has a worker of its own.

    Example:
        >>> import envfleet as ef
        >>> backend = ScriptedBackend()
        >>> with ef.make("CartPole-v1", num_envs=3, backend=backend) as fleet:
        ...     batch = fleet.reset(seed=0)
        ...     backend.hold = True
        ...     fleet.send([0, 1, 0])
        ...     backend.finish(slot=2)
        ...     fleet.recv(at_least=1).slots.tolist()
        [2]
    """

    name = "scripted"
    can_kill = True

    def __init__(self, num_workers: int | None = None, script: Script | None = None, hold: bool = False) -> None:
        super().__init__()
        self._wanted = num_workers
        self.script = script
        self.hold = hold
        #: Slots whose row was changed by the caller while they were out. Stays empty as long as invariant 1 holds.
        self.touched: list[int] = []
        self.submissions: np.ndarray[Any, Any] = np.zeros(0, np.int64)  # [slot]
        self._time = 0.0
        self._queues: list[deque[_Job]] = []

    def start(self, recipe: Recipe) -> dict[int, Described]:
        """Build the envs here."""
        self._make_lives(recipe)
        self.num_workers = min(self._wanted or recipe.num_slots, recipe.num_slots)
        self.worker_of = spread(recipe.num_slots, self.num_workers)
        self.submissions = np.zeros(recipe.num_slots, np.int64)
        words = np.zeros((self.num_workers, 8), np.int64)
        self.pulses = [_VirtualPulse(words[i], self.now) for i in range(self.num_workers)]
        for pulse in self.pulses:
            pulse.enter(-1, "idle")
        self._queues = [deque() for _ in range(self.num_workers)]
        for life in self.lives:
            drive(life, life.build(), unwatched)
        return {life.slot: self._described(life) for life in self.lives}

    # -- what the test says -------------------------------------------------------------------------------------

    def now(self) -> float:
        """The virtual clock: it stands still until a wait."""
        return self._time

    def pass_time(self, seconds: float) -> None:
        """Let time pass outside of a wait, as a slow policy does."""
        self._time += seconds

    @property
    def out(self) -> list[int]:
        """Slots that are with their workers."""
        return sorted(job.slot for queue in self._queues for job in queue)

    def finish(self, slot: int, after_s: float = 0.0) -> None:
        """Let a slot that is out finish."""
        self._decide(slot, Fate("finish", after_s))

    def stall(self, slot: int) -> None:
        """Let a slot that is out never come back by itself."""
        self._decide(slot, Fate("stall"))

    def die(self, slot: int, exit_code: int = -9, after_s: float = 0.0) -> None:
        """Let the slot's worker die, in that slot if it is out, else idle."""
        if slot in self.out:
            self._decide(slot, Fate("die", after_s, exit_code))
        else:
            worker = int(self.worker_of[slot])
            current = self._queues[worker][0].slot if self._queues[worker] else -1
            self._lose(worker)
            self.losses.append(Loss(worker, exit_code, current, "idle" if current < 0 else "step"))

    def _decide(self, slot: int, fate: Fate) -> None:
        for queue in self._queues:
            for job in queue:
                if job.slot == slot:
                    job.fate = fate
                    job.at = self._time + fate.after_s if job.begun and fate.then != "stall" else None
                    return
        raise ValueError(f"slot {slot} is not out; out are {self.out}")

    def _fate(self, slot: int) -> Fate:
        nth = int(self.submissions[slot])
        if callable(self.script):
            return self.script(slot, nth)
        fates = (self.script or {}).get(slot, ())
        if nth < len(fates):
            return fates[nth]
        return Fate("stall") if self.hold else Fate()

    # -- the backend's contract ---------------------------------------------------------------------------------

    def submit(self, slots: Slots) -> None:
        """Queue the slots at their workers."""
        for slot in slots.tolist():
            job = _Job(slot, self._fate(slot), row=self._row(slot))
            self.submissions[slot] += 1
            self.given[slot] += np.uint32(1)
            self._queues[self.worker_of[slot]].append(job)
        self._begin()

    def _row(self, slot: int) -> bytes:
        return b"".join(self.slab.arrays[name][slot].tobytes() for name in self.slab.names("head", "action", "obs"))

    def _begin(self) -> None:
        """Workers without a current job take their next one."""
        for worker, queue in enumerate(self._queues):
            if queue and not queue[0].begun:
                job = queue[0]
                job.begun = True
                if job.fate.then != "stall":
                    job.at = self._time + job.fate.after_s
                self.pulses[worker].enter(job.slot, self._phase(job.slot))

    def _phase(self, slot: int) -> str:
        command = int(self.slab.head["command"][slot])
        return {RESET: "reset", REBUILD: "init"}.get(command, "step")

    def wait(self, at_least: int, timeout_s: float) -> None:
        """Let the clock run to the next fate, as often as it takes, but no further than `timeout_s`."""
        deadline, target = self._time + timeout_s, self.num_out - at_least
        while True:
            due = [(queue[0].at, worker) for worker, queue in enumerate(self._queues) if queue and queue[0].at is not None]
            at, worker = min(due, default=(None, -1))
            enough = self.num_out <= target or bool(self.losses)
            if at is None or at > (self._time if enough else deadline):
                if not enough:
                    self._time = max(self._time, deadline)
                break
            self._time = max(self._time, at)
            self._happen(worker)

    def _happen(self, worker: int) -> None:
        job = self._queues[worker][0]
        slot = job.slot
        if job.row != self._row(slot):
            self.touched.append(slot)
        if job.fate.then == "die":
            phase = self._phase(slot)
            self._lose(worker)
            self.losses.append(Loss(worker, job.fate.exit_code, slot, phase))
            return
        self._queues[worker].popleft()
        life = self.lives[slot]
        life.turn = int(self.given[slot])
        drive(life, life.advance(), unwatched)
        self.pulses[worker].enter(-1, "idle")
        self._finish(slot, life.turn)
        self._begin()

    def _lose(self, worker: int) -> None:
        """All envs of the worker are gone, without a close, as when a process ends."""
        self._queues[worker].clear()
        self.pulses[worker].enter(-1, "idle")
        for slot in np.flatnonzero(self.worker_of == worker).tolist():
            self.lives[slot].env = None

    def kill(self, worker: int) -> str:
        """End a worker that is past its deadline."""
        slot, phase, since = self.pulses[worker].read()
        self._lose(worker)
        return f"scripted: slot {slot} was told to stall in {phase}, {self._time - since:g} s ago"

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Close the envs."""
        self._queues = [deque() for _ in self._queues]
        return self._close_lives()
