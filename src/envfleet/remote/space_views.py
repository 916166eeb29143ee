"""Observations and actions of the wire seen through Gymnasium spaces: text, numbers, or the schema's."""

from __future__ import annotations

import json
import math
import string
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envfleet.errors import BadArgument, ProtocolBroken
from envfleet.remote.result import StepResult
from envfleet.remote.space_codec import SPACE_KEY, jsonable, space_from_json, to_binary
from envfleet.remote.space_members import BadAction, Flag, MaybeText, from_json
from envfleet.util.trees import space_tree, tree_leaves

CHARSET = "".join(sorted(string.printable))
_MAX_NUMBERS = 2**31  # of one array: a schema that asks for more is refused
# What a malformed schema raises, one that refers to itself or asks for petabytes included.
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, MemoryError, RecursionError,
               StopIteration, AssertionError)  # fmt: skip
_UNSIZED = (spaces.Text, spaces.Sequence)
_INHERITED = ("metadata", "reward", "done")  # fields every official observation has, whatever the environment

# The options of a view over a session, with the defaults of a fleet's; all others are the client's.
VIEW_OPTIONS: dict[str, Any] = {"observation_mode": "auto", "action_mode": "auto", "actions": None, "text_length": 4096,
                                "max_steps": None, "null_reward": 0.0}  # fmt: skip
OBSERVATION_MODES = ("auto", "text", "raw_text", "json", "vector")
ACTION_MODES = ("auto", "text", "discrete", "json")


@dataclass(frozen=True)
class ObservationView:
    """A space, and how an observation's fields (and their text) become a member of it; raises BadArgument.

    The third argument of `value` means that the fields are exact (from a server of ours): null then is no NaN.
    """

    space: spaces.Space[Any]
    value: Callable[[Any, str, bool], Any]
    needs_text: bool = False


@dataclass(frozen=True)
class ActionView:
    """A space, and how its members become the fields of an action."""

    space: spaces.Space[Any]
    payload: Callable[[Any], dict[str, Any]]


def text_of(observation: Any) -> str:
    """The text of an observation: its `text` field, else its only string field, else all of it as JSON."""
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
    """The view for an observation mode; raises BadArgument when the schema does not give the space.

    "auto" is the schema's space, or text when it describes none.
    """
    if mode not in OBSERVATION_MODES:
        raise BadArgument(f"observation_mode is one of {OBSERVATION_MODES}, not {mode!r}")
    if mode == "auto":
        try:
            return observation_view("json", schema, length)
        except BadArgument:  # the schema describes no space
            return observation_view("raw_text", schema, length)
    if mode == "text":

        def to_bytes(_: Any, text: str, is_exact: bool) -> Any:
            padded = np.zeros(length, np.uint8)
            raw = text.encode(errors="surrogatepass")[:length]
            padded[: len(raw)] = np.frombuffer(raw, np.uint8)
            return padded

        return ObservationView(spaces.Box(0, 255, (length,), np.uint8), to_bytes, needs_text=True)
    if mode == "raw_text":
        # Its alphabet and length are for sampling only: text outside of it is given as it is.
        text_space = spaces.Text(length, min_length=0, charset=CHARSET)
        return ObservationView(text_space, lambda _, text, is_exact: text, needs_text=True)
    space, field_name = _schema_space(schema, "observation")
    where = field_name or "observation"

    def read(fields: Any, is_exact: bool) -> Any:
        if field_name is not None and (not isinstance(fields, Mapping) or field_name not in fields):
            raise BadAction(f"the observation has no field {field_name!r}")
        value = fields if field_name is None else fields[field_name]
        return from_json(space, value, where, observed=True, nulls=not is_exact)

    if mode == "json" or isinstance(space, spaces.Box):
        return ObservationView(space, lambda fields, _, is_exact: read(fields, is_exact))
    try:
        flat = spaces.flatten_space(space)
    except (NotImplementedError, KeyError):
        flat = None
    if not isinstance(flat, spaces.Box) or any(isinstance(leaf, _UNSIZED) for _, leaf in tree_leaves(space_tree(space))):
        shown = ", ".join(space.spaces) if isinstance(space, spaces.Dict) else str(space)
        hint = 'use observation_mode="text" or "json"'
        raise BadArgument(f"the server's observation ({shown}) is not numbers of a fixed size, so it is no vector: {hint}")
    box = spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32), flat.shape, np.float32)

    def to_vector(fields: Any, _: str, is_exact: bool) -> Any:
        return np.asarray(spaces.flatten(space, read(fields, is_exact)), np.float32)

    return ObservationView(box, to_vector)


