"""The fleet: N slots behind send and recv."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from envfleet.backends.base import Backend
from envfleet.core.actions import ActionWriter
from envfleet.core.arguments import checked_seed, checked_slots, per_slot
from envfleet.core.batch import Batch, pick
from envfleet.core.one_thread import interrupts_call, other_caller, wait_for_callers
from envfleet.core.plan import Plan
from envfleet.core.slot_table import DONE, KEEP, OUT, SlotTable
from envfleet.core.snapshot import Snapshot, put_back, take
from envfleet.core.supervisor import Policy, Supervisor
from envfleet.errors import BadArgument, FleetClosed, FleetError, RecvTimeout, ResetNeeded, SlotBusy
from envfleet.faults.failure import Failure, Fault
from envfleet.multiagent.groups import AgentGroup
from envfleet.slots.layout import RESET, STEP, Layout
from envfleet.slots.slab import Slab, Slots

T = TypeVar("T")

_FOREVER = 1e9
_EVERY = slice(None)
_NO_SLOTS = np.zeros(0, np.int64)


class Fleet:
    """Many environments, stepped all together or some at a time.

    Made by `envfleet.make`. One thread at a time drives it; a call while another thread is in one is refused. Any thread may `close` it.

    Every call has one meaning and up to two code paths. The slow path checks everything. The fast path saves about 2 µs of
    the parent's time between two batches; it is used while `SlotTable.plain` says that nothing has to be checked.

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
        self._observation_spaces = about["observation_spaces"] if backend.recipe.bounds_differ else None
        self.slab: Slab = backend.attach(layout)
        self._backend = backend
        self._debug = debug
        self._table = SlotTable(backend.given, backend.done)
        self._supervisor = Supervisor(backend, policy, self._table)
        self._writer = ActionWriter(self.slab)
        self._all = np.arange(self.num_envs)
        self._last_slots: Slots = _NO_SLOTS  # of the last batch, until the next send; `_all` itself for all slots
        self._handed_out: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._closed = False
        self._closing = threading.Lock()  # one thread closes
        self._close_due = False  # a signal handler closed it in the middle of a call, whose end does it
        self._joined = False  # another fleet has the backend now: see `joining`
        self._inside: object = None  # set: a call runs, or an exception interrupted the last one: see `_enter`
        self._optioned: set[int] = set()  # slots that were given options for a reset that has not been sent yet
        final_info = backend.info if self.on_end == "wait" else backend.final_info
        self._whole = Batch(self.slab, self._all, backend.info, final_info, copy=False)
        # The finalizer holds the backend, not the fleet: dropping the last reference closes, and so does exit.
        self._finalizer = weakref.finalize(self, _close_quietly, weakref.ref(self), backend, os.getpid())

    # -- what a fleet is ----------------------------------------------------------------------------------------

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The space of `batch.obs` for all slots."""
        if self._observation_spaces is not None:
            return batch_differing_spaces(self._observation_spaces)
        return batch_space(self.single_observation_space, self.num_envs)

    @property
    def action_space(self) -> gym.Space[Any]:
        """The space of the actions for all slots."""
        return batch_space(self.single_action_space, self.num_envs)

    @property
    def on_end(self) -> str:
        """What happens at an episode's end: "reset" or "wait"."""
        return self._backend.recipe.on_end

    @property
    def faults(self) -> list[Fault]:
        """Every fault so far, oldest first."""
        return self._supervisor.faults

    @property
    def quarantined(self) -> Slots:
        """Slots that failed more than `max_restarts` times and are not restarted any more."""
        return np.flatnonzero(self._supervisor.quarantined)

    @property
    def is_out(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[slot]: sent and not yet received."""
        out: np.ndarray[Any, np.dtype[np.bool_]] = self._table.given != self._table.seen
        return out

    @property
    def is_resetting(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[slot]: sent by a reset and not yet received, also if that reset was interrupted."""
        resetting: np.ndarray[Any, np.dtype[np.bool_]] = self.is_out & self._table.resetting
        return resetting

    @property
    def seeds_per_slot(self) -> bool:
        """Whether each slot can have a seed of its own at each reset; False: the fleet is one engine with one seed."""
        return self._backend.seeds_per_slot

    def runnable(self) -> Slots:
        """Slots that can run at once: not quarantined, and no more than remote servers have sessions for right now."""
        able = self._backend.runnable()
        return np.setdiff1d(self._all if able is None else able, self.quarantined)

    def __len__(self) -> int:
        return self.num_envs

    def __repr__(self) -> str:
        return f"Fleet({self._backend.recipe.name}, num_envs={self.num_envs}, {self.plan})"

    def __reduce__(self) -> Any:
        raise TypeError("a fleet cannot be copied or pickled: it owns processes and memory; make another one with ef.make")

    # -- stepping -----------------------------------------------------------------------------------------------

    def step(self, actions: Any, copy: bool = True) -> Batch:
        """Step all slots: `send` to all, `recv` of all."""
        # What surrounds the fast path stands in `step`, `send` and `recv`: a decorator costs 0.1 to 0.2 us, and a call costs 2.
        try:
            if self._begin_plain(actions, self._all) is not None:
                return self._step_plain(copy)
        except Exception:
            self._tell_closed()
            raise
        finally:
            if self._close_due:
                self._end_if_due()
        self.send(actions)
        return self.recv(self._all, copy=copy)

    def _step_plain(self, copy: bool) -> Batch:
        """The rest of a `step` on the fast path, after the actions are written: one call of the backend."""
        self._table.actions.append((self._all, self._writer.last))
        self._last_slots = _NO_SLOTS
        if not self._backend.round(self._all, 0.02) and (self._backend.has_trouble or self._backend.num_out):
            self._inside = None
            return self.recv(self._all, copy=copy)
        self._supervisor.look()
        # One batch of views serves every step, but Python objects are not views: a batch holds those it was made with.
        batch = self._batch(self._all, copy) if copy or self.slab.has_mail else self._whole
        self._table.seen[:] = self._table.given
        self._last_slots = self._all
        self._inside = None
        return batch

    def send(self, actions: Any, slots: Sequence[int] | Slots | None = None) -> None:
        """Hand actions to slots and let them step. Returns at once on backends with workers.

        `actions` are batched as Gymnasium batches them, one per slot in the order of `slots` (default: all).
        """
        try:
            last = self._begin_plain(actions, slots)
            if last is not None:
                self._table.actions.append((last, self._writer.last))
                self._last_slots = _NO_SLOTS
                self._backend.submit(last)
                self._inside = None
                return
        except Exception:
            self._tell_closed()
            raise
        finally:
            if self._close_due:
                self._end_if_due()
        self._do(self._send, actions, slots)

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
        try:
            if slots is None and timeout_s is None and self._enter_plain():
                finished = self._recv_plain(at_least)
                if finished is not None:
                    batch = self._deliver(finished, copy)
                    self._inside = None
                    return batch
        except Exception:
            self._tell_closed()
            raise
        finally:
            if self._close_due:
                self._end_if_due()
        return self._do(self._recv, slots, at_least, timeout_s, copy)

    def _enter_plain(self) -> bool:
        """Begin a call on the fast path, if it may be used. The process id is checked each time, because this may be a forked child."""
        if os.getpid() != self.plan.pid:
            return False
        # From here to the assignment is one step: CPython changes threads, and runs signal handlers, only at calls and loops.
        if self._closed or not self._table.plain or self._inside:
            return False
        self._inside = True
        return True

    def _begin_plain(self, actions: Any, slots: Any) -> Slots | None:
        """Enter for a `send` to the slots that were received last, and write their actions; None: use the slow path."""
        if not self._enter_plain():
            return None
        last, written = self._last_slots, False
        try:
            same = slots is last or (slots is None and last is self._all)
            written = same and len(last) > 0 and self._writer.write_plain(actions, last)
        finally:
            if not written:
                self._inside = None
        return last if written else None

    def _recv_plain(self, at_least: int | None) -> Slots | None:
        """Slots that are finished, once there are enough; None: use the slow path."""
        table, backend = self._table, self._backend
        new = table.given != table.seen
        out = int(np.count_nonzero(new))
        need = out if at_least is None else at_least
        if not 1 <= need <= out:
            self._inside = None
            return None
        finished = int(np.count_nonzero(new & (table.done == table.given)))
        backend.wait(need - finished, self._supervisor.next_look_s())
        got: Slots = (new & (table.done == table.given)).nonzero()[0]
        if backend.has_trouble or len(got) < need:
            self._inside = None
            return None
        self._supervisor.look()
        return got

    # -- the slow path ------------------------------------------------------------------------------------------

    def _do(self, call: Callable[..., T], *args: Any) -> T:
        """Make a call that may change slots. If the last one was interrupted, it is completed first.

        An exception may come at any moment: Ctrl-C, or a signal handler of the caller that raises. The numbers in the table
        still say who owns each slot. What is found here may be reported late, but is never wrong.
        """
        try:
            self._refuse_closed()
            self._enter()
            try:
                result = call(*args)
            except Exception as error:
                if isinstance(error, FleetError):  # refused, or a fault that was raised: nothing was interrupted
                    self._inside = None
                self._tell_closed()
                raise
            self._inside = None
            return result
        finally:
            if self._close_due:
                self._end_if_due()

    def _enter(self) -> None:
        """Begin a call, unless another thread is in one."""
        mine = object()
        while True:
            inside, self._inside = self._inside, mine  # one step: see `_enter_plain`
            if inside is None:
                break
            self._refuse_other_threads()
            if self._inside is mine:  # else a call of another thread has ended since, and the next may have begun
                break
        self._backend.check()
        if self._backend.is_broken:
            self._inside = inside
            raise self._backend.broken()
        if inside is not None:
            self._table.plain = False
            self._last_slots = _NO_SLOTS
            self._backend.settle()
            self._supervisor.take()

    def _send(self, actions: Any, slots: Any) -> None:
        chosen, order = self._slots(slots)
        self._refuse_unless_idle(chosen)
        fresh = self.slab.head["started"][chosen] == 0
        if fresh.any():
            missing = chosen[fresh & ~self._supervisor.quarantined[chosen]]
            if len(missing):
                raise ResetNeeded(missing.tolist())
        mail = self._writer.write(actions, chosen, order, check=self._debug)
        self._table.actions.append((chosen, self._writer.last))
        if mail:
            self._backend.give_mail(mail)
        self._submit(chosen, STEP)

    def _submit(self, slots: Slots, command: int) -> None:
        supervisor = self._supervisor
        if self._backend.has_trouble:
            supervisor.take()  # found while a message was sent to a worker that is gone
        self._table.deliver_late(self.slab, slots)
        if command == STEP and self._optioned:
            self._give_options(dict.fromkeys(self._optioned.intersection(slots.tolist())))
        if self._debug:
            for batch in list(self._handed_out):
                batch.poison(slots)
        self._table.plain &= command == STEP
        self.slab.head["command"][slots] = command
        self._table.resetting[slots] = command == RESET
        if supervisor.troubled:
            slots = self._submit_troubled(slots, command)
        self._last_slots = _NO_SLOTS
        if len(slots):
            self._backend.submit(slots)
        self._optioned.difference_update(slots.tolist() if self._optioned else ())

    def _give_options(self, options: dict[int, Any]) -> None:
        """Options of a reset that is about to be sent; None takes back those of a reset that was interrupted before."""
        self._table.plain = False
        self._optioned.update(options)
        self._backend.give_options(options)

    def _submit_troubled(self, slots: Slots, command: int) -> Slots:
        """Slots that are quarantined come back at once; lost ones are rebuilt, and their row is a fault row."""
        supervisor = self._supervisor
        quarantined = supervisor.quarantined[slots]
        sent = slots[~quarantined]
        lost = sent[supervisor.lost[sent]].tolist()
        for slot in lost:
            if command == STEP:
                supervisor.sent_lost(slot)  # may raise: before any slot changes its owner
            else:
                supervisor.reset_lost(slot)
        for slot in slots[quarantined].tolist():
            supervisor.quarantine_row(slot)
        supervisor.prepare_rebuild(lost)
        return sent

    def _recv(self, slots: Any, at_least: int | None, timeout_s: float | None, copy: bool) -> Batch:
        state = self._table.state
        wanted: Slots | slice = _EVERY if slots is None else self._slots(slots)[0]
        count = self._check_sent(state, wanted)
        need = count if at_least is None else at_least
        if not 1 <= need <= count:
            raise BadArgument(f"at_least={at_least}: {count} slots are out")
        self._wait(wanted, need, timeout_s)
        done = (self._table.state[wanted] == DONE).nonzero()[0]
        got = done if isinstance(wanted, slice) else wanted[done]
        if self._supervisor.pending:
            self._supervisor.raise_pending(got.tolist())
        return self._deliver(got, copy)

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
        """Wait until `need` of `wanted` are done. The supervisor handles failures meanwhile."""
        backend, supervisor = self._backend, self._supervisor
        deadline = backend.now() + (_FOREVER if timeout_s is None else timeout_s)
        looked = False
        while True:
            if self._closed:  # meanwhile, by another thread or a signal handler
                raise FleetClosed
            supervisor.take()
            state = self._table.meet()[wanted]
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

    def _deliver(self, got: Slots, copy: bool) -> Batch:
        """Return rows to the caller, who owns them when this is complete."""
        got = self._all if len(got) == self.num_envs else got
        got.flags.writeable = False
        batch = self._batch(got, copy)
        self._supervisor.credit(got)
        self._table.seen[got] = self._table.given[got]
        if not self._table.plain:
            self._look_whether_plain(got)
        self._last_slots = got
        return batch

    def _look_whether_plain(self, got: Slots) -> None:
        """After the slow path: whether the next call may use the fast one."""
        head, supervisor = self.slab.head, self._supervisor
        head["command"][got] = STEP  # of rows that the caller owns now; those that are out keep theirs
        self._table.resetting[got] = False
        self._table.plain = not (
            supervisor.troubled
            or supervisor.has_restarts
            or self._table.has_late
            or self._optioned
            or self._debug
            or (head["command"] != STEP).any()
            or (head["started"] == 0).any()
        )

    def _batch(self, slots: Slots, copy: bool) -> Batch:
        backend = self._backend
        info, final_info = pick(backend.info, slots), pick(backend.final_info, slots)
        if self.on_end == "wait":
            final_info = info
        if not self._debug or copy:
            return Batch(self.slab, slots, info, final_info, copy)
        # Debug: what looks like a view is a copy that is overwritten when its slot is sent again.
        batch = Batch(self.slab, slots, info, final_info, True)
        self._handed_out.add(batch)
        return batch

    def ready(self) -> Slots:
        """Slots that are finished and wait to be received. Never blocks."""
        return self._do(self._ready)

    def _ready(self) -> Slots:
        if self._backend.num_out or self._supervisor.troubled:
            self._supervisor.rebuild_due()
            self._backend.wait(self.num_envs, 0.0)
            self._supervisor.take()
            self._supervisor.look()
        return np.flatnonzero(self._table.meet() == DONE)

    def abandon(self, slots: Sequence[int] | Slots | None = None) -> list[Fault]:
        """Give up what slots (default: all) are doing, without waiting for it. Their rows are dropped, and they can be reset.

        For a deadline of your own, and for leaving early. A worker process is killed, and other slots that share it come
        back as FAULT rows; an awaited call is cancelled. A thread cannot be ended: on `thread`, and for ordinary envs on
        `aio`, the call runs on, nothing of it is used, and the slot is quarantined. Rows that were complete are dropped too.
        On `native` it waits: code in C++ cannot be given up.
        Returns the faults that were recorded for these slots; they do not count as restarts.

        Example:
            >>> import envfleet as ef
            >>> with ef.make("CartPole-v1", num_envs=2, backend="pipe") as fleet:
            ...     batch = fleet.reset(seed=0)
            ...     fleet.send([0, 1])
            ...     faults = fleet.abandon([1])
            ...     batch = fleet.reset(slots=[1])
            >>> batch.slots.tolist()
            [1]
        """
        return self._do(self._abandon, slots)

    def _abandon(self, slots: Any) -> list[Fault]:
        chosen, _ = self._slots(slots)
        num_faults = len(self.faults)
        if self._backend.num_out:
            self._backend.wait(self.num_envs, 0.0)  # what is complete stays complete; slots of the parent's own are stepped
        table, part_of = self._table, self._backend.part_of
        while any(table.given[i] != table.done[i] and not part_of(i).has_deadlines for i in chosen.tolist()):
            self._backend.wait(1, 0.1)  # native code cannot be given up: it is waited for
            if self._closed:
                raise FleetClosed
        self._supervisor.abandon(chosen.tolist())
        self._last_slots = _NO_SLOTS
        return [fault for fault in self.faults[num_faults:] if fault.slot in chosen]

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
        continue. `tasks`: see `assign`. `options` reach `env.reset(options=…)` in this reset only.
        """
        if self._inside is not None:
            self.drop(slots)
        self.send_reset(seed, tasks, slots, options)
        return self.recv(self._all if slots is None else slots)

    def drop(self, slots: Sequence[int] | Slots | None = None) -> None:
        """Wait for those of the slots (default: all) that are out, and drop their rows, so that they can be reset.

        For what an interrupted call has left; `abandon` does not wait.

        Example:
            >>> import envfleet as ef
            >>> with ef.make("CartPole-v1", num_envs=2, backend="serial") as fleet:
            ...     batch = fleet.reset(seed=0)
            ...     fleet.send([0, 1])
            ...     fleet.drop()
            ...     fleet.is_out.tolist()
            [False, False]
        """
        self._do(self._drop, slots)

    def _drop(self, slots: Any) -> None:
        chosen, _ = self._slots(slots)
        out = chosen[self._table.given[chosen] != self._table.seen[chosen]]
        if len(out):
            self._wait(out, len(out), None)
            self._table.seen[out] = self._table.given[out]

    def send_reset(
        self,
        seed: int | Sequence[int | None] | None = None,
        tasks: Any = None,
        slots: Sequence[int] | Slots | None = None,
        options: Any = None,
    ) -> None:
        """Start a `reset` and return: `recv` returns the first observations. `options` may be a list, one per slot."""
        self._do(self._send_reset, seed, tasks, slots, options)

    def _send_reset(self, seed: Any, tasks: Any, slots: Any, options: Any) -> None:
        chosen, order = self._slots(slots)
        table = self._table
        out = chosen[(table.given[chosen] != table.seen[chosen]) & (table.given[chosen] != table.met[chosen])]
        if len(out):
            raise SlotBusy(out.tolist(), "recv() them before resetting")
        self._table.seen[chosen] = self._table.given[chosen]  # rows that were not received are dropped
        names = (chosen if order is None else chosen[np.argsort(order)]).tolist()
        if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
            seed = [int(seed) + slot for slot in names]
        if seed is not None or tasks is not None:
            self._assign(names, tasks, seed, now=True)
        given = dict(zip(names, per_slot("options", options, len(names)))) if options is not None else {}
        changed = [slot for slot in names if given.get(slot) is not None or slot in self._optioned]
        if changed:
            self._give_options({slot: given.get(slot) for slot in changed})
        for slot in names:
            self._supervisor.pending.pop(slot, None)
        self._submit(chosen, RESET)

    def assign(self, slots: Sequence[int] | Slots, tasks: Any = None, seeds: Any = None) -> None:
        """Set what the next reset of these slots uses, automatic or not.

        `tasks`: a list or tuple with one task per slot (KEEP keeps the task of a slot, None removes it), or one task
        for all (any other value). A task stays until replaced. `seeds`: one int or None per slot, used once.
        """
        self._do(self._assign, slots, tasks, seeds, False)

    def _assign(self, slots: Any, tasks: Any, seeds: Any, now: bool) -> None:
        """`assign`. `now`: for a reset that is sent at once."""
        chosen, order = self._slots(slots)
        names = chosen if order is None else chosen[np.argsort(order)]
        changes: dict[int, dict[str, int]] = {int(slot): {} for slot in names}
        if tasks is not None:
            for slot, value in zip(changes, per_slot("tasks", tasks, len(names))):
                if value is not KEEP:
                    changes[slot]["next_task"] = self._table.task_id(value, self._backend.give_tasks)
        if seeds is not None:
            given = per_slot("seeds", seeds, len(names), (list, tuple, np.ndarray))
            checked = [None if value is None else checked_seed(value) for value in given]
            self._backend.check_seeds(list(changes), checked, now)
            for slot, number in zip(changes, checked):
                if number is not None:
                    changes[slot]["next_seed"] = number
        for slot, change in changes.items():
            self._table.assign(self.slab, slot, change)

    def snapshot(self, slots: Sequence[int] | Slots | None = None) -> Snapshot:
        """Copies of the environments in slots (default: all), to be put back with `restore`. For `backend="native"`.

        Example:
            >>> import envfleet as ef
            >>> with ef.make("CartPole-v1", num_envs=4, backend="native") as fleet:
            ...     batch = fleet.reset(seed=0)
            ...     start = fleet.snapshot([2])
            ...     batch = fleet.restore(start)  # slot 2's environment, in all four slots
            >>> bool((batch.obs == batch.obs[2]).all())
            True
        """
        return self._do(self._snapshot, slots)

    def _snapshot(self, slots: Any) -> Snapshot:
        return take(self._backend, self._slots_with_episodes(slots), self._table)

    def restore(self, snapshot: Snapshot, slots: Sequence[int] | Slots | None = None) -> Batch:
        """Put environments of a snapshot into slots (default: all), one each, or one into all; gives their observations.

        They go on as they would have there, with the same random numbers: `assign` other seeds where the next episodes must differ.
        What a slot ran before is dropped. The rows count as no transition (`scored` is False), and as a new episode of the slot.
        """
        return self._do(self._restore, snapshot, slots)

    def _restore(self, snapshot: Snapshot, slots: Any) -> Batch:
        chosen = self._slots_with_episodes(slots)
        self._table.plain = False
        put_back(self._backend, chosen, snapshot, self._table)
        return self._batch(np.sort(chosen), True)  # a batch is ascending

    def _slots_with_episodes(self, slots: Any) -> Slots:
        """Slots that the caller owns and whose environment runs."""
        chosen, order = self._slots(slots)
        self._refuse_unless_idle(chosen)
        missing = chosen[
            (self.slab.head["started"][chosen] == 0) | self._supervisor.lost[chosen] | self._supervisor.quarantined[chosen]
        ]
        if len(missing):
            raise ResetNeeded(missing.tolist())
        self._table.deliver_late(self.slab, chosen)  # what was assigned while they were out belongs to them too
        return chosen if order is None else chosen[np.argsort(order)]

    def resize(self, num_workers: int) -> None:
        """Let another number of workers step the slots, while episodes run. Results do not change. For `pipe` and `ray`.

        Environments are copied between workers; one that cannot be copied is refused, and nothing changes. On Ray, new workers need
        a place within `spawn_timeout_s`. All slots must have been received.

        Example:
            >>> import envfleet as ef
            >>> with ef.make("CartPole-v1", num_envs=4, backend="pipe", num_workers=1) as fleet:
            ...     batch = fleet.reset(seed=0)
            ...     fleet.resize(num_workers=2)
            ...     batch = fleet.step([0, 1, 0, 1])
            ...     fleet.plan.num_workers
            2
        """
        self._do(self._resize, num_workers)

    def _resize(self, num_workers: Any) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or not 1 <= num_workers <= self.num_envs:
            raise BadArgument(
                f"resize(num_workers={num_workers!r}): give a whole number from 1 to {self.num_envs}, the number of slots"
            )
        self._refuse_unless_idle(self._all)
        self._table.plain = False
        supervisor = self._supervisor
        self._backend.wait(1, 0.0)
        supervisor.take()  # workers that were lost have no environments to move
        try:
            self._backend.resize(num_workers, ~(supervisor.lost | supervisor.quarantined))
        finally:
            self.plan = dataclasses.replace(self.plan, num_workers=self._backend.num_workers)

    def task_value(self, task: int) -> Any:
        """The task behind an id of the column `task` (None for -1)."""
        return self._table.task_value(int(task))

    # -- the environments' own interface -------------------------------------------------------------------------

    def call(self, name: str, *args: Any, slots: Sequence[int] | Slots | None = None, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env (or read an attribute) through its wrappers; one result per slot."""
        return self._call("call", name, args, kwargs, slots)

    def get_attr(self, name: str, slots: Sequence[int] | Slots | None = None) -> tuple[Any, ...]:
        """An attribute of each env."""
        return self.call(name, slots=slots)

    def set_attr(self, name: str, values: Any, slots: Sequence[int] | Slots | None = None) -> None:
        """Set an attribute of each env: a list or tuple has one value per slot, anything else goes to all."""
        each = per_slot("values", values, len(self._slots(slots)[0]))
        self._call("call", "__set__", [(name, value) for value in each], {}, slots, each=True)

    def render(self, slot: int = 0) -> Any:
        """What `env.render()` of one slot gives."""
        return self._call("render", "render", (), {}, [slot])[0]

    def render_all(self) -> tuple[Any, ...]:
        """What `env.render()` of every slot gives."""
        return self._call("render", "render", (), {}, None)

    def _call(self, phase: str, name: str, args: Any, kwargs: Any, slots: Any, each: bool = False) -> tuple[Any, ...]:
        return self._do(self._call_all, phase, name, args, kwargs, slots, each)

    def _call_all(self, phase: str, name: str, args: Any, kwargs: Any, slots: Any, each: bool) -> tuple[Any, ...]:
        chosen, order = self._slots(slots)
        out = chosen[self._table.state[chosen] == OUT]
        if len(out):
            raise SlotBusy(out.tolist(), f"recv() them before calling {name!r}")
        if each and order is not None:
            args = [args[i] for i in order]
        watch = self._supervisor.watch_calls(chosen.tolist())
        self._backend.call(chosen.tolist(), phase, name, args, kwargs, each)
        # Wait for all answers, also if a worker is lost: a remaining answer would be taken for that of the next call.
        results: dict[int, Any] = {}
        while watch.waiting:
            if self._closed:
                raise FleetClosed
            answers = self._backend.replies(self._supervisor.next_look_s())
            # An answer of another slot belongs to a call that was interrupted.
            results.update((slot, answer) for slot, answer in answers.items() if slot in watch.waiting)
            watch.waiting.difference_update(answers)
            self._backend.wait(1, 0.0)
            self._supervisor.look_after_calls(watch)
        if watch.lost is not None:
            raise watch.lost.error()
        for slot in chosen.tolist():
            if type(results[slot]) is Failure:  # not isinstance: that runs code of the result
                raise self._supervisor.call_fault(slot, phase, results[slot]).error()
        ordered = chosen if order is None else chosen[np.argsort(order)]
        return tuple(results[slot] for slot in ordered.tolist())

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 4.0) -> None:
        """End everything: envs are asked to close, and workers that do not end within `timeout_s` are killed. Idempotent.

        What went wrong in closing is in `faults` and in one warning; it is never raised. From any thread, and from a signal handler:
        a call that runs meanwhile raises FleetClosed, and the end of one that a signal handler interrupted is the end of the fleet.
        """
        self._closed = self._backend.is_closing = True
        if not self._finalizer.alive or os.getpid() != self.plan.pid:
            return
        if interrupts_call(self):
            self._close_due = True
        elif self._backend.is_own_thread():
            threading.Thread(target=self._end, args=(timeout_s,), name="envfleet-close").start()
        else:
            self._end(timeout_s)

    def _end_if_due(self) -> None:
        """At the end of a call, whether it gave something or raised."""
        if os.getpid() == self.plan.pid and not interrupts_call(self):
            self._end(4.0)

    def _end(self, timeout_s: float) -> None:
        """What `close` does."""
        with self._closing:
            wait_for_callers(self, timeout_s)
            problems = self._backend.close(timeout_s) if self._finalizer.alive else ()
            self._finalizer.detach()  # not before: a close that was interrupted can be called again
            self._close_due = False
        faults = [self._supervisor.note_close(slot, problem) for slot, problem in problems]
        late = [fault for fault in faults if fault.phase == "close" or fault.kind == "timeout"]
        if late:
            warnings.warn("while closing: " + "; ".join(str(fault) for fault in late), RuntimeWarning, stacklevel=3)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _hand_over(self) -> None:
        """Another fleet closes the backend from now on."""
        self._joined, self._table.plain = True, False
        self._finalizer.detach()

    def _take_back(self) -> None:
        """Undo `_hand_over`."""
        if not self._finalizer.alive:
            self._finalizer = weakref.finalize(self, _close_quietly, weakref.ref(self), self._backend, self.plan.pid)
        self._joined = False

    # -- checks -------------------------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._joined:
            raise FleetClosed("this fleet was joined with others and on its own", "use the fleet that envfleet.join gave")
        if os.getpid() != self.plan.pid:
            raise FleetClosed("a fleet of the process this one was forked from")
        if self._closed:
            raise FleetClosed
        if self._backend.is_broken:
            raise self._backend.broken()

    def _tell_closed(self) -> None:
        """A call that fails because another thread, or a signal handler, has closed the fleet meanwhile tells just this."""
        if self._closed:
            self._refuse_closed()

    def _refuse_other_threads(self) -> None:
        if (name := other_caller(self)) is not None:
            raise FleetError(f"thread {name!r} is in a call of this fleet: use it from one thread at a time")

    def _slots(self, slots: Any) -> tuple[Slots, Slots | None]:
        self._refuse_closed()
        if slots is self._last_slots:  # our own array, read-only: what the last batch said
            return self._last_slots, None
        return checked_slots(slots, self._all)

    def _refuse_unless_idle(self, slots: Slots) -> None:
        busy = self._table.given[slots] != self._table.seen[slots]
        if busy.any():
            raise SlotBusy(slots[busy].tolist())


def _close_quietly(dropped: weakref.ref[Fleet], backend: Backend, pid: int) -> None:
    """Close a backend whose fleet was dropped, or, at the end of the interpreter, is in use by a daemon thread."""
    # A forked child of the user's process inherits this finalizer, but must not end the parent's workers.
    if os.getpid() == pid:
        fleet = dropped()
        with contextlib.nullcontext() if fleet is None else fleet._closing:  # another daemon thread may be closing it
            if fleet is not None:
                fleet._closed = backend.is_closing = True
                wait_for_callers(fleet, 2.0)
            if backend.is_own_thread():  # the garbage collector runs in any thread
                threading.Thread(target=backend.close, args=(2.0,), name="envfleet-close").start()
            else:
                backend.close(2.0)
