"""Views of a fleet for other libraries: `envfleet.adapters.sb3`, `.torchrl`, `.gymnasium`, loaded when first used."""

from __future__ import annotations

import importlib
from typing import Any

_PARTS = ("agents", "classic", "flatten", "gymnasium", "sb3", "torchrl")


def __getattr__(name: str) -> Any:
    if name not in _PARTS:
        raise AttributeError(f"module 'envfleet.adapters' has no attribute {name!r}")
    return importlib.import_module(f"envfleet.adapters.{name}")
