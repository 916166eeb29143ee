"""The many-agent part of a slot's life: a seat's arrays, written into the slot's row."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from envfleet.multiagent.agent_env import MASK
from envfleet.slots.layout import Leaf, fits, gather, leaves_of
from envfleet.slots.slab import Slab


class Transition(NamedTuple):
    """One transition of all agents, as the head of a row tells it."""

    reward: list[float]
    ep_return: list[float]
    episode: int
    step: int
    task: int
    seed: int
    terminated: list[bool]
    truncated: list[bool]
    scored: list[bool]
    over: bool


class JointRow:
    """The row of one slot whose env has many agents.

    The seat (`envfleet.multiagent.pettingzoo`) says what happened to each agent; here it becomes bytes. `obs` holds zeros
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
        self._memory: Any = slab.memory.data  # the head comes first in it
        count, fields, row = slab.layout.num_agents, slab.head.dtype.fields or {}, slot * slab.head.dtype.itemsize
        self._front, self._front_at = struct.Struct(f"={2 * count}d5q"), row + fields["reward"][1]
        self._now, self._now_at = struct.Struct(f"=4q{count}d"), row + fields["started"][1]
        self._count, self._count_at = struct.Struct(f"=q{count}d"), row + fields["now_length"][1]
        self._flags, self._flags_at = struct.Struct(f"={5 * count + 1}?"), row + fields["terminated"][1]

    def actions(self) -> list[Any]:
        """One action per agent, as its env expects it: copies, because envs keep what they are given."""
        return [read() for read in self._reads]

    def write_obs(self, seat: Any, check: Callable[[], None]) -> None:
        """What agents see now, and their columns. `check` is called when all is read and nothing is written yet."""
        slot = self.slot
        found = [(name, leaf, seat.columns.get(name)) for name, leaf, _ in self._columns]
        values = [_declared(leaf, name, seat) if own is None else own for name, leaf, own in found]
        check()
        for (_, _, column), value in zip(self._columns, values):
            column[slot, 0] = value
        for array, value in zip(self._obs, seat.obs):
            array[slot, 0] = value  # type: ignore[index]

    def read_obs(self, seat: Any) -> None:
        """Give the seat back what agents see, where the compiled life has written it."""
        for array, value in zip(self._obs, seat.obs):
            value[...] = array[self.slot, 0]  # type: ignore[index]

    def write_final(self, seat: Any) -> None:
        """What agents saw last."""
        if seat.has_final:
            for array, value in zip(self._final, seat.final):
                array[self.slot, 0] = value  # type: ignore[index]
            seat.has_final = False

    def begin(self, seat: Any) -> None:
        """A new episode: who is there, and what they were given for nothing."""
        slot = self.slot
        self.head["active"][slot], self.head["pending"][slot] = seat.active, seat.pending
        self.head["now_return"][slot] = seat.earned

    def transition(self, seat: Any) -> Transition:
        """What the seat's last step was; kept aside, for a reset may come before it is written."""
        started, seed, task, length, *returns = self._now.unpack_from(self._memory, self._now_at)
        return Transition(
            seat.reward, [a + b for a, b in zip(returns, seat.earned)], started - 1, length, task, seed,
            seat.terminated, seat.truncated, seat.scored, seat.over,
        )  # fmt: skip

    def go_on(self, row: Transition) -> None:
        """The episode is as long as this transition says, and worth as much so far."""
        self._count.pack_into(self._memory, self._count_at, row.step + 1, *row.ep_return)

    def write_head(self, row: Transition, seat: Any) -> None:
        """The transition, and who is active now: two runs of bytes, because a row has dozens of small fields."""
        self._front.pack_into(
            self._memory, self._front_at, *row.reward, *row.ep_return,
            row.episode, row.step, row.step + 1, row.task, row.seed,
        )  # fmt: skip
        self._flags.pack_into(
            self._memory,
            self._flags_at,
            *row.terminated,
            *row.truncated,
            *seat.active,
            *row.scored,
            *seat.pending,
            row.over,
        )


def _declared(joint: Leaf, name: str, seat: Any) -> np.ndarray[Any, Any]:
    """A declared column from the agents' infos; zeros where an agent says nothing, or has no action to choose."""
    leaf = Leaf(joint.path, joint.space, joint.dtype, joint.shape[1:])
    rows = np.zeros(joint.shape, joint.dtype)
    for i, agent in enumerate(seat.agents):
        info = seat.infos.get(agent)
        if info and name in info and (seat.active[i] or name != MASK):
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
