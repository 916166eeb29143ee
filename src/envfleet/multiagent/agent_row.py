"""The many-agent part of a slot's life: the arrays of its `AgentEnv`, written into the slot's row."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from envfleet.multiagent.agent_env import MASK
from envfleet.slots.layout import Leaf, fits, gather, leaves_of
from envfleet.slots.slab import Slab


class Transition(NamedTuple):
    """One transition of all agents, as in the head of a row."""

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


class AgentRow:
    """The row of one slot whose env has many agents.

    The `AgentEnv` (`envfleet.multiagent.pettingzoo`) records what happened to each agent; here it is written. `obs` holds zeros
    for agents that are not active. `final_obs` is valid for agents with a flag; for those whose transition is open it holds
    their last observation, so that it is known when the worker is found dead.
    """

    def __init__(self, slab: Slab, slot: int) -> None:
        self.slot = slot
        self.head = slab.scalars
        self._obs, self._final = slab.leaf_arrays("obs"), slab.leaf_arrays("final_obs")
        self._columns = [
            (name, leaves_of(space)[0], slab.arrays[f"column/{name}"]) for name, space in slab.layout.columns.items()
        ]
        self._reads = _readers(slab, slot)
        memory: Any = slab.memory.data  # the head comes first in it
        head = slab.head.dtype

        def part(*names: str) -> tuple[Any, Any]:
            fields, at = _fields(head, *names)
            at += slot * head.itemsize
            return partial(fields.pack_into, memory, at), partial(fields.unpack_from, memory, at)

        self._write_front, _ = part("reward", "ep_return", "episode", "step", "length", "task", "seed")
        self._write_flags, _ = part("terminated", "truncated", "active", "scored", "pending", "over")
        self._write_count, _ = part("now_length", "now_return")
        _, self._read_now = part("started", "now_seed", "now_task", "now_length", "now_return")

    def actions(self) -> list[Any]:
        """One action per agent, as its env expects it: copies, because envs keep what they are given."""
        return [read() for read in self._reads]

    def write_obs(self, agent_env: Any, check: Callable[[], None]) -> None:
        """What agents see now, and their columns. `check` is called when all is read and nothing is written yet."""
        slot = self.slot
        found = [(name, leaf, agent_env.columns.get(name)) for name, leaf, _ in self._columns]
        values = [_declared(leaf, name, agent_env) if own is None else own for name, leaf, own in found]
        check()
        for (_, _, column), value in zip(self._columns, values):
            column[slot, 0] = value
        for array, value in zip(self._obs, agent_env.obs):
            array[slot, 0] = value  # type: ignore[index]

    def read_obs(self, agent_env: Any) -> None:
        """Give the agent env back what agents see, where the compiled life has written it."""
        for array, value in zip(self._obs, agent_env.obs):
            value[...] = array[self.slot, 0]  # type: ignore[index]

    def write_final(self, agent_env: Any) -> None:
        """What agents saw last."""
        if agent_env.has_final:
            for array, value in zip(self._final, agent_env.final):
                array[self.slot, 0] = value  # type: ignore[index]
            agent_env.has_final = False

    def begin(self, agent_env: Any) -> None:
        """A new episode: which agents are there, and rewards that came before any action."""
        slot = self.slot
        self.head["active"][slot], self.head["pending"][slot] = agent_env.active, agent_env.pending
        self.head["now_return"][slot] = agent_env.earned

    def transition(self, agent_env: Any) -> Transition:
        """The last step, kept because a reset may come before it is written."""
        started, seed, task, length, *returns = self._read_now()
        return Transition(
            agent_env.reward, [a + b for a, b in zip(returns, agent_env.earned)], started - 1, length, task, seed,
            agent_env.terminated, agent_env.truncated, agent_env.scored, agent_env.over,
        )  # fmt: skip

    def go_on(self, row: Transition) -> None:
        """The episode is as long as this transition says, and worth as much so far."""
        self._write_count(row.step + 1, *row.ep_return)

    def write_head(self, row: Transition, agent_env: Any) -> None:
        """The transition, and which agents are active now: two runs of bytes, because a row has dozens of small fields."""
        self._write_front(*row.reward, *row.ep_return, row.episode, row.step, row.step + 1, row.task, row.seed)
        active, pending = agent_env.active, agent_env.pending
        self._write_flags(*row.terminated, *row.truncated, *active, *row.scored, *pending, row.over)


def _fields(head: np.dtype[Any], *names: str) -> tuple[struct.Struct, int]:
    """Fields of a head that follow each other, as one struct, and where it begins. Packing costs 0.9 µs a row, 13 assignments 3.0.

    Example:
        >>> fields, at = _fields(np.dtype([("a", "?"), ("b", "<f8", (2,)), ("c", "<i8")]), "b", "c")
        >>> fields.format, at
        ('=2d1q', 1)
    """
    codes, fields = {"f8": "d", "i8": "q", "b1": "?"}, head.fields
    assert fields is not None
    text, first, end = "=", -1, -1
    for name in names:
        dtype, offset = fields[name][:2]
        if first >= 0 and offset != end:
            raise AssertionError(f"{name!r} does not follow the fields before it in the head: {head.names}")
        first, end = (offset if first < 0 else first), offset + dtype.itemsize
        text += f"{dtype.itemsize // dtype.base.itemsize}{codes[dtype.base.str[1:]]}"
    return struct.Struct(text), first


def _declared(joint: Leaf, name: str, agent_env: Any) -> np.ndarray[Any, Any]:
    """A declared column from the agents' infos; zeros where an agent says nothing, or has no action to choose."""
    leaf = Leaf(joint.path, joint.space, joint.dtype, joint.shape[1:])
    rows = np.zeros(joint.shape, joint.dtype)
    for i, agent in enumerate(agent_env.agents):
        info = agent_env.infos.get(agent)
        if info and name in info and (agent_env.active[i] or name != MASK):
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
