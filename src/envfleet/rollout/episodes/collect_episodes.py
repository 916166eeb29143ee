"""Collecting episodes by ticket over a fleet: the loop behind `Collector.episodes`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.core.batch import Batch
from envfleet.errors import FaultError, RolloutError
from envfleet.rollout.engine import Engine, all_gone
from envfleet.rollout.episodes.episode import Rollout
from envfleet.rollout.episodes.episode_buffer import History
from envfleet.rollout.ledger import Ledger
from envfleet.rollout.tickets import Ticket, TicketOffice
from envfleet.slots.layout import QUARANTINED, READY
from envfleet.util.trees import Tree, as_columns, tree_rows

Ints = npt.NDArray[np.int64]


class EpisodeRun:
    """One call of `episodes`: slots work off their tickets, finished episodes come out in ticket order.

    A slot is idle (no ticket), seated (a ticket, acting), held (a ticket whose turn is too far ahead of the
    oldest unfinished one) or gone (quarantined).
    """

    def __init__(
        self,
        engine: Engine,
        office: TicketOffice,
        ledger: Ledger,
        *,
        env_name: str,
        max_steps: int | None,
        max_retries: int,
        max_ahead: int,
        ordered: bool,
        yield_failed: bool,
        keep_infos: bool,
    ) -> None:
        self.engine, self.office, self.ledger = engine, office, ledger
        self.fleet = fleet = engine.fleet
        self.env_name, self.max_steps, self.max_retries = env_name, max_steps, max_retries
        self.max_ahead, self.ordered, self.yield_failed, self.keep_infos = max_ahead, ordered, yield_failed, keep_infos
        self.history = History(fleet.num_envs)
        self.seated: dict[int, Ticket] = {}
        self.coming: dict[int, Ticket] = {}  # assigned ahead: the automatic reset will begin it
        self.held: dict[int, Ticket] = {}  # begun (reset) but not yet acting
        self.idle: set[int] = set(fleet.runnable().tolist())
        gone = set(range(fleet.num_envs)) - self.idle
        if len(gone) > len(fleet.quarantined):
            warnings.warn(
                f"the servers have sessions for {len(self.idle)} of {fleet.num_envs} slots: so many run at once",
                RuntimeWarning,
                stacklevel=2,
            )
        for slot in gone:
            office.close_slot(slot)
        self.done: dict[int, Rollout | None] = {}  # position → episode, or None: it failed for good
        self.next_position = 0
        self._finished: list[Rollout | None] = []  # order="finish"
        self._started = np.zeros(fleet.num_envs)
        self._began = np.zeros(fleet.num_envs)
        self._infos: dict[int, list[dict[str, Any]]] = {}
        self._reset_info: dict[int, dict[str, Any]] = {}

    # -- the loop --

    def __iter__(self) -> Iterator[Rollout]:
        engine = self.engine
        try:
            self._fill()
            for group in engine.halves(self._free()):
                self._act(group)
            while True:
                # Handed over after the next actions were sent: environments work while the caller does.
                yield from self._hand_over()
                if not engine.waiting:
                    self._seat_and_act()
                    if not engine.waiting:
                        return
                self._take(engine.receive())
                self._seat_and_act()
        except FaultError as error:  # on_fault="raise": the episode of that slot failed, the others are given up
            if self.seated.pop(error.fault.slot, None) is not None:
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
        for rollout in self._ready():
            if rollout is None:
                continue
            if rollout.error is None:
                self.ledger.use()  # before the caller sees it: what it holds is used, also if it never comes back
            yield rollout

    def _ready(self) -> Iterator[Rollout | None]:
        if not self.ordered:
            while self._finished:
                yield self._finished.pop(0)
            return
        while self.next_position in self.done:
            rollout = self.done.pop(self.next_position)
            self.next_position += 1
            yield rollout

    def _free(self) -> Ints:
        """Slots that have a ticket and wait for an action."""
        out = self.engine.out
        return np.array(sorted(slot for slot in self.seated if not out[slot]), dtype=np.int64)

    def _act(self, slots: Ints) -> None:
        obs, columns = self.history.now(slots)
        tickets = [self.seated[slot] for slot in slots.tolist()]
        answer, version = self.engine.ask(
            obs=obs,
            slots=slots,
            episode=np.array([ticket.number for ticket in tickets], dtype=np.int64),
            step=self.history.position[slots],
            task=[ticket.task for ticket in tickets],
            columns=columns,
        )
        self.history.act(slots, answer.actions, answer.extras, version)
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
        history.reward[rows, steps] = batch.reward[scored]
        history.terminated[rows, steps] = batch.terminated[scored]
        history.truncated[rows, steps] = batch.truncated[scored]
        history.position[rows] += 1
        going = scored & ~ended
        obs = self._rows(batch.obs)
        names = self.fleet.layout.columns
        columns = {name: getattr(batch, name) for name in names}
        if going.any():
            there = {name: values[going] for name, values in columns.items()}
            history.observe(slots[going], history.position[slots[going]], tree_rows(obs, going), there)
        if self.keep_infos:
            self._keep_infos(batch, scored)
        if ended.any():
            final = tree_rows(self._rows(batch.final_obs), ended)
            history.observe(slots[ended], history.position[slots[ended]], final, {})
        over = np.flatnonzero(ended)
        if self.max_steps is not None:
            cut = going & (history.position[slots] >= self.max_steps)
            for slot in slots[cut].tolist():
                history.truncated[slot, history.position[slot] - 1] = True
        else:
            cut = np.zeros(len(slots), dtype=np.bool_)
        for slot in slots[ended | cut].tolist():
            self._complete(slot)
        wants: dict[int, Ticket] = {}
        self._go_on(batch, obs, over, wants)
        for row in np.flatnonzero(cut | ~scored).tolist():
            slot = int(slots[row])
            if not scored[row]:
                self._failed(slot, gone=int(batch.status[row]) == QUARANTINED, wants=wants)
            else:
                self._next_for(slot, wants)
        self._seat(wants)

    def _go_on(self, batch: Batch, obs: Tree, over: Ints, wants: dict[int, Ticket]) -> None:
        """Slots whose episode ended: the next one has begun already where its ticket was assigned ahead."""
        begun = [row for row in over.tolist() if int(batch.slots[row]) in self.coming]
        for row in over.tolist():
            slot = int(batch.slots[row])
            if slot not in self.coming:
                self._next_for(slot, wants)
        if begun:
            slots = batch.slots[begun]
            columns = {name: getattr(batch, name)[begun] for name in self.fleet.layout.columns}
            self._open(slots, [self.coming.pop(int(slot)) for slot in slots], tree_rows(obs, begun), columns, batch, begun)

    def _next_for(self, slot: int, wants: dict[int, Ticket]) -> None:
        ticket = self.coming.pop(slot, None) or self.office.take(slot)
        if ticket is None:
            self.idle.add(slot)
        else:
            wants[slot] = ticket

    def _failed(self, slot: int, gone: bool, wants: dict[int, Ticket]) -> None:
        """A slot's environment failed in the middle of its ticket."""
        ticket = self.seated.pop(slot)
        reason, fault = self.engine.reason(slot)
        again = ticket.attempt <= self.max_retries
        self.ledger.fail(reason, retried=again)
        if again:
            ticket.attempt += 1
        else:
            self._close_failed(slot, ticket, fault)
        if gone:
            self._lose_slot(slot, ticket if again else None)
        elif again:
            wants[slot] = ticket
        else:
            self._next_for(slot, wants)

    def _lose_slot(self, slot: int, ticket: Ticket | None) -> None:
        self.office.close_slot(slot)
        for left in (ticket, self.coming.pop(slot, None)):
            if left is not None:
                self.office.give_back(left)
        if len(self.fleet.quarantined) == self.fleet.num_envs:
            _, fault = self.engine.reason(slot)
            raise all_gone(fault) from fault.error()

    def _close_failed(self, slot: int, ticket: Ticket, fault: Any) -> None:
        rollout = None
        if self.yield_failed:
            rollout = self._record(slot, ticket)
            rollout.error = fault.error() if fault is not None else RolloutError("the environment failed")
        self._put(ticket, rollout)

    def _complete(self, slot: int) -> None:
        ticket = self.seated.pop(slot)
        self._put(ticket, self._record(slot, ticket))

    def _put(self, ticket: Ticket, rollout: Rollout | None) -> None:
        if self.ordered:
            self.done[ticket.position] = rollout
        else:
            self.next_position += 1
            self._finished.append(rollout)

    def _record(self, slot: int, ticket: Ticket) -> Rollout:
        return Rollout(
            env_name=self.env_name,
            seed=ticket.seed,
            task=ticket.task,
            slot=slot,
            episode=ticket.number,
            attempts=ticket.attempt,
            infos=self._infos.pop(slot, []),
            reset_info=self._reset_info.pop(slot, {}),
            started_s=float(self._started[slot]),
            wall_s=time.perf_counter() - float(self._began[slot]),
            **self.history.cut(slot),
        )

    def _keep_infos(self, batch: Batch, scored: npt.NDArray[np.bool_]) -> None:
        at_end = self.fleet.on_end == "reset"
        for slot, good, ended, info, final in zip(
            batch.slots.tolist(), scored.tolist(), batch.ended.tolist(), batch.info, batch.final_info
        ):
            if good:
                self._infos.setdefault(slot, []).append(dict(final if ended and at_end else info))

    # -- seats --

    def _fill(self) -> None:
        """Give idle slots tickets: at the beginning, and when a lost slot left some behind."""
        wants: dict[int, Ticket] = {}
        for slot in sorted(self.idle):
            ticket = self.office.take(slot)
            if ticket is None:
                break
            self.idle.discard(slot)
            wants[slot] = ticket
        self._seat(wants)

    def _seat(self, wants: dict[int, Ticket]) -> None:
        """Begin tickets by an explicit reset. A reset may fail too; then the ticket is begun again or given up."""
        while wants:
            slots = np.array(sorted(wants), dtype=np.int64)
            tickets = [wants[slot] for slot in slots.tolist()]
            with_tasks = any(ticket.task is not None for ticket in tickets)
            batch = self.fleet.reset(
                seed=[ticket.seed for ticket in tickets],
                tasks=[ticket.task for ticket in tickets] if with_tasks else None,
                slots=slots,
            )
            good = batch.status == READY
            again: dict[int, Ticket] = {}
            for row in np.flatnonzero(~good).tolist():
                slot = int(slots[row])
                self.seated[slot] = tickets[row]
                self.ledger.start()
                self.history.position[slot] = 0
                self._failed(slot, gone=int(batch.status[row]) == QUARANTINED, wants=again)
            rows = np.flatnonzero(good)
            columns = {name: getattr(batch, name)[rows] for name in self.fleet.layout.columns}
            seats = [tickets[row] for row in rows.tolist()]
            self._open(slots[rows], seats, tree_rows(self._rows(batch.obs), rows), columns, batch, rows.tolist())
            wants = again

    def _open(self, slots: Ints, tickets: list[Ticket], obs: Any, columns: dict[str, Any], batch: Batch, rows: list[int]) -> None:
        """These slots have the first observation of their ticket: let them act, or hold them back."""
        if not len(slots):
            return
        self.history.position[slots] = 0
        self.history.observe(slots, np.zeros(len(slots), dtype=np.int64), obs, columns)
        if self.keep_infos:
            infos = batch.info
            for slot, row in zip(slots.tolist(), rows):
                self._infos[slot], self._reset_info[slot] = [], dict(infos[row])
        ahead: dict[int, Ticket] = {}
        for slot, ticket in zip(slots.tolist(), tickets):
            self._started[slot], self._began[slot] = time.time(), time.perf_counter()
            if ticket.position >= self.next_position + self.max_ahead:
                self.held[slot] = ticket
            else:
                self.ledger.start()
                self.seated[slot] = ticket
            if self.fleet.on_end == "reset":
                # Assigned anew also if it was before: a rebuild or an explicit reset used the seed up.
                following = self.coming.pop(slot, None) or self.office.take(slot)
                if following is not None:
                    ahead[slot] = following
        self._assign(ahead)

    def _assign(self, ahead: dict[int, Ticket]) -> None:
        if ahead:
            with_tasks = any(ticket.task is not None for ticket in ahead.values())
            self.fleet.assign(
                list(ahead),
                tasks=[ticket.task for ticket in ahead.values()] if with_tasks else None,
                seeds=[ticket.seed for ticket in ahead.values()],
            )
            self.coming.update(ahead)

    def _release(self) -> None:
        """Let held slots act whose ticket is near enough now."""
        for slot in [s for s, t in self.held.items() if t.position < self.next_position + self.max_ahead]:
            self.seated[slot] = self.held.pop(slot)
            self.ledger.start()

    def _give_up(self) -> None:
        """The caller has left: what runs and what it did not take is dropped, and counted."""
        self.ledger.drop("unfinished when the caller stopped", len(self.seated))
        ready = [rollout for rollout in (*self.done.values(), *self._finished) if rollout is not None]
        self.ledger.drop("finished but not taken", sum(rollout.error is None for rollout in ready))
        self.seated.clear()
        self.done.clear()
        self._finished.clear()
