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
    "BadFrame": "wire",
    "BadMessage": "errors",
    "BadRequest": "errors",
    "CapacityReached": "errors",
    "CapacityTable": "capacity",
    "ChaosProxy": "chaos",
    "ClientBusy": "errors",
    "ClientConfig": "client",
    "ClientStats": "client",
    "ConnectFailed": "errors",
    "Endpoint": "wire",
    "EnvError": "errors",
    "Fields": "result",
    "HttpEnvClient": "sync",
    "LocalEnvClient": "local",
    "MessageTimeout": "errors",
    "MessageTooBig": "errors",
    "OpenEnvGymnasiumWrapper": "wrapper",
    "ProtocolBroken": "errors",
    "RemoteError": "errors",
    "Server": "server",
    "ServerConfig": "server",
    "ServerError": "errors",
    "SessionInterrupted": "errors",
    "SessionLost": "errors",
    "SessionRefused": "errors",
    "StepResult": "result",
    "Unauthorized": "errors",
    "as_client": "official",
    "serve": "server",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
