"""Segments of some slots each, joined into the segment of all of them; and the segment of slots that were lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from envfleet.rollout.segments.segment import Bools, Ints, Segment
from envfleet.util.trees import Tree, tree_length, tree_map, tree_rows

#: Fields with an entry per slot, [B, ...], and fields with one per end, [K, ...]. All others are [T, B, ...].
_OF_SLOTS = ("bootstrap_obs", "bootstrap_columns", "bootstrap_active")
_OF_ENDS = ("end_index", "final_obs", "end_return", "end_length", "end_returns")
_OF_FATES = ("fate_index", "fate_obs", "fate_state")


def join_segments(parts: Sequence[Segment]) -> Segment:
    """One segment of all slots, from segments of neighbouring slots in ascending order, all with the same steps.

    Example:
        >>> parts = [Segment.empty(2, count, obs=np.zeros((count, 4)), action=np.zeros(count)) for count in (3, 1)]
        >>> joined = join_segments(parts)
        >>> joined.reward.shape, joined.slots.tolist()
        ((2, 4), [0, 1, 2, 3])
    """
    first = np.cumsum([0, *(part.num_slots for part in parts[:-1])])
    joined: dict[str, Any] = {
        "slots": np.arange(sum(part.num_slots for part in parts)),
        "end_index": np.concatenate([part.end_index + [0, at] for part, at in zip(parts, first)]),
    }
    order = np.lexsort(joined["end_index"].T[::-1])
    for field in dataclasses.fields(parts[0]):
        trees = [getattr(part, field.name) for part in parts]
        if field.name in joined or trees[0] is None:
            continue
        if field.name not in _OF_FATES:
            axis = 0 if field.name in _OF_SLOTS + _OF_ENDS else 1
            joined[field.name] = tree_map(lambda *leaves, axis=axis: np.concatenate(leaves, axis), *trees)
        if field.name in _OF_ENDS and tree_length(joined[field.name]):  # agents have no common last observations
            joined[field.name] = tree_rows(joined[field.name], order)
    joined["end_index"] = joined["end_index"][order]
    return type(parts[0])(**joined | _fates(parts, first))


def _fates(parts: Sequence[Any], first: Ints) -> dict[str, Any]:
    """Ends of agents, by group, in the order of (step, slot, place). A part has only groups of which an agent ended."""
    fates: dict[str, Any] = {name: {} for name in _OF_FATES} if hasattr(parts[0], "fate_index") else {}
    for group in sorted({group for part in parts for group in getattr(part, "fate_index", ())}):
        there = [(part, at) for part, at in zip(parts, first) if group in part.fate_index]
        index = np.concatenate([part.fate_index[group] + [0, at, 0] for part, at in there])
        order = np.lexsort(index.T[::-1])
        fates["fate_index"][group] = index[order]
        for name in ("fate_obs", "fate_state"):
            trees = [getattr(part, name)[group] for part, _ in there if group in getattr(part, name)]
            if trees:
                joined = tree_map(lambda *leaves: np.concatenate(leaves), *trees)
                fates[name][group] = tree_rows(joined, order)
    return fates


def lost_segment(like: Segment, obs: Tree, running: Bools, returns: Any, lengths: Ints, episode: Ints) -> Segment:
    """The segment of slots that were lost while it was collected: no row counts, and the first one ends what ran.

    `like`: a segment of other slots. `obs` [B, ...]: what the lost slots saw last.
    """
    steps, count = like.num_steps, len(running)
    ended = np.flatnonzero(running)
    given: dict[str, Any] = {"bootstrap_obs": obs, "end_return": returns[ended], "end_length": lengths[ended]}
    for field in dataclasses.fields(like):
        name = field.name
        if name in given or name in _OF_FATES or getattr(like, name) is None:
            continue
        many = () if name in _OF_ENDS else (count,) if name in _OF_SLOTS else (steps, count)
        skip = 2 if len(many) == 2 else 1
        shape = many or (len(ended),)
        given[name] = tree_map(lambda leaf, s=shape, k=skip: np.zeros((*s, *leaf.shape[k:]), leaf.dtype), getattr(like, name))
    given["slots"] = np.arange(count)
    given["obs"] = tree_map(lambda leaf: np.repeat(np.asarray(leaf)[None], steps, axis=0), obs)
    given["final_obs"] = tree_rows(obs, ended[:0] if hasattr(like, "acted") else ended)
    given["end_index"] = np.stack([np.zeros_like(ended), ended], axis=1)
    given["episode"][:] = episode
    given["step"][:], given["task"][:] = -1, -1
    given["truncated"][0] = running
    return type(like)(**given)
