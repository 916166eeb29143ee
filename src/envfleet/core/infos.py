"""Infos that are sent as bytes: reads what the compiled life or pickle wrote."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import numpy as np

#: The first byte of an info written by compiled/info.c; no pickle begins with it.
PLAIN = 1
_FLOAT, _INT, _FALSE, _TRUE, _NONE, _TEXT, _SCALAR, _ARRAY = range(8)
_CONSTANTS = {_FALSE: False, _TRUE: True, _NONE: None}


def read_info(data: bytes) -> dict[str, Any]:
    """The info in bytes that came from one of our own workers.

    Example:
        >>> read_info(pickle.dumps({"won": True}))
        {'won': True}
    """
    if data[0] != PLAIN:
        info = pickle.loads(data)
        assert isinstance(info, dict)
        return info
    out: dict[str, Any] = {}
    at = 1
    while at < len(data):
        key, at = _text(data, at)
        out[key], at = _value(data, at)
    return out


def _text(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("=I", data, at)
    return data[at + 4 : at + 4 + length].decode(), at + 4 + length


def _value(data: bytes, at: int) -> tuple[Any, int]:
    kind, at = data[at], at + 1
    if kind in _CONSTANTS:
        return _CONSTANTS[kind], at
    if kind == _TEXT:
        return _text(data, at)
    if kind in (_FLOAT, _INT):
        return struct.unpack_from("=d" if kind == _FLOAT else "=q", data, at)[0], at + 8
    dtype, at = _DTYPES[data[at]], at + 1
    if kind == _SCALAR:
        return np.frombuffer(data, dtype, 1, at)[0], at + dtype.itemsize
    ndim, at = data[at], at + 1
    shape = struct.unpack_from(f"={ndim}q", data, at)
    count = int(np.prod(shape, dtype=np.int64))
    array = np.frombuffer(data, dtype, count, at + 8 * ndim).reshape(shape).copy()
    return array, at + 8 * ndim + array.nbytes


# NumPy's own numbers of its number types: the codes are those of this build, in which both ends run.
_DTYPES: dict[int, np.dtype[Any]] = {dtype.num: dtype for dtype in (np.dtype(code) for code in "?bBhHiIlLqQefdgFDG")}
