"""From spaces to columns: which bytes a slot's row holds, decided once from the spaces.

A space is a tree. Its fixed-shape leaves (Box, Discrete, MultiDiscrete, MultiBinary) become columns; every other leaf
(Text, Sequence, Graph, OneOf, a space we do not know) is a *mailbox* leaf whose Python objects are sent separately.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from envfleet.util.text import short

#: A cache line. Columns start on one, so that two columns never share a line.
ALIGN = 64

#: What new memory holds in debug mode: a value that is easy to recognise.
LOUD = -4242

# Row status, in the column `status`.
READY, FAULT, QUARANTINED = 0, 2, 3

# What a send asks of the slot life, in the column `command`.
STEP, RESET, REBUILD = 0, 1, 2

_FIXED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a space: its path, and its dtype and shape in a row (`dtype` None: a mailbox leaf)."""

    path: tuple[Any, ...]
    space: gym.Space[Any]
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]

    @property
    def is_column(self) -> bool:
        """Whether this leaf is stored in the slab."""
        return self.dtype is not None

    @property
    def name(self) -> str:
        """The leaf's path as people write it, for messages."""
        return "".join(f"[{key!r}]" for key in self.path)


def leaves_of(space: gym.Space[Any], path: tuple[Any, ...] = ()) -> list[Leaf]:
    """The leaves of a space in the order of its tree.

    Example:
        >>> [leaf.path for leaf in leaves_of(spaces.Dict(a=spaces.Discrete(3), b=spaces.Text(5)))]
        [('a',), ('b',)]
    """
    if isinstance(space, spaces.Dict):
        return [leaf for key, sub in space.spaces.items() for leaf in leaves_of(sub, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for i, sub in enumerate(space.spaces) for leaf in leaves_of(sub, (*path, i))]
    if isinstance(space, _FIXED) and space.dtype is not None and space.dtype.kind != "O":
        return [Leaf(path, space, np.dtype(space.dtype), tuple(space.shape or ()))]
    return [Leaf(path, space, None, ())]


def same_rows(one: gym.Space[Any], other: gym.Space[Any]) -> bool:
    """Whether values of two spaces are stored in the same way: equal but for their bounds.

    Example:
        >>> same_rows(spaces.Box(0, 1, (2,)), spaces.Box(0, 9, (2,))), same_rows(spaces.Box(0, 1, (2,)), spaces.Box(0, 1, (3,)))
        (True, False)
    """
    rows = [[(leaf.path, leaf.dtype, leaf.shape) for leaf in leaves_of(space)] for space in (one, other)]
    return rows[0] == rows[1]


def gather(space: gym.Space[Any], values: list[Any]) -> Any:
    """Build the tree of `space` from one value per leaf, given in the order of `leaves_of`.

    Example:
        >>> gather(spaces.Dict(a=spaces.Discrete(3), b=spaces.Discrete(2)), [1, 0])
        {'a': 1, 'b': 0}
    """
    iterator = iter(values)

    def build(node: gym.Space[Any]) -> Any:
        if isinstance(node, spaces.Dict):
            return {key: build(sub) for key, sub in node.spaces.items()}
        if isinstance(node, spaces.Tuple):
            return tuple(build(sub) for sub in node.spaces)
        return next(iterator)

    return build(space)


def scatter(leaves: list[Leaf], value: Any) -> list[Any]:
    """The leaves of a value, in the order of `leaves`: the inverse of `gather`.

    Example:
        >>> scatter(leaves_of(spaces.Dict(a=spaces.Discrete(3), b=spaces.Discrete(2))), {"a": 1, "b": 0})
        [1, 0]
    """
    out = []
    for leaf in leaves:
        node = value
        for depth, key in enumerate(leaf.path):
            try:
                node = node[key]
            except (KeyError, IndexError, TypeError) as missing:
                where = "".join(f"[{step!r}]" for step in leaf.path[: depth + 1])
                raise TypeError(f"{short(value)} has no {where}, which the space promises") from missing
        out.append(node)
    return out


def fits(leaf: Leaf, value: Any) -> np.ndarray[Any, Any]:
    """`value` as an array of the leaf's shape, refused as NumPy's `stack(..., out=)` would refuse it.

    The same rule as Gymnasium's `concatenate`, so that what runs there runs here: equal shape, "same kind" cast.
    """
    array: np.ndarray[Any, Any] = np.asanyarray(value)
    if array.shape != leaf.shape:
        where = f" at {leaf.name}" if leaf.path else ""
        raise ValueError(f"shape {array.shape}{where}, but the space says {leaf.shape}")
    assert leaf.dtype is not None
    if array.dtype != leaf.dtype and not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        where = f" at {leaf.name}" if leaf.path else ""
        raise TypeError(f"dtype {array.dtype}{where} cannot become the space's {leaf.dtype}")
    return array


def scalar_reader(leaf: Leaf) -> Callable[[Any], Any]:
    """How a stored leaf goes back to a single value: Discrete becomes an int, arrays are copied."""
    if isinstance(leaf.space, spaces.Discrete):
        return int
    return np.copy


@dataclasses.dataclass(frozen=True)
class Layout:
    """What one row holds. Built once from the spaces; equal spaces give equal layouts in parent and workers."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    columns: Mapping[str, gym.Space[Any]] = dataclasses.field(default_factory=dict)
    #: The agent axis. With agents, the spaces are joint ones (`envfleet.multiagent.groups`) and hold every agent's part already.
    agents: tuple[str, ...] = ()
    groups: tuple[Any, ...] = ()

    @property
    def num_agents(self) -> int:
        """The length of the agent axis: 1 for a single-agent env."""
        return len(self.agents) or 1

    @property
    def obs_leaves(self) -> list[Leaf]:
        """The leaves of an observation."""
        return leaves_of(self.observation_space)

    @property
    def action_leaves(self) -> list[Leaf]:
        """The leaves of an action."""
        return leaves_of(self.action_space)

    @property
    def head(self) -> np.dtype[Any]:
        """The fixed part of a row as one record, so that a row's scalars are one memory copy.

        `started` counts the episodes begun in the slot; `now_…` belong to the one now running, `waiting` says that there
        is none; `next_seed` (-1: none) and `next_task` are for the next reset. These are the whole state of the slot life,
        kept here so that the C and the Python version can alternate. All else describes the transition in the row.
        `pending` (acted, and its transition is still open) and `over` are written for envs of many agents only.
        `step_ns`, how long the env worked for this row, and `busy_ns`, for all rows so far, are measurements, not data.
        `action_type` says, per leaf of the action, in which dtype the caller gave it: see `action_types`.
        """
        agents = (self.num_agents,)
        return np.dtype(
            [
                ("reward", "f8", agents),
                ("ep_return", "f8", agents),
                ("episode", "i8"),
                ("step", "i8"),
                ("length", "i8"),
                ("task", "i8"),
                ("seed", "i8"),
                ("started", "i8"),
                ("now_seed", "i8"),
                ("now_task", "i8"),
                ("now_length", "i8"),
                ("now_return", "f8", agents),
                ("next_seed", "i8"),
                ("next_task", "i8"),
                ("step_ns", "i8"),
                ("busy_ns", "i8"),
                ("terminated", "?", agents),
                ("truncated", "?", agents),
                ("active", "?", agents),
                ("scored", "?", agents),
                ("pending", "?", agents),
                ("over", "?"),
                ("waiting", "?"),
                ("status", "u1"),
                ("command", "u1"),
                ("action_type", "u1", (max(1, len(self.action_leaves)),)),
            ],
            align=True,
        )

    def arrays(self, keep: bool = False, keep_obs: bool = True) -> list[tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """Name, dtype and row shape of every array of the slab, the head first.

        `keep` adds what a row held before the advance that is being made, with its observation or without: see `Slab.keep`.
        """
        out: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = [("head", self.head, ())]
        one = (1,)  # many agents are inside the joint spaces
        for kind, leaves in (("obs", self.obs_leaves), ("final_obs", self.obs_leaves), ("action", self.action_leaves)):
            for i, leaf in enumerate(leaves):
                if leaf.dtype is not None:
                    out.append((f"{kind}/{i}", leaf.dtype, one + leaf.shape))
        for i, leaf in enumerate(() if self.agents else self.action_leaves):
            if leaf.dtype is not None:
                out.append((f"wide_action/{i}", np.dtype(np.uint64), one + leaf.shape))
        for name, space in self.columns.items():
            (leaf,) = leaves_of(space)
            assert leaf.dtype is not None
            out.append((f"column/{name}", leaf.dtype, one + leaf.shape))
        if keep:
            # Of many agents, those that wait for their turn have their last observation in `final_obs` (see `AgentRow`).
            kinds = ("head", "obs", "final_obs") if self.agents else ("head", "obs")
            kept = [entry for entry in out if entry[0].split("/")[0] in kinds or entry[0] == "column/state"]
            kept = kept if keep_obs else [entry for entry in kept if entry[0] == "head"]
            out += [(f"kept/{name}", dtype, shape) for name, dtype, shape in kept]
            out.append(("kept_turn", np.dtype(np.uint32), ()))
        return out

    def offsets(self, num_slots: int, keep: bool = False, keep_obs: bool = True) -> tuple[dict[str, int], int]:
        """Where each array begins in one block of memory for `num_slots` rows, and the block's size in bytes."""
        at, size = {}, 0
        for name, dtype, shape in self.arrays(keep, keep_obs):
            at[name] = size
            count = num_slots * int(np.prod(shape, dtype=np.int64))
            size += -(-count * dtype.itemsize // ALIGN) * ALIGN
        return at, max(size, ALIGN)
