"""What can go wrong on the way to an environment behind a server.

::

    RemoteError (FleetError)
    ├── ConnectFailed (ConnectionError)   no server answered; `.url`
    │   └── Unauthorized                  it answered 401 or 403: the token is missing or wrong
    ├── CapacityReached                   no session came free in time; `.active`, `.max`
    ├── SessionInterrupted                the episode is over, reset() is due; `.reason`, `.steps`
    │   ├── MessageTimeout (TimeoutError) no answer within the message's deadline
    │   ├── SessionLost (ConnectionError) the connection ended
    │   ├── MessageTooBig                 a message over the limit of this client or of the server
    │   └── ProtocolBroken                the server said something that is not an answer
    ├── ClientBusy                        two calls at once on one client
    └── ServerError                       the server answered with an error; `.code`
        ├── EnvError                      EXECUTION_ERROR: the environment raised; the session goes on
        ├── BadRequest                    VALIDATION_ERROR: the message does not fit; the session goes on
        ├── BadMessage                    INVALID_JSON, UNKNOWN_TYPE: not understood; the session goes on
        └── SessionRefused                FACTORY_ERROR, SESSION_ERROR: no environment; the session is over
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envfleet.errors import FleetError


class RemoteError(FleetError):
    """The base of the errors of remote environments."""


class ConnectFailed(RemoteError, ConnectionError):
    """No session could be opened because no server answered (or not as an OpenEnv server would)."""

    def __init__(self, url: str, why: str) -> None:
        self.url, self.why = url, why
        super().__init__(f"cannot connect to {url}: {why}")


class Unauthorized(ConnectFailed):
    """The server wants a token, or another one."""


class CapacityReached(RemoteError):
    """The servers were full for as long as the caller would wait.

    Example:
        >>> CapacityReached("http://a:8000", active=2, max=2).max
        2
    """

    def __init__(self, url: str, active: int | None = None, max: int | None = None, waited_s: float = 0.0) -> None:
        self.url, self.active, self.max, self.waited_s = url, active, max, waited_s
        seen = f"{active}/{max} sessions are taken" if max is not None else "every session is taken"
        waited = f" and none came free in {waited_s:g} s" if waited_s else ""
        super().__init__(
            f"{url} is full: {seen}{waited}. Raise the server's session limit, add servers, or ask for fewer"
        )


class SessionInterrupted(RemoteError):
    """The session was cut in the middle; what the environment did since the last answer is not known."""

    def __init__(self, url: str, reason: str, steps: int = 0) -> None:
        self.url, self.reason, self.steps = url, reason, steps
        super().__init__(f"the episode at {url} was interrupted after {steps} steps: {reason}. reset() starts anew")


class MessageTimeout(SessionInterrupted, TimeoutError):
    """A request was not answered in time."""


class SessionLost(SessionInterrupted, ConnectionError):
    """The connection ended while an episode was running, or while an answer was due."""


class MessageTooBig(SessionInterrupted):
    """A message was larger than `max_message_bytes` here, or than the server accepts."""


class ProtocolBroken(SessionInterrupted):
    """The server sent what is not an answer to the request."""


class ClientBusy(RemoteError):
    """A client is one session; it cannot run two calls at once."""

    def __init__(self) -> None:
        super().__init__("this client is in the middle of another call: one client is one session, use one each")


class ServerError(RemoteError):
    """The server answered with an error frame."""

    def __init__(self, code: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        self.code, self.details = code, dict(details or {})
        super().__init__(f"{code}: {message}")


class EnvError(ServerError):
    """The environment raised in a reset or a step; the session is still there."""


class BadRequest(ServerError):
    """The server did not accept the fields of the request; `details["errors"]` lists them."""


class BadMessage(ServerError):
    """The server could not read the message at all."""


class SessionRefused(ServerError):
    """The server could not give (or keep) an environment for this session."""


class Unsolicited(Exception):
    """Between link and client: a frame came without a request; it must not answer a later request."""

    def __init__(self, message: Any) -> None:
        self.message = message
        super().__init__("a frame without a request")


class Closed(Exception):
    """Between link and client: the connection ended; `too_big` when a size limit was the reason."""

    def __init__(self, why: str, too_big: bool = False) -> None:
        self.too_big = too_big
        super().__init__(why)


_BY_CODE: dict[str, type[ServerError]] = {
    "EXECUTION_ERROR": EnvError,
    "VALIDATION_ERROR": BadRequest,
    "INVALID_JSON": BadMessage,
    "UNKNOWN_TYPE": BadMessage,
    "FACTORY_ERROR": SessionRefused,
    "SESSION_ERROR": SessionRefused,
}


def from_frame(data: Any, url: str) -> RemoteError:
    """The exception for an error frame's data."""
    data = data if isinstance(data, Mapping) else {"message": str(data)}
    code, message = str(data.get("code", "UNKNOWN")), str(data.get("message", "no message"))
    if code == "CAPACITY_REACHED":
        return CapacityReached(url, _count(data.get("active_sessions")), _count(data.get("max_sessions")))
    details = {key: value for key, value in data.items() if key not in ("code", "message")}
    return _BY_CODE.get(code, ServerError)(code, message, details)


def _count(value: Any) -> int | None:
    """What a server says of its sessions, if it is a number that can be one."""
    return value if type(value) is int and 0 <= value < 2**31 else None