def action_view(mode: str, schema: Mapping[str, Any], actions: Sequence[Any] | None, length: int) -> ActionView:
    """The view for an action mode; BadArgument when neither the schema nor `actions` gives the space.

    "auto" is `actions` if there are any, else the exact space, else the schema's choices, else text, else its space.
    """
    if mode not in ACTION_MODES:
        raise BadArgument(f"action_mode is one of {ACTION_MODES}, not {mode!r}")
    if mode == "auto":
        is_exact = isinstance(schema.get("action"), Mapping) and SPACE_KEY in schema["action"]
        for candidate in () if is_exact and actions is None else ("discrete", "text"):
            try:
                return action_view(candidate, schema, actions, length)
            except BadArgument:
                if actions is not None:
                    raise
    if mode == "text":
        name = only_field(schema)
        return ActionView(spaces.Text(length, min_length=0, charset=CHARSET), lambda text: {name: str(text)})
    if mode == "discrete":
        choices = list(actions) if actions is not None else _choices(schema)
        if not choices:
            raise BadArgument("action_mode='discrete' needs at least one action")
        fields = [dict(choice) if isinstance(choice, Mapping) else {only_field(schema): choice} for choice in choices]
        return ActionView(spaces.Discrete(len(fields)), lambda index: dict(fields[int(index)]))
    space, only = _schema_space(schema, "action")
    if only is None:
        return ActionView(space, lambda value: dict(to_binary(space, value)))
    return ActionView(space, lambda value: {only: to_binary(space, value)})


