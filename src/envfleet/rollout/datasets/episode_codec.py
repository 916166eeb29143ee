"""A rollout as one Arrow row, and back. Nothing is pickled: numbers as numbers, the rest as text or JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.errors import DatasetError, RolloutError
from envfleet.rollout.episodes.episode import Rollout
from envfleet.util.extras import from_extra
from envfleet.util.jsonable import to_jsonable
from envfleet.util.trees import Tree, object_rows, stack_values, tree_leaves, tree_length

VERSION = 1
#: The columns of every dataset that hold one value per episode, and their Arrow types.
_SCALARS = {
    "id": "int64",
    "env_name": "string",
    "slot": "int64",
    "seed": "int64",
    "task": "string",
    "episode_return": "double",
    "episode_length": "int64",
    "error": "string",
    "attempts": "int64",
    "wall_s": "double",
    "started_s": "double",
    "reset_info": "string",
}
#: Those that are read back as they are.
_PLAIN = ("env_name", "slot", "seed", "attempts", "wall_s", "started_s")


def arrow() -> Any:
    """The pyarrow module, or an error that says what to install."""
    with from_extra("datasets"):
        import pyarrow
        import pyarrow.parquet
    return pyarrow


@dataclass(frozen=True)
class Leaf:
    """How one array of an episode is stored: its dtype and the shape of a step, or "text" or "json"."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def is_array(self) -> bool:
        """Whether it holds numbers."""
        return self.dtype not in ("text", "json")


class Codec:
    """Rows of one dataset: the same columns for every episode, set by the first one.

    `structure` says how leaves make up observations and actions: a column name, {"dict": …} or {"tuple": […]}.

    Example:
        >>> rollout = Rollout(observations=[[0.0], [1.0]], actions=[1], rewards=[2.0], terminated=[True],
        ...                   truncated=[False], episode=7)
        >>> codec = Codec.of(rollout)
        >>> codec.decode(codec.encode(rollout))[0].digest() == rollout.digest()
        True
    """

    def __init__(self, leaves: dict[str, Leaf], structure: dict[str, Any]) -> None:
        self.leaves = leaves
        self.structure = structure
        self.schema = self._schema()

    @classmethod
    def of(cls, rollout: Rollout) -> Codec:
        """The columns this rollout needs."""
        arrays = _time_arrays(rollout)
        listed = [(path, leaf) for name, tree in arrays.items() for path, leaf in tree_leaves(tree, name)]
        leaves = {path: _leaf_of(leaf) for path, leaf in listed}
        if len(leaves) < len(listed):
            raise DatasetError(
                f"two parts of the episode have the same column name, joined by '/': {sorted(p for p, _ in listed)}"
            )
        return cls(leaves, {name: _structure(tree, name) for name, tree in arrays.items()})

    @classmethod
    def from_schema(cls, schema: Any) -> Codec:
        """Read the columns back from a file's metadata."""
        try:
            about = json.loads((schema.metadata or {}).get(b"envfleet", b"null"))
        except ValueError:
            about = None
        if not isinstance(about, dict) or about.get("version") != VERSION:
            raise DatasetError("this is no envfleet dataset, or one of a version this release cannot read")
        leaves = {name: Leaf(dtype, tuple(shape)) for name, (dtype, shape) in about["leaves"].items()}
        return cls(leaves, about["structure"])

    def _schema(self) -> Any:
        pa = arrow()
        fields = [pa.field(name, pa.type_for_alias(kind)) for name, kind in _SCALARS.items()]
        fields.append(pa.field("infos", pa.list_(pa.string())))
        fields += [pa.field(name, pa.list_(_arrow_type(leaf))) for name, leaf in self.leaves.items()]
        about = {
            "version": VERSION,
            "leaves": {name: [leaf.dtype, list(leaf.shape)] for name, leaf in self.leaves.items()},
            "structure": self.structure,
        }
        return pa.schema(fields, metadata={"envfleet": json.dumps(about)})

    def encode(self, rollout: Rollout) -> Any:
        """One record batch with one row."""
        pa = arrow()
        values: dict[str, Any] = {name: getattr(rollout, name, None) for name in _SCALARS} | {
            "id": rollout.episode,
            "task": None if rollout.task is None else stored_json(rollout.task, "the task"),
            "error": None if rollout.error is None else f"{type(rollout.error).__name__}: {rollout.error}",
            "reset_info": stored_json(rollout.reset_info, "the reset info") if rollout.reset_info else None,
            "infos": [stored_json(info, "an info") for info in rollout.infos] if any(rollout.infos) else [],
        }
        columns = [pa.array([values[field.name]], field.type) for field in self.schema if field.name in values]
        arrays = self._leaf_arrays(rollout)
        columns += [self._encode_leaf(name, arrays[name], rollout.episode) for name in self.leaves]
        return pa.record_batch(columns, schema=self.schema)

    def _leaf_arrays(self, rollout: Rollout) -> dict[str, npt.NDArray[Any]]:
        """The arrays by column; a part that never began (a failed reset) is empty in all its columns."""
        trees = _time_arrays(rollout)
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name in {**self.structure, **trees}:
            if name not in trees and len(rollout):
                continue  # its policy wrote less than the others': refused below
            tree = trees.get(name, ())
            if tree_length(tree) == 0:
                arrays |= {path: np.zeros(0) for path in self.leaves if f"{path}/".startswith(f"{name}/")}
            else:
                arrays |= dict(tree_leaves(tree, name))
        if arrays.keys() != self.leaves.keys():
            raise DatasetError(
                f"episode {rollout.episode} has the columns {sorted(arrays)}, the dataset has "
                f"{sorted(self.leaves)}: one dataset holds episodes of one kind"
            )
        return arrays

    def _encode_leaf(self, name: str, array: npt.NDArray[Any], episode: int) -> Any:
        pa = arrow()
        leaf = self.leaves[name]
        if not leaf.is_array:
            texts = array.tolist()
            if leaf.dtype == "json":
                texts = [stored_json(value, name) for value in texts]
            return pa.array([texts], pa.list_(pa.string()))
        if len(array) == 0:
            return pa.array([[]], pa.list_(_arrow_type(leaf)))
        same = array.shape[1:] == leaf.shape and array.dtype != object
        if not same or not np.can_cast(array.dtype, leaf.dtype, "safe"):
            raise DatasetError(
                f"episode {episode}: {name!r} has dtype {array.dtype} and shape {array.shape[1:]} a step, "
                f"the dataset has {leaf.dtype} and {leaf.shape}"
            )
        values = pa.array(np.ascontiguousarray(array, dtype=leaf.dtype).reshape(-1))
        for size in reversed(leaf.shape):
            values = pa.FixedSizeListArray.from_arrays(values, size)
        return pa.ListArray.from_arrays(pa.array([0, len(array)], pa.int32()), values)

    def decode(self, batch: Any) -> list[Rollout]:
        """The rollouts of a record batch."""
        rows = batch.select([*_SCALARS, "infos"]).to_pylist()
        columns = {name: self._decode_leaf(name, batch.column(name)) for name in self.leaves}
        return [
            self._rollout(row, {name: episodes[position] for name, episodes in columns.items()})
            for position, row in enumerate(rows)
        ]

    def _rollout(self, row: dict[str, Any], arrays: dict[str, Any]) -> Rollout:
        trees = {name: _rebuild(shape, arrays) for name, shape in self.structure.items()}
        extras = {name.removeprefix("extras/"): trees.pop(name) for name in list(trees) if name.startswith("extras/")}
        return Rollout(
            **trees,
            **{name: row[name] for name in _PLAIN},
            episode=row["id"],
            task=None if row["task"] is None else json.loads(row["task"]),
            error=None if row["error"] is None else RolloutError(row["error"]),
            reset_info=json.loads(row["reset_info"] or "{}"),
            infos=[json.loads(text) for text in row["infos"]],
            extras=extras,
        )

    def _decode_leaf(self, name: str, column: Any) -> list[npt.NDArray[Any]]:
        leaf = self.leaves[name]
        if not leaf.is_array:
            decode = json.loads if leaf.dtype == "json" else str
            return [object_rows([decode(text) for text in texts]) for texts in column.to_pylist()]
        offsets = column.offsets.to_numpy()
        values = column.values
        for _ in leaf.shape:
            # A slice of a fixed-size list keeps its parent's child whole: take the part that is ours.
            size = values.type.list_size
            values = values.values.slice(values.offset * size, len(values) * size)
        flat = values.to_numpy(zero_copy_only=False).astype(leaf.dtype, copy=False)
        steps = flat.reshape(-1, *leaf.shape)
        return [steps[begin:end].copy() for begin, end in pairwise(offsets)]


