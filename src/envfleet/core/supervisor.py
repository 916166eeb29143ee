"""The supervisor: turns failures, lost workers and overrun deadlines into fault rows, restarts and quarantine.

It is between the fleet and its backend, and it alone decides what happens after a fault. Slots are rebuilt in place, by
the REBUILD command of the slot life.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from envfleet.backends.base import Backend
from envfleet.core.slot_table import SlotTable
from envfleet.errors import FaultError
from envfleet.faults.failure import VERBS, Failure, Fault, Loss
from envfleet.slots.layout import FAULT, QUARANTINED, REBUILD, RESET
from envfleet.slots.slab import Slots
from envfleet.util.backoff import backoff_s

_LOOK_S = 0.05
#: Time between two checks counts as at most this much: a parent that did not check (it was stopped, the caller computed
#: for minutes) cannot know that a worker was silent.
_MAX_GAP_S = 0.25


@dataclasses.dataclass(frozen=True)
class Policy:
    """What to do after a fault. A slot gets `max_restarts` without a completed episode in between, then quarantine."""

    on_fault: str = "raise"
    max_restarts: int = 3
    backoff_s: float = 0.1
    max_backoff_s: float = 1.0

    def delay_s(self, restarts: int) -> float:
        """How long to wait before restart number `restarts` (from 1)."""
        return backoff_s(restarts, self.backoff_s, self.max_backoff_s)


@dataclasses.dataclass
class _Interrupted:
    """What a fault row will say about the interrupted episode."""

    final_obs: list[Any]
    head: dict[str, Any]


@dataclasses.dataclass
class CallWatch:
    """Calls whose answers are awaited: of which slots, since when (watched time), and the first that was lost."""

    waiting: set[int]
    begun_s: float
    num_losses: np.ndarray[Any, Any]
    lost: Fault | None = None


class Supervisor:
    """Per-slot fault state of one fleet.

    `lost[slot]`: its env is gone or broken and is rebuilt when next sent. `pending[slot]`: a fault to be raised when the
    slot is received.
    """

    def __init__(self, backend: Backend, policy: Policy, table: SlotTable) -> None:
        self.backend = backend
        self.policy = policy
        self.table = table
        count = backend.recipe.num_slots
        self.lost = np.zeros(count, bool)
        self.quarantined = np.zeros(count, bool)
        self.troubled = False  # whether any slot is lost, quarantined or pending
        self.restarts = np.zeros(count, np.int64)
        self.has_restarts = False  # whether any slot has restarts counted
        self.faults: list[Fault] = []
        self.num_losses = np.zeros(count, np.int64)  # how often a slot's worker was lost
        self._newest: dict[int, list[Fault]] = {}  # slot -> its faults of the turn of the newest one
        self.pending: dict[int, Fault] = {}
        self._due: dict[int, float] = {}  # slot -> when to rebuild it
        self._interrupted: dict[int, _Interrupted] = {}
        self._last_rows: dict[int, tuple[Any, list[Any]]] = {}  # of lost slots: the last whole row, until they are back
        self._without_task: set[int] = set()  # rebuilt without the task that they failed with
        self._suspect: dict[int, tuple[tuple[int, str, float], float]] = {}  # pulse -> what it said, and since when
        self._out_turn = np.zeros(count, np.uint32)  # [slot]: the turn in which it was last seen out
        self._out_time = np.zeros(count)  # and the watched time when that was first seen
        self._last_look = backend.now()
        self._watched_s = 0.0  # the time spent looking
        self._lost_at = np.zeros(count, np.uint32)  # the turn in which a slot was lost
        self._rebuilds = np.zeros(count, np.int64)
        self._abandoned: set[int] = set()  # slots the caller gives up, until that is complete
        self.parked = np.zeros(count, bool)  # quarantined only until there is a place for their worker
        self._returned: set[int] = set()  # were parked: the next row begins an episode, and tells of no fault

    # -- what the backend reports ---------------------------------------------------------------------------------

    def take(self) -> None:
        """Handle what the backend found: failures, lost workers, lost slots that are back.

        Entries are removed from the backend's lists after they were handled. If this is interrupted they are handled again,
        which changes nothing: a fault is identified by its slot and turn.
        """
        backend = self.backend
        if backend.is_broken:
            self.troubled = True
            raise backend.broken()
        if self.troubled:
            self._take_back()  # first: what has come back may be lost again by what follows
        for slot in sorted(self._abandoned):  # giving it up was interrupted
            self._give_up(slot)
        self._take_reports()
        if self.troubled:
            self._take_back()

    def _take_reports(self) -> None:
        backend = self.backend
        while backend.failures:
            slot, failure = next(iter(backend.failures.items()))
            self._failed(slot, failure)
            del backend.failures[slot]
        while backend.losses:
            self._worker_lost(backend.losses[0])
            backend.losses.popleft()
        while backend.placings:
            worker, why_not = backend.placings[0]
            self._park(worker, why_not) if why_not else self._return(worker)
            backend.placings.popleft()

    def credit(self, slots: list[int] | Slots) -> None:
        """A completed episode clears the slot's count of restarts."""
        if self.has_restarts:
            slab = self.backend.slab
            ended = slab.ended(slots) & (slab.head["status"][slots] != FAULT)
            # The slots of one engine fail together, so that a completed episode speaks for all of them.
            cleared = slice(None) if self.backend.is_one_engine and ended.any() else np.asarray(slots, np.int64)[ended]
            self.restarts[cleared] = 0
            self.has_restarts = bool(self.restarts.any())

    def _take_back(self) -> None:
        """Lost slots that were rebuilt and are done: their rows describe the interrupted episode."""
        table = self.table
        back = self.lost & (table.given != self._lost_at) & (table.done == table.given) & ~table.held & ~self.quarantined
        for slot in np.flatnonzero(back).tolist():
            if slot in self.pending or slot in self.backend.failures:
                continue
            interrupted = self._interrupted.get(slot)
            if interrupted is not None:
                self._write_fault_row(slot, interrupted, FAULT)
                self._interrupted.pop(slot)
            self.lost[slot] = False
            self._returned.discard(slot)
            self._last_rows.pop(slot, None)
            if slot in self._without_task:  # it runs: the task was the reason, not the slot
                self._without_task.remove(slot)
                self.restarts[slot] = 0
        self._look_for_trouble()

    def _failed(self, slot: int, failure: Failure) -> None:
        is_out = bool(self.table.given[slot] != self.table.seen[slot])
        details = {"failure": failure, "traceback": failure.traceback}
        fault = self._record(slot, "failed", failure.phase, failure.summary, is_out, True, **details)
        self._handle(fault, counts=True, is_out=is_out)

    def _worker_lost(self, loss: Loss) -> None:
        """Every slot of the worker has lost its env: the one it was in, and those that shared it."""
        slots = np.flatnonzero(self.backend.worker_of == loss.worker).tolist()
        self.num_losses[slots] += 1
        words = loss.how
        culprit = loss.slot
        if loss.ended_because:
            slots.sort(key=lambda slot: slot != culprit)  # the slot that caused it first
        for slot in slots:
            if self.quarantined[slot] or (self.lost[slot] and self._lost_at[slot] == self.table.given[slot]):
                continue
            is_out = self.table.is_out(slot)
            details: dict[str, Any] = {"worker": loss.worker, "exit_code": loss.exit_code}
            if loss.is_final and self.lost[slot]:
                fault = self.last_fault(slot)  # it is known already, and was sent again
            elif loss.is_final:
                fault = self._record(slot, "lost", "step" if is_out else "idle", words, is_out, True, **details)
            elif slot == culprit:
                kind, cause = (loss.kind, loss.ended_because) if loss.ended_because else ("lost", f"the worker process {words}")
                fault = self._record(slot, kind, loss.phase, cause, is_out, True, stack=loss.stack, **details)
            else:
                what = (
                    f"{VERBS[loss.kind]} in {loss.phase}"
                    if loss.ended_because
                    else f"was in {loss.phase} when the process {words}"
                )
                shared = f"it shared worker {loss.worker} with slot {culprit}, which {what}"
                idle = " while idle" if loss.phase == "idle" else ""
                cause = shared if culprit >= 0 else f"the worker process {words}{idle}"
                details["shared_with"] = culprit if culprit >= 0 else None
                fault = self._record(slot, "lost", "step" if is_out else "idle", cause, is_out, True, **details)
            # The restart counts only for the slot that ended the worker; if it is not known, for all.
            self._handle(fault, counts=slot == culprit or culprit < 0, is_out=is_out, gone=loss.is_final)

    # -- workers that have no place ------------------------------------------------------------------------------

    def _park(self, worker: int, why: str) -> None:
        """There is no place for a worker now: its slots are quarantined until there is, and those that are out come back."""
        table = self.table
        for slot in np.flatnonzero(self.backend.worker_of == worker).tolist():
            if self.quarantined[slot]:
                self.num_losses[slot] += 1  # a call to it was made meanwhile, and will not be answered
                continue
            is_out = table.is_out(slot)
            fault = self._record(slot, "lost", "init", f"the worker process {why}", is_out, True)
            self._last_rows[slot] = self._delivered(slot, is_out)
            self.lost[slot] = self.troubled = True
            self._lost_at[slot], table.plain = table.given[slot], False
            self._due.pop(slot, None)
            table.held[slot] = False
            interrupted = self._interrupted.pop(slot, None)
            if self.policy.on_fault == "raise":
                if is_out:
                    self.pending[slot] = fault
            else:
                self.parked[slot] = self.quarantined[slot] = True
                if is_out and interrupted is not None:
                    self._write_fault_row(slot, interrupted, QUARANTINED)
                elif is_out:
                    self._mark_quarantined(slot)
            table.done[slot] = table.given[slot]

    def _return(self, worker: int) -> None:
        """A worker whose slots were parked has a place: they begin a new episode when they are sent next."""
        for slot in np.flatnonzero(self.parked & (self.backend.worker_of == worker)).tolist():
            self._returned.add(slot)
            self._lost_at[slot] = self.table.given[slot]  # it was never rebuilt: what it came back with since were empty rows
            self.quarantined[slot] = False
            self.parked[slot] = False

    # -- deadlines -----------------------------------------------------------------------------------------------

    def look(self, force: bool = False) -> None:
        """Find calls past their deadline; at most every 50 ms unless forced."""
        backend = self.backend
        now = backend.now()
        if not backend.has_deadlines or (not force and now - self._last_look < _LOOK_S):
            return
        self._watched_s += min(now - self._last_look, _MAX_GAP_S)
        self._last_look = now
        for i, pulse in enumerate(backend.pulses):
            slot, phase, since = seen = pulse.read()
            known = 0 <= slot < len(self.lost)
            limit = (backend.part_of(slot) if known else backend).recipe.timeout_s(phase)
            if not known or phase == "idle" or now - since <= limit:
                self._suspect.pop(i, None)
                continue
            said, first = self._suspect.get(i, (None, now))
            if said != seen:
                self._suspect[i] = (seen, now)  # seen twice, some time apart: see Pulse
            elif now - first >= min(0.5, 0.1 * limit):
                self._suspect.pop(i)
                setting = phase if phase in ("init", "reset") else "step"
                self._end_call(slot, phase, f"{phase} took longer than {setting}_timeout_s={limit:g}")
        self._look_for_silence(now)
        if not force:
            backend.mind(self._free)

    def _free(self) -> Slots:
        """Slots whose env is there and idle."""
        table = self.table
        free: Slots = ((table.given == table.done) & ~table.held & ~self.lost & ~self.quarantined).nonzero()[0]
        return free

    def _look_for_silence(self, now: float) -> None:
        """Find slots that are out although the pulse of their worker does not explain it.

        A worker that was stopped, whose interpreter is blocked by a thread or a signal handler of the env, or that has lost a
        message, looks idle forever. Only time in which the parent checked counts.
        """
        backend, table, recipe = self.backend, self.table, self.backend.recipe  # of joined backends: the shortest timeouts
        out = table.given != table.done
        fresh = out & (self._out_turn != table.given)
        self._out_turn[fresh], self._out_time[fresh] = table.given[fresh], self._watched_s
        shortest = min(recipe.step_timeout_s, recipe.reset_timeout_s, recipe.init_timeout_s)
        for slot in np.flatnonzero(out & (self._watched_s - self._out_time > shortest)).tolist():
            if not backend.has_deadline(slot):
                self._out_time[slot] = self._watched_s  # it counts from when there is one
                continue
            phase = {RESET: "reset", REBUILD: "init"}.get(int(backend.slab.head["command"][slot]), "step")
            part = backend.part_of(slot)
            recipe = part.recipe
            waited_s, limit = self._watched_s - float(self._out_time[slot]), recipe.timeout_s(phase)
            said, _, since = backend.pulse_of(slot).read()
            is_idle = part.can_kill and said < 0 and min(waited_s, now - since) > limit
            # One turn may step, close, build and reset; and those of its worker's other slots may come first.
            longest = 2 * recipe.step_timeout_s + recipe.init_timeout_s + recipe.reset_timeout_s
            if is_idle or waited_s > longest * (1 + -(-recipe.num_slots // part.num_workers)):
                words = (
                    f"no answer within {phase}_timeout_s={limit:g}, and its worker says that it does nothing: "
                    "it was stopped, or the environment left something behind that blocks its interpreter"
                )
                self._end_call(slot, phase, words)
                return  # the other slots of the same worker are lost too

    def watch_calls(self, slots: list[int]) -> CallWatch:
        """Start to watch calls to these slots, before they are made."""
        return CallWatch(set(slots), self._watched_s, self.num_losses.copy())

    def look_after_calls(self, watch: CallWatch) -> None:
        """Find calls that will not be answered: their worker was lost, or is past its deadline."""
        num_faults = len(self.faults)
        self.take()
        self.look(force=True)
        self._look_for_silent_calls(watch)
        for fault in self.faults[num_faults:]:
            if fault.slot in watch.waiting:
                watch.waiting.remove(fault.slot)
                watch.lost = fault if watch.lost is None or watch.lost.shared_with is not None else watch.lost
        for slot in np.flatnonzero(self.num_losses != watch.num_losses).tolist():
            if slot in watch.waiting:  # its env was lost before, and now the worker that would report it
                watch.waiting.remove(slot)
                watch.lost = watch.lost or self.last_fault(slot)

    def call_fault(self, slot: int, phase: str, failure: Failure) -> Fault:
        """Record a call in which an env raised. The env is kept."""
        return self._record(slot, "failed", phase, failure.summary, failure=failure, traceback=failure.traceback)

    def _look_for_silent_calls(self, watch: CallWatch) -> None:
        """As `_look_for_silence`, for slots of which an answer to a call is awaited."""
        backend, limit = self.backend, self.backend.recipe.timeout_s("call")
        waited_s = self._watched_s - watch.begun_s
        for slot in sorted(watch.waiting) if waited_s > limit and backend.has_deadlines else ():
            part = backend.part_of(slot)
            limit = part.recipe.timeout_s("call")
            said, _, since = backend.pulse_of(slot).read()
            is_idle = part.can_kill and said < 0 and min(waited_s, backend.now() - since) > limit
            if backend.has_deadline(slot) and (is_idle or waited_s > limit * (1 + len(self.lost))):
                words = f"no answer to a call within step_timeout_s={limit:g}, and its worker says that it does nothing"
                self._end_call(slot, "call", words)
                return  # the other slots of the same worker are lost too

    def next_look_s(self) -> float:
        """How long to wait before checking deadlines again, or until a rebuild is due if that is sooner."""
        if not self._due:
            return _LOOK_S
        return max(0.001, min(_LOOK_S, min(self._due.values()) - self.backend.now()))

    def _end_call(self, slot: int, phase: str, words: str, kind: str = "timeout") -> None:
        """End what a slot is doing: its worker, or where that is impossible only the wait for it."""
        part = self.backend.part_of(slot)
        if part.can_kill:
            self.backend.end_worker(slot, phase, words, kind)
            self._take_back()  # first, as in `take`: a slot that the worker has just rebuilt is back, and lost again
            self._take_reports()
            return
        is_out = self.table.is_out(slot)
        fault = self._record(slot, kind, phase, words, is_out, stack=self.backend.give_up(slot))
        self._handle(fault, counts=True, is_out=is_out, gone=not part.can_rebuild_abandoned)

    # -- giving up -----------------------------------------------------------------------------------------------

    def abandon(self, slots: list[int]) -> None:
        """Give up what these slots are doing: the caller owns them again, without their rows."""
        self.take()
        self._abandoned.update(slots)  # from here on `take` completes it, should this be interrupted
        for slot in slots:
            self._give_up(slot)

    def _give_up(self, slot: int) -> None:
        table = self.table
        is_waiting = slot in self._due and table.given[slot] == self._lost_at[slot]  # it failed, and is not yet rebuilt
        self._due.pop(slot, None)
        table.held[slot] = False
        if not is_waiting and table.is_out(slot):
            phase = {RESET: "reset", REBUILD: "init"}.get(int(self.backend.slab.head["command"][slot]), "step")
            self._end_call(slot, phase, "the caller gave it up: reset the slot to use it again", "abandoned")
        self.pending.pop(slot, None)
        table.done[slot] = table.given[slot]
        table.seen[slot] = table.given[slot]
        table.plain = False
        self._abandoned.discard(slot)

    # -- what happens next --------------------------------------------------------------------------------------

    def _delivered(self, slot: int, is_out: bool) -> tuple[Any, list[Any]]:
        """The row as the caller last got it, or will get it next. `is_out`: the row that is being written will not come.

        Of a lost slot it is the row from before the loss: what is in the slab since then may be half written or was never
        delivered, and every attempt to rebuild the slot may write there.
        """
        if self.lost[slot] and slot in self._last_rows:
            return self._last_rows[slot]
        row: tuple[Any, list[Any]] = self.backend.delivered(slot) if is_out else self.backend.slab.delivered(slot, -1)
        return row

    def _record(
        self, slot: int, kind: str, phase: str, cause: str, is_out: bool = False, once: bool = False, **more: Any
    ) -> Fault:
        """Add a fault to the list. `once`: not if the same one is there, because dealing with it was interrupted."""
        turn, live = int(self.table.given[slot]), self.backend.slab.head[slot]
        newest = self._newest.get(slot, [])
        for known in [*newest, *self.faults[-1:]] if once else ():  # the last, should recording it have been interrupted
            if (known.slot, known.turn, known.kind, known.phase, known.cause) == (slot, turn, kind, phase, cause):
                return known
        head, _ = self._delivered(slot, is_out)
        running = int(head["started"]) - 1
        same = int(head["episode"]) == running and not self.backend.slab.has_ended(head)
        named = live if phase in ("init", "reset") else head  # a reset that fails has its own seed and task
        seed = int(named["now_seed"])
        more.setdefault("worker", int(self.backend.worker_of[slot]))
        fault = Fault(
            slot=slot,
            kind=kind,
            phase=phase,
            cause=cause,
            episode=running,
            step=(int(head["step"]) + 1 if same else 0) if running >= 0 else -1,
            seed=None if seed < 0 else seed,
            task=self.table.told_task(int(named["now_task"])),
            last_actions=self.table.last_actions(slot),
            time_s=self.backend.now(),
            turn=turn,
            **more,
        )
        self.faults.append(fault)
        self._newest[slot] = [*(known for known in newest if known.turn == turn), fault]
        return fault

    def _handle(self, fault: Fault, counts: bool, is_out: bool, gone: bool = False) -> None:
        """Decide what happens to the slot. `is_out`: the caller waits for its row; else it has the last one."""
        slot, table = fault.slot, self.table
        self.troubled, table.plain = True, False
        self._last_rows[slot] = self._delivered(slot, is_out)
        if is_out and slot not in self._interrupted:
            self._interrupted[slot] = self._interrupt(slot, fault, is_out)
        if slot in self._abandoned:
            is_out = False
            self.quarantined[slot] |= gone
        self._lost_at[slot] = table.given[slot]
        self.lost[slot] = True
        if not is_out:
            return  # the caller learns of the fault when it sends the slot again
        if self.policy.on_fault == "raise":
            self.pending[slot] = fault
            self.quarantined[slot] |= gone
            self._interrupted.pop(slot)
            table.done[slot] = table.given[slot]
            return
        self.restarts[slot] += counts
        self.has_restarts |= counts
        if gone or self.restarts[slot] > self.policy.max_restarts:
            self.quarantined[slot] = True
            self._write_fault_row(slot, self._interrupted[slot], QUARANTINED)
            self._interrupted.pop(slot)
            table.done[slot] = table.given[slot]
            return
        delay = self.policy.delay_s(int(self.restarts[slot])) if counts else 0.0
        table.held[slot] = True
        self._due[slot] = self.backend.now() + delay

    def _interrupt(self, slot: int, fault: Fault, is_out: bool) -> _Interrupted:
        head, obs = self._delivered(slot, is_out)
        same = int(head["episode"]) == fault.episode
        named = self.backend.slab.head[slot] if fault.phase in ("init", "reset") else head
        return _Interrupted(
            final_obs=obs,
            head={
                "episode": fault.episode,
                "step": fault.step,
                "length": max(fault.step, 0),
                "ep_return": head["ep_return"].copy() if same and fault.step > 0 else 0.0,
                "task": int(named["now_task"]),
                "seed": int(named["now_seed"]),
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
        for slot in [slot for slot in self._due if self.table.given[slot] != self._lost_at[slot]]:
            self._was_sent(slot)  # before an interrupt
        slots = sorted(slot for slot, when in self._due.items() if when <= now)
        if slots and self.backend.is_one_engine:
            slots = sorted(self._due)  # it is rebuilt once, for all that wait for it
        if slots:
            self._leave_out_tasks(slots)
            self.prepare_rebuild(slots)
            self.backend.submit(np.array(slots, np.int64))  # if it raises they are still due: the next recv tries again
            for slot in slots:
                self._was_sent(slot)

    def _leave_out_tasks(self, slots: list[int]) -> None:
        """The last rebuild before quarantine, where every reset failed with one task, is without it: one bad task must not take slot after slot."""
        head = self.backend.slab.head
        for slot in slots:
            task = int(head["now_task"][slot])
            last = self.restarts[slot] >= self.policy.max_restarts
            if last and task >= 0 and task == head["next_task"][slot] and self.last_fault(slot).phase == "reset":
                head["next_task"][slot] = -1
                self._without_task.add(slot)

    def _was_sent(self, slot: int) -> None:
        self.table.held[slot] = False
        del self._due[slot]

    def prepare_rebuild(self, slots: list[int]) -> None:
        """Write the REBUILD command. A rebuilt env has no random stream to continue: it gets a new seed, spawned
        from the last seed of the slot, so that the same run gives the same results again."""
        head = self.backend.slab.head
        for slot in slots:
            head["command"][slot] = REBUILD
            self._rebuilds[slot] += 1
            base = int(self.table.base_seed[slot])
            if head["next_seed"][slot] < 0 and base >= 0:
                spawned = np.random.SeedSequence(base, spawn_key=(int(self._rebuilds[slot]),))
                head["next_seed"][slot] = int(spawned.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def sent_lost(self, slot: int) -> None:
        """A slot that was lost while the caller had it is sent: what comes back is a fault row."""
        if slot in self._returned:
            return
        if self.policy.on_fault == "raise":
            raise self.last_fault(slot).error()
        if slot not in self._interrupted:
            self._interrupted[slot] = self._interrupt(slot, self.last_fault(slot), False)

    def reset_lost(self, slot: int) -> None:
        """A lost slot is reset: its interrupted episode is not reported, even if a send had started to."""
        self._interrupted.pop(slot, None)

    def last_fault(self, slot: int) -> Fault:
        """The newest fault of a slot."""
        if self._newest.get(slot):
            return self._newest[slot][-1]
        for fault in self.faults:  # of a slot that could not be built at the start
            if fault.slot == slot:
                return fault
        return self._record(slot, "lost", "idle", "its environment is gone")

    def quarantine_row(self, slot: int) -> None:
        """The row of a quarantined slot, returned at once: it is not a transition."""
        self._mark_quarantined(slot)
        turn = self.table.given[slot] + np.uint32(1)
        self.table.done[slot] = turn  # in this order: between the two lines the caller still owns it
        self.table.given[slot] = turn

    def _mark_quarantined(self, slot: int) -> None:
        row = self.backend.slab.head[slot : slot + 1]
        row["reward"], row["terminated"], row["truncated"] = 0.0, False, False
        row["scored"], row["active"], row["pending"], row["over"] = False, False, False, False
        row["status"] = QUARANTINED

    def raise_pending(self, slots: list[int]) -> None:
        """Raise the first fault among slots that are being received; the caller then owns all of them again."""
        faults = [self.pending[slot] for slot in slots if slot in self.pending]
        if not faults:
            return
        faults.sort(key=lambda fault: fault.shared_with is not None)  # the slot that caused it first
        error: FaultError = faults[0].error()
        for other in [] if self.backend.is_one_engine else faults[1:]:  # an engine's slots all tell the same
            error.add_note(f"also: {other}")
        for fault in faults:
            self.table.seen[fault.slot] = self.table.given[fault.slot]
            self.pending.pop(fault.slot, None)
        raise error

    def note_close(self, slot: int, problem: Failure | Loss) -> Fault:
        """Record what went wrong in closing a slot."""
        if isinstance(problem, Failure):
            text: dict[str, Any] = {"stack" if problem.kind == "timeout" else "traceback": problem.traceback}
            return self._record(max(slot, 0), problem.kind, problem.phase, problem.summary, failure=problem, **text)
        cause = f"the worker process {problem.how}"
        return self._record(slot, "lost", problem.phase, cause, exit_code=problem.exit_code)

    def _look_for_trouble(self) -> None:
        self.troubled = bool(self.lost.any() or self.quarantined.any() or self.pending or self._interrupted or self._due)
