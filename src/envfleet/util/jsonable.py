"""Python values as JSON: datasets, digests and messages hold nothing that would have to be unpickled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def to_jsonable(value: Any, *, unknown: Callable[[Any], Any] | None = None, nan: bool = True) -> Any:
    """Return a JSON value that keeps numbers, texts, lists and dicts.

    Args:
        value: what to convert.
        unknown: converts other objects; by default dataclasses and pydantic models become dicts, the rest its repr.
        nan: keep NaN and infinities, which strict JSON lacks; False makes them None.

    Example:
        >>> to_jsonable({"board": np.arange(3), "done": np.bool_(True), (1, 2): None})
        {'board': [0, 1, 2], 'done': True, '(1, 2)': None}
        >>> to_jsonable([np.nan, 1j], unknown=type, nan=False)
        [None, <class 'complex'>]
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if nan or math.isfinite(value) else None
    if isinstance(value, np.ndarray):
        kind = value.dtype.kind
        if kind in "biu" or (kind == "f" and (nan or np.isfinite(value).all())):
            return value.tolist()
        return to_jsonable(value.tolist(), unknown=unknown, nan=nan)
    if isinstance(value, np.generic):
        return to_jsonable(value.item(), unknown=unknown, nan=nan)
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else str(key): to_jsonable(item, unknown=unknown, nan=nan) for key, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(item, unknown=unknown, nan=nan) for item in value]
    return unknown(value) if unknown is not None else _described(value, nan)


def _described(value: Any, nan: bool) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name), nan=nan) for f in dataclasses.fields(value)}
    for name in ("model_dump", "tolist"):  # pydantic, which OpenEnv's observations are; tensors
        convert = getattr(value, name, None)
        if callable(convert):
            return to_jsonable(convert(), nan=nan)
    return repr(value)
