"""What the running episodes of all slots have gathered so far, written a batch at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.util.trees import Tree, tree_map, tree_put

Ints = npt.NDArray[np.int64]
Arrays = dict[str, Tree]


class History:
    """Arrays [slot, step, ...] that grow by doubling: one write for a whole batch, one slice for an episode.

    An array is made when its first values are written. Memory follows the longest episode so far, times the number of
    slots; pages that were never written cost none.
    """

    def __init__(self, num_slots: int, room: int = 64) -> None:
        self._shape = (num_slots, room)
        self.position = np.zeros(num_slots, dtype=np.int64)  # [slot] steps of the running episode so far
        self.steps: Arrays = {}  # by the names they have in a `Rollout`
        self.extras: Arrays = {}  # written by the policy
        self.columns: Arrays = {}  # declared columns

    def make_room(self, steps: int) -> None:
        """Have room for `steps` steps and one more observation."""
        num_slots, room = self._shape
        if steps + 1 < room:
            return
        while steps + 1 >= room:
            room *= 2
        self._shape = (num_slots, room)

        def grow(old: npt.NDArray[Any]) -> npt.NDArray[Any]:
            new = np.zeros((*self._shape, *old.shape[2:]), dtype=old.dtype)
            new[:, : old.shape[1]] = old
            return new

        self.steps, self.extras, self.columns = tree_map(grow, (self.steps, self.extras, self.columns))

    def put(self, arrays: Arrays, slots: Ints, steps: Ints, values: Arrays) -> None:
        """Write values, one row a slot, at (slot, step) of these arrays."""
        for name, rows in values.items():
            if name not in arrays:
                arrays[name] = tree_map(lambda leaf: np.zeros((*self._shape, *leaf.shape[1:]), dtype=leaf.dtype), rows)
            tree_put(arrays[name], (slots, steps), rows)

    def now(self, slots: Ints) -> tuple[Tree, dict[str, Any]]:
        """Observations and columns these slots have to act on."""
        steps = self.position[slots]
        obs, columns = tree_map(lambda leaf: leaf[slots, steps], (self.steps["observations"], self.columns))
        return obs, columns

    def cut(self, slot: int, begun: bool = True) -> Arrays:
        """The running episode of a slot as arrays of its own, by the names of a `Rollout`."""
        length = int(self.position[slot])
        episode: Arrays = {
            name: tree_map(lambda leaf, end=length + (begun and name == "observations"): leaf[slot, :end].copy(), tree)
            for name, tree in self.steps.items()
        }
        episode["extras"] = {name: values[slot, :length].copy() for name, values in (self.extras | self.columns).items()}
        return episode
