"""Any Gymnasium environment as an OpenEnv server: `/ws` sessions in the engine's workers, and the HTTP side."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import socket
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from envfleet.errors import BackendMissing, BadArgument, FleetError
from envfleet.remote.codec import Dialect
from envfleet.remote.host import FleetHost
from envfleet.remote.named import environment_factory
from envfleet.remote.session import Frame, Over, Session, error_frame
from envfleet.remote.wire import SUBPROTOCOL

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class ServerConfig:
    """The options of a server; every one is a keyword argument of `serve` and `Server`.

    Args:
        host, port: where to listen; port 0 takes a free one. Other machines reach it only if `host` says so.
        max_sessions: environments at once; who comes later hears CAPACITY_REACHED.
        backend: "auto" ("pipe", or "aio" for environments with coroutines), "pipe" (worker processes with a thread
            for each session), "thread", "aio" (the server's own event loop), or "serial" (in the server itself:
            fastest, and no protection from the environment).
        workers: processes (or threads) the sessions share; None is a process for each processor and two at least,
            `max_sessions` a process for each session.
        idle_timeout_s: a session without a message for so long is ended.
        step_timeout_s: a step (or reset) past it fails; its worker process is ended, and who shares it is told.
        max_message_bytes: larger messages end the session.
        token: what clients must send as `Authorization: Bearer …`; None lets everyone in.
        ping_s: WebSocket keep-alive; a client that does not answer for as long again is gone.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_sessions: int = 64
    backend: str = "auto"
    workers: int | None = None
    idle_timeout_s: float = 300.0
    init_timeout_s: float = 120.0
    step_timeout_s: float = 60.0
    max_message_bytes: int = 16 * 2**20
    token: str | None = field(default=None, repr=False)
    ping_s: float = 20.0

    def __post_init__(self) -> None:
        if self.max_sessions < 1 or not 0 <= self.port < 65536:
            raise BadArgument("max_sessions must be at least 1, port between 0 and 65535")
        if min(self.idle_timeout_s, self.step_timeout_s, self.init_timeout_s, self.ping_s) <= 0:
            raise BadArgument("timeouts are seconds above 0")
        if self.token is not None and not self.token.strip():
            raise BadArgument("the token is empty")


@dataclass(eq=False)
class _Live:
    """An open session as the reaper sees it."""

    used_at: float
    busy: bool = False
    task: asyncio.Task[None] | None = None
    expired: bool = False


