"""The actions of every slot's running episode: with its seed and task, all that is needed to play it again."""

from __future__ import annotations

import numpy as np

from envfleet.rollout.segments.segment import Segment
from envfleet.util.trees import Tree, tree_concatenate, tree_length, tree_map


class RunningActions:
    """Collected from segments, in order."""

    def __init__(self, num_slots: int) -> None:
        self._parts: list[list[Tree]] = [[] for _ in range(num_slots)]

    def add(self, segment: Segment) -> None:
        """Add a segment; actions of episodes that ended in it are dropped."""
        ended, steps = segment.ended, segment.num_steps
        begins = np.where(ended.any(axis=0), steps - ended[::-1].argmax(axis=0), 0)
        for slot, begin in enumerate(begins.tolist()):
            if begin:
                self._parts[slot] = []
            if begin < steps:
                self._parts[slot].append(tree_map(lambda leaf, at=(begin, slot): leaf[at[0] :, at[1]], segment.action))

    def of(self, slot: int) -> Tree:
        """The actions of the slot's running episode, in order."""
        parts = self._parts[slot]
        if len(parts) > 1:
            self._parts[slot] = parts = [tree_concatenate(parts)]
        return parts[0] if parts else np.zeros(0)

    def set(self, slot: int, actions: Tree) -> None:
        """Begin from actions that a checkpoint stored."""
        self._parts[slot] = [actions] if tree_length(actions) else []
