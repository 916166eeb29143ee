"""Any Gymnasium environment as an OpenEnv server: `/ws` sessions in the engine's workers, and the HTTP side."""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Unpack

from envfleet.core.fleet_options import EnvLike
from envfleet.errors import BadArgument, FleetError
from envfleet.remote.app import App
from envfleet.remote.server_config import ServerConfig, ServerOptions
from envfleet.remote.session_host import FleetHost
from envfleet.remote.space_codec import Dialect
from envfleet.slots.factories import env_name, resolve
from envfleet.util.extras import from_extra


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

    def __init__(self, env: EnvLike, **options: Unpack[ServerOptions]) -> None:
        given: dict[str, Any] = {**options}
        if "workers" in given:  # as uvicorn calls it
            given["num_workers"] = given.pop("workers")
        try:
            self.config = ServerConfig(**given)
        except TypeError as unknown:
            raise BadArgument(f"server options: {unknown}") from None
        factory = resolve(env)
        dialect, is_async, about = _probe(factory, env_name(env))
        dialect.schemas()  # refuses spaces with no JSON form before anything starts
        self.app = App(FleetHost(factory, dialect, is_async, self.config), about)
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
        """How many slots are in use, including those that are still finishing a step."""
        return self.app.host.active

    def bind(self) -> int:
        """Take the port; returns its number."""
        if self._socket is None:
            where, is_v6 = (self.config.host, self.config.port), ":" in self.config.host
            family, both = socket.AF_INET6 if is_v6 else socket.AF_INET, is_v6 and socket.has_dualstack_ipv6()
            try:
                # A long backlog: a client that connects while the workers start waits instead of being refused.
                self._socket = socket.create_server(where, family=family, backlog=1024, dualstack_ipv6=both)
            except OSError as error:
                raise BadArgument(f"cannot listen: {error.strerror}; port=0 takes a free one") from None
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
        self.bind()  # here, so that a port in use is an error for the caller
        self._thread = threading.Thread(target=self.run, name="envfleet-server", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + self.config.init_timeout_s
        while self._server is None or not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise FleetError("the server did not start; see its log")
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


def serve(env: EnvLike, **options: Unpack[ServerOptions]) -> None:
    """Serve an environment to OpenEnv clients; see Server for `env`, ServerConfig for the options.

    It blocks until it is interrupted; `Server(env).start()` does not.
    """
    server = Server(env, **options)
    try:
        server.run()
    finally:
        server.close()


def _probe(factory: Callable[[], Any], name: str) -> tuple[Dialect, bool, dict[str, Any]]:
    """Build one environment to learn its spaces, its names, and whether it has coroutines."""
    env = factory()
    try:
        about = {
            "name": name,
            "description": inspect.getdoc(type(getattr(env, "unwrapped", env))) or name,
            **dict.fromkeys(("readme_content", "version", "author", "documentation_url")),
        }
        is_async = inspect.iscoroutinefunction(env.step) or inspect.iscoroutinefunction(env.reset)
        return Dialect.of(env), is_async, about
    finally:
        closing = env.close()
        if inspect.iscoroutine(closing):
            asyncio.run(closing)


def _uvicorn_server(app: App, config: ServerConfig) -> Any:
    with from_extra("remote"):
        import uvicorn

        from envfleet.remote.uvicorn_protocols import HttpProtocol, SilentConnections, WebSocketProtocol

    silent = SilentConnections(config.request_timeout_s)
    settings = uvicorn.Config(
        app,
        http=type("Connection", (HttpProtocol,), {"silent": silent}),
        ws=WebSocketProtocol,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        lifespan="on",
        ws_max_size=config.max_message_bytes,
        ws_ping_interval=config.ping_s,
        ws_ping_timeout=config.ping_s,
        ws_per_message_deflate=False,
        # No limit_concurrency: it counts silent connections and then refuses requests. `SilentConnections` bounds those,
        # the slots bound the sessions, and `endpoints` the bodies that are being read.
        timeout_graceful_shutdown=2,
    )
    return uvicorn.Server(settings)
