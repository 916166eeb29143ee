"""Settings as text: values of flags and YAML files, and the schema, all read off the fields of `PPOConfig`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envfleet.errors import BadArgument
from envfleet.train.config import FIELDS, KINDS, SECTIONS, checked, default_of, field_name, kinds_of
from envfleet.util.extras import from_extra
from envfleet.util.text import read_pairs


def parse(name: str, value: Any, shown: str = "") -> Any:
    """Turn text or a YAML value into what the field holds; refuse what does not fit. `shown` is how the user wrote it.

    Example:
        >>> parse("hidden", "64,64"), parse("num_envs", "8"), parse("target_kl", "none"), parse("wandb", "yes")
        ((64, 64), 8, None, True)
    """
    kinds, optional = kinds_of(name)
    if optional and isinstance(value, str) and value.lower() in ("none", "null", ""):
        return None
    for kind in kinds:
        try:
            return checked(name, _READ[kind](value) if value is not None else None, shown or f"{name}={value!r}")
        except (ValueError, TypeError, OverflowError) as error:  # the last: int(inf)
            if isinstance(error, BadArgument):
                raise
            continue  # not of this kind; the next one may fit
    raise BadArgument(f"{shown or f'{name}={value!r}'}: {' or '.join(KINDS[kind][2] for kind in kinds)} is needed")


def parse_assignment(text: str) -> tuple[str, Any]:
    """Read "env.num_envs=6" as a setting and its value."""
    key, sign, value = text.partition("=")
    if not sign:
        raise BadArgument(f"--set {text}: NAME=VALUE is needed, like --set env.num_envs=6")
    name = field_name(key.strip())
    return name, parse(name, value.strip(), f"--set {text}")


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
    return {str(key): part for key, part in value.items()} if isinstance(value, Mapping) else read_pairs(str(value))


_READ: dict[Any, Callable[[Any], Any]] = {bool: _bool, int: _int, float: _float, str: _str, tuple: _ints, dict: _mapping}


def settings_from_yaml(path: str | Path) -> dict[str, Any]:
    """Read the sections `env:` and `train:` of a YAML file into settings; a wrong key is named with the valid ones."""
    return settings_from_mapping(yaml_sections(path), f"{path}: ")


def yaml_sections(path: str | Path) -> dict[str, Any]:
    """The content of a YAML file of settings, not yet checked."""
    with from_extra("train"):
        import yaml
    path = Path(path)
    if not path.is_file():
        raise BadArgument(f"there is no configuration file {str(path)!r}")
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise BadArgument(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise BadArgument(f"{path}: sections env and train are needed, with settings below them")
    return content


def settings_from_mapping(content: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Read the sections `env` and `train` of a mapping into settings; a wrong key is named with the valid ones.

    Example:
        >>> settings_from_mapping({"env": {"env_name": "CartPole-v1"}, "train": {"lr": 0.001}})
        {'env': 'CartPole-v1', 'learning_rate': 0.001}
    """
    settings: dict[str, Any] = {}
    for section, values in content.items():
        if section not in SECTIONS:
            raise BadArgument(f"{where}there is no section {section!r}; the sections are env and train")
        if not isinstance(values or {}, Mapping):
            raise BadArgument(f"{where}{section}: {values!r}: settings are needed below it, as {section}: {{name: value}}")
        for key, value in (values or {}).items():
            name = field_name(f"{section}.{key}")
            if name in settings:
                raise BadArgument(f"{where}{section}.{key}: {name} was given before, under this or another name")
            settings[name] = parse(name, value)
    return settings


def settings_of_run(folder: str | Path) -> dict[str, Any]:
    """The settings that a run folder was started with; {} where there is no run."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        return {}
    try:
        stored = json.loads(path.read_text())
        columns = stored.pop("columns")
    except (ValueError, KeyError, AttributeError) as error:
        raise BadArgument(f"{path} is damaged: give the settings of the run again, as they were") from error
    if columns:
        raise BadArgument(f"{path.parent}: this run has columns= ({', '.join(columns)}), so it is resumed from Python")
    return {name: parse(name, value) for name, value in stored.items() if name in FIELDS}


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
