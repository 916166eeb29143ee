"""Request throttling per client or per server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from envfleet.errors import BadArgument


def server_of(client: Any) -> Hashable:
    """The server of a client: its address if it has one, else the client itself."""
    for name in ("base_url", "server_url", "url"):
        address = getattr(client, name, None)
        if isinstance(address, str):
            return address
    return id(client)


class Throttle:
    """At most `max_rate` requests per second and `max_in_flight` at a time, for each server.

    Example:
        >>> throttle = Throttle(max_rate=1000.0, max_in_flight=2)
        >>> with throttle.request("http://localhost:8000"):
        ...     pass
    """

    def __init__(
        self,
        max_rate: float | None = None,
        max_in_flight: int | None = None,
        key: Callable[[Any], Hashable] = server_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_rate is not None and max_rate <= 0:
            raise BadArgument(f"max_rate must be positive, got {max_rate}")
        if max_in_flight is not None and max_in_flight < 1:
            raise BadArgument(f"max_in_flight must be at least 1, got {max_in_flight}")
        self.max_rate, self.max_in_flight = max_rate, max_in_flight
        self._key, self._clock = key, clock
        self._lock = threading.Lock()
        self._next_start: dict[Hashable, float] = {}
        self._in_flight: dict[Hashable, int] = {}
        self._queues: dict[Hashable, deque[Future[None]]] = {}

    @property
    def active(self) -> bool:
        """Whether there is any limit."""
        return self.max_rate is not None or self.max_in_flight is not None

    @contextmanager
    def request(self, client: Any) -> Iterator[None]:
        """Wait for a permit and hold it during the block."""
        key = self._key(client)
        turn = self._enter(key)
        try:
            if turn is not None:
                turn.result()
            if (delay := self.delay(key)) > 0:
                time.sleep(delay)
            yield
        finally:
            self._leave(key, turn)

    @asynccontextmanager
    async def request_async(self, client: Any) -> AsyncIterator[None]:
        """The same without blocking the event loop; both kinds count together."""
        key = self._key(client)
        turn = self._enter(key)
        try:
            if turn is not None:
                await asyncio.wrap_future(turn)
            if (delay := self.delay(key)) > 0:
                await asyncio.sleep(delay)
            yield
        finally:
            self._leave(key, turn)

    def delay(self, key: Hashable) -> float:
        """Reserve the next start at this server and return how many seconds away it is."""
        if self.max_rate is None:
            return 0.0
        with self._lock:
            now = self._clock()
            start = max(now, self._next_start.get(key, now))
            self._next_start[key] = start + 1.0 / self.max_rate
            return start - now

    def _enter(self, key: Hashable) -> Future[None] | None:
        """Take a permit (None), or return a future that is done when the permit was passed on."""
        if self.max_in_flight is None:
            return None
        with self._lock:
            count = self._in_flight.get(key, 0)
            if count < self.max_in_flight:
                self._in_flight[key] = count + 1
                return None
            turn: Future[None] = Future()
            self._queues.setdefault(key, deque()).append(turn)
            return turn

    def _leave(self, key: Hashable, turn: Future[None] | None) -> None:
        """Pass the permit to the next waiter. An interrupted wait may have got its permit at the same moment, or not."""
        if self.max_in_flight is None or (turn is not None and turn.cancel()):
            return
        with self._lock:
            queue = self._queues.get(key)
            while queue:
                following = queue.popleft()
                if following.set_running_or_notify_cancel():  # not one that gave up waiting
                    following.set_result(None)
                    return
            self._queues.pop(key, None)
            self._in_flight[key] -= 1
            if not self._in_flight[key]:
                del self._in_flight[key]
