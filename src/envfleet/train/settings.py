"""Settings as text: values of flags and YAML files, and the schema, all read off the fields of `PPOConfig`."""

from __future__ import annotations

import ast
import json
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envfleet.errors import BadArgument
from envfleet.train.config import FIELDS, SECTIONS, TYPES, default_of, field_name
from envfleet.util.extras import from_extra


def parse(name: str, value: Any) -> Any:
    """Turn text or a YAML value into what the field holds; refuse what does not fit.

    Example:
        >>> parse("hidden", "64,64"), parse("num_envs", "8"), parse("target_kl", "none"), parse("wandb", "yes")
        ((64, 64), 8, None, True)
    """
    kinds, optional = kinds_of(name)
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null", "") and optional):
        if optional:
            return None
        raise BadArgument(f"{name} cannot be empty")
    for kind in kinds:
        try:
            return _KINDS[kind][0](value)
        except (ValueError, TypeError):
            continue  # not of this kind; the next one may fit
    wanted = " or ".join(_KINDS[kind][1] for kind in kinds)
    raise BadArgument(f"{name}={value!r}: {wanted} is needed")


def parse_assignment(text: str) -> tuple[str, Any]:
    """Read "env.num_envs=6" as a setting and its value."""
    key, sign, value = text.partition("=")
    if not sign:
        raise BadArgument(f"--set {text}: NAME=VALUE is needed, like --set env.num_envs=6")
    name = field_name(key.strip())
    return name, parse(name, value.strip())


def as_text(value: Any) -> str:
    """Write a value as `parse` reads it.

    Example:
        >>> as_text((64, 64)), as_text(None), as_text({"red": ["red_0", "red_1"], "size": 4})
        ('64,64', 'none', 'red=red_0+red_1,size=4')
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, Mapping):
        return ",".join(f"{k}={'+'.join(v) if isinstance(v, list) else v}" for k, v in value.items())
    return str(value)


def kinds_of(name: str) -> tuple[list[Any], bool]:
    """Return the types a setting may have, and whether it may be empty."""
    hint = TYPES[name]
    parts = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    kinds = [typing.get_origin(part) or part for part in parts if part is not type(None)]
    return [str if kind in (Any, typing.Literal) else kind for kind in kinds], type(None) in parts


# What cannot be read as the type raises ValueError or TypeError.


def _bool(value: Any) -> bool:
    word = str(value).lower()
    if word not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        raise ValueError(value)
    return word in ("true", "yes", "on", "1")


def _int(value: Any) -> int:
    if isinstance(value, str):
        value = float(value) if "e" in value.lower() else int(value)  # "1e5"; int reads "100_000"
    if isinstance(value, bool) or int(value) != value:
        raise ValueError(value)
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(value)
    return value


def _ints(value: Any) -> tuple[int, ...]:
    parts = value.strip("[]() ").split(",") if isinstance(value, str) else list(value)
    return tuple(_int(part) for part in parts if part != "")


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    pairs = [part.partition("=") for part in str(value).split(",") if part]
    if any(not sign for _, sign, _ in pairs):
        raise ValueError(value)
    return {key.strip(): _literal(text.strip()) for key, _, text in pairs}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


_KINDS: dict[Any, tuple[Callable[[Any], Any], str]] = {
    bool: (_bool, "true or false"),
    int: (_int, "a whole number"),
    float: (_float, "a number"),
    str: (_str, "a text"),
    tuple: (_ints, "numbers like 64,64"),
    dict: (_mapping, "pairs like name=value,other=2"),
}


def settings_from_yaml(path: str | Path) -> dict[str, Any]:
    """Read the sections `env:` and `train:` of a YAML file into settings; a wrong key is named with the valid ones."""
    with from_extra("train"):
        import yaml
    path = Path(path)
    if not path.is_file():
        raise BadArgument(f"there is no configuration file {str(path)!r}")
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise BadArgument(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise BadArgument(f"{path}: sections env and train are needed, with settings below them")
    settings: dict[str, Any] = {}
    for section, values in content.items():
        if section not in SECTIONS:
            raise BadArgument(f"{path}: there is no section {section!r}; the sections are env and train")
        for key, value in (values or {}).items():
            name = field_name(f"{section}.{key}")
            settings[name] = parse(name, value)
    return settings


def schema() -> str:
    """Return every setting with its default and text, as a commented YAML file."""
    lines: list[str] = []
    for section in SECTIONS:
        lines.append(f"{section}:")
        for spec in FIELDS.values():
            if spec.metadata["section"] == section and spec.metadata["cli"]:
                # JSON is YAML too.
                lines.append(f"  {spec.name}: {json.dumps(default_of(spec))}  # {spec.metadata['help']}")
    return "\n".join(lines) + "\n"
