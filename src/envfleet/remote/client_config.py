"""The options of a client, and what it counts."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

from envfleet.errors import BadArgument
from envfleet.remote.session_queue import CapacityTable


@dataclass(frozen=True)
class ClientConfig:
    """The options of a client; every one is a keyword argument of `HttpEnvClient` and `AsyncEnvClient`.

    Args:
        headers: sent with the handshake; `token` adds `Authorization: Bearer …`.
        connect_timeout_s: for one try at one server.
        message_timeout_s: for one request; `reset`, `step` and `state` take their own `timeout_s`.
        capacity_timeout_s: how long to wait for a free session before CapacityReached is raised.
        down_timeout_s: how long to keep trying when no server answers at all.
        max_message_bytes: larger answers are refused (MessageTooBig).
        ping_interval_s, ping_timeout_s: WebSocket keep-alive.
        compression: permessage-deflate; it costs CPU and helps only on slow connections.
        ssl_context: for https/wss; None verifies certificates with the system's roots.
        binary: send arrays as raw bytes to our servers; without it they are sent as text.
        repeats: what to do if an answer of a server that does not number its answers equals an earlier one byte for
            byte: "check" asks for the server's `state`; "fault" treats it as a duplicate, for environments whose
            answers never repeat (each has a step counter or a time).
        step_counts: whether the `step_count` of such a server's `state` must agree with the steps taken.
        capacity: the table of sessions to share; None is the one of this process.

    Example:
        >>> ClientConfig(capacity_timeout_s=5).capacity_timeout_s
        5
    """

    headers: Mapping[str, str] | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 10.0
    message_timeout_s: float = 60.0
    capacity_timeout_s: float = 60.0
    down_timeout_s: float = 0.0
    max_message_bytes: int = 100 * 2**20
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = 20.0
    compression: bool = False
    ssl_context: ssl.SSLContext | None = None
    binary: bool = True
    repeats: Literal["check", "fault"] = "check"
    step_counts: bool = True
    capacity: CapacityTable | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ClientConfig:
        """From keyword arguments; an unknown one is a BadArgument that lists the known."""
        known = [each.name for each in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise BadArgument(f"unknown client options {unknown}; there are {', '.join(known)}")
        if options.get("repeats", "check") not in ("check", "fault"):
            raise BadArgument(f"repeats={options['repeats']!r}: choose 'check' or 'fault'")
        return cls(**options)


class ClientOptions(TypedDict, total=False):
    """The fields of `ClientConfig`, for type checkers."""

    headers: Mapping[str, str] | None
    token: str | None
    connect_timeout_s: float
    message_timeout_s: float
    capacity_timeout_s: float
    down_timeout_s: float
    max_message_bytes: int
    ping_interval_s: float | None
    ping_timeout_s: float | None
    compression: bool
    ssl_context: ssl.SSLContext | None
    binary: bool
    repeats: Literal["check", "fault"]
    step_counts: bool
    capacity: CapacityTable | None


@dataclass
class ClientStats:
    """What a client has counted.

    `dropped`: answers without an open request; `checks`: requests made to find such answers; `renewed`: sessions that were
    replaced at a reset because they had ended or had sent something without a request. `opening_s`: time to open sessions,
    with the wait for a free one; `round_trip_s`: the shortest time of an answer that needs no environment, at its server.

    Example:
        >>> ClientStats().steps
        0
    """

    steps: int = 0
    resets: int = 0
    connects: int = 0
    refusals: int = 0
    interruptions: int = 0
    dropped: int = 0
    checks: int = 0
    renewed: int = 0
    opening_s: float = 0.0
    round_trip_s: float = 0.0
