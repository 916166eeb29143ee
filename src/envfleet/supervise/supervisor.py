"""The supervisor: turns failures, lost workers and overrun deadlines into fault rows, restarts and quarantine.

It stands between the fleet and its backend and is the only place that decides what happens after a fault. Slots are
rebuilt where they sit: the REBUILD command of the one slot life.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from envfleet.backends.base import Backend, Finished, Loss
from envfleet.book import DONE, IDLE, OUT, Book
from envfleet.errors import FaultError
from envfleet.layout import FAULT, QUARANTINED, REBUILD
from envfleet.supervise.faults import Failure, Fault, exit_words

_LOOK_S = 0.05


@dataclasses.dataclass(frozen=True)
class Policy:
    """What to do after a fault. A slot gets `max_restarts` without a completed episode in between, then quarantine."""

    on_fault: str = "raise"
    max_restarts: int = 3
    backoff_s: float = 0.1
    max_backoff_s: float = 1.0

    def delay_s(self, restarts: int) -> float:
        """How long to wait before restart number `restarts` (from 1)."""
        return min(self.max_backoff_s, self.backoff_s * 2.0 ** (restarts - 1))


@dataclasses.dataclass
class _Interrupted:
    """What a fault row will say of the episode that was cut short."""

    final_obs: list[Any]
    head: dict[str, Any]


class Supervisor:
    """Per-slot fault state of one fleet.

    `lost[slot]`: its env is gone or broken and is rebuilt when next sent. `pending[slot]`: a fault to be raised when the
    slot is received.
    """

    def __init__(self, backend: Backend, policy: Policy, book: Book) -> None:
        self.backend = backend
        self.policy = policy
        self.book = book
        count = backend.recipe.num_slots
        self.lost = np.zeros(count, bool)
        self.quarantined = np.zeros(count, bool)
        self.troubled = False  # whether any slot is lost, quarantined or pending: the fast path asks only this
        self.restarts = np.zeros(count, np.int64)
        self.has_restarts = False  # whether any slot has some on its account: the fast path asks only this
        self.faults: list[Fault] = []
        self.pending: dict[int, Fault] = {}
        self._due: dict[int, float] = {}  # slot -> when to rebuild it
        self._interrupted: dict[int, _Interrupted] = {}
        self._suspect: dict[int, tuple[int, str, float]] = {}
        self._last_look = backend.now()
        self._rebuilds = np.zeros(count, np.int64)

    # -- what the backend brings ---------------------------------------------------------------------------------

    def take(self, finished: Finished) -> None:
        """Sort what a wait brought: rows that are done, rows that failed, workers that are lost."""
        state = self.book.state
        if not finished.failures and not finished.losses and not self.troubled:
            state[finished.done] = DONE
            self.credit(finished.done)
            return
        for slot in finished.done:
            if slot in finished.failures:
                self._failed(slot, finished.failures[slot])
            else:
                self._came_back(slot)
        for loss in finished.losses:
            self._worker_lost(loss)

    def credit(self, slots: list[int]) -> None:
        """A completed episode clears the slot's count of restarts."""
        if self.has_restarts:
            slab = self.backend.slab
            ended = slab.ended(slots) & (slab.head["status"][slots] != FAULT)
            self.restarts[np.asarray(slots, np.int64)[ended]] = 0
            self.has_restarts = bool(self.restarts.any())

    def _came_back(self, slot: int) -> None:
        if self.book.state[slot] != OUT:
            return  # given up just as it finished
        self.lost[slot] = False
        self.book.state[slot] = DONE
        interrupted = self._interrupted.pop(slot, None)
        if interrupted is None:
            self.credit([slot])
        else:
            self._write_fault_row(slot, interrupted, FAULT)
        self._look_for_trouble()

    def _failed(self, slot: int, failure: Failure) -> None:
        fault = self._record(
            slot, "failed", failure.phase, failure.summary, failure=failure, traceback=failure.traceback
        )
        self._handle(fault, counts=True)

    def _worker_lost(self, loss: Loss, timed_out: Fault | None = None) -> None:
        """Every slot of the worker has lost its env: the one it was in, and those that shared it."""
        slots = np.flatnonzero(self.backend.worker_of == loss.worker).tolist()
        words = exit_words(loss.exit_code)
        culprit = loss.slot
        for slot in slots:
            if self.quarantined[slot]:
                continue
            if slot == culprit and timed_out is None:
                fault = self._record(
                    slot,
                    "lost",
                    loss.phase,
                    f"the worker process {words}",
                    worker=loss.worker,
                    exit_code=loss.exit_code,
                )
            elif slot == culprit:
                continue
            else:
                what = f"timed out in {loss.phase}" if timed_out else f"was in {loss.phase} when the process {words}"
                shared = f"it shared worker {loss.worker} with slot {culprit}, which {what}"
                cause = shared if culprit >= 0 else f"the worker process {words} while idle"
                fault = self._record(
                    slot,
                    "lost",
                    "step" if self.book.state[slot] == OUT else "idle",
                    cause,
                    worker=loss.worker,
                    exit_code=loss.exit_code,
                    shared_with=culprit if culprit >= 0 else None,
                )
            # Only the slot that brought the worker down pays from its budget; with none known, all do.
            self._handle(fault, counts=slot == culprit or culprit < 0)

    # -- deadlines -----------------------------------------------------------------------------------------------

    def look(self, force: bool = False) -> None:
        """Find calls past their deadline; at most every 50 ms unless forced."""
        backend = self.backend
        now = backend.now()
        if not backend.has_deadlines or (not force and now - self._last_look < _LOOK_S):
            return
        self._last_look = now
        for worker, pulse in enumerate(backend.pulses):
            slot, phase, since = seen = pulse.read()
            limit = backend.recipe.timeout_s(phase)
            if slot < 0 or phase == "idle" or now - since <= limit:
                self._suspect.pop(worker, None)
            elif self._suspect.get(worker) != seen:
                self._suspect[worker] = seen  # two looks in a row: see Pulse
            else:
                self._suspect.pop(worker)
                self._timed_out(worker, slot, phase, limit)

    def next_look_s(self) -> float:
        """How long to wait before looking at deadlines again, or until a rebuild is due if that is sooner."""
        if not self._due:
            return _LOOK_S
        return max(0.001, min(_LOOK_S, min(self._due.values()) - self.backend.now()))

    def _timed_out(self, worker: int, slot: int, phase: str, limit: float) -> None:
        stack = self.backend.kill(worker)
        fault = self._record(
            slot,
            "timeout",
            phase,
            f"{phase} took longer than {phase if phase in ('init', 'reset') else 'step'}_timeout_s={limit:g}",
            worker=worker,
            stack=stack,
        )
        if self.backend.can_kill:
            self._handle(fault, counts=True)
            self._worker_lost(Loss(worker, None, slot, phase), timed_out=fault)
        else:
            self._handle(fault, counts=True, gone=not self.backend.can_rebuild_abandoned)

    # -- what is done about it -----------------------------------------------------------------------------------

    def _record(self, slot: int, kind: str, phase: str, cause: str, **more: Any) -> Fault:
        head = self.backend.slab.head[slot]
        running = int(head["started"]) - 1
        same = int(head["episode"]) == running and not self.backend.slab.ended(slot)
        seed = int(head["now_seed"])
        more.setdefault("worker", int(self.backend.worker_of[slot]))
        fault = Fault(
            slot=slot,
            kind=kind,
            phase=phase,
            cause=cause,
            episode=running,
            step=(int(head["step"]) + 1 if same else 0) if running >= 0 else -1,
            seed=None if seed < 0 else seed,
            task=self.book.task_value(int(head["now_task"])),
            last_actions=self.book.last_actions(slot),
            time_s=self.backend.now(),
            **more,
        )
        self.faults.append(fault)
        return fault

    def _handle(self, fault: Fault, counts: bool, gone: bool = False) -> None:
        slot = fault.slot
        self.troubled = True
        was_lost, self.lost[slot] = self.lost[slot], True
        if self.book.state[slot] != OUT:
            return  # the caller has the row: it learns of the fault when it sends the slot again
        if slot not in self._interrupted:
            self._interrupted[slot] = self._interrupt(slot, fault, was_lost)
        if self.policy.on_fault == "raise":
            self._interrupted.pop(slot)
            self.pending[slot] = fault
            self.book.state[slot] = DONE
            self.quarantined[slot] |= gone
            return
        self.restarts[slot] += counts
        self.has_restarts |= counts
        if gone or self.restarts[slot] > self.policy.max_restarts:
            self.quarantined[slot] = True
            self._write_fault_row(slot, self._interrupted.pop(slot), QUARANTINED)
            self.book.state[slot] = DONE
            return
        delay = self.policy.delay_s(int(self.restarts[slot])) if counts else 0.0
        self._due[slot] = self.backend.now() + delay

    def _interrupt(self, slot: int, fault: Fault, was_lost: bool) -> _Interrupted:
        head = self.backend.slab.head[slot]
        same = int(head["episode"]) == fault.episode and not was_lost
        return _Interrupted(
            final_obs=self.backend.slab.save_obs(slot),
            head={
                "episode": fault.episode,
                "step": fault.step,
                "length": max(fault.step, 0),
                "ep_return": head["ep_return"].copy() if same and fault.step > 0 else 0.0,
                "task": int(head["now_task"]),
                "seed": int(head["now_seed"]),
                # Of many agents those that took part: they had an observation, or their transition was open.
                "truncated": head["active"] | head["pending"] if self.backend.slab.layout.agents else True,
            },
        )

    def _write_fault_row(self, slot: int, interrupted: _Interrupted, status: int) -> None:
        slab = self.backend.slab
        row = slab.head[slot : slot + 1]
        for name, value in interrupted.head.items():
            row[name] = value
        row["reward"], row["terminated"], row["scored"] = 0.0, False, False
        row["over"], row["status"] = True, status
        slab.restore_final_obs(slot, interrupted.final_obs)
        if status == QUARANTINED:
            row["active"] = row["pending"] = False
            slab.clear_obs(slot)
            self.backend.info.pop(slot, None)
        self.backend.final_info.pop(slot, None)

    def rebuild_due(self) -> None:
        """Send the slots whose time has come to be rebuilt."""
        if not self._due:
            return
        now = self.backend.now()
        slots = sorted(slot for slot, when in self._due.items() if when <= now)
        for slot in slots:
            del self._due[slot]
        if slots:
            self.prepare_rebuild(slots)
            try:
                self.backend.submit(np.array(slots, np.int64))
            except BaseException:
                self._due.update(dict.fromkeys(slots, now))  # still due: the next recv says so again, and does not hang
                raise

    def prepare_rebuild(self, slots: list[int]) -> None:
        """Write the REBUILD command. A rebuilt env has no random stream to go on with: it gets a seed of its own,
        spawned from the last one the slot was given, so that the same run takes the same way again."""
        head = self.backend.slab.head
        for slot in slots:
            head["command"][slot] = REBUILD
            self._rebuilds[slot] += 1
            base = int(self.book.base_seed[slot])
            if head["next_seed"][slot] < 0 and base >= 0:
                spawned = np.random.SeedSequence(base, spawn_key=(int(self._rebuilds[slot]),))
                head["next_seed"][slot] = int(spawned.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def sent_lost(self, slot: int) -> None:
        """A slot that was lost while the caller had it is sent: what comes back is a fault row."""
        if self.policy.on_fault == "raise":
            raise self.last_fault(slot).error()
        if slot not in self._interrupted:
            self._interrupted[slot] = self._interrupt(slot, self.last_fault(slot), False)

    def last_fault(self, slot: int) -> Fault:
        """The newest fault of a slot."""
        return next(fault for fault in reversed(self.faults) if fault.slot == slot)

    def quarantine_row(self, slot: int) -> None:
        """What a quarantined slot comes back with: nothing happened, nothing is to be learnt."""
        row = self.backend.slab.head[slot : slot + 1]
        row["reward"], row["terminated"], row["truncated"] = 0.0, False, False
        row["scored"], row["active"], row["pending"], row["over"] = False, False, False, False
        row["status"] = QUARANTINED

    def raise_pending(self, slots: list[int]) -> None:
        """Raise the first fault among slots that are being received; all of them are then the caller's again."""
        faults = [self.pending.pop(slot) for slot in slots if slot in self.pending]
        faults.sort(
            key=lambda fault: fault.shared_with is not None
        )  # the slot that began it before those it took along
        for fault in faults:
            self.book.state[fault.slot] = IDLE
        if faults:
            error: FaultError = faults[0].error()
            for other in faults[1:]:
                error.add_note(f"also: {other}")
            raise error

    def _look_for_trouble(self) -> None:
        self.troubled = bool(
            self.lost.any() or self.quarantined.any() or self.pending or self._interrupted or self._due
        )
