"""Actions in the caller's dtype.

A vector env hands each env its item of what the caller gave. A float64 action for a float32 space is another number than
its float32 version, so it must arrive as it is. Rows of the usual dtype, the space's, are in the column `action`. Any other
number type is written as bytes into the column `wide_action` (8 bytes per element), and `action_type` in the head says which.
"""

from __future__ import annotations

from typing import Any

import numpy as np

#: `action_type` 1 is the first of these; 0 is the dtype of the space.
TYPES = tuple(np.dtype(name) for name in ("?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"))
_NUMBER = {dtype: i for i, dtype in enumerate(TYPES, 1)}


def type_number(given: np.dtype[Any], own: np.dtype[Any]) -> int | None:
    """The `action_type` of an array; None when it cannot be sent as it is (text, objects, foreign byte order).

    Example:
        >>> [type_number(np.dtype(name), np.dtype("f4")) for name in ("f4", "f8", "O")]
        [0, 12, None]
    """
    return 0 if given == own else _NUMBER.get(given)


def write_wide(wide: np.ndarray[Any, Any], where: Any, rows: np.ndarray[Any, Any]) -> None:
    """Write rows of any of `TYPES` into the slots' rows of a `wide_action` column."""
    count, size = len(rows), int(np.prod(rows.shape[1:], dtype=np.int64)) * rows.dtype.itemsize
    if size:
        _bytes(wide)[where, :size] = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(count, size)


def read_wide(wide: np.ndarray[Any, Any], slot: int, number: int) -> Any:
    """The action of one slot: a NumPy scalar, or an array of its own.

    Example:
        >>> wide = np.zeros((2, 1, 3), np.uint64)
        >>> write_wide(wide, [1], np.array([[1, -2, 3]], np.int16))
        >>> read_wide(wide, 1, type_number(np.dtype(np.int16), np.dtype(np.int64)))
        array([ 1, -2,  3], dtype=int16)
    """
    dtype, shape = TYPES[number - 1], wide.shape[2:]
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return _bytes(wide)[slot, :size].copy().view(dtype).reshape(shape)[()]


def read_wide_rows(wide: np.ndarray[Any, Any], slots: Any, number: int) -> np.ndarray[Any, Any]:
    """The actions of several slots that were given in the same dtype, as one array.

    Example:
        >>> wide = np.zeros((3, 1, 2), np.uint64)
        >>> write_wide(wide, [0, 2], np.array([[1, 2], [3, 4]], np.int16))
        >>> read_wide_rows(wide, [0, 2], type_number(np.dtype(np.int16), np.dtype(np.int64))).tolist()
        [[1, 2], [3, 4]]
    """
    dtype, shape = TYPES[number - 1], wide.shape[2:]
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    rows = np.ascontiguousarray(_bytes(wide)[slots, :size])
    return rows.reshape(-1).view(dtype).reshape(len(rows), *shape)


def _bytes(wide: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return wide.reshape(-1).view(np.uint8).reshape(len(wide), -1)
