"""A TCP proxy that delays and cuts messages, to test clients on a bad connection."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from urllib.parse import urlsplit

from envfleet.errors import BadArgument
from envfleet.util.loop_thread import LoopThread


@dataclass
class ChaosCounts:
    """What the proxy has done so far."""

    connections: int = 0
    chunks: int = 0
    stalls: int = 0
    cuts: int = 0
    refused: int = 0


class ChaosProxy:
    """A proxy between a client and a server that delays or cuts a share of the chunks.

    A stalled chunk is delivered late, not lost: a client that gave up waiting and asks again on the same connection
    would read the old answer. A cut resets both sides. `calm()` ends the faults, `cut_all()` drops every
    connection now, `refuse(True)` turns new ones away as a server does that is down.

    Args:
        target: address of the server, such as "http://127.0.0.1:8000" or "127.0.0.1:8000".
        stall: share of chunks that are held for `stall_s`.
        cut: share of chunks at which the connection is cut instead.
        seed: of the choices.

    Example:
        >>> def through(url):
        ...     with ChaosProxy(url, stall=0.01, cut=0.01) as proxy:
        ...         return proxy.url  # give this to the client
    """

    def __init__(self, target: str, *, stall: float = 0.0, cut: float = 0.0, stall_s: float = 1.0, seed: int = 0) -> None:
        parts = urlsplit(target if "//" in target else f"//{target}")
        if not parts.hostname or not parts.port or not 0 <= stall + cut <= 1:
            raise BadArgument("ChaosProxy needs host:port, and stall + cut between 0 and 1")
        self._host, self._port = parts.hostname, parts.port
        self._stall, self._cut, self._stall_s = stall, cut, stall_s
        self._random = random.Random(seed)
        self._refusing = False
        self._writers: set[asyncio.StreamWriter] = set()  # both ends of every connection
        self._thread = LoopThread("envfleet-chaos")
        self._server: asyncio.Server | None = None
        self.counts = ChaosCounts()
        self.port = 0

    @property
    def url(self) -> str:
        """Where the client should go instead."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> ChaosProxy:
        """Listen on a free port of this machine."""
        self._server = self._thread.wait_for(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def calm(self) -> None:
        """No more faults from here on; chunks already stalled still come late."""
        self._stall = self._cut = 0.0

    def refuse(self, refuse: bool = True) -> None:
        """Whether new connections are turned away at once."""
        self._refusing = refuse

    def cut_all(self) -> None:
        """Drop every connection now."""
        self._thread.wait_for(self._cut_connections())

    def close(self) -> None:
        """Drop everything and stop. Safe to call twice."""
        if self._server is None:
            return
        self._thread.loop.call_soon_threadsafe(self._server.close)
        self.cut_all()
        self._thread.close(10.0)
        self._server = None

    def __enter__(self) -> ChaosProxy:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def _cut_connections(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._refusing:
                raise ConnectionRefusedError
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            self.counts.refused += 1
            writer.transport.abort()
            return
        self.counts.connections += 1
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            pumps = self._pump(reader, far_writer, writer), self._pump(far_reader, writer, far_writer)
            await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            for one in pair:
                one.transport.abort()
            self._writers -= pair

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: asyncio.StreamWriter) -> None:
        """Pass chunks on in one direction; a cut or an error ends both."""
        try:
            while chunk := await reader.read(65536):
                self.counts.chunks += 1
                lot = self._random.random()
                if lot < self._cut:
                    self.counts.cuts += 1
                    raise ConnectionResetError
                if lot < self._cut + self._stall:
                    self.counts.stalls += 1
                    await asyncio.sleep(self._stall_s)
                writer.write(chunk)
                await writer.drain()
            writer.write_eof()
        except (OSError, RuntimeError):
            writer.transport.abort()
            back.transport.abort()
