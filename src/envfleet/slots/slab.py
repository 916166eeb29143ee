"""The slab: a row per slot, in one block of memory.

A row belongs to the caller while its slot is received, to the worker while it is sent. There are no locks.
The block is this process's heap, or shared memory; the arrays are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from envfleet.slots.layout import LOUD, Layout, gather

Slots = np.ndarray[Any, np.dtype[np.int64]]


class Slab:
    """Arrays over one block: `slab.obs`, `slab.reward`, `slab.terminated` … with one row per slot.

    Example:
        >>> import gymnasium as gym
        >>> layout = Layout(gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2))
        >>> slab = Slab(layout, num_slots=4)
        >>> slab.obs.shape, slab.reward.shape
        ((4, 3), (4,))
    """

    def __init__(
        self, layout: Layout, num_slots: int, memory: Any = None, fill: bool = True, keep: bool = True, keep_obs: bool = True
    ) -> None:
        self.layout = layout
        self.num_slots = num_slots
        at, self.size_bytes = layout.offsets(num_slots, keep, keep_obs)
        # Through frombuffer, which keeps a reference to the block: with a bare mmap it could be unmapped while the arrays
        # below exist, and reading the rows of a closed fleet would end the process.
        self.memory = np.zeros(self.size_bytes, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        for name, dtype, shape in layout.arrays(keep, keep_obs):
            self.arrays[name] = np.ndarray((num_slots, *shape), dtype, buffer=self.memory, offset=at[name])
        self.head = self.arrays["head"]
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._plain: dict[str, np.ndarray[Any, Any]] = {}
        self.raw = self._plain_rows("head")
        #: A view of each scalar of all rows, made once: every life holds these, and thousands of lives hold the same.
        self.scalars = {name: self.head[name] for name in self.head.dtype.names or ()}
        #: (dtype, shape, offset) of each scalar in a row; the shape is () but for many agents' columns.
        self.fields = {
            name: (entry[0].base, entry[0].shape if layout.agents else (), entry[1])
            for name, entry in (self.head.dtype.fields or {}).items()
        }
        self.obs_leaves = layout.obs_leaves
        self.action_leaves = layout.action_leaves
        kinds = {"obs": self.obs_leaves, "final_obs": self.obs_leaves, "action": self.action_leaves}
        # Objects of mailbox leaves: per leaf index a list with one object per slot. Never in shared memory.
        self.mail: dict[str, dict[int, list[Any]]] = {
            kind: {i: [None] * num_slots for i, leaf in enumerate(leaves) if not leaf.is_column} for kind, leaves in kinds.items()
        }
        #: What `keep` copies: (rows, where they are kept). Empty where rows travel by value: those are whole or absent.
        self.kept = [(array, self.arrays[f"kept/{name}"]) for name, array in self.arrays.items() if f"kept/{name}" in self.arrays]
        self._kept_mail: dict[int, list[Any]] = {i: [None] * num_slots for i in self.mail["obs"]} if keep and keep_obs else {}
        self._leaf_arrays = {kind: [self.arrays.get(f"{kind}/{i}") for i in range(len(leaves))] for kind, leaves in kinds.items()}
        # If the value is one array, that array: this is the usual case, and every batch looks it up.
        self._only = {
            kind: arrays[0][:, 0] if len(arrays) == 1 and arrays[0] is not None and not leaves[0].path else None
            for (kind, arrays), leaves in zip(self._leaf_arrays.items(), (self.obs_leaves, self.obs_leaves, self.action_leaves))
        }
        if fill:
            for name in ("episode", "step", "task", "seed", "now_seed", "now_task", "next_seed", "next_task"):
                self.head[name] = -1
            self.head["waiting"] = True

    @property
    def has_mail(self) -> bool:
        """Whether any observation leaf is a mailbox leaf."""
        return bool(self.mail["obs"])

    def leaf_arrays(self, kind: str) -> list[np.ndarray[Any, Any] | None]:
        """Per leaf of `kind` ("obs", "final_obs", "action"): its array with the agent axis, None for mailbox leaves."""
        return self._leaf_arrays[kind]

    def tree(self, kind: str, slots: Slots | slice, copy: bool) -> Any:
        """Rows of "obs", "final_obs" or "action" as the batched value users know: array, dict or tuple."""
        only = self._only[kind]
        if only is not None:
            rows = only[slots]
            return rows.copy() if copy and isinstance(slots, slice) else rows
        space = self.layout.action_space if kind == "action" else self.layout.observation_space
        values: list[Any] = []
        for i, array in enumerate(self.leaf_arrays(kind)):
            if array is None:
                box = self.mail[kind][i]
                values.append(tuple(box[slots] if isinstance(slots, slice) else [box[s] for s in slots]))
            else:
                rows = array[slots, 0]
                # Indexing by an array copies already; by a slice it does not.
                values.append(rows.copy() if copy and isinstance(slots, slice) else rows)
        return gather(space, values)

    def __getattr__(self, name: str) -> Any:
        # slab.reward, slab.obs …: zero-copy views of every row, the agent axis hidden.
        if name.startswith("_") or "arrays" not in self.__dict__:
            raise AttributeError(name)
        if name in ("obs", "final_obs", "action"):
            return self.tree(name, slice(None), copy=False)
        if f"column/{name}" in self.arrays:
            return self.arrays[f"column/{name}"][:, 0]
        if name in (self.head.dtype.names or ()):
            column = self.head[name]
            return column[:, 0] if column.ndim == 2 and not self.layout.agents else column
        raise AttributeError(f"the slab has no column {name!r}")

    def gather_action(self, values: list[Any]) -> Any:
        """One action from its leaves."""
        return gather(self.layout.action_space, values)

    def keep(self, slot: int, turn: int) -> None:
        """Keep a copy of the row as it was delivered, before this turn's advance writes into it.

        If the advance fails (its process died, its call was given up), the fault row is made from this copy, and not from
        a row that is half written or was never delivered. Without fault rows (`on_fault="raise"`) the head is enough.
        """
        if not self.kept:
            return
        for array, kept in self.kept:
            kept[slot] = array[slot]
        for i, box in self._kept_mail.items():
            box[slot] = (turn, self.mail["obs"][i][slot])
        self.arrays["kept_turn"][slot] = turn

    def keep_rows(self, where: Any, turns: Any) -> None:
        """`keep` for many slots at once (an index of rows, or all of them by a slice), without objects beside rows."""
        for array, kept in self.kept:
            kept[where] = array[where]
        if self.kept:
            self.arrays["kept_turn"][where] = turns

    def delivered(self, slot: int, turn: int) -> tuple[Any, list[Any]]:
        """The row as it was last delivered, while the slot is out in this turn: its head and its observation's leaves."""
        is_kept = bool(self.kept) and int(self.arrays["kept_turn"][slot]) == turn
        source = {name: self.arrays[f"kept/{name}" if is_kept and f"kept/{name}" in self.arrays else name]
                  for name in self.names("head", "obs", "final_obs", "column")}  # fmt: skip
        head = source["head"][slot].copy()
        saved = [
            self._delivered_mail(i, slot, turn) if array is None else source[f"obs/{i}"][slot].copy()
            for i, array in enumerate(self.leaf_arrays("obs"))
        ]
        if self.layout.agents:
            for i, (_, rows) in enumerate(self.agent_rows):
                idle = ~head["active"][rows]
                saved[i][0, idle] = source[f"final_obs/{i}"][slot, 0, idle]
            if "column/final_state" in self.arrays:
                saved.append(source["column/state"][slot].copy())
        return head, saved

    def _delivered_mail(self, i: int, slot: int, turn: int) -> Any:
        """An object as it was delivered. Where a worker process makes them, this slab has only ever had delivered ones."""
        kept = self._kept_mail[i][slot] if self._kept_mail else None
        return kept[1] if kept is not None and kept[0] == turn else self.mail["obs"][i][slot]

    @property
    def agent_rows(self) -> list[tuple[str, list[int]]]:
        """Per leaf of an observation: its group, and the places of the group's agents on the agent axis."""
        groups = self.layout.groups
        several = {group.name: group for group in groups} if len(groups) > 1 else {}
        chosen = [several[leaf.path[0]] if several else groups[0] for leaf in self.obs_leaves]
        return [(group.name, list(group.indices)) for group in chosen]

    def clear_obs(self, slot: int) -> None:
        """No agent is active: observations and masks of many agents become zeros."""
        if self.layout.agents:
            for name in self.names("obs", "column"):
                self.arrays[name][slot] = 0

    def ended(self, slots: Any) -> Any:
        """bool per row (or one): its episode is over."""
        return self.has_ended(self.head[slots])

    def has_ended(self, head: Any) -> Any:
        """Whether the episode is over, by the heads of rows."""
        return head["over"] if self.layout.agents else (head["terminated"] | head["truncated"])[..., 0]

    def forget_final_mail(self, slot: int) -> None:
        """Drop the slot's `final_obs` where it is a Python object."""
        for box in self.mail["final_obs"].values():
            box[slot] = None

    def restore_final_obs(self, slot: int, saved: list[Any]) -> None:
        """Make a saved observation the slot's `final_obs`."""
        arrays = [*self.leaf_arrays("final_obs"), self.arrays.get("column/final_state")]
        for i, (array, value) in enumerate(zip(arrays, saved)):
            if array is None:
                self.mail["final_obs"][i][slot] = value
            else:
                array[slot] = value

    def pack(self, slots: Slots, names: Sequence[str]) -> bytes:
        """The rows' bytes of some arrays, for a backend that sends rows by value."""
        return b"".join(self._plain_rows(name)[slots].tobytes() for name in names)

    def unpack(
        self, slots: Slots, names: Sequence[str], data: Any, offset: int = 0, chosen: np.ndarray[Any, Any] | None = None
    ) -> int:
        """Write what `pack` made into the same rows here, or into the `chosen` ones (a bool per slot); where it ends."""
        for name in names:
            array = self._plain_rows(name)
            if not array.itemsize:
                continue
            rows = np.frombuffer(data, array.dtype, len(slots), offset)
            if chosen is None:
                array[slots] = rows
            else:
                array[slots[chosen]] = rows[chosen]
            offset += rows.nbytes
        return offset

    def _plain_rows(self, name: str) -> np.ndarray[Any, Any]:
        """The same rows as plain bytes, one item each: indexing a record array goes field by field, many times slower."""
        found = self._plain.get(name)
        if found is None:
            array = self.arrays[name]
            size = array.dtype.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
            plain = np.ndarray((self.num_slots,), f"V{size}", buffer=array) if size else np.empty(self.num_slots, "V")
            found = self._plain[name] = plain
        return found

    def pack_actions(self, slots: Slots, heads: bool) -> bytes:
        """What a worker needs of the rows to advance them: heads if it does not have them so, actions, wide ones where there are some."""
        data = self.pack(slots, self.names("head", "action") if heads else self.names("action"))
        return data + self.pack(slots, self.names("wide_action")) if self.scalars["action_type"][slots].any() else data

    def unpack_actions(self, slots: Slots, data: Any, offset: int, heads: bool) -> None:
        """Write what `pack_actions` made."""
        offset = self.unpack(slots, self.names("head", "action") if heads else self.names("action"), data, offset)
        if self.scalars["action_type"][slots].any():
            self.unpack(slots, self.names("wide_action"), data, offset)

    def names(self, *kinds: str) -> tuple[str, ...]:
        """The arrays' names of these kinds, in order: "head", "obs", "final_obs", "action", "wide_action", "column"."""
        found = self._names.get(kinds)
        if found is None:
            found = self._names[kinds] = tuple(name for name in self.arrays if name.split("/")[0] in kinds)
        return found


def make_loud(array: np.ndarray[Any, Any]) -> None:
    """Fill an array with a value that shows a bug when it appears in a batch."""
    if array.dtype.kind == "b":
        array[...] = True
    elif array.dtype.kind in "iu":
        info = np.iinfo(array.dtype)
        array[...] = LOUD if info.min <= LOUD else info.max
    else:
        array[...] = LOUD
