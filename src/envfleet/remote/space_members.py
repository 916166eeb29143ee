"""Members of a Gymnasium space from what came over the wire: of the right type, or refused.

Actions are read so on a server, observations in a client. A number is not a string, a truth value not a number, 3.7 not
an integer (2.0 is: JavaScript knows no other), a missing field not a zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.errors import BadArgument

_NAMED = 10  # names an error message lists; what came in may have millions


class BadAction(BadArgument):
    """A value from the wire does not fit its space; the message says which part."""


class Flag(spaces.Discrete):
    """A Discrete(2) that is `true` or `false` on the wire, as a schema's boolean is."""

    def __init__(self) -> None:
        super().__init__(2)

    def __eq__(self, other: object) -> bool:
        """The same space as any Discrete(2)."""
        return bool(isinstance(other, spaces.Discrete) and (other.n, other.start) == (2, 0))


class MaybeText(spaces.Text):
    """A Text that may be null on the wire, where a schema allows it; null is read as the empty text."""

    def __eq__(self, other: object) -> bool:
        """The same space as the Text without it."""
        plain = (self.min_length, self.max_length, self.character_set)
        return isinstance(other, spaces.Text) and plain == (other.min_length, other.max_length, other.character_set)


def from_json(space: spaces.Space[Any], value: Any, where: str, *, observed: bool = False, nulls: bool = False) -> Any:
    """A member of the space from decoded data; raises BadAction naming the part that does not fit.

    `observed`: what an environment gave is taken as it is also where it leaves its space's bounds, as a local fleet
    takes it. `nulls`: null stands for NaN, which is how official servers write it.
    """
    if type(value) is str and type(space) is spaces.Text:
        return value  # alphabets are a sampling aid; a message outside ASCII is still a message
    try:
        return _member(space, value, where, observed, nulls)
    except (OverflowError, RecursionError):
        raise BadAction(f"{where} = {show(value)} is out of range") from None


def _member(space: spaces.Space[Any], value: Any, where: str, observed: bool, nulls: bool) -> Any:
    if isinstance(space, spaces.Dict):
        return _dict(space, value, where, observed, nulls)
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(space.spaces):
            raise BadAction(f"{where} must be a list of {len(space.spaces)}")
        parts = enumerate(zip(space.spaces, value))
        return tuple(_member(inner, part, f"{where}[{i}]", observed, nulls) for i, (inner, part) in parts)
    if isinstance(space, Flag):
        if type(value) is not bool:
            raise BadAction(f"{where} must be true or false, got {show(value)}")
        return int(value)
    if isinstance(space, spaces.Discrete):
        return _integer(space, value, where, observed and not nulls)
    if isinstance(space, spaces.Text):
        if isinstance(value, str):
            return value
        if value is None and isinstance(space, MaybeText):
            return ""  # a Text space has nothing else for it
        raise BadAction(f"{where} must be a string, got {show(value)}")
    if isinstance(space, spaces.Sequence):
        return _sequence(space, value, where, observed, nulls)
    if isinstance(space, (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)):
        assert space.dtype is not None and space.shape is not None
        array = array_of(space.dtype, space.shape, value, where, exactly=observed and not nulls, nulls=nulls)
        if not observed and not space.contains(array):
            raise BadAction(f"{where} = {show(value)} is not in {space}")
        return array
    raise BadAction(f"{where}: values of {space} cannot be read")


def _dict(space: spaces.Dict, value: Any, where: str, observed: bool, nulls: bool) -> dict[str, Any]:
    # An observation may have more fields than its space (those of the info); an action may not.
    known = isinstance(value, Mapping) and value.keys() >= space.spaces.keys()
    if not known or (not observed and len(value) != len(space.spaces)):
        got = sorted(map(str, value))[:_NAMED] if isinstance(value, Mapping) else show(value)
        raise BadAction(f"{where} must have the fields {sorted(space.spaces)}, got {show(got)}")
    return {key: _member(inner, value[key], f"{where}.{key}", observed, nulls) for key, inner in space.spaces.items()}


