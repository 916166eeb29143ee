"""The fleet: N slots behind send and recv."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector.utils import batch_space

from envfleet.actions import ActionWriter
from envfleet.backends.base import Backend
from envfleet.batch import Batch
from envfleet.book import DONE, IDLE, KEEP, OUT, Book, checked_seed, checked_slots, per_slot
from envfleet.errors import BadArgument, FleetClosed, FleetError, RecvTimeout, ResetNeeded, SlotBusy
from envfleet.groups import AgentGroup
from envfleet.interface import EnvInterface
from envfleet.layout import RESET, STEP, Layout
from envfleet.plan import Plan
from envfleet.slab import Slab, Slots
from envfleet.supervise.faults import Failure, Fault
from envfleet.supervise.supervisor import Policy, Supervisor

_FOREVER = 1e9


class Fleet(EnvInterface):
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
        self._all_step = False  # every row's command is STEP
        final_info = backend.info if self.on_end == "wait" else backend.final_info
        self._whole = Batch(self.slab, self._all, backend.info, final_info, copy=False)
        # The finalizer holds the backend, not the fleet: dropping the last reference closes, and so does exit.
        self._finalizer = weakref.finalize(self, _close_quietly, backend, os.getpid())

    @property
    def observation_space(self) -> gym.Space[Any]:
        """The space of `batch.obs` for all slots."""
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
        """Slots that were given up."""
        return np.flatnonzero(self._supervisor.quarantined)

    # -- stepping -----------------------------------------------------------------------------------------------

    def send(self, actions: Any, slots: Sequence[int] | Slots | None = None) -> None:
        """Hand actions to slots and let them step. Returns at once on backends with workers.

        `actions` are batched as Gymnasium batches them, one per slot in the order of `slots` (default: all).
        """
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

    def _submit(self, slots: Slots, command: int) -> None:
        head, book, supervisor = self.slab.head, self._book, self._supervisor
        book.deliver_late(self.slab, slots)
        if self._debug:
            for batch in list(self._handed_out):
                batch.poison(slots)
        head["command"][slots] = command
        if supervisor.troubled:
            slots = self._submit_troubled(slots, command)
        self._smooth = False
        self._all_step = False
        book.state[slots] = OUT
        if len(slots):
            self._give(slots)

    def _give(self, slots: Slots) -> None:
        try:
            self._backend.submit(slots)
        except BaseException:
            # An env was interrupted in this very thread, or its worker cannot be started: rebuilt at the next reset.
            self._supervisor.lost[slots] = self._supervisor.troubled = True
            self._book.state[slots] = IDLE
            raise

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
        self._refuse_closed()
        state = self._book.state
        wanted = np.flatnonzero(state != IDLE) if slots is None else self._slots(slots)[0]
        if not len(wanted):
            raise FleetError("nothing was sent, so nothing can be received: send() first")
        idle = wanted[state[wanted] == IDLE]
        if len(idle):
            raise FleetError(f"slots {idle.tolist()} were not sent, so they cannot be received: send() them first")
        need = len(wanted) if at_least is None else at_least
        if not 1 <= need <= len(wanted):
            raise BadArgument(f"at_least={at_least}: {len(wanted)} slots are out")
        self._wait(wanted, need, timeout_s)
        got = wanted[state[wanted] == DONE]
        if self._supervisor.pending:
            self._supervisor.raise_pending(got.tolist())
        state[got] = IDLE
        got.flags.writeable = False
        self._last_slots = got
        if len(got) == self.num_envs:
            self._smooth = not self._debug and bool((self.slab.head["started"] > 0).all())
        return self._batch(got, copy)

    def _wait(self, wanted: Slots, need: int, timeout_s: float | None) -> None:
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
                raise RecvTimeout(wanted[state[wanted] == OUT].tolist(), timeout_s or 0.0)
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
        ):
            self.send(actions)
            return self.recv(self._all, copy=copy)
        # The same as above without the checks that cannot fail here: every slot is the caller's and has an episode.
        if not self._writer.write_all(actions):
            self.send(actions)
            return self.recv(self._all, copy=copy)
        self._book.actions.append((self._all, self._writer.last))
        if not self._all_step:
            self.slab.head["command"] = STEP
            self._all_step = True
        self._smooth = False  # until it is known that all came back well, also when this is interrupted
        self._book.state[:] = OUT
        self._give(self._all)
        finished = self._backend.wait(self.num_envs, 0.02)
        if len(finished.done) != self.num_envs or finished.failures or finished.losses:
            self._all_step = False  # the supervisor may write commands of its own
            self._supervisor.take(finished)
            return self.recv(self._all, copy=copy)
        self._book.state[:] = IDLE
        self._smooth = True
        if self._supervisor.has_restarts:
            self._supervisor.credit(finished.done)
        self._supervisor.look()
        if copy:
            return self._batch(self._all, True)
        return self._whole

    def _batch(self, slots: Slots, copy: bool) -> Batch:
        backend = self._backend
        info, final_info = _pick(backend.info, slots), _pick(backend.final_info, slots)
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
        chosen, order = self._slots(slots)
        out = chosen[self._book.state[chosen] == OUT]
        if len(out):
            raise SlotBusy(out.tolist(), "recv() them before resetting")
        if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool):
            seeds: Any = [int(seed) + int(slot) for slot in (chosen if order is None else chosen[np.argsort(order)])]
        else:
            seeds = seed
        if seeds is not None or tasks is not None:
            self.assign(slots if slots is not None else self._all, tasks=tasks, seeds=seeds)
        if options is not None:
            self._backend.give_options({slot: options for slot in chosen.tolist()})
        for slot in chosen.tolist():
            self._supervisor.pending.pop(slot, None)
        self._submit(chosen, RESET)
        return self.recv(chosen)

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

    # -- ending -------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = 4.0) -> None:
        """End everything: envs are asked to close, and whatever does not within `timeout_s` is killed. Idempotent.

        What went wrong in closing is in `faults` and in one warning; it is never raised.
        """
        if self._closed:
            return
        self._closed = True
        if self._finalizer.detach() is None or os.getpid() != self.plan.pid:
            return
        for slot, problem in self._backend.close(timeout_s):
            self._note_close_problem(slot, problem)
        late = [fault for fault in self.faults if fault.phase == "close" or "cannot be ended" in fault.cause]
        if late:
            warnings.warn("while closing: " + "; ".join(str(fault) for fault in late), RuntimeWarning, stacklevel=2)

    def _note_close_problem(self, slot: int, problem: Any) -> None:
        from envfleet.supervise.faults import exit_words

        if isinstance(problem, Failure):
            kind = "timeout" if "did not return" in problem.summary or "stuck" in problem.summary else "failed"
            text = {"stack": problem.traceback} if kind == "timeout" else {"traceback": problem.traceback}
            self._supervisor._record(max(slot, 0), kind, problem.phase, problem.summary, failure=problem, **text)
        else:
            cause = f"the worker process {exit_words(problem.exit_code)}"
            self._supervisor._record(slot, "lost", problem.phase, cause, exit_code=problem.exit_code)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __len__(self) -> int:
        return self.num_envs

    def __repr__(self) -> str:
        return f"Fleet({self._backend.recipe.name}, num_envs={self.num_envs}, {self.plan})"

    # -- checks -------------------------------------------------------------------------------------------------

    def _refuse_closed(self) -> None:
        if self._closed:
            raise FleetClosed
        if os.getpid() != self.plan.pid:
            raise FleetClosed("a fleet of the process this one was forked from")

    def _slots(self, slots: Any) -> tuple[Slots, Slots | None]:
        self._refuse_closed()
        if slots is self._last_slots:
            return self._last_slots, None  # our own array, read-only: what the last batch said
        return checked_slots(slots, self._all)

    def _refuse_unless_idle(self, slots: Slots) -> None:
        state = self._book.state[slots]
        if state.any():
            raise SlotBusy(slots[state != IDLE].tolist())


def _pick(side: dict[int, Any], slots: Slots) -> dict[int, Any]:
    if not side:
        return {}
    return {slot: side[slot] for slot in slots.tolist() if slot in side}


def _close_quietly(backend: Backend, pid: int) -> None:
    # A forked child of the user's process inherits this finalizer but not the right to end the parent's workers.
    if os.getpid() == pid:
        backend.close(2.0)
