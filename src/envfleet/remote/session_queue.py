"""Which server has room: a table that learns every server's session limit, and a fair queue in front of it.

A server shows its limit only by refusing. The table therefore lets a few tries through, remembers how many
sessions a refusal found open, lets one try past that now and then (a limit can rise, other users can leave),
and serves those who wait first come, first served. It holds no sockets and no clock of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from envfleet.util.backoff import backoff_s

FIRST_TRIES = 16  # attempts at once at a server whose limit is not known yet
RETRY_S, RETRY_MAX_S = 0.05, 1.0  # between tries past a learned limit
DOWN_S, DOWN_MAX_S = 0.1, 5.0  # between tries at a server that did not answer
_LOOK_AGAIN_S = 1.0


@dataclass
class Place:
    """What the table knows about a server: our sessions and tries there, and the limit as learned."""

    active: int = 0
    trying: int = 0
    limit: int | None = None
    retry_at: float = 0.0
    retries: int = 0  # refusals since the last sign of room
    down_until: float = 0.0
    failures: int = 0  # tries without an answer, since the last answer
    outage_logged: bool = False

    @property
    def load(self) -> float:
        """How full it is, as far as is known."""
        return (self.active + self.trying) / max(1, self.limit or FIRST_TRIES)


@dataclass(eq=False)
class Ticket:
    """A place in the queue; `wake` is called (from any thread) when looking again may help."""

    urls: tuple[str, ...]
    wake: Callable[[], Any]
    trying: str | None = None
    failures: dict[str, str] = field(default_factory=dict)


class CapacityTable:
    """Sessions per server, their limits as learned, and who waits. Safe to share between threads.

    Example:
        >>> table = CapacityTable(clock=lambda: 0.0)
        >>> ticket = table.enter(["http://a"], wake=lambda: None)
        >>> table.choose(ticket)
        'http://a'
        >>> table.refused(ticket)
        >>> table.view()["http://a"].limit
        0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._places: dict[str, Place] = {}
        self._queue: list[Ticket] = []
        self._learnt: dict[str, dict[str, Any]] = {}

    def learnt(self, url: str) -> dict[str, Any]:
        """What else was learnt about a server; all its clients share it."""
        with self._lock:
            return self._learnt.setdefault(url, {})

    def enter(self, urls: Sequence[str], wake: Callable[[], Any]) -> Ticket:
        """Queue for a session at any of these servers."""
        ticket = Ticket(tuple(urls), wake)
        with self._lock:
            for url in urls:
                self._places.setdefault(url, Place())
            self._queue.append(ticket)
        return ticket

    def choose(self, ticket: Ticket) -> str | float:
        """The server to try now, or how long to wait before asking again (a wake may come earlier)."""
        with self._lock:
            now = self._clock()
            found = {url: self._room(url, ticket, now) for url in ticket.urls}
            roomy = [url for url, (has_room, _) in found.items() if has_room]
            if not roomy:
                return max(0.001, min(again_s for _, again_s in found.values()))
            ticket.trying = min(roomy, key=lambda url: self._places[url].load)
            self._places[ticket.trying].trying += 1
            return ticket.trying

    def opened(self, ticket: Ticket) -> None:
        """The try succeeded; the ticket leaves the queue."""
        with self._lock:
            url, place = self._end_try(ticket)
            place.active += 1
            place.down_until, place.failures, place.outage_logged = 0.0, 0, False
            if place.limit is not None and place.active > place.limit:
                place.limit, place.retries, place.retry_at = place.active, 0, 0.0
            self._queue.remove(ticket)
            self._wake_next(url)

    def refused(self, ticket: Ticket) -> None:
        """The server said it is full."""
        with self._lock:
            _, place = self._end_try(ticket)
            # Ours only: others may hold the rest, and a limit is per process behind the address.
            place.limit = place.active
            place.retries += 1
            place.retry_at = self._clock() + backoff_s(place.retries, RETRY_S, RETRY_MAX_S, factor=1.5)
            place.down_until, place.failures = 0.0, 0

    def failed(self, ticket: Ticket, why: str) -> None:
        """The server did not answer."""
        with self._lock:
            url, place = self._end_try(ticket)
            ticket.failures[url] = why
            place.failures += 1
            place.down_until = self._clock() + backoff_s(place.failures, DOWN_S, DOWN_MAX_S)

    def leave(self, ticket: Ticket) -> None:
        """Stop waiting (a deadline, a cancellation). Does nothing after `opened`."""
        with self._lock:
            if ticket in self._queue:
                if ticket.trying is not None:
                    self._end_try(ticket)
                self._queue.remove(ticket)
                for url in ticket.urls:
                    self._wake_next(url)

    def released(self, url: str) -> None:
        """One of our sessions there ended."""
        with self._lock:
            place = self._places[url]
            place.active -= 1
            # The place is free in a moment if not now: the next in line may try at once, and soon again.
            place.retry_at, place.retries = self._clock(), 0
            self._wake_next(url)

    def contended(self, url: str) -> bool:
        """Whether a client waits that would take a session at this server."""
        if not self._queue:  # the hot path of every episode's end: no lock for the common answer
            return False
        with self._lock:
            return any(url in ticket.urls and ticket.trying is None for ticket in self._queue)

    def all_down(self, urls: Sequence[str]) -> bool:
        """Whether none of these servers answered when last tried."""
        with self._lock:
            now = self._clock()
            return all(self._places[url].down_until > now for url in urls)

    def is_new_outage(self, urls: Sequence[str]) -> bool:
        """Whether this outage was not logged yet: true once in an outage, however many clients wait."""
        with self._lock:
            places = [self._places[url] for url in urls]
            is_new = not all(place.outage_logged for place in places)
            for place in places:
                place.outage_logged = True
            return is_new

    def view(self) -> dict[str, Place]:
        """The table as it is now."""
        with self._lock:
            return {url: replace(place) for url, place in self._places.items()}

    @property
    def waiting(self) -> int:
        """How many wait in the queue."""
        return len(self._queue)

    def _room(self, url: str, ticket: Ticket, now: float) -> tuple[bool, float]:
        place = self._places[url]
        if place.down_until > now:
            return False, place.down_until - now
        if place.limit is None:
            return place.trying < FIRST_TRIES, _LOOK_AGAIN_S
        ahead = 0
        for other in self._queue:
            if other is ticket:
                break
            ahead += url in other.urls and other.trying is None
        if place.limit - place.active - place.trying > ahead:
            return True, _LOOK_AGAIN_S
        if ahead or place.trying:
            return False, _LOOK_AGAIN_S
        return now >= place.retry_at, max(place.retry_at - now, 0.0)

    def _end_try(self, ticket: Ticket) -> tuple[str, Place]:
        url = ticket.trying
        assert url is not None, "a ticket reports on a try it was not given"
        ticket.trying = None
        place = self._places[url]
        place.trying -= 1
        return url, place

    def _wake_next(self, url: str) -> None:
        for ticket in self._queue:
            if url in ticket.urls and ticket.trying is None:
                ticket.wake()
                return


_shared: tuple[int, CapacityTable] | None = None


def shared_table() -> CapacityTable:
    """The table of this process: all clients that are not given their own share what they learn."""
    global _shared
    # By process: a forked child inherits neither the sessions nor a lock that another thread may hold.
    if _shared is None or _shared[0] != os.getpid():
        _shared = (os.getpid(), CapacityTable())
    return _shared[1]
