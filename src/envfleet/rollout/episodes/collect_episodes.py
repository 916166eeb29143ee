"""Collecting episodes by ticket over a fleet: the loop behind `Collector.episodes`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from envfleet.core.batch import Batch
from envfleet.errors import FaultError, RolloutError
from envfleet.rollout.episodes.episode import Rollout
from envfleet.rollout.episodes.episode_buffer import History
from envfleet.rollout.tickets import Ticket, TicketOffice
from envfleet.slots.layout import QUARANTINED, READY
from envfleet.tasks.curriculum import TaskResult
from envfleet.util.trees import Tree, as_columns, tree_rows

if TYPE_CHECKING:
    from envfleet.rollout.collector import Collector

Ints = npt.NDArray[np.int64]


class EpisodeRun:
    """One call of `episodes`: slots collect their tickets, finished episodes are yielded in ticket order.

    A slot is idle (no ticket), acting (on a ticket), held (its ticket is too far ahead of the oldest
    unfinished one) or gone (quarantined).
    """

    def __init__(self, collector: Collector, office: TicketOffice, ordered: bool, yield_failed: bool) -> None:
        self.collector, self.office, self.ledger = collector, office, collector.ledger
        self.fleet, self.engine = collector.fleet, collector.engine
        self.ordered, self.yield_failed = ordered, yield_failed
        num_slots = self.fleet.num_envs
        self.history = History(num_slots)
        self.acting: dict[int, Ticket] = {}
        self.coming: dict[int, Ticket] = {}  # assigned ahead: the automatic reset will begin it
        self.held: dict[int, Ticket] = {}  # begun (reset) but not yet acting
        self.idle: set[int] = set(self.fleet.runnable().tolist())
        gone = set(range(num_slots)) - self.idle
        if len(gone) > len(self.fleet.quarantined):
            warnings.warn(
                f"the servers have sessions for {len(self.idle)} of {num_slots} slots: so many run at once",
                RuntimeWarning,
                stacklevel=2,
            )
        for slot in gone:
            office.close_slot(slot)
        self.done: dict[int, Rollout | None] = {}  # position in the output → episode, or None: all attempts failed
        self.next_position = 0  # in the output
        self._num_done = 0
        self._started = np.zeros((num_slots, 2))  # [slot] time of day and perf_counter
        self._infos: dict[int, list[dict[str, Any]]] = {}
        self._reset_info: dict[int, dict[str, Any]] = {}

    # -- the loop --

    def __iter__(self) -> Iterator[Rollout]:
        engine = self.engine
        engine.drain()  # of a call that was interrupted twice: also in the drain below
        try:
            self._fill()
            for group in engine.halves(self._free()):
                self._act(group)
            while True:
                # Handed over after the next actions were sent: environments work while the caller does.
                yield from self._hand_over()
                if not engine.waiting:
                    self._seat_and_act()
                    if not engine.waiting and self.held:
                        # The oldest ticket was given back by a lost slot, and is behind one that is held: that one goes first.
                        self._release(min(ticket.position for ticket in self.held.values()))
                        self._act(self._free())
                    if not engine.waiting:
                        return
                self._take(engine.receive())
                self._seat_and_act()
        except FaultError as error:  # on_fault="raise": the episode of that slot failed, the others are given up
            if self.acting.pop(error.fault.slot, None) is not None:
                self.ledger.fail(f"{error.fault.kind} in {error.fault.phase}")
            raise
        finally:
            engine.drain()
            self._give_up()

    def _seat_and_act(self) -> None:
        self._release()
        self._fill()
        go = self._free()
        if len(go):
            self._act(go)

    def _hand_over(self) -> Iterator[Rollout]:
        while self.next_position in self.done:
            rollout = self.done.pop(self.next_position)
            self.next_position += 1
            if rollout is None:
                continue
            if rollout.error is None:
                self.ledger.use()  # before the caller gets it: it counts as used even if the caller stops here
            yield rollout

    def _free(self) -> Ints:
        """Slots that have a ticket and wait for an action."""
        out = self.engine.out
        return np.array(sorted(slot for slot in self.acting if not out[slot]), dtype=np.int64)

    def _act(self, slots: Ints) -> None:
        obs, columns = self.history.now(slots)
        tickets = [self.acting[slot] for slot in slots.tolist()]
        answer, version = self.engine.ask(
            obs=obs,
            slots=slots,
            episode=np.array([ticket.number for ticket in tickets], dtype=np.int64),
            step=self.history.position[slots],
            task=[ticket.task for ticket in tickets],
            columns=columns,
        )
        history, steps = self.history, self.history.position[slots]
        versions = np.broadcast_to(np.asarray(version, dtype=np.int64), slots.shape)
        history.put(history.steps, slots, steps, {"actions": answer.actions, "policy_version": versions})
        history.put(history.extras, slots, steps, answer.extras)
        self.engine.post(slots, answer.actions)

    def _rows(self, obs: Any) -> Tree:
        return as_columns(self.fleet.single_observation_space, obs)

    # -- rows that came back --

    def _take(self, batch: Batch) -> None:
        history, slots = self.history, batch.slots
        scored = batch.scored & (batch.status == READY)
        ended = batch.ended & scored
        rows = slots[scored]
        steps = history.position[rows]
        history.make_room(int(steps.max(initial=0)) + 2)
        results = {"rewards": batch.reward, "terminated": batch.terminated, "truncated": batch.truncated}
        history.put(history.steps, rows, steps, tree_rows(results, scored))
        history.position[rows] += 1
        going = scored & ~ended
        if going.any():
            self._observe(batch, going)
        if self.collector.keep_infos:
            self._keep_infos(batch, scored)
        if ended.any():
            final = {"observations": tree_rows(self._rows(batch.final_obs), ended)}
            history.put(history.steps, slots[ended], history.position[slots[ended]], final)
        cut = np.zeros(len(slots), dtype=np.bool_)
        if self.collector.max_steps is not None:
            cut = going & (history.position[slots] >= self.collector.max_steps)
            for slot in slots[cut].tolist():
                history.steps["truncated"][slot, history.position[slot] - 1] = True
        for slot in slots[ended | cut].tolist():
            ticket = self.acting.pop(slot)
            self._put(ticket, self._record(slot, ticket))
        # Where a ticket was assigned ahead the environment has begun it already.
        begun = ended & np.array([slot in self.coming for slot in slots.tolist()], dtype=np.bool_)
        self._open(batch, begun, [self.coming.pop(slot) for slot in slots[begun].tolist()])
        wants: dict[int, Ticket] = {}
        for slot in slots[(ended & ~begun) | cut].tolist():
            self._next_for(slot, wants)
        for row in np.flatnonzero(~scored).tolist():
            self._failed(int(slots[row]), gone=int(batch.status[row]) == QUARANTINED, wants=wants)
        self._seat(wants)

    def _observe(self, batch: Batch, rows: npt.NDArray[np.bool_]) -> None:
        """Write what the slots of these rows act on next."""
        history, slots = self.history, batch.slots[rows]
        steps = history.position[slots]
        history.put(history.steps, slots, steps, {"observations": tree_rows(self._rows(batch.obs), rows)})
        columns = {name: getattr(batch, name)[rows] for name in self.fleet.layout.columns}
        history.put(history.columns, slots, steps, columns)

    def _next_for(self, slot: int, wants: dict[int, Ticket]) -> None:
        ticket = self.coming.pop(slot, None) or self.office.take(slot)
        if ticket is None:
            self.idle.add(slot)
        else:
            wants[slot] = ticket

    def _failed(self, slot: int, gone: bool, wants: dict[int, Ticket], begun: bool = True) -> None:
        """A slot's environment failed in the middle of its ticket."""
        ticket = self.acting.pop(slot)
        reason, fault = self.engine.reason(slot)
        if begun and slot in self.coming and fault is not None and fault.phase == "reset":
            # The next episode could not begin: that is an attempt of the next ticket. This one only has to be played again.
            again, following = True, self.coming.pop(slot)
            if following.attempt <= self.collector.max_retries:
                following.attempt += 1
                self.office.give_back(following)
            else:
                self.ledger.start()
                self.ledger.fail(reason)
                self._give_up_on(slot, following, fault, begun=False)
        elif again := ticket.attempt <= self.collector.max_retries:
            ticket.attempt += 1
        else:
            self._give_up_on(slot, ticket, fault, begun)
        self.ledger.fail(reason, retried=again)
        if gone:
            self._lose_slot(slot, ticket if again else None)
        elif again:
            wants[slot] = ticket
        else:
            self._next_for(slot, wants)

    def _give_up_on(self, slot: int, ticket: Ticket, fault: Any, begun: bool) -> None:
        """All attempts of a ticket failed. One that was not `begun` has nothing of the episode before it."""
        if not begun:
            self.history.position[slot] = 0
            self._infos.pop(slot, None)
            self._reset_info.pop(slot, None)
        rollout = self._record(slot, ticket, begun=begun) if self.yield_failed else None
        if rollout is not None:
            rollout.error = fault.error() if fault is not None else RolloutError("the environment failed")
        self._put(ticket, rollout)

    def _lose_slot(self, slot: int, ticket: Ticket | None) -> None:
        self.office.close_slot(slot)
        for left in (ticket, self.coming.pop(slot, None)):
            if left is not None:
                self.office.give_back(left)
        self.engine.check_slots_left(slot)

    def _put(self, ticket: Ticket, rollout: Rollout | None) -> None:
        self.done[ticket.position if self.ordered else self._num_done] = rollout
        self._num_done += 1
        source = self.collector.source
        if source is not None and rollout is not None and not rollout.failed:
            source.add(TaskResult(ticket.number, ticket.task, rollout.episode_return, len(rollout)))
        elif source is not None:
            source.drop([ticket.number])

    def _record(self, slot: int, ticket: Ticket, begun: bool = True) -> Rollout:
        """The running episode; one that was not `begun`, because its reset failed, has no observation."""
        return Rollout(
            env_name=self.collector.env_name,
            seed=ticket.seed,
            task=ticket.task,
            slot=slot,
            episode=ticket.number,
            attempts=ticket.attempt,
            infos=self._infos.pop(slot, []),
            reset_info=self._reset_info.pop(slot, {}),
            started_s=float(self._started[slot, 0]),
            wall_s=time.perf_counter() - float(self._started[slot, 1]),
            **self.history.cut(slot, begun),
        )

    def _keep_infos(self, batch: Batch, scored: npt.NDArray[np.bool_]) -> None:
        at_end = self.fleet.on_end == "reset"
        for slot, good, ended, info, final in zip(
            batch.slots.tolist(), scored.tolist(), batch.ended.tolist(), batch.info, batch.final_info
        ):
            if good:
                self._infos.setdefault(slot, []).append(dict(final if ended and at_end else info))

    # -- tickets for slots --

    def _fill(self) -> None:
        """Give idle slots tickets: at the beginning, and when a lost slot left some behind."""
        wants: dict[int, Ticket] = {}
        for slot in sorted(self.idle):
            ticket = self.office.take(slot)
            if ticket is None:
                if self.collector.source is None:
                    break
                continue  # the ticket of this slot has to wait for results; that of another may not
            self.idle.discard(slot)
            wants[slot] = ticket
        self._seat(wants)

    def _seat(self, wants: dict[int, Ticket]) -> None:
        """Begin tickets by an explicit reset. A reset may fail too; then the ticket is begun again or given up."""
        while wants:
            slots = np.array(sorted(wants), dtype=np.int64)
            tickets = [wants[slot] for slot in slots.tolist()]
            seeds, tasks = _seeds_and_tasks(tickets)
            batch = self.fleet.reset(seed=seeds, tasks=tasks, slots=slots)
            good = batch.status == READY
            again: dict[int, Ticket] = {}
            for row in np.flatnonzero(~good).tolist():
                slot = int(slots[row])
                self.acting[slot] = tickets[row]
                self.ledger.start()
                self.history.position[slot] = 0
                self._failed(slot, gone=int(batch.status[row]) == QUARANTINED, wants=again, begun=False)
            self._open(batch, good, [tickets[row] for row in np.flatnonzero(good).tolist()])
            wants = again

    def _open(self, batch: Batch, rows: npt.NDArray[np.bool_], tickets: list[Ticket]) -> None:
        """The slots of these rows have the first observation of their ticket: let them act, or hold them back."""
        if not tickets:
            return
        slots = batch.slots[rows]
        self.history.position[slots] = 0
        self._observe(batch, rows)
        if self.collector.keep_infos:
            infos = batch.info
            for slot, row in zip(slots.tolist(), np.flatnonzero(rows).tolist()):
                self._infos[slot], self._reset_info[slot] = [], dict(infos[row])
        self._started[slots] = time.time(), time.perf_counter()
        ahead: dict[int, Ticket] = {}
        for slot, ticket in zip(slots.tolist(), tickets):
            self.held[slot] = ticket
            if self.fleet.on_end == "reset":
                # Assigned again even if it was before: a rebuild or an explicit reset has used the seed.
                following = self.coming.pop(slot, None) or self.office.take(slot)
                if following is not None:
                    ahead[slot] = following
        self._release()
        if ahead:
            seeds, tasks = _seeds_and_tasks(list(ahead.values()))
            self.fleet.assign(list(ahead), tasks=tasks, seeds=seeds)
            self.coming.update(ahead)

    def _release(self, lowest: int = -1) -> None:
        """Let held slots act whose ticket is near enough now, or at most `lowest`."""
        last = max(self.next_position + self.collector.max_ahead, lowest + 1)
        for slot in [slot for slot, ticket in self.held.items() if ticket.position < last]:
            self.acting[slot] = self.held.pop(slot)
            self.ledger.start()

    def _give_up(self) -> None:
        """The caller stopped: running and unread episodes are dropped, and counted."""
        self.ledger.drop("unfinished when the caller stopped", len(self.acting))
        not_taken = sum(rollout is not None and rollout.error is None for rollout in self.done.values())
        self.ledger.drop("finished but not taken", not_taken)
        self.acting.clear()
        self.done.clear()


def _seeds_and_tasks(tickets: list[Ticket]) -> tuple[list[int], list[Any] | None]:
    """What a reset of these tickets needs; None where no ticket has a task."""
    tasks = [ticket.task for ticket in tickets]
    return [ticket.seed for ticket in tickets], tasks if any(task is not None for task in tasks) else None
