"""Which server has room: a table that learns every server's session limit, and a fair queue in front of it.

A server shows its limit only by refusing. The table therefore lets a few tries through, remembers how many
sessions a refusal found open, lets one try past that now and then (a limit can rise, other users can leave),
and serves those who wait first come, first served. It holds no sockets and no clock of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from envfleet.util.backoff import backoff_s

FIRST_TRIES = 16  # attempts at once at a server whose limit is not known yet
RETRY_S, RETRY_MAX_S = 0.05, 1.0  # between tries past a learned limit
DOWN_S, DOWN_MAX_S = 0.1, 5.0  # between tries at a server that did not answer
_LOOK_AGAIN_S = 1.0


@dataclass
class ServerState:
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
class Waiter:
    """A client that waits in the queue; `wake` is called (from any thread) when looking again may help."""

    urls: tuple[str, ...]
    wake: Callable[[], Any]
    trying: str | None = None
    failures: dict[str, str] = field(default_factory=dict)


class CapacityTable:
    """Sessions per server, their limits as learned, and who waits. Safe to share between threads.

    Example:
        >>> table = CapacityTable(clock=lambda: 0.0)
        >>> waiter = table.enter(["http://a"], wake=lambda: None)
        >>> table.choose(waiter)
        'http://a'
        >>> table.refused(waiter)
        >>> table.view()["http://a"].limit
        0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._servers: dict[str, ServerState] = {}
        self._queue: list[Waiter] = []
        self._learnt: dict[str, dict[str, Any]] = {}
        self._asking: dict[str, Lock] = {}
        self._offers: dict[int, tuple[str, Callable[[], Any]]] = {}  # by client, longest idle first

    def learnt(self, url: str) -> dict[str, Any]:
        """What else was learnt about a server; all its clients share it."""
        with self._lock:
            return self._learnt.setdefault(url, {})

    def asking(self, url: str) -> Lock:
        """Held by the client that asks a server for what all want to know."""
        with self._lock:
            return self._asking.setdefault(url, Lock())

    def offer(self, client: Any, url: str, give: Callable[[], Any]) -> None:
        """A client between episodes keeps its session until someone waits for one: `give` is called then, from any thread."""
        with self._lock:
            self._offers[id(client)] = url, give
            waiting = any(url in waiter.urls and waiter.trying is None for waiter in self._queue)
        if waiting:
            self._take_offer((url,))

    def withdraw(self, client: Any) -> None:
        """The client uses its session again, or has none."""
        if self._offers:
            with self._lock:
                self._offers.pop(id(client), None)

    def _take_offer(self, urls: Sequence[str]) -> None:
        with self._lock:
            key = next((key for key, (url, _) in self._offers.items() if url in urls), None)
            give = None if key is None else self._offers.pop(key)[1]
        if give is not None:
            with suppress(RuntimeError):  # its loop is closed
                give()

    def enter(self, urls: Sequence[str], wake: Callable[[], Any]) -> Waiter:
        """Queue for a session at any of these servers."""
        waiter = Waiter(tuple(urls), wake)
        with self._lock:
            for url in urls:
                self._servers.setdefault(url, ServerState())
            self._queue.append(waiter)
        return waiter

    def choose(self, waiter: Waiter) -> str | float:
        """The server to try now, or how long to wait before asking again (a wake may come earlier)."""
        choice = self._choose(waiter)
        if not isinstance(choice, str):
            self._take_offer(waiter.urls)
        return choice

    def _choose(self, waiter: Waiter) -> str | float:
        with self._lock:
            now = self._clock()
            found = {url: self._room(url, waiter, now) for url in waiter.urls}
            roomy = [url for url, (has_room, _) in found.items() if has_room]
            if not roomy:
                return max(0.001, min(again_s for _, again_s in found.values()))
            waiter.trying = min(roomy, key=lambda url: self._servers[url].load)
            self._servers[waiter.trying].trying += 1
            return waiter.trying

    def opened(self, waiter: Waiter) -> None:
        """The try succeeded; the waiter leaves the queue."""
        with self._lock:
            url, server = self._end_try(waiter)
            server.active += 1
            server.down_until, server.failures, server.outage_logged = 0.0, 0, False
            if server.limit is not None and server.active > server.limit:
                server.limit, server.retries, server.retry_at = server.active, 0, 0.0
            self._queue.remove(waiter)
            self._wake_next(url)

    def refused(self, waiter: Waiter) -> None:
        """The server said it is full."""
        with self._lock:
            _, server = self._end_try(waiter)
            # Ours only: others may hold the rest, and a limit is per process behind the address.
            server.limit = server.active
            server.retries += 1
            server.retry_at = self._clock() + backoff_s(server.retries, RETRY_S, RETRY_MAX_S, factor=1.5)
            server.down_until, server.failures = 0.0, 0

    def failed(self, waiter: Waiter, why: str) -> None:
        """The server did not answer."""
        with self._lock:
            url, server = self._end_try(waiter)
            waiter.failures[url] = why
            server.failures += 1
            server.down_until = self._clock() + backoff_s(server.failures, DOWN_S, DOWN_MAX_S)

    def leave(self, waiter: Waiter) -> None:
        """Stop waiting (a deadline, a cancellation). Does nothing after `opened`."""
        with self._lock:
            if waiter in self._queue:
                if waiter.trying is not None:
                    self._end_try(waiter)
                self._queue.remove(waiter)
                for url in waiter.urls:
                    self._wake_next(url)

    def released(self, url: str) -> None:
        """One of our sessions there ended."""
        with self._lock:
            server = self._servers[url]
            server.active -= 1
            # The session is free now or in a moment: the next in the queue may try at once, and again soon.
            server.retry_at, server.retries = self._clock(), 0
            self._wake_next(url)

    def contended(self, url: str) -> bool:
        """Whether a client waits that would take a session at this server."""
        if not self._queue:  # the hot path of every episode's end: no lock for the common answer
            return False
        with self._lock:
            return any(url in waiter.urls and waiter.trying is None for waiter in self._queue)

    def all_down(self, urls: Sequence[str]) -> bool:
        """Whether none of these servers answered when last tried."""
        with self._lock:
            now = self._clock()
            return all(self._servers[url].down_until > now for url in urls)

    def is_new_outage(self, urls: Sequence[str]) -> bool:
        """Whether this outage was not logged yet: true once in an outage, however many clients wait."""
        with self._lock:
            servers = [self._servers[url] for url in urls]
            is_new = not all(server.outage_logged for server in servers)
            for server in servers:
                server.outage_logged = True
            return is_new

    def view(self) -> dict[str, ServerState]:
        """The table as it is now."""
        with self._lock:
            return {url: replace(server) for url, server in self._servers.items()}

    @property
    def waiting(self) -> int:
        """How many wait in the queue."""
        return len(self._queue)

    def _room(self, url: str, waiter: Waiter, now: float) -> tuple[bool, float]:
        server = self._servers[url]
        if server.down_until > now:
            return False, server.down_until - now
        if server.limit is None:
            return server.trying < FIRST_TRIES, _LOOK_AGAIN_S
        ahead = 0
        for other in self._queue:
            if other is waiter:
                break
            ahead += url in other.urls and other.trying is None
        if server.limit - server.active - server.trying > ahead:
            return True, _LOOK_AGAIN_S
        if ahead or server.trying:
            return False, _LOOK_AGAIN_S
        return now >= server.retry_at, max(server.retry_at - now, 0.0)

    def _end_try(self, waiter: Waiter) -> tuple[str, ServerState]:
        url = waiter.trying
        assert url is not None, "a waiter reports on a try it did not make"
        waiter.trying = None
        server = self._servers[url]
        server.trying -= 1
        return url, server

    def _wake_next(self, url: str) -> None:
        for waiter in self._queue:
            if url in waiter.urls and waiter.trying is None:
                waiter.wake()
                return


_shared: tuple[int, CapacityTable] | None = None


def shared_table() -> CapacityTable:
    """The table of this process: all clients that are not given their own share what they learn."""
    global _shared
    # By process: a forked child inherits neither the sessions nor a lock that another thread may hold.
    if _shared is None or _shared[0] != os.getpid():
        _shared = (os.getpid(), CapacityTable())
    return _shared[1]
