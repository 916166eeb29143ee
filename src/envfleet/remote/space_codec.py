"""Gymnasium spaces as JSON: values, schemas, and the names an environment gives its fields.

An environment whose space is a `Dict` has its keys as fields. Any other space is one field, called `action`
or `obs` unless the environment says otherwise with a class attribute (plain data, so that it travels)::

    openenv = {"action": "message", "observation": "echoed", "info": ("n",)}

`info` lists the keys of Gymnasium's info that become fields of the observation; the others become metadata.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.errors import BadArgument
from envfleet.remote.space_members import BadAction, Flag, from_json, show
from envfleet.util.jsonable import to_jsonable

SPACE_KEY = "x-gymnasium"  # the exact space, beside the JSON schema every OpenEnv client understands


@dataclass(frozen=True)
class Dialect:
    """The messages of one environment: its spaces and field names."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    action_name: str = "action"
    observation_name: str = "obs"
    info_fields: tuple[str, ...] = ()
    # Asked at every step, and an isinstance() of Gymnasium's Dict goes through abc's slow path.
    _acts_in_fields: bool = field(init=False, repr=False)
    _sees_fields: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_acts_in_fields", isinstance(self.action_space, spaces.Dict))
        object.__setattr__(self, "_sees_fields", isinstance(self.observation_space, spaces.Dict))

    @classmethod
    def of(cls, env: Any) -> Dialect:
        """The dialect of an environment: its spaces, and the names in its `openenv` attribute."""
        names = getattr(getattr(env, "unwrapped", env), "openenv", None) or {}
        return cls(
            env.observation_space,
            env.action_space,
            names.get("action", "action"),
            names.get("observation", "obs"),
            tuple(names.get("info", ())),
        )

    def action(self, data: Any) -> Any:
        """The environment's action from the fields that came in; raises BadAction."""
        if not isinstance(data, dict):
            raise BadAction(f"an action is an object with fields, not {type(data).__name__}")
        fields = data
        if "metadata" in data:
            fields = {key: value for key, value in data.items() if key != "metadata"}
        if self._acts_in_fields:
            return from_json(self.action_space, fields, "action")
        if len(fields) != 1 or self.action_name not in fields:
            raise BadAction(f"an action has the one field {self.action_name!r}; got {show(list(fields)[:10])}")
        return from_json(self.action_space, fields[self.action_name], self.action_name)

    def observation(self, obs: Any, info: Mapping[str, Any], convert: Callable[..., Any] | None = None) -> Any:
        """The fields of an observation; `convert` is `to_json`, or `to_lists` or `to_binary` between our own ends."""
        value = (convert or to_json)(self.observation_space, obs)
        fields = value if self._sees_fields else {self.observation_name: value}
        for key in self.info_fields:
            if key in info:
                fields[key] = jsonable(info[key]) if convert in (None, to_json) else info[key]
        return fields

    def metadata(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """What of info is not a field of the observation and has a JSON form."""
        rest = {str(key): jsonable(value) for key, value in info.items() if key not in self.info_fields}
        return {key: value for key, value in rest.items() if value is not None}

    def schemas(self) -> dict[str, Any]:
        """The answer of `/schema`."""
        return {
            "action": _object_schema("Action", self.action_name, self.action_space),
            "observation": _object_schema("Observation", self.observation_name, self.observation_space),
            "state": {
                "title": "State",
                "type": "object",
                "properties": {"episode_id": {"type": ["string", "null"]}, "step_count": {"type": "integer"}},
            },
        }


def _object_schema(title: str, name: str, space: spaces.Space[Any]) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        inner = schema(space)
    else:
        inner = {"type": "object", "properties": {name: schema(space)}, "required": [name]}
    return {"title": title, **inner, SPACE_KEY: space_to_json(space)}


def to_json(space: spaces.Space[Any], value: Any) -> Any:
    """A value of the space as JSON data; numbers that JSON lacks (NaN, infinities) become null."""
    return _convert(space, value, jsonable)


def to_lists(space: spaces.Space[Any], value: Any) -> Any:
    """Like `to_json`, but numbers that JSON lacks stay what they are, for a frame between our own ends."""
    return _convert(space, value, lambda leaf: leaf.tolist() if isinstance(leaf, (np.ndarray, np.generic)) else leaf)


def to_binary(space: spaces.Space[Any], value: Any) -> Any:
    """Like `to_lists`, but arrays stay arrays, for a frame that carries raw bytes."""
    return _convert(space, value, lambda leaf: leaf.item() if isinstance(leaf, np.generic) else leaf)


def _convert(space: spaces.Space[Any], value: Any, leaf: Callable[[Any], Any]) -> Any:
    if type(value) is str or type(value) is np.ndarray:
        return leaf(value)
    if isinstance(space, spaces.Dict):
        return {key: _convert(inner, value[key], leaf) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [_convert(inner, part, leaf) for inner, part in zip(space.spaces, value)]
    if isinstance(space, spaces.Sequence) and not space.stack:
        return [_convert(space.feature_space, part, leaf) for part in value]
    return bool(value) if isinstance(space, Flag) else leaf(value)


def jsonable(value: Any) -> Any:
    """Plain JSON data for a value of info or of a space; what has no JSON form becomes null."""
    return to_jsonable(value, unknown=lambda _: None, nan=False)


def schema(space: spaces.Space[Any]) -> dict[str, Any]:
    """The JSON schema of a space's values; raises BadArgument for a space with no JSON form."""
    if isinstance(space, spaces.Dict):
        return {
            "type": "object",
            "properties": {key: schema(inner) for key, inner in space.spaces.items()},
            "required": list(space.spaces),
        }
    if isinstance(space, spaces.Tuple):
        return {"type": "array", "prefixItems": [schema(inner) for inner in space.spaces]}
    if isinstance(space, Flag):
        return {"type": "boolean"}
    if isinstance(space, spaces.Discrete):
        return {"type": "integer", "minimum": int(space.start), "maximum": int(space.start + space.n) - 1}
    if isinstance(space, spaces.Text):
        return {"type": "string", "minLength": space.min_length, "maxLength": space.max_length}
    if isinstance(space, spaces.Sequence):
        return {"type": "array", "items": schema(space.feature_space)}
    if isinstance(space, (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)) and space.shape is not None:
        assert space.dtype is not None
        nested: dict[str, Any] = {"type": "number" if space.dtype.kind == "f" else "integer"}
        for size in reversed(space.shape):
            nested = {"type": "array", "items": nested, "minItems": size, "maxItems": size}
        return nested
    raise BadArgument(f"{type(space).__name__} spaces have no JSON form: wrap the environment's space")


def space_to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """A space as JSON data from which `space_from_json` builds an equal one."""
    if isinstance(space, spaces.Dict):
        return {"space": "Dict", "spaces": {key: space_to_json(inner) for key, inner in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"space": "Tuple", "spaces": [space_to_json(inner) for inner in space.spaces]}
    if isinstance(space, spaces.Discrete):
        return {"space": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiBinary):
        return {"space": "MultiBinary", "shape": list(space.shape)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"space": "MultiDiscrete", "nvec": space.nvec.tolist(), "dtype": space.dtype.str}
    if isinstance(space, spaces.Text):
        return {
            "space": "Text",
            "min_length": space.min_length,
            "max_length": space.max_length,
            "charset": "".join(sorted(space.character_set)),
        }
    if isinstance(space, spaces.Box):
        return {
            "space": "Box",
            "shape": list(space.shape),
            "dtype": space.dtype.str,
            "low": _bounds(space.low),
            "high": _bounds(space.high),
        }
    if isinstance(space, spaces.Sequence):
        return {"space": "Sequence", "of": space_to_json(space.feature_space), "stack": space.stack}
    raise BadArgument(f"{type(space).__name__} spaces have no JSON form: wrap the environment's space")


def _bounds(bound: np.ndarray[Any, Any]) -> Any:
    """One number where all are equal; infinities as strings, because JSON has none."""
    values = np.unique(bound)
    numbers = values.tolist() if len(values) == 1 else bound.ravel().tolist()
    shown = [value if math.isfinite(value) else str(value) for value in numbers]
    return shown[0] if len(values) == 1 else shown


def space_from_json(data: Mapping[str, Any]) -> spaces.Space[Any]:
    """The inverse of `space_to_json`."""
    kind = data["space"]
    if kind == "Dict":
        return spaces.Dict(
            OrderedDict((key, space_from_json(inner)) for key, inner in data["spaces"].items())
        )  # a dict is sorted
    if kind == "Tuple":
        return spaces.Tuple([space_from_json(inner) for inner in data["spaces"]])
    if kind == "Discrete":
        return spaces.Discrete(data["n"], start=data["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["shape"] if len(data["shape"]) > 1 else data["shape"][0])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(data["nvec"], dtype=np.dtype(data["dtype"]).type)
    if kind == "Text":
        return spaces.Text(data["max_length"], min_length=data["min_length"], charset=data["charset"])
    if kind == "Sequence":
        return spaces.Sequence(space_from_json(data["of"]), stack=data["stack"])
    if kind == "Box":
        shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
        if math.prod(shape) > 2**31 or dtype.kind not in "biuf":
            raise BadArgument(f"a Box of shape {shape} and dtype {dtype} cannot be built")
        low, high = (_bound(data[name], shape, dtype) for name in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    raise BadArgument(f"unknown space {kind!r} in the server's schema")


def _bound(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    bound = np.array(value, dtype=np.float64 if dtype.kind == "f" else dtype).astype(dtype)
    return np.broadcast_to(bound, shape).copy() if bound.ndim == 0 else bound.reshape(shape)
