"""Observations and actions of the wire seen through Gymnasium spaces: text, numbers, or the schema's."""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from envfleet.errors import BadArgument
from envfleet.remote.codec import SPACE_KEY, from_json, jsonable, space_from_json, to_json
from envfleet.remote.http import action_fields, only_field

CHARSET = "".join(sorted(string.printable))
_ALLOWED = frozenset(CHARSET)
_INHERITED = ("metadata", "reward", "done")  # fields every official observation has, whatever the environment


@dataclass(frozen=True)
class ObservationView:
    """A space, and how an observation's fields (and their text) become a member of it."""

    space: spaces.Space[Any]
    value: Callable[[Any, str], Any]
    needs_text: bool = False


@dataclass(frozen=True)
class ActionView:
    """A space, and how its members become the fields of an action."""

    space: spaces.Space[Any]
    payload: Callable[[Any], dict[str, Any]]


def text_of(observation: Any) -> str:
    """The text of an observation: its `text` field, else its only string field, else all of it as JSON.

    Example:
        >>> text_of({"echoed": "hi", "n": 1}), text_of({"n": 1})
        ('hi', '{"n":1}')
    """
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        strings = [value for value in observation.values() if isinstance(value, str)]
        if isinstance(observation.get("text"), str):
            return str(observation["text"])
        if len(strings) == 1:
            return strings[0]
    return json.dumps(jsonable(observation), separators=(",", ":"), ensure_ascii=False)


def observation_view(mode: str, schema: Mapping[str, Any], length: int) -> ObservationView:
    """The view for an observation mode; raises BadArgument when the schema does not give the space."""
    if mode == "text":

        def to_bytes(_: Any, text: str) -> Any:
            padded = np.zeros(length, np.uint8)
            raw = text.encode()[:length]
            padded[: len(raw)] = np.frombuffer(raw, np.uint8)
            return padded

        return ObservationView(spaces.Box(0, 255, (length,), np.uint8), to_bytes, needs_text=True)
    if mode == "raw_text":

        def to_ascii(_: Any, text: str) -> Any:
            return "".join(c if c in _ALLOWED else "?" for c in text[:length])

        return ObservationView(spaces.Text(length, min_length=0, charset=CHARSET), to_ascii, needs_text=True)
    space, names = _schema_space(schema, "observation")
    read = _reader(space, names)
    if mode == "json" or isinstance(space, spaces.Box):
        return ObservationView(space, lambda fields, _: read(fields))
    try:
        flat = spaces.flatten_space(space)
    except (NotImplementedError, KeyError):
        flat = None
    if not isinstance(flat, spaces.Box) or _has_text(space):
        raise BadArgument(
            f"the server's observation ({_names(space)}) is not numbers of a fixed size, so it is no vector: "
            'use observation_mode="text" or "json"'
        )
    box = spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32), flat.shape, np.float32)
    return ObservationView(box, lambda fields, _: np.asarray(spaces.flatten(space, read(fields)), np.float32))


def action_view(mode: str, schema: Mapping[str, Any], actions: Sequence[Any] | None, length: int) -> ActionView:
    """The view for an action mode; BadArgument when neither the schema nor `actions` gives the space."""
    if mode == "text":
        name = only_field(schema)
        return ActionView(spaces.Text(length, min_length=0, charset=CHARSET), lambda text: {name: str(text)})
    if mode == "discrete":
        choices = list(actions) if actions is not None else _choices(schema)
        if not choices:
            raise BadArgument("action_mode='discrete' needs at least one action")
        fields = [dict(choice) if isinstance(choice, Mapping) else {only_field(schema): choice} for choice in choices]
        return ActionView(spaces.Discrete(len(fields)), lambda index: dict(fields[int(index)]))
    space, names = _schema_space(schema, "action")
    if names is None:
        return ActionView(space, lambda value: dict(to_json(space, value)))
    only = names[0]
    return ActionView(space, lambda value: {only: to_json(space, value)})


def auto_observation(mode: str, schema: Mapping[str, Any], length: int) -> ObservationView:
    """`observation_view` with one more mode, "auto": the schema's space, or text when it describes none."""
    if mode != "auto":
        return observation_view(mode, schema, length)
    try:
        return observation_view("json", schema, length)
    except BadArgument:  # the schema describes no space
        return observation_view("raw_text", schema, length)


def auto_action(mode: str, schema: Mapping[str, Any], actions: Sequence[Any] | None, length: int) -> ActionView:
    """`action_view` with one more mode, "auto": the exact space, else choices, else text, else the schema's."""
    if mode != "auto":
        return action_view(mode, schema, actions, length)
    exact = isinstance(schema.get("action"), Mapping) and SPACE_KEY in schema["action"]
    failure: BadArgument | None = None
    for candidate in ("json",) if exact else ("discrete", "text", "json"):
        try:
            return action_view(candidate, schema, actions, length)
        except BadArgument as error:
            failure = error
    assert failure is not None
    raise failure


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    name = only_field(schema)
    field = _resolve(action_fields(schema)[name], schema["action"])
    if "enum" in field:
        return list(field["enum"])
    if "const" in field:
        return [field["const"]]
    low, high = field.get("minimum"), field.get("maximum")
    low = field["exclusiveMinimum"] + 1 if "exclusiveMinimum" in field else low
    high = field["exclusiveMaximum"] - 1 if "exclusiveMaximum" in field else high
    if field.get("type") == "integer" and low is not None and high is not None and high - low < 100_000:
        return list(range(int(low), int(high) + 1))
    if field.get("type") == "boolean":
        return [False, True]
    raise BadArgument(
        f"the server's schema lists no choices for {name!r} (no enum, no integer bounds): pass actions=[…]"
    )


