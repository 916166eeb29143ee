"""Arguments of a fleet's methods, checked before anything happens."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import numpy as np

from envfleet.errors import BadArgument
from envfleet.slots.slab import Slots


def refuse_unknown(call: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Refuse keyword arguments that do not exist, and say which was meant.

    Example:
        >>> refuse_unknown("make", ["n_envs"], ["num_envs", "backend"])
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: make() has no argument 'n_envs': did you mean num_envs?
    """
    known = sorted(known)
    for name in unknown:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        raise BadArgument(f"{call}() has no argument {name!r}: {hint}")


def per_slot(what: str, values: Any, count: int, sequences: tuple[type, ...] = (list, tuple)) -> list[Any]:
    """One value per slot: a sequence of the right length, or the same value for all."""
    listed: list[Any] = [*values] if isinstance(values, sequences) else [values] * count  # type: ignore[misc]
    if len(listed) != count:
        raise BadArgument(f"{what} has {len(listed)} entries for {count} slots")
    return listed


def checked_seed(seed: Any) -> int:
    """A seed that fits the column.

    Example:
        >>> checked_seed(7)
        7
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= int(seed) < 2**63:
        raise BadArgument(f"seed {seed!r}: give a whole number from 0 to 2**63 - 1, or None")
    return int(seed)


def checked_slots(slots: Any, everything: Slots) -> tuple[Slots, Slots | None]:
    """Ascending slots, and the order that sorts the caller's values in the same way (None: already sorted)."""
    if slots is None or slots is everything:
        return everything, None
    chosen = np.asarray(slots)
    if chosen.dtype == bool and chosen.shape == everything.shape:
        return np.flatnonzero(chosen), None
    if chosen.ndim != 1 or not len(chosen) or chosen.dtype.kind not in "iu":
        raise BadArgument(f"slots={slots!r}: give a list of slot numbers, at least one")
    chosen = chosen.astype(np.int64)
    order = None
    if (chosen[1:] <= chosen[:-1]).any():
        order = np.argsort(chosen, kind="stable")
        chosen = chosen[order]
        if (np.diff(chosen) == 0).any():
            raise BadArgument(f"slots={slots!r}: a slot is named twice")
    if chosen[0] < 0 or chosen[-1] >= len(everything):
        raise BadArgument(f"slots={slots!r}: this fleet has slots 0 … {len(everything) - 1}")
    return chosen, order
