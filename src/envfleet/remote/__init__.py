"""Environments behind OpenEnv servers: protocol, clients, capacity, a server and a Gymnasium view.

Importing this package imports nothing else; each name loads its module when it is first used, so that
`websockets`, `uvicorn` and `starlette` (extra `remote`) are needed only where they are used.

Example:
    >>> from envfleet.remote import StepResult
    >>> StepResult({"n": 1}, reward=0.5).done
    False
"""

from __future__ import annotations

from envfleet.util.lazy_names import attach

__getattr__, __dir__, __all__ = attach(__name__)
