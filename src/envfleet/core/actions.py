"""Actions as users batch them, written into the slots' rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.errors import BadArgument
from envfleet.slots.action_types import type_number, write_wide
from envfleet.slots.layout import Leaf, gather
from envfleet.slots.slab import Slab, Slots

_ALL = slice(None)


class ActionWriter:
    """Checks a batch of actions against the space and writes it; remembers it for fault records."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.leaves = slab.action_leaves
        self.arrays = slab.leaf_arrays("action")
        self.last: Any = None  # the batch last written, when it is one array
        only = self.leaves[0] if len(self.leaves) == 1 and not self.leaves[0].path else None
        self._whole = self.arrays[0][:, 0] if only is not None and self.arrays[0] is not None else None
        self._wide = [slab.arrays.get(f"wide_action/{i}") for i in range(len(self.leaves))]
        self._types = slab.head["action_type"]
        self._any_wide = False  # whether a row was ever written in another dtype than the space's

    def write_plain(self, actions: Any, slots: Slots) -> bool:
        """`write` for ascending slots when the action is one array; False leaves it to `write`."""
        whole = self._whole
        if whole is None:
            return False
        rows = actions if type(actions) is np.ndarray else np.asarray(actions)
        if rows.shape != (len(slots), *whole.shape[1:]) or (rows.dtype != whole.dtype and not self._fits(0, rows)):
            return False
        self._put(0, _ALL if len(slots) == len(whole) else slots, rows)
        self.last = rows.copy()
        return True

    def write(self, actions: Any, slots: Slots, order: Slots | None, check: bool = False) -> dict[int, dict[int, Any]]:
        """Write the actions into the rows; returns the objects of mailbox leaves (leaf index -> slot -> object)."""
        count, mail = len(slots), {}
        values = self._leaf_batches(actions, count)
        for i, (leaf, array, value) in enumerate(zip(self.leaves, self.arrays, values)):
            if array is None:
                items = list(value)
                if len(items) != count:
                    raise BadArgument(f"{len(items)} actions{leaf.name} for {count} slots")
                if order is not None:
                    items = [items[j] for j in order]
                mail[i] = dict(zip(slots.tolist(), items))
                self.last = items
            else:
                rows = self._column(i, leaf, value, count)
                if order is not None:
                    rows = rows[order]
                if check and not self.slab.layout.agents:
                    _check_contained(leaf, rows, slots)
                self._put(i, _ALL if count == self.slab.num_slots else slots, rows)
                # A copy, so that a fault record shows what was sent, also if the caller changes the array later.
                self.last = rows.copy()
        if check and self.slab.layout.agents:
            self._check_agents(slots)
        return mail

    def _put(self, i: int, where: Any, rows: np.ndarray[Any, Any]) -> None:
        """Write the rows of one leaf as they were given: see `action_types`."""
        array, wide = self.arrays[i], self._wide[i]
        assert array is not None
        number = type_number(rows.dtype, array.dtype) if wide is not None and rows.dtype != array.dtype else 0
        if number:
            self._any_wide = True  # first: if this is interrupted, the next write sets the types
            assert wide is not None
            write_wide(wide, where, rows)
        else:
            array[where, 0] = rows
        if self._any_wide:
            self._types[where, i] = number or 0

    def _fits(self, i: int, rows: np.ndarray[Any, Any]) -> bool:
        """Whether rows of this dtype can be sent: as they are, or else cast within their kind."""
        dtype = self.leaves[i].dtype
        assert dtype is not None
        as_given = self._wide[i] is not None and type_number(rows.dtype, dtype) is not None
        return as_given or np.can_cast(rows.dtype, dtype, "same_kind" if rows.dtype.isnative else "no")

    def _leaf_batches(self, actions: Any, count: int) -> list[Any]:
        if len(self.leaves) == 1 and not self.leaves[0].path:
            return [actions]
        if isinstance(actions, (list, tuple)) and len(actions) == count and _looks_single(actions, self.leaves):
            # One action per slot, as an agent per env would give them.
            return [[_follow(action, leaf) for action in actions] for leaf in self.leaves]
        return [_follow(actions, leaf) for leaf in self.leaves]

    def _column(self, i: int, leaf: Leaf, value: Any, count: int) -> np.ndarray[Any, Any]:
        try:
            rows = np.asarray(value)
        except ValueError as ragged:
            raise BadArgument(f"actions{leaf.name} cannot be one array: {ragged}") from None
        rows = rows if rows.dtype.isnative else rows.astype(rows.dtype.newbyteorder("="))  # the same numbers
        if rows.shape != (count, *leaf.shape):
            raise BadArgument(
                f"actions{leaf.name} have shape {rows.shape}; {count} slots of {leaf.space} need {(count, *leaf.shape)}"
            )
        if rows.dtype != leaf.dtype and not self._fits(i, rows):
            raise BadArgument(f"actions{leaf.name} have dtype {rows.dtype}, which cannot become {leaf.dtype} safely")
        return rows

    def _check_agents(self, slots: Slots) -> None:
        """Many agents: actions of inactive agents are ignored, so only those of active agents are checked."""
        groups = self.slab.layout.groups
        for slot in slots.tolist():
            rows = [array[slot, 0] for array in self.arrays if array is not None]
            for group in groups:
                mine = [row for row, leaf in zip(rows, self.leaves) if len(groups) == 1 or leaf.path[0] == group.name]
                for place, i in enumerate(group.indices):
                    action = gather(group.action_space, [row[place] for row in mine])
                    if self.slab.head["active"][slot, i] and not group.action_space.contains(action):
                        raise BadArgument(
                            f"action {action} of agent {group.agents[place]!r} in slot {slot} is not in {group.action_space}"
                        )


def _check_contained(leaf: Leaf, rows: np.ndarray[Any, Any], slots: Slots) -> None:
    """Refuse actions outside the space. A dtype of the same kind is no reason: the values count."""
    assert leaf.dtype is not None
    values = rows.astype(leaf.dtype) if np.can_cast(rows.dtype, leaf.dtype, "same_kind") else rows
    for slot, value in zip(slots.tolist(), values):
        if not leaf.space.contains(value):
            raise BadArgument(f"action {value}{leaf.name} of slot {slot} is not in {leaf.space}")


def _looks_single(actions: Any, leaves: list[Leaf]) -> bool:
    """Whether a sequence holds one whole action per slot, rather than one batch per leaf."""
    key = leaves[0].path[0]
    if isinstance(key, str):
        return all(isinstance(action, Mapping) for action in actions)
    return all(isinstance(action, (tuple, list)) for action in actions) and isinstance(actions, list)


def _follow(value: Any, leaf: Leaf) -> Any:
    for key in leaf.path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise BadArgument(f"the actions have no {leaf.name}, which the action space asks for") from None
    return value
