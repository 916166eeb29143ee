"""Observations and actions as trees of arrays: the only code that walks Dict and Tuple spaces.

A tree is an array, a dict of trees or a tuple of trees, as Gymnasium's `batch_space` lays them out. What
has no fixed shape (text, graphs, arbitrary Python values) is a leaf too: an object array, one value per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

Tree = Any
_ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def tree_map(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply `function` to the leaves that stand at the same place in every tree.

    Example:
        >>> tree_map(lambda x: x + 1, {"a": 1, "b": (2, 3)})
        {'a': 2, 'b': (3, 4)}
    """
    first = trees[0]
    if isinstance(first, dict):
        return {key: tree_map(function, *(tree[key] for tree in trees)) for key in first}
    if isinstance(first, tuple):
        return tuple(tree_map(function, *parts) for parts in zip(*trees))
    return function(*trees)


def tree_leaves(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) in a fixed order; the path joins dict keys and tuple positions with "/".

    Example:
        >>> list(tree_leaves({"a": 1, "b": (2, 3)}))
        [('a', 1), ('b/0', 2), ('b/1', 3)]
    """
    if isinstance(tree, dict):
        for key in tree:
            yield from tree_leaves(tree[key], f"{path}/{key}" if path else str(key))
    elif isinstance(tree, tuple):
        for position, part in enumerate(tree):
            yield from tree_leaves(part, f"{path}/{position}" if path else str(position))
    else:
        yield path, tree


def space_tree(space: spaces.Space[Any]) -> Tree:
    """A space as a tree: a dict for Dict, a tuple for Tuple; every other space is a leaf.

    Example:
        >>> space_tree(spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple([spaces.Discrete(3)])}))
        {'a': Discrete(2), 'b': (Discrete(3),)}
    """
    if isinstance(space, spaces.Dict):
        return {key: space_tree(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(space_tree(part) for part in space.spaces)
    return space


def tree_rows(tree: Tree, rows: Any) -> Tree:
    """Index the first axis of every leaf."""
    return tree_map(lambda leaf: leaf[rows], tree) if isinstance(tree, (dict, tuple)) else tree[rows]


def tree_put(tree: Tree, index: Any, values: Tree) -> None:
    """Write `values`, a tree of the same form, at an index of every leaf.

    Example:
        >>> tree = {"x": np.zeros(3), "y": (np.zeros((3, 2)),)}
        >>> tree_put(tree, 1, {"x": 5.0, "y": (np.array([6.0, 7.0]),)})
        >>> tree["x"].tolist(), tree["y"][0].tolist()
        ([0.0, 5.0, 0.0], [[0.0, 0.0], [6.0, 7.0], [0.0, 0.0]])
    """
    if isinstance(tree, dict):
        for key, part in tree.items():
            tree_put(part, index, values[key])
    elif isinstance(tree, tuple):
        for part, value in zip(tree, values):
            tree_put(part, index, value)
    else:
        tree[index] = values


def tree_concatenate(trees: Sequence[Tree]) -> Tree:
    """Join trees of equal structure along their first axis.

    Example:
        >>> tree_concatenate([(np.zeros(2), np.ones(2)), (np.zeros(1), np.ones(1))])[1].tolist()
        [1.0, 1.0, 1.0]
    """
    return tree_map(lambda *leaves: np.concatenate(leaves), *trees)


def tree_stack(trees: Sequence[Tree]) -> Tree:
    """Stack trees of equal structure along a new first axis.

    Example:
        >>> tree_stack([{"x": np.zeros(2)}, {"x": np.ones(2)}])["x"].shape
        (2, 2)
    """
    return tree_map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *trees)


def as_columns(space: spaces.Space[Any] | None, batch: Tree) -> Tree:
    """Make every leaf of a batched value an array with one row per slot.

    Leaves without a fixed shape arrive as a tuple with one Python value per row and become object arrays;
    only the space distinguishes such a tuple from a Tuple observation.
    """
    if isinstance(space, spaces.Dict):
        return {key: as_columns(part, batch[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(as_columns(part, value) for part, value in zip(space.spaces, batch))
    if space is None or isinstance(space, _ARRAY_SPACES) or isinstance(batch, np.ndarray):
        return np.asarray(batch)
    return object_rows(batch)


def object_rows(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return an object array with one value per row; NumPy would otherwise unpack sequences into more axes."""
    rows = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):
        rows[position] = value
    return rows


def stack_values(values: Sequence[Any]) -> Tree:
    """Stack an episode's values: numbers into arrays, dicts and tuples by part, the rest as is.

    Example:
        >>> stack_values([(1, 2.0), (3, 4.0)])
        (array([1, 3]), array([2., 4.]))
        >>> stack_values(["a", "b"])
        array(['a', 'b'], dtype=object)
    """
    if not len(values):
        return np.zeros(0)
    first = values[0]
    if isinstance(first, dict) and first and all(isinstance(v, dict) and v.keys() == first.keys() for v in values):
        return {key: stack_values([value[key] for value in values]) for key in first}
    if isinstance(first, tuple) and first and all(isinstance(v, tuple) and len(v) == len(first) for v in values):
        return tuple(stack_values(parts) for parts in zip(*values))
    try:
        arrays = [np.asarray(value) for value in values]
    except Exception:  # ragged lists, foreign objects with an odd __array__
        return object_rows(values)
    same = all(a.shape == arrays[0].shape and a.dtype.kind in "biuf" for a in arrays)
    return np.stack(arrays) if same else object_rows(values)


def tree_length(tree: Tree) -> int:
    """Length of the first axis; 0 for an empty tree."""
    for _, leaf in tree_leaves(tree):
        return len(leaf)
    return 0
