"""Tickets: which episodes are to be collected, fixed before the first one starts.

Ticket number k has its seed and task from k alone, and its slot from its position in the order. So the
tickets decide what is returned, never which episode ends first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.errors import BadArgument
from envfleet.util.seeding import episode_seed

DealsTasks = Callable[[int], Any]


@dataclass
class Ticket:
    """One episode to collect."""

    number: int  # its identity: seed and task follow from it
    position: int  # its place in the order of this collection
    seed: int
    task: Any
    attempt: int = 1


class TicketOffice:
    """Gives tickets to slots: position p belongs to slot p modulo the number of slots.

    With `shared`, for a fleet of parts that are not equally fast, the next position belongs to the slot that asks first. Then which slot ran
    a ticket depends on time; what the ticket gives does not.

    Example:
        >>> office = TicketOffice(range(10, 14), num_slots=2, seed=0)
        >>> [office.take(0).number, office.take(0).number, office.take(0), office.take(1).number]
        [10, 12, None, 11]
    """

    def __init__(
        self,
        numbers: Sequence[int] | itertools.count[int],
        num_slots: int,
        seed: int,
        tasks: DealsTasks | None = None,
        ready: Callable[[int], bool] | None = None,
        shared: bool = False,
    ) -> None:
        self._numbers = numbers
        self._first = next(iter(numbers)) if isinstance(numbers, itertools.count) else 0
        self.total = None if isinstance(numbers, itertools.count) else len(numbers)
        self._seed, self._tasks, self._ready = seed, tasks, ready
        self._stride = 1 if shared else num_slots
        # [slot] next position of each; if they are shared, there is one for all.
        self._next = np.zeros(1, np.int64) if shared else np.arange(num_slots)
        self._dead: list[tuple[int, int]] = []  # heap of (position, slot): streams of slots that are gone
        self._returned: list[Ticket] = []

    def take(self, slot: int) -> Ticket | None:
        """The next ticket for a slot: its own, or one that a lost slot left behind if that comes first.

        None: there is none, or its task cannot be chosen yet.
        """
        stream = slot % self._stride
        own = int(self._next[stream])
        if self._returned and self._returned[0].position < own:
            return self._returned.pop(0)
        if self._dead and self._dead[0][0] < own and self._open(self._dead[0][0]):
            position, dead = self._dead[0]
            heapq.heapreplace(self._dead, (position + self._stride, dead))
            return self._ticket(position)
        if self._open(own):
            self._next[stream] += self._stride
            return self._ticket(own)
        return self._returned.pop(0) if self._returned else None

    def close_slot(self, slot: int) -> None:
        """The slot is gone; the others take over its tickets."""
        if self._stride > 1:
            heapq.heappush(self._dead, (int(self._next[slot]), slot))

    def give_back(self, ticket: Ticket) -> None:
        """Put a ticket back for any slot to take."""
        self._returned.append(ticket)
        self._returned.sort(key=lambda returned: returned.position)

    def _open(self, position: int) -> bool:
        if self.total is not None and position >= self.total:
            return False
        return self._ready is None or self._ready(self._number(position))

    def _number(self, position: int) -> int:
        return self._first + position if isinstance(self._numbers, itertools.count) else int(self._numbers[position])

    def _ticket(self, position: int) -> Ticket:
        number = self._number(position)
        task = None if self._tasks is None else self._tasks(number)
        # Not spawned by slot: the same episodes whatever the number of slots.
        return Ticket(number, position, episode_seed(self._seed, "collect", 0, number), task)


def numbers_for(first: int, count: int | None, skip: Collection[int]) -> Sequence[int] | itertools.count[int]:
    """Ticket numbers from `first` on, without those that are done already."""
    if count is None:
        if skip:
            raise BadArgument("skip= needs a number of episodes")
        return itertools.count(first)
    if not skip:
        return range(first, first + count)
    done = skip if isinstance(skip, (set, frozenset)) else set(skip)
    return [number for number in range(first, first + count) if number not in done]


def task_source(tasks: Any) -> DealsTasks | None:
    """A callable number → task is itself; a sequence is dealt out in turn."""
    if tasks is None:
        return None
    if callable(tasks):
        return tasks  # type: ignore[no-any-return]
    if isinstance(tasks, Sequence) and not isinstance(tasks, str) and len(tasks):
        return lambda number: tasks[number % len(tasks)]
    raise BadArgument(f"tasks must be a callable ticket → task or a non-empty sequence, got {tasks!r}")