def stored_json(value: Any, what: str) -> str:
    """A value as JSON; one that would be read back as something else is refused."""
    try:
        return json.dumps(to_jsonable(value, strict=True))
    except TypeError as error:
        raise DatasetError(f"{what} cannot be stored: {error}, which JSON lacks: convert it before, or leave it out") from error


def _time_arrays(rollout: Rollout) -> dict[str, Tree]:
    """Everything with a time axis, by column name."""
    arrays = rollout.arrays()
    arrays["policy_version"] = np.asarray(rollout.policy_version, dtype=np.int64)
    arrays["step_latencies"] = np.asarray(rollout.step_latencies, dtype=np.float64)
    for name, values in rollout.extras.items():
        arrays[f"extras/{name}"] = stack_values(values) if isinstance(values, list) else np.asarray(values)
    return arrays


def _leaf_of(array: npt.NDArray[Any]) -> Leaf:
    if array.dtype == object or array.dtype.kind not in "biuf" or 0 in array.shape[1:]:
        texts = len(array) > 0 and all(isinstance(value, str) for value in array.tolist())
        return Leaf("text" if texts else "json", ())
    return Leaf(str(array.dtype), array.shape[1:])


def _arrow_type(leaf: Leaf) -> Any:
    pa = arrow()
    if not leaf.is_array:
        return pa.string()
    kind = pa.from_numpy_dtype(np.dtype(leaf.dtype))
    for size in reversed(leaf.shape):
        kind = pa.list_(kind, size)
    return kind


def _structure(tree: Tree, path: str) -> Any:
    if isinstance(tree, dict):
        if strange := [key for key in tree if not isinstance(key, str)]:
            raise DatasetError(f"{path} has the key {strange[0]!r}: keys must be text in a dataset, convert them before")
        return {"dict": {key: _structure(part, f"{path}/{key}") for key, part in tree.items()}}
    if isinstance(tree, tuple):
        return {"tuple": [_structure(part, f"{path}/{position}") for position, part in enumerate(tree)]}
    return path


def _rebuild(structure: Any, arrays: dict[str, Any]) -> Tree:
    if isinstance(structure, str):
        return arrays[structure]
    if "dict" in structure:
        return {key: _rebuild(part, arrays) for key, part in structure["dict"].items()}
    return tuple(_rebuild(part, arrays) for part in structure["tuple"])