def _integer(space: spaces.Discrete, value: Any, where: str, unbounded: bool) -> int:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or (not isinstance(value, int) and (not math.isfinite(value) or value != int(value))):
        raise BadAction(f"{where} must be an integer, got {show(value)}")
    whole = int(value)
    low, high = (-(2**63), 2**63) if unbounded else (int(space.start), int(space.start) + int(space.n))
    if not low <= whole < high:
        raise BadAction(f"{where} = {show(value)} is not in {space}")
    return whole


def _sequence(space: spaces.Sequence, value: Any, where: str, observed: bool, nulls: bool) -> Any:
    feature = space.feature_space
    if not space.stack:
        if not isinstance(value, (list, tuple)):
            raise BadAction(f"{where} must be a list")
        return tuple(_member(feature, part, f"{where}[{i}]", observed, nulls) for i, part in enumerate(value))
    if feature.dtype is None or feature.shape is None or not isinstance(value, (list, np.ndarray)):
        raise BadAction(f"{where}: values of {space} cannot be read")
    return array_of(feature.dtype, (len(value), *feature.shape), value, where, nulls=nulls)


def array_of(
    dtype: np.dtype[Any], shape: tuple[int, ...], value: Any, where: str, exactly: bool = False, nulls: bool = False
) -> np.ndarray[Any, Any]:
    """An array of this dtype and shape from an array or nested lists, every value as it was; raises BadAction.

    `exactly`: an array that came must have this very dtype.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        given = np.asarray(value)
        if given.shape != shape or (exactly and given.dtype != dtype) or given.dtype.kind not in "biufc":
            raise BadAction(f"{where} must be {dtype} of shape {shape}, got {given.dtype} of {given.shape}")
        return _cast(given, dtype, where)
    flat = [value]
    for size in shape:
        if not all(isinstance(part, (list, tuple)) and len(part) == size for part in flat):
            raise BadAction(f"{where} must have shape {shape}, got {show(value)}")
        flat = list(chain.from_iterable(flat))
    kinds = set(map(type, flat))
    if nulls and dtype.kind == "f" and type(None) in kinds:
        flat = [math.nan if number is None else number for number in flat]
        kinds.discard(type(None))
    if not kinds <= ({bool} if dtype.kind == "b" else {int, float}):
        raise BadAction(f"{where} must be numbers ({dtype}) of shape {shape}, got {show(value)}")
    if dtype.kind == "f" and kinds <= {float}:
        return _cast(np.array(flat, np.float64), dtype, where).reshape(shape)
    if dtype.kind in "iu":
        return np.array([_whole(number, dtype, where) for number in flat], dtype).reshape(shape)
    return _cast(np.array([float(number) for number in flat]), dtype, where).reshape(shape)


def _whole(number: float, dtype: np.dtype[Any], where: str) -> int:
    limits = np.iinfo(dtype)
    if type(number) is float and not number.is_integer():
        raise BadAction(f"{where} must be integers, got {show(number)}")
    if not limits.min <= number <= limits.max:
        raise BadAction(f"{where} = {show(number)} does not fit {dtype}")
    return int(number)


def _cast(given: np.ndarray[Any, Any], dtype: np.dtype[Any], where: str) -> np.ndarray[Any, Any]:
    """The array in another dtype; refused where that would change a value (but for a float's last digits)."""
    if given.dtype == dtype:
        return given
    if (given.dtype.kind == "b") != (dtype.kind == "b") or (given.dtype.kind == "c" and dtype.kind != "c"):
        raise BadAction(f"{where} must be {dtype}, got {given.dtype}")
    with np.errstate(all="ignore"):
        cast = given.astype(dtype)
        same = np.isfinite(cast) == np.isfinite(given) if dtype.kind in "fc" else cast == given
    if not same.all():
        raise BadAction(f"{where} has values that do not fit {dtype}")
    return cast


def show(value: Any) -> str:
    """A value for an error message: short, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value[:80] if isinstance(value, (str, bytes, list)) else value)
    except (RecursionError, ValueError):
        text = type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
