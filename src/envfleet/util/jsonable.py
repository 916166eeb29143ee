"""Python values as JSON: datasets, digests and messages hold nothing that would have to be unpickled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from envfleet.util.text import short


def to_jsonable(value: Any, *, unknown: Callable[[Any], Any] | None = None, nan: bool = True, strict: bool = False) -> Any:
    """Return a JSON value that keeps numbers, texts, lists and dicts.

    Args:
        value: what to convert.
        unknown: converts other objects; by default dataclasses and pydantic models become dicts, the rest its repr.
        nan: keep NaN and infinities, which strict JSON lacks; False makes them None.
        strict: TypeError instead of a repr, and for keys that are not text: nothing becomes text that was not.

    Example:
        >>> to_jsonable({"board": np.arange(3), "done": np.bool_(True), (1, 2): None})
        {'board': [0, 1, 2], 'done': True, '(1, 2)': None}
        >>> to_jsonable([np.nan, 1j], unknown=type, nan=False)
        [None, <class 'complex'>]
        >>> to_jsonable({"raw": b"abc"}, strict=True)
        Traceback (most recent call last):
        ...
        TypeError: b'abc' is of type bytes
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if nan or math.isfinite(value) else None
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind != "O":
        kind = value.dtype.kind
        if strict and kind in "mM":  # tolist() makes integers of some
            raise TypeError(f"{short(value)} is of type {value.dtype}")
        if kind in "biu" or (kind == "f" and (nan or np.isfinite(value).all())):
            return value.tolist()
        return to_jsonable(value.tolist(), unknown=unknown, nan=nan, strict=strict)
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else _text_key(key, strict): to_jsonable(item, unknown=unknown, nan=nan, strict=strict)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(item, unknown=unknown, nan=nan, strict=strict) for item in value]
    return unknown(value) if unknown is not None else _described(value, nan, strict)


def _text_key(key: Any, strict: bool) -> str:
    if strict:
        raise TypeError(f"the key {key!r} is of type {type(key).__name__}")
    return str(key)


def _described(value: Any, nan: bool, strict: bool) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name), nan=nan, strict=strict) for f in dataclasses.fields(value)}
    for name in ("model_dump", "tolist"):  # pydantic, which OpenEnv's observations are; tensors
        convert = getattr(value, name, None)
        if callable(convert):
            return to_jsonable(convert(), nan=nan, strict=strict)
    if strict:
        raise TypeError(f"{short(value)} is of type {type(value).__name__}")
    return repr(value)
