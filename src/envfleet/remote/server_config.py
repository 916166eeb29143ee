"""The options of a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from envfleet.errors import BadArgument

ServerBackend = Literal["auto", "pipe", "thread", "aio", "serial"]


@dataclass(frozen=True)
class ServerConfig:
    """The options of a server; every one is a keyword argument of `serve` and `Server`.

    Args:
        host, port: where to listen; port 0 chooses a free port. For other machines `host` must be a network address.
        max_sessions: the most sessions at a time; further clients get CAPACITY_REACHED.
        backend: "auto" ("pipe", or "aio" for environments with coroutines), "pipe" (worker processes with a thread
            for each session), "thread", "aio" (the server's own event loop), or "serial" (in the server itself:
            fastest, and no protection from the environment).
        num_workers: processes (or threads) that sessions share; None is one per CPU, at least two;
            with `max_sessions` every session has its own process.
        idle_timeout_s: a session without a message for this time is ended, even if no client waits.
        handover_s: while other clients wait, a session without a running episode is ended after this idle
            time.
        episode_idle_s: the same for a session with a running episode, whose client may still compute its action.
        request_timeout_s: a connection that has not sent a complete request within this time is closed.
        step_timeout_s: a longer step (or reset) fails; its worker process is ended, and the sessions that share it get an error.
        max_message_bytes: larger messages end the session.
        token: clients must send it as `Authorization: Bearer …`; None accepts every client.
        ping_s: WebSocket keep-alive; a client that does not answer for as long again is disconnected.
        allow_hosts: further host names that clients may use for this server; loopback names and the address it is bound to
            are always allowed, "*" allows all.
        allow_origins: web origins ("https://lab.example") whose pages may use it; "*" allows all.

    Example:
        >>> ServerConfig(port=0, max_sessions=4).max_sessions
        4
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_sessions: int = 64
    backend: ServerBackend = "auto"
    num_workers: int | None = None
    idle_timeout_s: float = 300.0
    init_timeout_s: float = 120.0
    step_timeout_s: float = 60.0
    max_message_bytes: int = 16 * 2**20
    token: str | None = field(default=None, repr=False)
    ping_s: float = 20.0
    handover_s: float = 5.0
    episode_idle_s: float = 120.0
    request_timeout_s: float = 30.0
    allow_hosts: Sequence[str] = ()
    allow_origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.max_sessions < 1:
            raise BadArgument(f"max_sessions={self.max_sessions}: give 1 or more")
        if not 0 <= self.port < 65536:
            raise BadArgument(f"port={self.port}: give a number from 0 to 65535")
        for name in ("idle_timeout_s", "step_timeout_s", "init_timeout_s", "ping_s", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise BadArgument(f"{name}={getattr(self, name)}: give seconds above 0")
        for name in ("handover_s", "episode_idle_s"):
            if getattr(self, name) < 0:
                raise BadArgument(f"{name}={getattr(self, name)}: give seconds, 0 or more")
        if self.token is not None and not self.token.strip():
            raise BadArgument("the token is empty")
        if isinstance(self.allow_hosts, str) or isinstance(self.allow_origins, str):
            raise BadArgument("allow_hosts and allow_origins are lists of strings")


class ServerOptions(TypedDict, total=False):
    """The fields of `ServerConfig`, for type checkers; `workers` is uvicorn's name for `num_workers`."""

    host: str
    port: int
    max_sessions: int
    backend: ServerBackend
    num_workers: int | None
    workers: int | None
    idle_timeout_s: float
    init_timeout_s: float
    step_timeout_s: float
    max_message_bytes: int
    token: str | None
    ping_s: float
    handover_s: float
    episode_idle_s: float
    request_timeout_s: float
    allow_hosts: Sequence[str]
    allow_origins: Sequence[str]