class SessionView(gymnasium.Env[Any, Any]):
    """What the two environments over a session share: spaces after the schema, answers read by them, a limit of steps."""

    client: Any

    def _set_views(self, schema: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Take the spaces from the schema; `options` has every key of `VIEW_OPTIONS`."""
        self._max_steps, self._null_reward = options["max_steps"], options["null_reward"]
        length = options["text_length"]
        if length < 1 or (self._max_steps is not None and self._max_steps < 1):
            raise BadArgument("text_length and max_steps must be at least 1")
        self._observe = observation_view(options["observation_mode"], schema, length)
        self._act = action_view(options["action_mode"], schema, options["actions"], length)
        self.observation_space, self.action_space = self._observe.space, self._act.space
        self._steps = 0

    def _read(self, result: StepResult, with_text: bool) -> tuple[Any, str]:
        """Observation and text of an answer; one that does not fit the space is ProtocolBroken."""
        try:
            text = text_of(result.observation) if with_text else ""
            return self._observe.value(result.observation, text, result.ends is not None), text
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            why = f"an observation that does not fit the schema: {str(error)[:300]}"
            refuse = getattr(self.client, "refuse", None)
            raise (refuse(why) if refuse else ProtocolBroken("the environment", why, self._steps)) from None

    def _count_step(self, result: StepResult) -> tuple[float, bool]:
        """The reward of a step, and whether `max_steps` ends the episode here."""
        self._steps += 1
        is_cut = not result.done and self._max_steps is not None and self._steps >= self._max_steps
        # The protocol lets a reward be absent; Gymnasium does not.
        return self._null_reward if result.reward is None else float(result.reward), is_cut


def action_fields(schema: Any) -> dict[str, Any]:
    """The fields of the action in a server's `/schema`, without the ones every action inherits."""
    action = schema.get("action") if isinstance(schema, Mapping) else None
    properties = action.get("properties") if isinstance(action, Mapping) else None
    return {key: value for key, value in (properties or {}).items() if key != "metadata"}


def only_field(schema: Any) -> str:
    """The field a bare value means: the action's only one, or its only required one; else BadArgument."""
    names = list(action_fields(schema))
    required = [name for name in names if name in schema["action"].get("required", ())]
    if len(names) != 1 and len(required) != 1:
        raise BadArgument(f"the server's action has the fields {names}: pass a mapping with them, not a bare value")
    return (required if len(required) == 1 else names)[0]


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
    raise BadArgument(f"the server's schema lists no choices for {name!r} (no enum, no integer bounds): pass actions=[…]")


def _schema_space(schema: Mapping[str, Any], part: str) -> tuple[spaces.Space[Any], str | None]:
    """The space of the part, and the name of the field that holds it when it is not a Dict of fields."""
    described = schema.get(part)
    if not isinstance(described, Mapping) or not isinstance(described.get("properties"), Mapping):
        raise BadArgument(f"/schema does not describe the server's {part}: use the text modes, or pass schema=")
    properties = {key: value for key, value in described["properties"].items() if key not in _INHERITED}
    try:
        if SPACE_KEY in described:
            space = space_from_json(described[SPACE_KEY])
            return space, None if isinstance(space, spaces.Dict) else next(iter(properties))
        if not properties:
            raise BadArgument(f"/schema gives the server's {part} no fields: use the text modes, or pass schema=")
        fields = ((key, _space(value, described, f"{part}.{key}")) for key, value in properties.items())
        return spaces.Dict(OrderedDict(fields)), None  # a dict would be sorted
    except BadArgument:
        raise
    except _UNREADABLE as error:
        why = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadArgument(f"/schema describes the server's {part} in a way that cannot be read ({why})") from None


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
    nullable = any(isinstance(each, Mapping) and each.get("type") == "null" for each in field.get("anyOf", ()))
    field = _resolve(field, root)
    kind = field.get("type")
    low, high = field.get("minimum"), field.get("maximum")
    if kind == "boolean":
        return Flag()
    if kind == "integer" and low is not None and high is not None:
        return spaces.Discrete(int(high - low) + 1, start=int(low))
    bounds = np.iinfo(np.int64)
    if kind == "integer":
        least, most = bounds.min if low is None else int(low), bounds.max if high is None else int(high)
        return spaces.Box(least, most, (), np.int64)
    if kind == "number":
        return spaces.Box(-np.inf if low is None else low, np.inf if high is None else high, (), np.float64)
    if kind == "string":
        text = MaybeText if nullable else spaces.Text
        return text(int(field.get("maxLength", 4096)), min_length=0, charset=CHARSET)
    if kind == "object" and field.get("properties"):
        inner = field["properties"].items()
        return spaces.Dict(OrderedDict((key, _space(value, root, f"{where}.{key}")) for key, value in inner))
    shape, item = _array_shape(field, root)
    if shape and item == "number":
        return spaces.Box(-np.inf, np.inf, shape, np.float64)
    if shape and item == "integer":
        return spaces.Box(bounds.min, bounds.max, shape, np.int64)
    hint = 'use the "text" mode, or pass schema= with minItems and maxItems'
    raise BadArgument(f"{where} ({kind or 'any type'}) has no fixed size in the server's schema, so it has no space: {hint}")


def _array_shape(field: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[tuple[int, ...], str | None]:
    shape: list[int] = []
    while field.get("type") == "array" and field.get("minItems") == field.get("maxItems") is not None:
        shape.append(int(field["maxItems"]))
        if math.prod(shape) > _MAX_NUMBERS or len(shape) > 32:
            return (), None
        field = _resolve(field.get("items", {}), root)
    return tuple(shape), field.get("type")
