"""Python values as JSON: datasets and digests hold nothing that would have to be unpickled."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def to_jsonable(value: Any) -> Any:
    """Return a JSON value that keeps numbers, texts, lists and dicts; anything unknown becomes its repr.

    Example:
        >>> to_jsonable({"board": np.arange(3), "done": np.bool_(True), (1, 2): None})
        {'board': [0, 1, 2], 'done': True, '(1, 2)': None}
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, np.generic):
        return to_jsonable(value.item())
    if isinstance(value, np.ndarray):
        return to_jsonable(value.tolist())
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    dump = getattr(value, "model_dump", None)  # pydantic, which OpenEnv's observations are
    if callable(dump):
        return to_jsonable(dump())
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return to_jsonable(tolist())
    return repr(value)
