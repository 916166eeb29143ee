"""A TCP proxy that stalls and cuts, to see what a client does when the line is bad."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from envfleet.errors import BadArgument


@dataclass
class ChaosCounts:
    """What the proxy has done so far."""

    connections: int = 0
    chunks: int = 0
    stalls: int = 0
    cuts: int = 0
    refused: int = 0


@dataclass(eq=False)
class _Pair:
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class ChaosProxy:
    """Stands between a client and a server and, for a share of the chunks that pass, stalls or cuts.

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
        self._pairs: set[_Pair] = set()
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._server: asyncio.Server | None = None
        self.counts = ChaosCounts()
        self.port = 0

    @property
    def url(self) -> str:
        """Where the client should go instead."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> ChaosProxy:
        """Listen on a free port of this machine."""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="envfleet-chaos", daemon=True)
        self._thread.start()
        ready.wait(10.0)
        return self

    def calm(self) -> None:
        """No more faults from here on; chunks already stalled still come late."""
        self._stall = self._cut = 0.0

    def refuse(self, refuse: bool = True) -> None:
        """Whether new connections are turned away at once."""
        self._refusing = refuse

    def cut_all(self) -> None:
        """Drop every connection now."""
        self._do(self._cut_pairs())

    def close(self) -> None:
        """Drop everything and stop. Safe to call twice."""
        if self._thread is None:
            return
        self._do(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._thread = None

    def __enter__(self) -> ChaosProxy:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        ready.set()
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _cut_pairs(self) -> None:
        for pair in list(self._pairs):
            pair.cut()

    async def _shut(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks = [task for pair in self._pairs for task in pair.tasks]
        await self._cut_pairs()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            self.counts.refused += 1
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            self.counts.refused += 1
            writer.transport.abort()
            return
        self.counts.connections += 1
        pair = _Pair((writer, far_writer))
        self._pairs.add(pair)
        pair.tasks = [
            asyncio.ensure_future(self._pump(reader, far_writer, pair)),
            asyncio.ensure_future(self._pump(far_reader, writer, pair)),
        ]
        await asyncio.gather(*pair.tasks, return_exceptions=True)
        pair.cut()
        self._pairs.discard(pair)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: _Pair) -> None:
        try:
            while chunk := await reader.read(65536):
                self.counts.chunks += 1
                lot = self._random.random()
                if lot < self._cut:
                    self.counts.cuts += 1
                    pair.cut()
                    return
                if lot < self._cut + self._stall:
                    self.counts.stalls += 1
                    await asyncio.sleep(self._stall_s)
                writer.write(chunk)
                await writer.drain()
            writer.write_eof()
        except (OSError, RuntimeError):
            pair.cut()
