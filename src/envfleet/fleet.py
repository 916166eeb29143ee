"""The fleet: N slots behind send and recv."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from envfleet.about import About
from envfleet.actions import ActionWriter
from envfleet.backends.base import Backend
from envfleet.batch import Batch, pick
from envfleet.book import DONE, IDLE, KEEP, OUT, Book, checked_seed, checked_slots, per_slot
from envfleet.ending import Ending, close_quietly
from envfleet.errors import BadArgument, FleetClosed, FleetError, RecvTimeout, ResetNeeded, SlotBusy
from envfleet.groups import AgentGroup
from envfleet.interface import EnvInterface
from envfleet.layout import RESET, STEP, Layout
from envfleet.plan import Plan
from envfleet.slab import Slab, Slots
from envfleet.supervise.supervisor import Policy, Supervisor

_FOREVER = 1e9
_EVERY = slice(None)
_NO_SLOTS = np.zeros(0, np.int64)


class Fleet(About, EnvInterface, Ending):
    """Many environments, stepped together or apart.

    Made by `envfleet.make`. Not thread-safe: one thread drives a fleet.

    Example:
        >>> import envfleet as ef
        >>> with ef.make("CartPole-v1", num_envs=4, backend="serial") as fleet:
        ...     batch = fleet.reset(seed=0)
        ...     fleet.send([0, 1], slots=[1, 3])
        ...     batch = fleet.recv(at_least=1)
        >>> batch.slots.tolist()
        [1, 3]
    """

    def __init__(
        self, backend: Backend, layout: Layout, about: dict[str, Any], policy: Policy, plan: Plan, debug: bool = False
    ) -> None:
        self.plan = plan
        self.layout = layout
        self.num_envs = backend.recipe.num_slots
        self.single_observation_space = layout.observation_space
        self.single_action_space = layout.action_space
        self.agents, self.num_agents = layout.agents, layout.num_agents  # the agent axis; () and 1 without one
        self.groups: tuple[AgentGroup, ...] = layout.groups
        self.metadata: dict[str, Any] = about["metadata"]
        self.render_mode: str | None = about["render_mode"]
        self.spec = backend.recipe.spec
        self.slab: Slab = backend.attach(layout)
        self._backend = backend
        self._debug = debug
        self._book = Book(self.num_envs)
        self._supervisor = Supervisor(backend, policy, self._book)
        self._writer = ActionWriter(self.slab)
        self._all = np.arange(self.num_envs)
        self._last_slots = self._all
        self._handed_out: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._closed = False
        self._smooth = False  # every slot is the caller's, with a running or waiting episode: `step` may be short
        self._all_step = False  # every row's command is STEP, unless the supervisor has written since
        self._all_begun = False  # every slot has had an episode
        final_info = backend.info if self.on_end == "wait" else backend.final_info
        self._whole = Batch(self.slab, self._all, backend.info, final_info, copy=False)
        # The finalizer holds the backend, not the fleet: dropping the last reference closes, and so does exit.
        self._finalizer = weakref.finalize(self, close_quietly, backend, os.getpid())

    # -- stepping -----------------------------------------------------------------------------------------------

    def send(self, actions: Any, slots: Sequence[int] | Slots | None = None) -> None:
        """Hand actions to slots and let them step. Returns at once on backends with workers.

        `actions` are batched as Gymnasium batches them, one per slot in the order of `slots` (default: all).
        """
        if slots is self._last_slots and self._is_ordinary() and self._writer.write_some(actions, self._last_slots):
            self._send_again(self._last_slots)
            return
        chosen, order = self._slots(slots)
        self._refuse_unless_idle(chosen)
        fresh = self.slab.head["started"][chosen] == 0
        if fresh.any():
            missing = chosen[fresh & ~self._supervisor.quarantined[chosen]]
            if len(missing):
                raise ResetNeeded(missing.tolist())
        mail = self._writer.write(actions, chosen, order, check=self._debug)
        self._book.actions.append((chosen, self._writer.last))
        if mail:
            self._backend.give_mail(mail)
        self._submit(chosen, STEP)

    def _is_ordinary(self) -> bool:
        """Whether every row that is sent is a plain step: no slot to be built or begun, nothing to be delivered with it."""
        return (
            self._all_step
            and self._all_begun
            and not self._supervisor.troubled
            and not self._supervisor.has_written
            and not self._book.has_late
            and not self._closed
            and not self._debug
            and os.getpid() == self.plan.pid
        )

    def _send_again(self, slots: Slots) -> None:
        """The end of `send` for the slots last received, whose actions are written: they are known to be the caller's."""
        self._book.actions.append((slots, self._writer.last))
        self._last_slots = _NO_SLOTS
        self._smooth = False
        self._book.state[slots] = OUT
        self._give(slots)

    def _submit(self, slots: Slots, command: int) -> None:
        head, book, supervisor = self.slab.head, self._book, self._supervisor
        book.deliver_late(self.slab, slots)
        if self._debug:
            for batch in list(self._handed_out):
                batch.poison(slots)
        head["command"][slots] = command
        if len(slots) == self.num_envs:
            self._all_step, supervisor.has_written = command == STEP, False
        self._all_step &= command == STEP
        if supervisor.troubled:
            slots = self._submit_troubled(slots, command)
        self._smooth = False
        self._last_slots = _NO_SLOTS
        book.state[slots] = OUT
        if len(slots):
            self._give(slots)

    def _give(self, slots: Slots) -> None:
        try:
            self._backend.submit(slots)
        except BaseException:
            self._give_up(slots)
            raise

    def _give_up(self, slots: Slots) -> None:
        """An env was interrupted in this very thread, or its worker cannot be started: rebuilt at the next reset."""
        self._supervisor.lost[slots] = self._supervisor.troubled = True
        self._book.state[slots] = IDLE

    def _submit_troubled(self, slots: Slots, command: int) -> Slots:
        """Slots that are quarantined come back at once; lost ones are rebuilt, and say so in their row."""
        supervisor, state = self._supervisor, self._book.state
        quarantined = supervisor.quarantined[slots]
        sent = slots[~quarantined]
        lost = sent[supervisor.lost[sent]].tolist()
        if command == STEP:
            for slot in lost:
                supervisor.sent_lost(slot)  # may raise: before any slot changes hands
        for slot in slots[quarantined].tolist():
            supervisor.quarantine_row(slot)
            state[slot] = DONE
        supervisor.prepare_rebuild(lost)
        return sent

    def recv(
        self,
        slots: Sequence[int] | Slots | None = None,
        at_least: int | None = None,
        timeout_s: float | None = None,
        copy: bool = True,
    ) -> Batch:
        """Receive slots that were sent: all of them, or as many as are finished once `at_least` are.

        Rows come in ascending slot order. `copy=False` gives views valid until a slot is sent again. With `timeout_s`,
        RecvTimeout is raised when the time is over; nothing is lost by it.
        """
        if slots is None and timeout_s is None and (quick := self._recv_finished(at_least)) is not None:
            return self._batch(quick, copy)
        self._refuse_closed()
        state = self._book.state
        wanted: Slots | slice = _EVERY if slots is None else self._slots(slots)[0]
        count = self._check_sent(wanted)
        need = count if at_least is None else at_least
        if not 1 <= need <= count:
            raise BadArgument(f"at_least={at_least}: {count} slots are out")
        self._wait(wanted, need, timeout_s)
        done = (state[wanted] == DONE).nonzero()[0]
        got = done if isinstance(wanted, slice) else wanted[done]
        if self._supervisor.pending:
            self._supervisor.raise_pending(got.tolist())
        self._received(got)
        return self._batch(got, copy)

    def _received(self, got: Slots) -> None:
        self._book.state[got] = IDLE
        got.flags.writeable = False
        self._last_slots = got
        if len(got) == self.num_envs:
            self._all_begun = bool((self.slab.scalars["started"] > 0).all())
            self._smooth = self._all_begun and not self._debug

    def _recv_finished(self, at_least: int | None) -> Slots | None:
        """The short way of a `recv` of whatever comes, while nothing is out of order; None: take the long way."""
        flags = self._book.state.tobytes()  # looking at bytes is several times cheaper than comparing arrays
        out = flags.count(OUT)
        need = out if at_least is None else at_least
        supervisor = self._supervisor
        if supervisor.troubled or DONE in flags or not 1 <= need <= out or self._closed or os.getpid() != self.plan.pid:
            return None
        finished = self._backend.wait(need, supervisor.next_look_s())
        if len(finished.done) < need or finished.failures or finished.losses:
            supervisor.take(finished)
            return None
        got = np.sort(finished.done)
        self._received(got)
        supervisor.credit(got)
        supervisor.look()
        return got

    def _check_sent(self, wanted: Slots | slice) -> int:
        """How many slots `recv` may wait for."""
        out = np.count_nonzero(self._book.state[wanted])
        if not out:
            raise FleetError("nothing was sent, so nothing can be received: send() first")
        if isinstance(wanted, np.ndarray) and out < len(wanted):
            idle = wanted[self._book.state[wanted] == IDLE].tolist()
            raise FleetError(f"slots {idle} were not sent, so they cannot be received: send() them first")
        return int(out)

    def _wait(self, wanted: Slots | slice, need: int, timeout_s: float | None) -> None:
        """Until `need` of `wanted` are done. Everything that can go wrong on the way is the supervisor's."""
        backend, supervisor, state = self._backend, self._supervisor, self._book.state
        deadline = backend.now() + (_FOREVER if timeout_s is None else timeout_s)
        looked = False
        while True:
            missing = need - int(np.count_nonzero(state[wanted] == DONE))
            if missing <= 0:
                return
            left = deadline - backend.now()
            if left <= 0 and looked:
                raise RecvTimeout(self._all[wanted][state[wanted] == OUT].tolist(), timeout_s or 0.0)
            looked = True  # once at least: timeout_s=0 asks for what is there
            supervisor.rebuild_due()
            finished = backend.wait(missing, min(max(left, 0.0), supervisor.next_look_s()))
            if finished:
                supervisor.take(finished)
                supervisor.look()
            else:
                supervisor.look(force=True)

    def ready(self) -> Slots:
        """Slots that are finished and wait to be received. Never blocks."""
        self._refuse_closed()
        if (self._book.state == OUT).any():
            self._supervisor.rebuild_due()
            finished = self._backend.wait(self.num_envs, 0.0)
            if finished:
                self._supervisor.take(finished)
            self._supervisor.look()
        return np.flatnonzero(self._book.state == DONE)

    def step(self, actions: Any, copy: bool = True) -> Batch:
        """Step all slots: `send` and `recv` of all."""
        if (
            not self._smooth
            or self._supervisor.troubled
            or self._book.has_late
            or self._closed
            or os.getpid() != self.plan.pid
            or not self._writer.write_all(actions)
        ):
            self.send(actions)
            return self.recv(self._all, copy=copy)
        # The same as above without the checks that cannot fail here: every slot is the caller's and has an episode.
        self._book.actions.append((self._all, self._writer.last))
        if not self._all_step or self._supervisor.has_written:
            self.slab.scalars["command"][:] = STEP
            self._all_step, self._supervisor.has_written = True, False
        self._last_slots = _NO_SLOTS
        self._smooth = False  # until it is known that all came back well, also when this is interrupted
        self._book.state[:] = OUT
        try:
            finished = self._backend.round(self._all, 0.02)
        except BaseException:
            if not self._backend.handed_over:
                self._give_up(self._all)
            raise
        if finished is not None and (len(finished.done) != self.num_envs or finished.failures or finished.losses):
            self._supervisor.take(finished)
            return self.recv(self._all, copy=copy)
        self._book.state[:] = IDLE
        self._smooth = True
        if self._supervisor.has_restarts:
            self._supervisor.credit(self._all)
        self._supervisor.look()
        if copy:
            return self._batch(self._all, True)
        return self._whole

    def _batch(self, slots: Slots, copy: bool) -> Batch:
        backend = self._backend
        info, final_info = pick(backend.info, slots), pick(backend.final_info, slots)
        if self.on_end == "wait":
            final_info = info
        if not self._debug or copy:
            return Batch(self.slab, slots, info, final_info, copy)
        # Debug: what looks like a view is a copy that turns loud when its slot is sent again.
        batch = Batch(self.slab, slots, info, final_info, True)
        self._handed_out.add(batch)
        return batch

    # -- resetting ----------------------------------------------------------------------------------------------

    def reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        tasks: Any = None,
        slots: Sequence[int] | Slots | None = None,
        options: dict[str, Any] | None = None,
    ) -> Batch:
        """Reset slots (default: all) now and give their first observations.

        `seed`: an int gives slot i the seed `seed + i`, a sequence one per slot, None lets each env's own random stream
        go on. `tasks`: see `assign`. `options` reach `env.reset(options=…)` in this reset only.
        """
        self.send_reset(seed, tasks, slots, options)
        return self.recv(self._all if slots is None else slots)

    def send_reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        tasks: Any = None,
        slots: Sequence[int] | Slots | None = None,
        options: Any = None,
    ) -> None:
        """Begin a `reset` and return: `recv` gives the first observations. `options` may be a list, one per slot."""
        chosen, order = self._slots(slots)
        out = chosen[self._book.state[chosen] == OUT]
        if len(out):
            raise SlotBusy(out.tolist(), "recv() them before resetting")
        names = (chosen if order is None else chosen[np.argsort(order)]).tolist()
        if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
            seed = [int(seed) + slot for slot in names]
        if seed is not None or tasks is not None:
            self.assign(names, tasks=tasks, seeds=seed)
        if options is not None:
            given = dict(zip(names, per_slot("options", options, len(names))))
            self._backend.give_options({slot: value for slot, value in given.items() if value is not None})
        for slot in names:
            self._supervisor.pending.pop(slot, None)
        self._submit(chosen, RESET)

    def assign(self, slots: Sequence[int] | Slots, tasks: Any = None, seeds: Any = None) -> None:
        """Set what the next reset of these slots uses, automatic or not.

        `tasks`: a list or tuple with one task per slot (KEEP leaves a slot as it is, None takes its task away), or one task
        for all (any other value). A task stays until replaced. `seeds`: one int or None per slot, used once.
        """
        chosen, order = self._slots(slots)
        names = chosen if order is None else chosen[np.argsort(order)]
        changes: dict[int, dict[str, int]] = {int(slot): {} for slot in names}
        if tasks is not None:
            for slot, value in zip(changes, per_slot("tasks", tasks, len(names))):
                if value is not KEEP:
                    changes[slot]["next_task"] = self._book.task_id(value, self._backend.give_tasks)
        if seeds is not None:
            for slot, value in zip(changes, per_slot("seeds", seeds, len(names), (list, tuple, np.ndarray))):
                if value is not None:
                    changes[slot]["next_seed"] = checked_seed(value)
        for slot, change in changes.items():
            self._book.assign(self.slab, slot, change)

    def task_value(self, task: int) -> Any:
        """The task behind an id of the column `task` (None for -1)."""
        return self._book.task_value(int(task))

    # -- checks -------------------------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._closed:
            raise FleetClosed
        if os.getpid() != self.plan.pid:
            raise FleetClosed("a fleet of the process this one was forked from")

    def _slots(self, slots: Any) -> tuple[Slots, Slots | None]:
        self._refuse_closed()
        if slots is self._last_slots:  # our own array, read-only: what the last batch said
            return self._last_slots, None
        return checked_slots(slots, self._all)

    def _refuse_unless_idle(self, slots: Slots) -> None:
        state = self._book.state[slots]
        if state.any():
            raise SlotBusy(slots[state != IDLE].tolist())
