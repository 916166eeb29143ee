"""joined: several running backends as one. Slots, workers and tasks are numbered through; a part that is lost is lost alone.

The rows here are copies. `submit` copies what a slot needs down into its part's rows, `wait` copies finished rows up, as `pipe` does
with its workers. That costs two memory copies a step, and no part has to know that it is one. Turns are counted here and in the parts:
`_handed` says which turn of this backend the current turn of a part belongs to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import select
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from envfleet.backends.base import Backend, EnvState, Turns
from envfleet.errors import KeeperLost
from envfleet.faults.failure import Failure, Loss
from envfleet.slots.factories import Recipe
from envfleet.slots.layout import Layout
from envfleet.slots.slab import Slab, Slots
from envfleet.workers.shared_memory import Pulse

#: While some of several parts are waited for, each is waited for this long in turn: what another part has finished is seen so much later.
_SLICE_S = 0.0005
_TASKS = ("task", "now_task", "next_task")
#: The least time a part has to close, if those before it took all of it.
_CLOSE_S = 0.5


@dataclasses.dataclass
class Part:
    """One of the joined backends, and where its slots and workers begin."""

    backend: Backend
    first: int
    first_worker: int
    num_tasks: int  # how many it knew before: the tasks of the joined fleet come behind them
    #: A submission that is under way: slots, their new turns here, and their turns in the part before.
    handing: tuple[Slots, Turns, Turns] | None = None
    is_gone: bool = False  # it has broken, and its slots are among the losses or were
    is_closed: bool = False

    @property
    def count(self) -> int:
        """How many slots it has."""
        return self.backend.recipe.num_slots

    @property
    def where(self) -> slice:
        """Its slots."""
        return slice(self.first, self.first + self.count)

    @property
    def num_workers(self) -> int:
        """How many numbers its workers take."""
        return max(self.backend.num_workers, len(self.backend.pulses), int(self.backend.worker_of.max()) + 1)

    def loss(self, loss: Loss) -> Loss:
        """A loss with the numbers of the joined fleet."""
        slot = loss.slot + self.first if 0 <= loss.slot < self.count else -1
        return dataclasses.replace(loss, worker=loss.worker + self.first_worker, slot=slot)


class _PartPulse(Pulse):
    """The pulse of a part's worker, with the slot's number in the joined fleet."""

    def __init__(self, part: Part, index: int) -> None:
        self._part, self._index = part, index

    def read(self) -> tuple[int, str, float]:
        """As `Pulse.read`. Looked up each time: a part may replace its pulses."""
        part, pulses = self._part, self._part.backend.pulses
        if part.is_gone or self._index >= len(pulses):
            return -1, "idle", 0.0
        slot, phase, since = pulses[self._index].read()
        return (slot + part.first, phase, since) if 0 <= slot < part.count else (-1, phase, since)


class JoinedBackend(Backend):
    """Backends that run already, under one fleet. Made by `envfleet.join`.

    `num_tasks`: how many tasks each part has been told of.
    """

    name = "joined"

    def __init__(self, backends: Sequence[Backend], num_tasks: Sequence[int]) -> None:
        super().__init__()
        self.owns_parts = False  # until then `close` closes nothing: the fleets they came from still have them
        self.parts: list[Part] = []
        first = first_worker = 0
        for backend, tasks in zip(backends, num_tasks):
            self.parts.append(Part(backend, first, first_worker, tasks))
            first += self.parts[-1].count
            first_worker += self.parts[-1].num_workers
        self.recipe = _joined_recipe([backend.recipe for backend in backends])
        self.num_workers = sum(backend.num_workers for backend in backends)
        self.can_kill = any(backend.can_kill for backend in backends)
        self.has_deadlines = any(backend.has_deadlines for backend in backends)
        self.pulses = [_PartPulse(part, i) for part in self.parts for i in range(len(part.backend.pulses))]
        self.worker_of = np.zeros(first, np.int64)
        self._owners = np.repeat(np.arange(len(self.parts)), [part.count for part in self.parts])
        # Those that step in the caller's own thread last, so that the others work meanwhile.
        self._order = sorted(range(len(self.parts)), key=lambda p: not self.parts[p].backend.has_deadlines)
        self._handed: Turns = np.zeros(0, np.uint32)  # [slot]: the last turn that its part was given
        self._stashed: dict[int, tuple[int, Any]] = {}  # slot -> turn and its row before that turn's was taken in
        self._asked: list[Part] = []  # whose answers to calls are awaited
        self._problems: list[tuple[int, Failure | Loss]] = []
        self._num_notes = [len(backend.notes) for backend in backends]
        self._number_workers()

    def start(self, recipe: Recipe) -> dict[int, dict[str, Any] | Failure | Loss]:
        """Not used: the parts have been started."""
        raise AssertionError("joined backends run already")

    def attach(self, layout: Layout) -> Slab:
        """Rows of its own, as for slots that have not been reset yet."""
        self._count_turns()
        self._handed = np.zeros_like(self.given)
        self.slab = Slab(layout, self.recipe.num_slots, keep=False)
        self._up = self.slab.names("obs", "final_obs", "column")
        self._down, self._wide = self.slab.names("action"), self.slab.names("wide_action")
        return self.slab

    def part_of(self, slot: int) -> Backend:
        """The part that runs this slot."""
        part, local = self._local(slot)
        return part.backend.part_of(local)

    def _local(self, slot: int) -> tuple[Part, int]:
        part = self.parts[self._owners[slot]]
        return part, slot - part.first

    def _living(self) -> Iterator[Part]:
        return (part for part in self.parts if not part.is_gone)

    def _split(self, slots: Slots) -> Iterator[tuple[Part, Slots]]:
        """The slots of each part, in the order in which they are to be submitted."""
        owners = self._owners[slots]
        for p in self._order:
            mine = slots[owners == p]
            if len(mine):
                yield self.parts[p], mine

    def _number_workers(self) -> None:
        for part in self.parts:  # slots of shm may move between workers
            self.worker_of[part.where] = part.backend.worker_of + part.first_worker

    # -- down: what the caller sends ------------------------------------------------------------------------------

    def submit(self, slots: Slots) -> None:
        """Copy the rows down and let each part work on its slots."""
        self._finish_handing()
        for part, mine in self._split(self._without_lost(slots)):
            self._hand(part, mine)

    def _without_lost(self, slots: Slots) -> Slots:
        """Count the turn of slots whose worker is among the losses: see `ProcessBackend._without_lost`."""
        if not self.losses:
            return slots
        lost = np.isin(self.worker_of[slots], [loss.worker for loss in self.losses])
        self.given[slots[lost]] += np.uint32(1)
        return slots[~lost]

    def _hand(self, part: Part, slots: Slots) -> None:
        turns = self.given[slots] + np.uint32(1)
        if not part.is_gone:
            with self._asking(part) as backend:
                self._copy_down(part, slots)
                # Interrupted after this line: the part's own turns say which slots it was given.
                part.handing = slots, turns, backend.given[slots - part.first]
                backend.submit(slots - part.first)
                self._complete(part)
        if part.is_gone:
            self.given[slots] = turns
            self._tell_gone(part, slots)

    def _complete(self, part: Part) -> None:
        """Count the turns of the slots that the part was given in the submission under way."""
        if part.handing is not None:
            slots, turns, before = part.handing
            moved = part.backend.given[slots - part.first] != before
            self._handed[slots[moved]] = turns[moved]
            self.given[slots[moved]] = turns[moved]
            part.handing = None

    def _copy_down(self, part: Part, slots: Slots) -> None:
        """The heads and actions of slots that the caller owns."""
        slab, ours, theirs = part.backend.slab, *self._rows(part, slots)
        slab.raw[theirs] = self.slab.raw[ours]
        wide = self._wide if self.slab.head["action_type"][ours].any() else []
        for name in (*self._down, *wide):
            slab.arrays[name][theirs] = self.slab.arrays[name][ours]
        self._shift_tasks(slab, theirs, part.num_tasks)

    @staticmethod
    def _rows(part: Part, slots: Slots) -> tuple[Any, Any]:
        """Where rows are, here and in the part: slices if these are all of them, which are copied faster."""
        return (part.where, slice(None)) if len(slots) == part.count else (slots, slots - part.first)

    @staticmethod
    def _shift_tasks(slab: Slab, rows: Any, by: int) -> None:
        for name in _TASKS if by else ():
            ids = slab.head[name][rows]
            slab.head[name][rows] = np.where(ids >= 0, ids + by, ids)

    # -- up: what the parts have finished ---------------------------------------------------------------------------

    def wait(self, at_least: int, timeout_s: float) -> None:
        """Take in what the parts have finished, until that is enough."""
        self._finish_handing()
        target = self.num_out - at_least
        deadline = time.monotonic() + timeout_s
        while True:
            for part in self._living():
                with self._asking(part) as backend:
                    backend.wait(max(1, self._num_handed(part)), 0.0)
            need, left = self.num_out - target, deadline - time.monotonic()
            if need <= 0 or left <= 0 or self.has_trouble:
                return
            self._wait_a_while(need, left)

    def _wait_a_while(self, need: int, left: float) -> None:
        busy = [(part, count) for part in self._living() if (count := self._num_handed(part))]
        if need >= sum(count for _, count in busy):
            # All of them are needed, so none is waited for in vain; what else happens is looked at before and after.
            for part, count in busy:
                with self._asking(part) as backend:
                    begun = time.monotonic()
                    backend.wait(count, left)
                left = max(0.0, left - (time.monotonic() - begun))
            if not busy:
                self._sleep(left)
        elif all(getattr(part.backend, "by_value", False) for part, _ in busy):
            self._sleep(min(left, 0.01))  # not longer: a message that did not fit may have to be sent on
        else:
            for part, count in busy:
                with self._asking(part) as backend:
                    backend.wait(min(need, count), min(left, _SLICE_S))

    def _sleep(self, timeout_s: float) -> None:
        """Until a part's socket can be read, at most so long."""
        poller = select.poll()
        for number in self.sockets():
            poller.register(number, select.POLLIN)
        poller.poll(max(1.0, timeout_s * 1000))

    def _num_handed(self, part: Part) -> int:
        """How many rows the part owes."""
        given = self.given[part.where]
        return int(np.count_nonzero((given != self.done[part.where]) & (given == self._handed[part.where])))

    def round(self, slots: Slots, timeout_s: float) -> bool:
        """Submit and wait; what parts have finished at `submit` is not waited for again."""
        self.submit(slots)
        self.wait(self.num_out, timeout_s)
        return False

    @contextlib.contextmanager
    def _asking(self, part: Part) -> Iterator[Backend]:
        """Ask a part for something, then take in what it has found meanwhile. One that is broken is given up here."""
        backend = part.backend
        try:
            yield backend
        except KeeperLost:
            backend.is_broken = True
        self._take_in(part)

    def _take_in(self, part: Part) -> None:
        """Finished rows, failures, losses. An entry is removed from the part when it is here; until then this can be repeated."""
        backend = part.backend
        if backend.is_broken:
            self._complete(part)
        self._collect(part)
        for local, failure in list(backend.failures.items()) if backend.failures else ():
            slot = local + part.first
            if self.given[slot] == self.done[slot] or self._handed[slot] != self.given[slot]:  # else its row comes first
                self.failures[slot] = failure
                del backend.failures[local]
        if backend.losses:
            backend.check()  # if its keeper is gone, that is why its workers are
            self._number_workers()
        while backend.losses and not backend.is_broken:
            self.losses.append(part.loss(backend.losses[0]))
            backend.losses.popleft()
        while backend.placings:
            worker, why_not = backend.placings[0]
            self.placings.append((worker + part.first_worker, why_not))
            backend.placings.popleft()
        if backend.is_broken and not part.is_gone:
            self._tell_gone(part, np.arange(part.first, part.first + part.count))
            part.is_gone = True
            self.is_broken = all(other.is_gone for other in self.parts)

    def _tell_gone(self, part: Part, slots: Slots) -> None:
        """These slots of a part that is gone are lost for good."""
        told = {loss.worker for loss in self.losses if loss.is_final}
        words = f"{part.backend.name}, a part of this fleet, is gone: {part.backend.broken()}"
        for worker in np.unique(self.worker_of[slots]).tolist():
            if worker not in told:
                self.losses.append(Loss(worker, None, -1, "step", words=words, is_final=True))

    def _collect(self, part: Part) -> None:
        backend, where = part.backend, part.where
        given = self.given[where]
        ready = (given != self.done[where]) & (given == self._handed[where]) & (backend.done == backend.given)
        if ready.any():
            self._copy_up(part, np.flatnonzero(ready) + part.first)

    def _copy_up(self, part: Part, slots: Slots) -> None:
        """Rows of slots that are done, and what is beside them. `done` is set last: until then this can be repeated."""
        backend, slab = part.backend, part.backend.slab
        failed = [slot for slot in slots.tolist() if slot - part.first in backend.failures] if backend.failures else []
        for slot in failed:
            self._stashed[slot] = int(self.given[slot]), self.delivered(slot)
        ours, theirs = self._rows(part, slots)
        for name in self._up:
            self.slab.arrays[name][ours] = slab.arrays[name][theirs]
        self.slab.raw[ours] = slab.raw[theirs]
        self._shift_tasks(self.slab, ours, -part.num_tasks)
        for kind in ("obs", "final_obs"):
            for i, box in self.slab.mail[kind].items():
                for slot in slots.tolist():
                    box[slot] = slab.mail[kind][i][slot - part.first]
        if self.info or self.final_info or backend.info or backend.final_info:
            for slot in slots.tolist():
                self._keep_side(slot, backend.info.get(slot - part.first), backend.final_info.get(slot - part.first))
        for slot in failed:
            self.failures[slot] = backend.failures[slot - part.first]
        self.done[slots] = self.given[slots]
        for slot in failed:
            del backend.failures[slot - part.first]

    def delivered(self, slot: int) -> Any:
        """The row as it was last delivered. Rows are copied up when they are whole, so it is the one here."""
        turn, row = self._stashed.get(slot, (-1, None))
        return row if turn == self.given[slot] else super().delivered(slot)

    # -- interrupts and the end of a part -----------------------------------------------------------------------------

    def settle(self) -> None:
        """Let every part complete what was interrupted, then what was interrupted between the parts and here."""
        for part in self._living():
            with self._asking(part) as backend:
                backend.settle()
                self._complete(part)
        self._number_workers()

    def _finish_handing(self) -> None:
        if any(part.handing is not None for part in self.parts):
            self.settle()

    def check(self) -> None:
        """Check every part."""
        for part in self._living():
            part.backend.check()
            if part.backend.is_broken:
                self._take_in(part)

    def broken(self) -> KeeperLost:
        """The error of the first part: it is raised only when all are gone."""
        return self.parts[0].backend.broken()

    # -- asked of the part of a slot or worker --------------------------------------------------------------------------

    def kill(self, worker: int) -> str:
        """End a worker of a part."""
        part = next(p for p in reversed(self.parts) if p.first_worker <= worker)
        with self._asking(part) as backend:
            return backend.kill(worker - part.first_worker)
        return ""

    def end_worker(self, slot: int, phase: str, words: str, kind: str) -> None:
        """End the worker of a slot."""
        part, local = self._local(slot)
        with self._asking(part) as backend:
            backend.end_worker(local, phase, words, kind)

    def give_up(self, slot: int) -> str:
        """Give up what a slot is doing."""
        part, local = self._local(slot)
        return part.backend.give_up(local)

    def pulse_of(self, slot: int) -> Pulse:
        """The pulse of this slot, in its part."""
        part, local = self._local(slot)
        return Pulse.local(1)[0] if part.is_gone else part.backend.pulse_of(local)

    def has_deadline(self, slot: int) -> bool:
        """Whether its part notices silence."""
        part, local = self._local(slot)
        return not part.is_gone and part.backend.has_deadlines and part.backend.has_deadline(local)

    def runnable(self) -> list[int] | None:
        """What each part can run, together."""
        found = [None if part.is_gone else part.backend.runnable() for part in self.parts]
        if all(able is None for able in found):
            return None
        able_of = [range(part.count) if able is None else able for part, able in zip(self.parts, found)]
        return [slot + part.first for part, able in zip(self.parts, able_of) for slot in able]

    def sockets(self) -> Collection[int]:
        """Of all parts."""
        return [number for part in self._living() for number in part.backend.sockets()]

    # -- off the step path ------------------------------------------------------------------------------------------------

    def give_tasks(self, tasks: Mapping[int, bytes]) -> None:
        """To every part, behind the tasks that it knew before."""
        for part in self._living():
            with self._asking(part) as backend:
                backend.give_tasks({task + part.num_tasks: blob for task, blob in tasks.items()})

    def give_options(self, options: Mapping[int, dict[str, Any] | None]) -> None:
        """To the parts of these slots."""
        for part, mine in self._divided(options):
            with self._asking(part) as backend:
                backend.give_options(mine)

    def give_mail(self, mail: Mapping[int, Mapping[int, Any]]) -> None:
        """To the parts of these slots."""
        grouped: dict[int, dict[int, dict[int, Any]]] = {}
        for i, objects in mail.items():
            for part, mine in self._divided(objects):
                grouped.setdefault(part.first, {})[i] = mine
        for part in self._living():
            if part.first in grouped:
                with self._asking(part) as backend:
                    backend.give_mail(grouped[part.first])

    def _divided(self, values: Mapping[int, Any]) -> Iterator[tuple[Part, dict[int, Any]]]:
        for part in self._living():
            mine = {slot - part.first: value for slot, value in values.items() if part is self._local(slot)[0]}
            if mine:
                yield part, mine

    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """Ask every part for its slots."""
        self._asked = []
        for part in self.parts:
            at = [i for i, slot in enumerate(slots) if part is self._local(slot)[0]]
            mine = [slots[i] - part.first for i in at]
            if mine and not part.is_gone:
                self._asked.append(part)
                with self._asking(part) as backend:
                    backend.call(mine, phase, name, [args[i] for i in at] if each else args, kwargs, each)
            if mine and part.is_gone:
                self._tell_gone(part, np.array(mine) + part.first)

    def replies(self, timeout_s: float) -> dict[int, Any]:
        """Answers that have arrived, from each part in turn."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        asked = [part for part in self._asked if not part.is_gone]
        while True:
            for part in asked:
                with self._asking(part) as backend:
                    answers = backend.replies(0.0 if found else min(timeout_s, 0.001 if len(asked) > 1 else timeout_s))
                    found.update((local + part.first, answer) for local, answer in answers.items())
            if found or self.has_trouble or not asked or time.monotonic() >= deadline:
                return found

    def states(self, slots: Slots) -> list[EnvState]:
        """Of native parts."""
        found: dict[int, EnvState] = {}
        for part, mine in self._split(slots):
            found.update(zip(mine.tolist(), part.backend.states(mine - part.first)))
        return [found[slot] for slot in slots.tolist()]

    def set_states(self, slots: Slots, states: Sequence[EnvState]) -> None:
        """Of native parts, which read the heads of their own rows."""
        given = dict(zip(slots.tolist(), states))
        for part, mine in self._split(slots):
            self._copy_down(part, mine)
            part.backend.set_states(mine - part.first, [given[slot] for slot in mine.tolist()])

    def mind(self, free: Callable[[], Slots]) -> None:
        """Let every part do its periodic work with its own slots."""
        for p, part in enumerate(self.parts):
            if part.is_gone:
                continue
            with self._asking(part) as backend:
                backend.mind(lambda part=part: _of(part, free()))  # type: ignore[misc]
            self.notes += [f"{backend.name}: {note}" for note in backend.notes[self._num_notes[p] :]]
            self._num_notes[p] = len(backend.notes)
        self._number_workers()

    def is_own_thread(self) -> bool:
        """Of any part."""
        return any(part.backend.is_own_thread() for part in self.parts)

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Close the parts one after another. Each has what is left of the time, and a little at least."""
        deadline = time.monotonic() + timeout_s
        errors: list[Exception] = []
        for part in self.parts if self.owns_parts else ():
            if part.is_closed:
                continue
            try:
                found = part.backend.close(max(_CLOSE_S, deadline - time.monotonic()))
                for slot, problem in found:
                    told = part.loss(problem) if isinstance(problem, Loss) else problem
                    self._problems.append((max(slot, 0) + part.first, told))
            except Exception as error:  # the other parts are closed all the same
                errors.append(error)
            part.is_closed = True
        if errors:
            raise errors[0]
        return self._problems


def _of(part: Part, slots: Slots) -> Slots:
    """Those of the slots that are the part's, by its own numbers."""
    return slots[(slots >= part.first) & (slots < part.first + part.count)] - part.first


def _joined_recipe(recipes: Sequence[Recipe]) -> Recipe:
    """All factories; the shortest of the timeouts, with which deadlines begin to be looked at: they are those of the parts."""
    return dataclasses.replace(
        recipes[0],
        factories=tuple(factory for recipe in recipes for factory in recipe.factories),
        init_timeout_s=min(recipe.init_timeout_s for recipe in recipes),
        reset_timeout_s=min(recipe.reset_timeout_s for recipe in recipes),
        step_timeout_s=min(recipe.step_timeout_s for recipe in recipes),
        bounds_differ=any(recipe.bounds_differ for recipe in recipes),
    )
