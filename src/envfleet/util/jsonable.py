"""Python values as JSON: datasets and digests hold nothing that would have to be unpickled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def to_jsonable(value: Any, strict: bool = False) -> Any:
    """Return a JSON value that keeps numbers, texts, lists and dicts; anything unknown becomes its repr.

    `strict`: what JSON has no form for (NaN, infinities, unknown objects) becomes null, and no method of an object is called.

    Example:
        >>> to_jsonable({"board": np.arange(3), "done": np.bool_(True), (1, 2): None})
        {'board': [0, 1, 2], 'done': True, '(1, 2)': None}
        >>> to_jsonable([1.5, float("nan"), object()], strict=True)
        [1.5, None, None]
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return None if strict and not math.isfinite(value) else value
    if isinstance(value, np.ndarray):
        plain = value.dtype.kind in "biu" or (value.dtype.kind == "f" and (not strict or np.isfinite(value).all()))
        return value.tolist() if plain else to_jsonable(value.tolist(), strict)
    if isinstance(value, np.generic):
        return to_jsonable(value.item(), strict)
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item, strict) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(item, strict) for item in value]
    if strict:
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    for name in ("model_dump", "tolist"):  # pydantic, which OpenEnv's observations are; arrays of other libraries
        method = getattr(value, name, None)
        if callable(method):
            return to_jsonable(method())
    return repr(value)