def _schema_space(schema: Mapping[str, Any], part: str) -> tuple[spaces.Space[Any], tuple[str] | None]:
    """The space of the part, and the name of the field that holds it when it is not a Dict of fields."""
    described = schema.get(part)
    if not isinstance(described, Mapping) or not isinstance(described.get("properties"), Mapping):
        raise BadArgument(f"/schema does not describe the server's {part}: use the text modes, or pass schema=")
    properties = {key: value for key, value in described["properties"].items() if key not in _INHERITED}
    if SPACE_KEY in described:
        space = space_from_json(described[SPACE_KEY])
        return space, None if isinstance(space, spaces.Dict) else (next(iter(properties)),)
    if not properties:
        raise BadArgument(f"/schema gives the server's {part} no fields: use the text modes, or pass schema=")
    fields = {key: _space(value, described, f"{part}.{key}") for key, value in properties.items()}
    return spaces.Dict(fields), None


def _resolve(field: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a `$ref` into the definitions, and take the first real type of an optional field."""
    for _ in range(8):
        if "$ref" in field:
            name = str(field["$ref"]).rsplit("/", 1)[-1]
            field = root.get("$defs", root.get("definitions", {})).get(name, {})
        elif "anyOf" in field or "allOf" in field:
            kinds = field.get("anyOf") or field.get("allOf") or []
            field = next((kind for kind in kinds if kind.get("type") != "null"), {})
    return field


def _space(field: Mapping[str, Any], root: Mapping[str, Any], where: str) -> spaces.Space[Any]:
    field = _resolve(field, root)
    kind = field.get("type")
    low, high = field.get("minimum"), field.get("maximum")
    if kind == "boolean":
        return spaces.Discrete(2)
    if kind == "integer" and low is not None and high is not None:
        return spaces.Discrete(int(high - low) + 1, start=int(low))
    if kind == "integer":
        bounds = np.iinfo(np.int64)
        least, most = bounds.min if low is None else int(low), bounds.max if high is None else int(high)
        return spaces.Box(least, most, (), np.int64)
    if kind == "number":
        return spaces.Box(-np.inf if low is None else low, np.inf if high is None else high, (), np.float64)
    if kind == "string":
        return spaces.Text(int(field.get("maxLength", 4096)), min_length=0, charset=CHARSET)
    if kind == "object" and field.get("properties"):
        inner = field["properties"].items()
        return spaces.Dict({key: _space(value, root, f"{where}.{key}") for key, value in inner})
    shape, item = _array_shape(field, root)
    if shape and item in ("number", "integer"):
        dtype = np.float64 if item == "number" else np.int64
        if dtype is np.float64:
            return spaces.Box(-np.inf, np.inf, shape, dtype)
        return spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, shape, np.int64)
    raise BadArgument(
        f"{where} ({kind or 'any type'}) has no fixed size in the server's schema, so it has no space: "
        'use the "text" mode, or pass schema= with minItems and maxItems'
    )


def _array_shape(field: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[tuple[int, ...], str | None]:
    shape: list[int] = []
    while field.get("type") == "array" and field.get("minItems") == field.get("maxItems") is not None:
        shape.append(int(field["maxItems"]))
        field = _resolve(field.get("items", {}), root)
    return tuple(shape), field.get("type")


def _reader(space: spaces.Space[Any], names: tuple[str] | None) -> Callable[[Any], Any]:
    if names is not None:
        only = names[0]
        return lambda fields: _member(space, fields[only], only)
    return lambda fields: _member(space, fields, "observation")


def _member(space: spaces.Space[Any], value: Any, where: str) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _member(inner, value.get(key), f"{where}.{key}") for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Text):
        return "".join(c if c in space.character_set else "?" for c in str(value or ""))[: space.max_length]
    if isinstance(space, spaces.Discrete):
        return int(value or 0)
    if isinstance(space, spaces.Box):
        # NaN crosses the wire as null, and a schema's array need not say its bounds.
        array = np.asarray(np.nan if value is None else value)
        if array.dtype == object:
            array = np.array(value, dtype=np.float64)
        return array.astype(space.dtype).reshape(space.shape)
    return from_json(space, value, where)


def _has_text(space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Dict):
        return any(map(_has_text, space.spaces.values()))
    if isinstance(space, spaces.Tuple):
        return any(map(_has_text, space.spaces))
    return isinstance(space, (spaces.Text, spaces.Sequence))


def _names(space: spaces.Space[Any]) -> str:
    return ", ".join(space.spaces) if isinstance(space, spaces.Dict) else str(space)
