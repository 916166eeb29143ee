"""uvicorn's HTTP protocol with an end to its patience: who connects must ask for something soon.

Left alone it waits for ever for a request that never comes, or that stops half way, and such connections count against
those who do ask. Here each has a time limit for its request, body included, and beyond a number of them the oldest go
first; whoever asks at once is served, however many are silent.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_SILENT = 1024  # connections without a request; more than that, and the oldest are closed before their time
GRACE_S = 1.0  # but not before a request that was sent at once can have been read


class Patience:
    """The connections that have not asked for anything yet, oldest first. It belongs to the server's event loop."""

    def __init__(self, timeout_s: float, most: int = MAX_SILENT) -> None:
        self._timeout_s, self._most = timeout_s, most
        self._silent: dict[PatientProtocol, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.closed = 0

    def expect(self, connection: PatientProtocol, now: float) -> None:
        """A request is due from this connection."""
        self._silent.pop(connection, None)
        self._silent[connection] = now
        if self._timer is None:
            self._timer = connection.loop.call_later(min(GRACE_S, self._timeout_s / 4), self._look, connection.loop)

    def satisfied(self, connection: PatientProtocol) -> None:
        """It has asked, or has gone."""
        self._silent.pop(connection, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for connection, since in list(self._silent.items()):
            crowded = len(self._silent) > self._most and now - since > GRACE_S
            if not crowded and now - since <= self._timeout_s:
                break  # the others are younger
            del self._silent[connection]
            self.closed += 1
            connection.transport.abort()
        if self._silent:
            self._timer = loop.call_later(min(GRACE_S, self._timeout_s / 4), self._look, loop)


class PatientProtocol(H11Protocol):  # type: ignore[misc]
    """A connection that tells `patience` (set by a subclass, one for each server) what it is waiting for."""

    patience: Patience

    def connection_made(self, transport: Any) -> None:
        """Called by asyncio."""
        super().connection_made(transport)
        self.patience.expect(self, self.loop.time())

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self.patience.satisfied(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Called when something was received."""
        super().handle_events()
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            self.patience.satisfied(self)

    def handle_websocket_upgrade(self, event: Any) -> None:
        """Called with a whole request for a WebSocket: sessions have limits of their own."""
        self.patience.satisfied(self)
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """Called when a request has been answered: the next may come on the same connection."""
        if not self.transport.is_closing():
            self.patience.expect(self, self.loop.time())
        super().on_response_complete()  # reads on, and may find a request that came meanwhile
