"""The many-agent part of a slot's life: a seat's arrays, written into the slot's row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from envfleet.layout import Leaf, fits, gather, leaves_of
from envfleet.slab import Slab


class JointRow:
    """The row of one slot whose env has many agents.

    The seat (`envfleet.adapters.pettingzoo`) says what happened to each agent; here it becomes bytes. `obs` holds zeros
    for agents that are not active. `final_obs` is valid for agents with a flag; for those whose transition is open it holds
    their last observation, so that whoever finds the worker dead can still tell what it was.
    """

    def __init__(self, slab: Slab, slot: int) -> None:
        self.slot = slot
        self.head = slab.scalars
        self._obs, self._final = slab.leaf_arrays("obs"), slab.leaf_arrays("final_obs")
        self._columns = [
            (name, leaves_of(space)[0], slab.arrays[f"column/{name}"]) for name, space in slab.layout.columns.items()
        ]
        self._reads = _readers(slab, slot)

    def actions(self) -> list[Any]:
        """One action per agent, as its env expects it: copies, because envs keep what they are given."""
        return [read() for read in self._reads]

    def write_obs(self, seat: Any) -> None:
        """What agents see now, and their columns."""
        slot = self.slot
        for name, leaf, column in self._columns:
            own = seat.columns.get(name)
            column[slot, 0] = _declared(leaf, name, seat.infos, seat.agents) if own is None else own
        for array, value in zip(self._obs, seat.obs):
            array[slot, 0] = value  # type: ignore[index]
        self.head["active"][slot], self.head["pending"][slot] = seat.active, seat.pending

    def read_obs(self, seat: Any) -> None:
        """Give the seat back what agents see, where the compiled life has written it."""
        for array, value in zip(self._obs, seat.obs):
            value[...] = array[self.slot, 0]  # type: ignore[index]

    def write_final(self, seat: Any) -> None:
        """What agents saw last."""
        for array, value in zip(self._final, seat.final):
            array[self.slot, 0] = value  # type: ignore[index]

    def transition(self, seat: Any) -> dict[str, Any]:
        """What the seat's last step was, as the head will tell it: copies, for a reset may come before it is written."""
        head, slot = self.head, self.slot
        step = int(head["now_length"][slot])
        return {
            "reward": seat.reward.copy(),
            "terminated": seat.terminated.copy(),
            "truncated": seat.truncated.copy(),
            "scored": seat.scored.copy(),
            "over": seat.over,
            "ep_return": head["now_return"][slot] + seat.earned,
            "episode": head["started"][slot] - 1,
            "step": step,
            "length": step + 1,
            "task": head["now_task"][slot],
            "seed": head["now_seed"][slot],
        }

    def write_head(self, row: dict[str, Any]) -> None:
        """The transition: scalars of the env, arrays of the agents."""
        head, slot = self.head, self.slot
        for name, value in row.items():
            head[name][slot] = value


def _declared(joint: Leaf, name: str, infos: dict[Any, Any], agents: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """A declared column from the agents' infos; zeros where an agent says nothing."""
    leaf = Leaf(joint.path, joint.space, joint.dtype, joint.shape[1:])
    rows = np.zeros(joint.shape, joint.dtype)
    for i, agent in enumerate(agents):
        info = infos.get(agent)
        if info and name in info:
            rows[i] = fits(leaf, info[name])
    return rows


def _readers(slab: Slab, slot: int) -> list[Callable[[], Any]]:
    """Per agent: how its action is read from the row."""
    layout = slab.layout
    at = {leaf.path: i for i, leaf in enumerate(slab.action_leaves)}
    reads: dict[int, Callable[[], Any]] = {}
    for group in layout.groups:
        leaves = leaves_of(group.action_space)
        joined = [at[leaf.path if len(layout.groups) == 1 else (group.name, *leaf.path)] for leaf in leaves]
        for place, i in enumerate(group.indices):
            rows = [slab.leaf_arrays("action")[joint_i][slot, 0] for joint_i in joined]  # type: ignore[index]
            reads[i] = _reader(group.action_space, leaves, rows, place)
    return [reads[i] for i in range(len(reads))]


def _reader(space: Any, leaves: list[Leaf], rows: list[np.ndarray[Any, Any]], place: int) -> Callable[[], Any]:
    if len(leaves) == 1 and not leaves[0].path:
        only = rows[0]
        return (lambda: only[place]) if leaves[0].shape == () else (lambda: only[place].copy())
    return lambda: gather(space, [row[place].copy() for row in rows])
