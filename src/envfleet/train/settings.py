"""Settings by name: aliases, text to values, YAML files, and the schema, all read off the fields of `PPOConfig`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envfleet.errors import BackendMissing, BadArgument
from envfleet.train.config import PPOConfig

ALIASES = {
    "env_name": "env",
    "env_id": "env",
    "name": "env",
    "n_envs": "num_envs",
    "num_parallel_workers": "num_envs",
    "num_parallel_envs": "num_envs",
    "kwargs": "env_kwargs",
    "parallel_start_method": "start_method",
    "total_timesteps": "total_steps",
    "lr": "learning_rate",
    "n_steps": "num_steps",
    "n_epochs": "num_epochs",
    "update_epochs": "num_epochs",
    "clip_coef": "clip",
    "clip_range": "clip",
    "ent_coef": "entropy",
    "entropy_coef": "entropy",
    "vf_coef": "value_coef",
    "lam": "gae_lambda",
    "checkpoint_dir": "out",
    "hidden_size": "state_size",
    "agent_arch": "arch",
}
SECTIONS = ("env", "train")
FIELDS: dict[str, dataclasses.Field[Any]] = {spec.name: spec for spec in dataclasses.fields(PPOConfig)}
_TYPES = typing.get_type_hints(PPOConfig)


def field_name(name: str) -> str:
    """Return the field a name stands for: `env.num_envs`, `n-envs`, an alias or the name itself.

    Example:
        >>> field_name("env.num_parallel_workers"), field_name("ent-coef")
        ('num_envs', 'entropy')
        >>> field_name("train.learning_rat")
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: there is no setting 'train.learning_rat'. Did you mean learning_rate? Settings of train: ...
    """
    section, _, bare = name.rpartition(".")
    if section and section not in SECTIONS:
        raise BadArgument(f"there is no section {section!r} in {name!r}; the sections are env and train")
    bare = bare.replace("-", "_")
    found = ALIASES.get(bare, bare)
    if found in FIELDS and (not section or FIELDS[found].metadata["section"] == section):
        return found
    known = [key for key, spec in FIELDS.items() if not section or spec.metadata["section"] == section]
    close = difflib.get_close_matches(bare, [*known, *ALIASES], n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    if found in FIELDS:
        hint = f" It belongs to the section {FIELDS[found].metadata['section']}."
    where = f"Settings of {section}" if section else "Settings"
    raise BadArgument(f"there is no setting {name!r}.{hint} {where}: {', '.join(sorted(known))}")


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
            return _CONVERT[kind](value)
        except (ValueError, TypeError):
            continue  # not of this kind; the next one may fit
    wanted = " or ".join(_WORDS[kind] for kind in kinds)
    raise BadArgument(f"{name}={value!r}: {wanted} is needed")


def kinds_of(name: str) -> tuple[list[Any], bool]:
    """Return the types a setting may have, and whether it may be empty."""
    hint = _TYPES[name]
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [typing.get_origin(part) or part for part in parts if part is not type(None)]
    return [str if kind is Any else kind for kind in kinds], type(None) in parts


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    return words[str(value).lower()] if str(value).lower() in words else _refuse(value)


def _int(value: Any) -> int:
    if isinstance(value, bool):
        return int(_refuse(value))
    number = float(value) if isinstance(value, str) and ("e" in value.lower() or "_" in value) else value
    return int(number) if float(number) == int(number) else int(_refuse(value))


def _float(value: Any) -> float:
    return float(_refuse(value)) if isinstance(value, bool) else float(value)


def _str(value: Any) -> str:
    return value if isinstance(value, str) else str(_refuse(value))


def _ints(value: Any) -> tuple[int, ...]:
    parts = value.strip("[]() ").split(",") if isinstance(value, str) else list(value)
    return tuple(_int(part) for part in parts if part != "")


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(key): part for key, part in value.items()}
    pairs = [part.partition("=") for part in str(value).split(",") if part]
    if any(not sign for _, sign, _ in pairs):
        _refuse(value)
    return {key.strip(): _literal(text.strip()) for key, _, text in pairs}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _refuse(value: Any) -> Any:
    raise ValueError(value)


_CONVERT: dict[Any, Callable[[Any], Any]] = {
    bool: _bool, int: _int, float: _float, str: _str, tuple: _ints, dict: _mapping,
}  # fmt: skip
_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text", tuple: "numbers like 64,64",
    dict: "pairs like name=value,other=2",
}  # fmt: skip


def settings_from_yaml(path: str | Path) -> dict[str, Any]:
    """Read the sections `env:` and `train:` of a YAML file into settings; a wrong key is named with the valid ones."""
    try:
        import yaml
    except ImportError as missing:
        raise BackendMissing("pyyaml", extra="train") from missing
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
            if spec.metadata["section"] != section or spec.metadata.get("cli") is False:
                continue
            default = spec.default if spec.default is not dataclasses.MISSING else {}
            shown = list(default) if isinstance(default, tuple) else default
            text = json_like(shown)
            lines.append(f"  {spec.name}: {text}  # {spec.metadata['help']}")
    return "\n".join(lines) + "\n"


def json_like(value: Any) -> str:
    """Write a default as YAML does."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
