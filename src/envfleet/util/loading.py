"""Objects by name: "module:name"."""

from __future__ import annotations

import importlib
from typing import Any

from envfleet.errors import BadArgument


def load_attribute(target: str, what: str) -> Any:
    """Import what "module:name" names; an error begins with `what`, e.g. the flag it was given with.

    Example:
        >>> load_attribute("math:pi", "--policy")
        3.141592653589793
        >>> load_attribute("math:tau2", "--policy")
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: --policy 'math:tau2': module 'math' has no attribute 'tau2'
    """
    module, colon, name = target.partition(":")
    if not colon:
        raise BadArgument(f"{what} {target!r}: MODULE:NAME is needed")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadArgument(f"{what} {target!r}: {error}") from error
