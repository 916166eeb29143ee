"""Environments behind OpenEnv servers: the wire once, clients, capacity, a server and a Gymnasium view.

Importing this package imports nothing else; each name loads its module when it is first used, so that
`websockets`, `uvicorn` and `starlette` (extra `remote`) are needed only by who uses them.

Example:
    >>> from envfleet.remote import StepResult
    >>> StepResult({"n": 1}, reward=0.5).done
    False
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "AsyncEnvClient": "client",
    "BadFrame": "exact_protocol",
    "BadMessage": "remote_errors",
    "BadRequest": "remote_errors",
    "CapacityReached": "remote_errors",
    "CapacityTable": "session_queue",
    "ClientBusy": "remote_errors",
    "ClientConfig": "client_config",
    "ClientStats": "client_config",
    "Connect4Client": "local_client",
    "ConnectFailed": "remote_errors",
    "EchoClient": "local_client",
    "Endpoint": "address",
    "EnvError": "remote_errors",
    "Fields": "result",
    "HttpEnvClient": "sync_client",
    "LocalEnvClient": "local_client",
    "MessageTimeout": "remote_errors",
    "MessageTooBig": "remote_errors",
    "OpenEnvGymnasiumWrapper": "wrapper",
    "ProtocolBroken": "remote_errors",
    "RemoteError": "remote_errors",
    "Server": "server",
    "ServerConfig": "server_config",
    "ServerError": "remote_errors",
    "SessionInterrupted": "remote_errors",
    "SessionLost": "remote_errors",
    "SessionRefused": "remote_errors",
    "StepResult": "result",
    "Unauthorized": "remote_errors",
    "as_client": "official_clients",
    "serve": "server",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