class App:
    """The ASGI application: WebSocket sessions here, everything else in `envfleet.remote.endpoints`."""

    def __init__(self, host: FleetHost, about: dict[str, Any], config: ServerConfig) -> None:
        from envfleet.remote.endpoints import http_app

        self.host, self.about, self.config = host, about, config
        self.live: set[_Live] = set()
        self.refused = 0
        self._http = http_app(self)
        self._reaper: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] == "websocket" and scope["path"].rstrip("/") == "/ws":
            await self._websocket(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._http(scope, receive, send)

    def allowed(self, headers: Any) -> bool:
        """Whether these request headers carry the token, if one is asked for."""
        if self.config.token is None:
            return True
        given = next((value for name, value in headers if name.lower() == b"authorization"), b"")
        return hmac.compare_digest(given, b"Bearer " + self.config.token.encode())

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.host.start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
            return
        self._reaper = asyncio.ensure_future(self._reap())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._reaper.cancel()
        self.host.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if not self.allowed(scope["headers"]):
            await send({"type": "websocket.close", "code": 1008})  # before accept: HTTP 403
            return
        binary = SUBPROTOCOL in scope.get("subprotocols", ())
        seat = self.host.take()
        try:
            await send({"type": "websocket.accept", "subprotocol": SUBPROTOCOL if binary else None})
            if seat is None:
                await self._refuse(send)
                return
            await self._serve(Session(self.host, seat, binary), receive, send)
        except (OSError, RuntimeError, asyncio.CancelledError):
            pass  # the client has gone (uvicorn says so with either of the first), or the server is closing
        finally:
            if seat is not None:
                # Not awaited by the connection: the seat is free when its running step is over, not before.
                task = asyncio.ensure_future(self.host.release(seat))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _refuse(self, send: Send) -> None:
        self.refused += 1
        most = self.config.max_sessions
        message = f"Server at capacity: {most}/{most} sessions active. Cannot accept new connections."
        frame = error_frame("CAPACITY_REACHED", message, active_sessions=most, max_sessions=most)
        await send({"type": "websocket.send", "text": frame})
        await send({"type": "websocket.close", "code": 1000})

    async def _serve(self, session: Session, receive: Receive, send: Send) -> None:
        live = _Live(time.monotonic(), task=asyncio.current_task())
        self.live.add(live)
        try:
            while True:
                message = await receive()
                if message["type"] != "websocket.receive":
                    return
                live.busy = True
                frame = message.get("text")
                reply = await session.answer(frame if frame is not None else message["bytes"])
                live.used_at, live.busy = time.monotonic(), False
                await send(_outgoing(reply))
        except Over as over:
            if over.frame is not None:
                await send(_outgoing(over.frame))
            await send({"type": "websocket.close", "code": 1000})
        except asyncio.CancelledError:
            if not live.expired:
                raise
            why = f"no message for {self.config.idle_timeout_s:g} s"
            await send(_outgoing(error_frame("SESSION_ERROR", f"the session was ended: {why}")))
            await send({"type": "websocket.close", "code": 1000})
        finally:
            self.live.discard(live)

    async def _reap(self) -> None:
        """End sessions whose client says nothing; half-open sockets are ended by the keep-alive."""
        while True:
            await asyncio.sleep(min(1.0, self.config.idle_timeout_s / 4))
            oldest = time.monotonic() - self.config.idle_timeout_s
            for live in list(self.live):
                if not live.busy and live.used_at < oldest and live.task is not None:
                    live.expired = True
                    live.task.cancel()


def _outgoing(frame: Frame) -> dict[str, Any]:
    return {"type": "websocket.send", ("text" if isinstance(frame, str) else "bytes"): frame}


class Server:
    """A server in this process: `start()` it in a thread of its own, or `run()` it here until it is stopped.

    Args:
        env: a Gymnasium id, the name of an environment of ours ("Echo", "Connect4", "Connect4-hard"),
            "module:Class", an EnvSpec, or a callable that builds an environment.
        options: see ServerConfig.

    Example:
        >>> from envfleet.remote import HttpEnvClient
        >>> with Server("CartPole-v1", port=0, max_sessions=2) as server:
        ...     with HttpEnvClient(server.url) as client:
        ...         _ = client.reset(seed=1)
        ...         reward = client.step({"action": 1}).reward
        >>> reward
        1.0
    """

    def __init__(self, env: Any, **options: Any) -> None:
        try:
            self.config = ServerConfig(**options)
        except TypeError as unknown:
            raise BadArgument(f"server options: {unknown}") from None
        factory, name = environment_factory(env)
        dialect, is_async, about = _probe(factory, name)
        dialect.schemas()  # refuses spaces with no JSON form before anything starts
        host = FleetHost(
            factory,
            dialect,
            seats=self.config.max_sessions,
            backend=self.config.backend,
            workers=self.config.workers,
            is_async=is_async,
            init_timeout_s=self.config.init_timeout_s,
            step_timeout_s=self.config.step_timeout_s,
        )
        self.app = App(host, about, self.config)
        self._thread: threading.Thread | None = None
        self._server: Any = None
        self._socket: socket.socket | None = None
        self.port = self.config.port

    @property
    def url(self) -> str:
        """Where clients connect."""
        host = self.config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def active_sessions(self) -> int:
        """How many seats are taken, the ones that are still finishing a step included."""
        return self.config.max_sessions - self.app.host.free - self.app.host.lost

    def bind(self) -> int:
        """Take the port; returns its number."""
        if self._socket is None:
            family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                self._socket.bind((self.config.host, self.config.port))
            except OSError as error:
                self._socket.close()
                self._socket = None
                where = f"{self.config.host}:{self.config.port}"
                raise BadArgument(f"cannot listen on {where}: {error.strerror}; port=0 takes a free one") from None
            self._socket.listen(1024)  # who connects while the workers start waits instead of being turned away
            self.port = self._socket.getsockname()[1]
        return self.port

    def run(self) -> None:
        """Serve until stopped (Ctrl-C, `close()` from another thread)."""
        self.bind()
        self._server = _uvicorn_server(self.app, self.config)
        self._server.run(sockets=[self._socket])
        self._socket = None

    def start(self) -> Server:
        """Serve in a thread; returns when clients can connect."""
        self.bind()
        self._server = _uvicorn_server(self.app, self.config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="envfleet-server", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + self.config.init_timeout_s
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise FleetError("the server did not start; its log says why")
            self._thread.join(0.005)
        return self

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop serving and end the workers. Safe to call twice."""
        if self._server is not None:
            self._server.should_exit = True
            if self._thread is not None:
                self._thread.join(timeout_s)
                self._thread = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()


def serve(env: Any, *, block: bool = True, **options: Any) -> Server:
    """Serve an environment to OpenEnv clients; see Server for `env`, ServerConfig for the options.

    With `block=False` it returns a running Server; close it, or use it in a `with` block.
    """
    server = Server(env, **options)
    if not block:
        return server.start()
    try:
        server.run()
    finally:
        server.close()
    return server


def _probe(factory: Callable[[], Any], name: str) -> tuple[Dialect, bool, dict[str, Any]]:
    """Build one environment to learn its spaces, its names, and whether it has coroutines."""
    env = factory()
    try:
        about = {
            "name": name,
            "description": inspect.getdoc(type(getattr(env, "unwrapped", env))) or name,
            "readme_content": None,
            "version": None,
            "author": None,
            "documentation_url": None,
        }
        is_async = inspect.iscoroutinefunction(env.step) or inspect.iscoroutinefunction(env.reset)
        return Dialect.of(env), is_async, about
    finally:
        closing = env.close()
        if inspect.iscoroutine(closing):
            asyncio.run(closing)


def _uvicorn_server(app: App, config: ServerConfig) -> Any:
    try:
        import uvicorn
    except ImportError as missing:
        raise BackendMissing("uvicorn", extra="remote") from missing
    protocol: Any = "auto"
    try:
        from envfleet.remote.lean import LeanWebSocket

        protocol = LeanWebSocket
    except ImportError:
        pass  # an uvicorn that has its protocol elsewhere: its own choice serves as well, at more CPU a step
    settings = uvicorn.Config(
        app,
        ws=protocol,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        lifespan="on",
        ws_max_size=config.max_message_bytes,
        ws_ping_interval=config.ping_s,
        ws_ping_timeout=config.ping_s,
        ws_per_message_deflate=False,
        # Far more than the seats, so that those who come too late get an answer; bounded, so that they cannot
        # take the memory of those who are served.
        limit_concurrency=4 * config.max_sessions + 256,
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(settings)
