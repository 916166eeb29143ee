"""What the running episodes of all slots have gathered so far, written a batch at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.util.trees import Tree, tree_map, tree_put

Ints = npt.NDArray[np.int64]
Array = npt.NDArray[Any]


class History:
    """Arrays [slot, step, ...] that grow by doubling: one write for a whole batch, one slice for an episode.

    Memory follows the longest episode so far, times the number of slots; pages that were never written cost
    none.
    """

    def __init__(self, num_slots: int, room: int = 64) -> None:
        self.num_slots = num_slots
        self._room = room
        self.position = np.zeros(num_slots, dtype=np.int64)  # [slot] steps of the running episode so far
        self.reward = np.zeros((num_slots, room))
        self.terminated = np.zeros((num_slots, room), dtype=np.bool_)
        self.truncated = np.zeros((num_slots, room), dtype=np.bool_)
        self.policy_version = np.zeros((num_slots, room), dtype=np.int64)
        self.obs: Tree = None  # shaped like the first batch
        self.action: Tree = None
        self.extras: dict[str, Array] = {}
        self.columns: dict[str, Array] = {}

    def make_room(self, steps: int) -> None:
        """Have room for `steps` steps and one more observation."""
        if steps + 1 < self._room:
            return
        while steps + 1 >= self._room:
            self._room *= 2

        def grow(old: Array) -> Array:
            new = np.empty((old.shape[0], self._room, *old.shape[2:]), dtype=old.dtype)
            new[:, : old.shape[1]] = old
            return new

        self.reward, self.terminated, self.truncated, self.policy_version = map(
            grow, (self.reward, self.terminated, self.truncated, self.policy_version)
        )
        if self.obs is not None:
            self.obs = tree_map(grow, self.obs)
        if self.action is not None:
            self.action = tree_map(grow, self.action)
        self.extras = {name: grow(old) for name, old in self.extras.items()}
        self.columns = {name: grow(old) for name, old in self.columns.items()}

    def _like(self, rows: Array) -> Array:
        return np.empty((self.num_slots, self._room, *rows.shape[1:]), dtype=rows.dtype)

    def observe(self, slots: Ints, steps: Ints, obs: Tree, columns: dict[str, Array]) -> None:
        """Write observations (and declared columns seen with them) at (slot, step)."""
        if self.obs is None:
            self.obs = tree_map(self._like, obs)
        tree_put(self.obs, (slots, steps), obs)
        for name, values in columns.items():
            if name not in self.columns:
                self.columns[name] = self._like(values)
            self.columns[name][slots, steps] = values

    def act(self, slots: Ints, actions: Tree, extras: dict[str, Array], version: Any) -> None:
        """Write what the policy answered for the running step of these slots."""
        steps = self.position[slots]
        if self.action is None:
            self.action = tree_map(self._like, actions)
        tree_put(self.action, (slots, steps), actions)
        self.policy_version[slots, steps] = version
        for name, values in extras.items():
            if name not in self.extras:
                self.extras[name] = self._like(values)
                self.extras[name][:] = np.zeros((), dtype=values.dtype)  # steps answered without it (a warm-up)
            self.extras[name][slots, steps] = values

    def now(self, slots: Ints) -> tuple[Tree, dict[str, Array]]:
        """Observations and columns these slots have to act on."""
        steps = self.position[slots]
        obs = tree_map(lambda leaf: leaf[slots, steps], self.obs)
        return obs, {name: values[slots, steps] for name, values in self.columns.items()}

    def cut(self, slot: int) -> dict[str, Any]:
        """The running episode of a slot as arrays of its own."""
        length = int(self.position[slot])
        extras = {name: values[slot, :length].copy() for name, values in (self.extras | self.columns).items()}
        return {
            "observations": tree_map(lambda leaf: leaf[slot, : length + 1].copy(), self.obs),
            "actions": [] if self.action is None else tree_map(lambda leaf: leaf[slot, :length].copy(), self.action),
            "rewards": self.reward[slot, :length].copy(),
            "terminated": self.terminated[slot, :length].copy(),
            "truncated": self.truncated[slot, :length].copy(),
            "policy_version": self.policy_version[slot, :length].copy(),
            "extras": extras,
        }
