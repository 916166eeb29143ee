"""What a fleet knows about its slots: their state, seeds, tasks and last actions.

Fleet and supervisor share one `SlotTable`. It holds no reference to the fleet, so that no cycle keeps a dropped fleet alive.
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from envfleet.backends.base import Turns
from envfleet.faults.failure import Failure, load_value
from envfleet.slots.factories import pickled
from envfleet.slots.slab import Slab, Slots

#: State of a slot: idle (the caller owns it), out (sent), done (finished but not yet received).
IDLE, OUT, DONE = 0, 1, 2


class Keep:
    """The type of `KEEP`."""

    def __repr__(self) -> str:
        return "KEEP"


#: In `assign`: leave this slot's task as it is.
KEEP: Final = Keep()


class SlotTable:
    """Per-slot state of one fleet.

    Three numbers say who owns a slot: the turn it was last `given` (by the backend), the turn that is `done` (by the
    backend, or by the supervisor for a row that it writes itself), and the turn the caller has `seen`. Each changes in
    one step, so an exception between any two steps leaves a valid state.
    """

    def __init__(self, given: Turns, done: Turns) -> None:
        num_slots = len(given)
        self.given, self.done = given, done
        self.seen = given.copy()
        self.met = given.copy()  # the turn the caller could have received: a recv or ready() has found it done
        self.resetting = np.zeros(num_slots, bool)  # last sent to be reset: its next row is no step's
        self.held = np.zeros(num_slots, bool)  # failed, and to be rebuilt before the caller gets the row
        self.base_seed = np.full(num_slots, -1, np.int64)  # the last seed a slot was given
        self.actions: collections.deque[Any] = collections.deque(maxlen=8)  # (slots, actions) of the last sends
        #: Nothing special is pending: every slot has an episode, the command in every row is STEP, and there is nothing to
        #: rebuild, raise or deliver with the next send. `Fleet` sets it after a call that has checked this; any change
        #: clears it. While it is set, calls may skip their checks.
        self.plain = False
        self._task_blobs: list[bytes] = []
        self._task_ids: dict[bytes, int] = {}
        self._num_sent = 0  # tasks the workers know
        self._late: dict[int, dict[str, int]] = {}

    @property
    def state(self) -> np.ndarray[Any, Any]:
        """[slot] -> IDLE, OUT or DONE."""
        is_done = (self.done == self.given) & ~self.held
        state: np.ndarray[Any, Any] = (self.given != self.seen) * np.where(is_done, DONE, OUT)
        return state

    def meet(self) -> np.ndarray[Any, Any]:
        """The state; what is done can from now on also be dropped by a reset."""
        state = self.state
        done = state == DONE
        self.met[done] = self.given[done]
        return state

    def is_out(self, slot: int) -> bool:
        """Whether the caller waits for this slot's row."""
        return bool(self.given[slot] != self.seen[slot] and (self.done[slot] != self.given[slot] or self.held[slot]))

    def task_value(self, task: int) -> Any:
        """The task behind an id, None for -1."""
        return pickle.loads(self._task_blobs[task]) if task >= 0 else None

    def told_task(self, task: int) -> Any:
        """The same for the record of a fault. A task that only workers can unpickle is given as text."""
        value = load_value(self._task_blobs[task], "call") if task >= 0 else None
        return f"<task {task}: {value.summary}>" if isinstance(value, Failure) else value

    def task_id(self, value: Any, send: Callable[[Mapping[int, bytes]], None]) -> int:
        """The id of a task. A new one is sent to the workers; equal values share an id and are sent once."""
        if value is None:
            return -1
        return self.id_of(pickled(value, "the task"), send)

    def id_of(self, blob: bytes, send: Callable[[Mapping[int, bytes]], None]) -> int:
        """The same for a task that is pickled already: see `task_blob`."""
        if blob not in self._task_ids:
            self._task_blobs.append(blob)
            self._task_ids[blob] = len(self._task_blobs) - 1
        if self._num_sent != len(self._task_blobs):  # also if sending an earlier one was interrupted
            send(dict(enumerate(self._task_blobs[self._num_sent :], self._num_sent)))
            self._num_sent = len(self._task_blobs)
        return self._task_ids[blob]

    def task_blob(self, task: int) -> bytes:
        """The task behind an id, pickled."""
        return self._task_blobs[task]

    def last_actions(self, slot: int) -> tuple[Any, ...]:
        """The actions a slot was sent in the last few sends, oldest first."""
        found = []
        for slots, actions in self.actions:
            at = int(np.searchsorted(slots, slot))
            if actions is not None and at < len(slots) and slots[at] == slot:
                found.append(actions[at])
        return tuple(found)

    def assign(self, slab: Slab, slot: int, change: dict[str, int]) -> None:
        """Write what the next reset of a slot uses, now or, while its row has not been received, with the next send."""
        if self.given[slot] != self.seen[slot]:  # also when it is done: the result must not depend on when it finished
            self.plain = False
            self._late.setdefault(slot, {}).update(change)
        else:
            self._write(slab, slot, {**self._late.get(slot, {}), **change})  # the last value counts
            self._late.pop(slot, None)

    @property
    def has_late(self) -> bool:
        """Whether something was assigned to a slot that is out."""
        return bool(self._late)

    def deliver_late(self, slab: Slab, slots: Slots) -> None:
        """The slots are being sent: write what was assigned while they were out."""
        if self._late:
            for slot in slots.tolist():
                self._write(slab, slot, self._late.get(slot, {}))
                self._late.pop(slot, None)

    def _write(self, slab: Slab, slot: int, change: dict[str, int]) -> None:
        for name, value in change.items():
            slab.head[name][slot] = value
        if "next_seed" in change:
            self.base_seed[slot] = change["next_seed"]
