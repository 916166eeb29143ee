"""`Segment`: T steps of B slots as arrays, for learning.

Axes have these letters here and everywhere: T steps of a slot, B slots, K ends within the segment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from envfleet.util.trees import Tree, tree_map

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass
class Segment:
    """T consecutive transitions of each of B slots.

    `obs[t, b]` is what the policy saw, `action[t, b]` what it answered, and `reward`, `terminated`,
    `truncated` what came of it. Where an episode ended at (t, b), `obs[t + 1, b]` already belongs to the
    next episode; the observation the ended episode stopped at is the row of `final_obs` that `end_index`
    lists (t, b) for. `bootstrap_obs[b]` follows the last step. Rows with `scored` False are not
    transitions (a fault, a reset row) and must not be learned from.

    Example:
        >>> segment = Segment.empty(2, 3, obs=np.zeros((3, 4)), action=np.zeros(3, dtype=np.int64))
        >>> segment.num_steps, segment.num_slots, segment.obs.shape
        (2, 3, (2, 3, 4))
    """

    obs: Tree  # [T, B, ...]
    action: Tree  # [T, B, ...]
    reward: Floats  # [T, B]
    terminated: Bools  # [T, B]
    truncated: Bools  # [T, B]
    scored: Bools  # [T, B] a real transition
    bootstrap_obs: Tree  # [B, ...]
    episode: Ints  # [T, B] index of the episode in its slot
    step: Ints  # [T, B] index of the transition in its episode, from 0; -1 on a reset row
    task: Ints  # [T, B] task id, -1: none
    policy_version: Ints  # [T, B] version of the policy that chose the action
    slots: Ints  # [B] which slot each column is
    end_index: Ints  # [K, 2] (t, b) of every row whose episode ended, in ascending order
    final_obs: Tree  # [K, ...] the last observation of each ended episode
    end_return: Floats  # [K] return of each ended episode
    end_length: Ints  # [K] length of each ended episode
    extras: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # written by the policy, each [T, B, ...]
    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # declared columns seen with obs, [T, B, ...]
    bootstrap_columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)  # the same with bootstrap_obs, [B, ...]
    learned: Bools | None = None  # [T, B] of the scored rows, those that are learned from; None: all of them

    @classmethod
    def empty(cls, num_steps: int, num_slots: int, *, obs: Tree, action: Tree = None, **more: Any) -> Self:
        """Make a segment to be filled, its leaves shaped like one batch ([B, ...]); without `action` it has none yet.

        `more` are the fields that a subclass adds.
        """
        shape = (num_steps, num_slots)

        def room(leaf: Any) -> npt.NDArray[Any]:
            leaf = np.asarray(leaf)
            return np.zeros(shape + leaf.shape[1:], dtype=leaf.dtype)

        return cls(
            obs=tree_map(room, obs),
            action=None if action is None else tree_map(room, action),
            reward=np.zeros(shape),
            terminated=np.zeros(shape, dtype=np.bool_),
            truncated=np.zeros(shape, dtype=np.bool_),
            scored=np.zeros(shape, dtype=np.bool_),
            bootstrap_obs=tree_map(lambda leaf: np.array(leaf), obs),
            episode=np.zeros(shape, dtype=np.int64),
            step=np.full(shape, -1, dtype=np.int64),
            task=np.full(shape, -1, dtype=np.int64),
            policy_version=np.zeros(shape, dtype=np.int64),
            slots=np.arange(num_slots, dtype=np.int64),
            end_index=np.zeros((0, 2), dtype=np.int64),
            final_obs=tree_map(lambda leaf: np.asarray(leaf)[:0].copy(), obs),
            end_return=np.zeros(0),
            end_length=np.zeros(0, dtype=np.int64),
            **more,
        )

    @property
    def num_steps(self) -> int:
        """T, the steps of each slot."""
        return int(self.reward.shape[0])

    @property
    def num_slots(self) -> int:
        """B, the slots."""
        return int(self.reward.shape[1])

    @property
    def ended(self) -> Bools:
        """[T, B] terminated or truncated."""
        return self.terminated | self.truncated

    @property
    def num_scored(self) -> int:
        """How many real transitions the segment holds."""
        return int(self.scored.sum())

    @property
    def filled(self) -> Bools | None:
        """[T, B] rows that are there at all; None: every one."""
        return None


@dataclass
class RaggedSegment(Segment):
    """A segment whose columns differ in length: column b has `lengths[b]` transitions, at its top.

    The row below the last one holds the observation that follows it (in `bootstrap_obs`, where the column is full).

    Example:
        >>> segment = RaggedSegment.empty(3, 2, obs=np.zeros((2, 4)), action=np.zeros(2))
        >>> segment.lengths = np.array([1, 3])
        >>> segment.filled.tolist()
        [[True, True], [False, True], [False, True]]
    """

    lengths: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [B]

    @property
    def filled(self) -> Bools:
        """[T, B] rows that are there at all."""
        there: Bools = np.arange(self.num_steps)[:, None] < self.lengths
        return there
