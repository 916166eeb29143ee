"""The fleet: N slots behind send and recv."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from envfleet.backends.base import Backend
from envfleet.core.about import About
from envfleet.core.actions import ActionWriter
from envfleet.core.batch import Batch, pick
from envfleet.core.ending import Ending, close_quietly
from envfleet.core.interface import EnvInterface
from envfleet.core.plan import Plan
from envfleet.core.slot_table import DONE, KEEP, OUT, Book, checked_seed, checked_slots, per_slot
from envfleet.core.supervisor import Policy, Supervisor
from envfleet.errors import BadArgument, FleetClosed, FleetError, KeeperLost, RecvTimeout, ResetNeeded, SlotBusy
from envfleet.multiagent.groups import AgentGroup
from envfleet.slots.layout import RESET, STEP, Layout
from envfleet.slots.slab import Slab, Slots

T = TypeVar("T")

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
        self._book = Book(backend.given, backend.done)
        self._supervisor = Supervisor(backend, policy, self._book)
        self._writer = ActionWriter(self.slab)
        self._all = np.arange(self.num_envs)
        self._last_slots = self._all
        self._handed_out: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._closed = False
        self._inside = False  # a call is under way, or an exception cut the last one short: see `_enter`
        self._optioned: set[int] = set()  # slots that were given options for a reset that has not been sent yet
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
        else:
            self._do(self._send, actions, slots)

    def _send(self, actions: Any, slots: Any) -> None:
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

    def _do(self, call: Callable[..., T], *args: Any) -> T:
        """Make a call that may change slots. If the last one did not come to its end, what it left half done is settled first.

        An exception may pass at any moment: Ctrl-C, or a signal handler of the caller's that raises. The numbers in the book
        then still say of every slot whose it is; what is found out here is only told late, never wrong.
        """
        self._backend.check()
        self._refuse_closed()
        if self._inside:
            self._smooth = False
            self._last_slots = _NO_SLOTS
            self._all_step = False
            self._backend.settle()
            self._supervisor.take()
        self._inside = True
        try:
            result = call(*args)
        except FleetError:  # refused, or a fault that was told: nothing was cut short
            self._inside = False
            raise
        self._inside = False
        return result

    def _is_ordinary(self) -> bool:
        """Whether every row that is sent is a plain step: no slot to be built or begun, nothing to be delivered with it."""
        return (
            self._all_step
            and self._all_begun
            and not self._inside
            and not self._supervisor.troubled
            and not self._supervisor.has_written
            and not self._book.has_late
            and not self._optioned
            and not self._closed
            and not self._debug
            and os.getpid() == self.plan.pid
        )

    def _send_again(self, slots: Slots) -> None:
        """The end of `send` for the slots last received, whose actions are written: they are known to be the caller's."""
        self._inside = True
        self._book.actions.append((slots, self._writer.last))
        self._last_slots = _NO_SLOTS
        self._smooth = False
        self._backend.submit(slots)
        self._inside = False

    def _submit(self, slots: Slots, command: int) -> None:
        head, book, supervisor = self.slab.head, self._book, self._supervisor
        if self._backend.has_trouble:
            supervisor.take()  # what was met on the way here, by a message to a worker that is gone
        book.deliver_late(self.slab, slots)
        if command == STEP and self._optioned:
            self._give_options(dict.fromkeys(self._optioned.intersection(slots.tolist())))
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
        if len(slots):
            self._backend.submit(slots)
        self._optioned.difference_update(slots.tolist() if self._optioned else ())

    def _give_options(self, options: dict[int, Any]) -> None:
        """Options of a reset that is about to be sent; None takes back those of a reset that was interrupted before."""
        self._optioned.update(options)
        self._backend.give_options(options)

    def _submit_troubled(self, slots: Slots, command: int) -> Slots:
        """Slots that are quarantined come back at once; lost ones are rebuilt, and say so in their row."""
        supervisor = self._supervisor
        quarantined = supervisor.quarantined[slots]
        sent = slots[~quarantined]
        lost = sent[supervisor.lost[sent]].tolist()
        for slot in lost:
            if command == STEP:
                supervisor.sent_lost(slot)  # may raise: before any slot changes hands
            else:
                supervisor.reset_lost(slot)
        for slot in slots[quarantined].tolist():
            supervisor.quarantine_row(slot)
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
            return self._deliver(quick, copy)
        return self._do(self._recv, slots, at_least, timeout_s, copy)

    def _recv(self, slots: Any, at_least: int | None, timeout_s: float | None, copy: bool) -> Batch:
        state = self._book.state
        wanted: Slots | slice = _EVERY if slots is None else self._slots(slots)[0]
        count = self._check_sent(state, wanted)
        need = count if at_least is None else at_least
        if not 1 <= need <= count:
            raise BadArgument(f"at_least={at_least}: {count} slots are out")
        self._wait(wanted, need, timeout_s)
        done = (self._book.state[wanted] == DONE).nonzero()[0]
        got = done if isinstance(wanted, slice) else wanted[done]
        if self._supervisor.pending:
            self._supervisor.raise_pending(got.tolist())
        return self._deliver(got, copy)

    def _deliver(self, got: Slots, copy: bool) -> Batch:
        """Hand rows to the caller. They are the caller's from the moment when all else is done."""
        got.flags.writeable = False
        if len(got) == self.num_envs:
            self._all_begun = bool((self.slab.scalars["started"] > 0).all())
        batch = self._batch(got, copy)
        self._supervisor.credit(got)
        self._book.seen[got] = self._book.given[got]
        self._last_slots = got
        self._smooth = len(got) == self.num_envs and self._all_begun and not self._debug
        self._inside = False
        return batch

    def _recv_finished(self, at_least: int | None) -> Slots | None:
        """The short way of a `recv` of whatever comes, while nothing is out of order; None: take the long way."""
        book, backend, supervisor = self._book, self._backend, self._supervisor
        if supervisor.troubled or self._inside or self._closed or os.getpid() != self.plan.pid:
            return None
        new = book.given != book.seen
        out = int(np.count_nonzero(new))
        need = out if at_least is None else at_least
        if not 1 <= need <= out:
            return None
        self._inside = True
        backend.wait(need - int(np.count_nonzero(new & (book.done == book.given))), supervisor.next_look_s())
        got: Slots = (new & (book.done == book.given)).nonzero()[0]
        if backend.has_trouble or len(got) < need:
            self._inside = False
            return None
        supervisor.look()
        return got

    def _check_sent(self, state: np.ndarray[Any, Any], wanted: Slots | slice) -> int:
        """How many slots `recv` may wait for."""
        out = np.count_nonzero(state[wanted])
        if not out:
            raise FleetError("nothing was sent, so nothing can be received: send() first")
        if isinstance(wanted, np.ndarray) and out < len(wanted):
            idle = wanted[state[wanted] == 0].tolist()
            raise FleetError(f"slots {idle} were not sent, so they cannot be received: send() them first")
        return int(out)

    def _wait(self, wanted: Slots | slice, need: int, timeout_s: float | None) -> None:
        """Until `need` of `wanted` are done. Everything that can go wrong on the way is the supervisor's."""
        backend, supervisor = self._backend, self._supervisor
        deadline = backend.now() + (_FOREVER if timeout_s is None else timeout_s)
        looked = False
        while True:
            supervisor.take()
            state = self._book.meet()[wanted]
            missing = need - int(np.count_nonzero(state == DONE))
            if missing <= 0:
                return
            left = deadline - backend.now()
            if left <= 0 and looked:
                raise RecvTimeout(self._all[wanted][state == OUT].tolist(), timeout_s or 0.0)
            looked = True  # once at least: timeout_s=0 asks for what is there
            supervisor.rebuild_due()
            before = backend.num_out
            backend.wait(missing, min(max(left, 0.0), supervisor.next_look_s()))
            supervisor.look(force=backend.num_out == before)

    def ready(self) -> Slots:
        """Slots that are finished and wait to be received. Never blocks."""
        return self._do(self._ready)

    def _ready(self) -> Slots:
        if self._backend.num_out or self._supervisor.troubled:
            self._supervisor.rebuild_due()
            self._backend.wait(self.num_envs, 0.0)
            self._supervisor.take()
            self._supervisor.look()
        return np.flatnonzero(self._book.meet() == DONE)

    def step(self, actions: Any, copy: bool = True) -> Batch:
        """Step all slots: `send` and `recv` of all."""
        if (
            not self._smooth
            or self._inside
            or self._supervisor.troubled
            or self._book.has_late
            or self._optioned
            or self._closed
            or os.getpid() != self.plan.pid
            or not self._writer.write_all(actions)
        ):
            self.send(actions)
            return self.recv(self._all, copy=copy)
        # The same as above without the checks that cannot fail here: every slot is the caller's and has an episode.
        self._inside = True
        self._book.actions.append((self._all, self._writer.last))
        if not self._all_step or self._supervisor.has_written:
            self.slab.scalars["command"][:] = STEP
            self._all_step, self._supervisor.has_written = True, False
        self._last_slots = _NO_SLOTS
        if not self._backend.round(self._all, 0.02) and (self._backend.has_trouble or self._backend.num_out):
            self._smooth = self._inside = False
            return self.recv(self._all, copy=copy)
        if self._supervisor.has_restarts:
            self._supervisor.credit(self._all)
        self._supervisor.look()
        batch = self._batch(self._all, True) if copy else self._whole
        self._book.seen[:] = self._book.given
        self._inside = False
        return batch

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
        if self._inside:
            self._do(self._drop, slots)
        self.send_reset(seed, tasks, slots, options)
        return self.recv(self._all if slots is None else slots)

    def _drop(self, slots: Any) -> None:
        """After an exception cut a call short: wait for the slots that are out, so that they can be reset."""
        chosen, _ = self._slots(slots)
        out = chosen[self._book.given[chosen] != self._book.seen[chosen]]
        if len(out):
            self._wait(out, len(out), None)
            self._book.seen[out] = self._book.given[out]

    def send_reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        tasks: Any = None,
        slots: Sequence[int] | Slots | None = None,
        options: Any = None,
    ) -> None:
        """Begin a `reset` and return: `recv` gives the first observations. `options` may be a list, one per slot."""
        self._do(self._send_reset, seed, tasks, slots, options)

    def _send_reset(self, seed: Any, tasks: Any, slots: Any, options: Any) -> None:
        chosen, order = self._slots(slots)
        book = self._book
        out = chosen[(book.given[chosen] != book.seen[chosen]) & (book.given[chosen] != book.met[chosen])]
        if len(out):
            raise SlotBusy(out.tolist(), "recv() them before resetting")
        self._book.seen[chosen] = self._book.given[chosen]  # rows that nobody received are given up
        names = (chosen if order is None else chosen[np.argsort(order)]).tolist()
        if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
            seed = [int(seed) + slot for slot in names]
        if seed is not None or tasks is not None:
            self.assign(names, tasks=tasks, seeds=seed)
        given = dict(zip(names, per_slot("options", options, len(names)))) if options is not None else {}
        changed = [slot for slot in names if given.get(slot) is not None or slot in self._optioned]
        if changed:
            self._give_options({slot: given.get(slot) for slot in changed})
        for slot in names:
            self._supervisor.pending.pop(slot, None)
        self._submit(chosen, RESET)

    def assign(self, slots: Sequence[int] | Slots, tasks: Any = None, seeds: Any = None) -> None:
        """Set what the next reset of these slots uses, automatic or not.

        `tasks`: a list or tuple with one task per slot (KEEP leaves a slot as it is, None takes its task away), or one task
        for all (any other value). A task stays until replaced. `seeds`: one int or None per slot, used once.
        """
        if self._inside:
            self._backend.settle()  # a call was cut short: only now is it certain which slots are out
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

    def __reduce__(self) -> Any:
        raise TypeError(
            "a fleet cannot be copied or pickled: it owns processes and memory; make another one with ef.make"
        )

    # -- checks -------------------------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._closed:
            raise FleetClosed
        if os.getpid() != self.plan.pid:
            raise FleetClosed("a fleet of the process this one was forked from")
        if self._backend.is_broken:
            raise KeeperLost

    def _slots(self, slots: Any) -> tuple[Slots, Slots | None]:
        self._refuse_closed()
        if slots is self._last_slots:  # our own array, read-only: what the last batch said
            return self._last_slots, None
        return checked_slots(slots, self._all)

    def _refuse_unless_idle(self, slots: Slots) -> None:
        busy = self._book.given[slots] != self._book.seen[slots]
        if busy.any():
            raise SlotBusy(slots[busy].tolist())
