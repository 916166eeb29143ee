"""Short names of the environments that come with envfleet, and a helpful error for names nobody knows."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from envfleet.errors import BadArgument

SHORT_NAMES = {
    "tmaze": "envfleet.envs.tmaze:TMaze",
    "cartpole-novel": "envfleet.envs.novelocity:cartpole_no_velocity",
    "catch": "envfleet.envs.catch:PixelCatch",
    "echo": "envfleet.envs.echo:Echo",
    "asyncecho": "envfleet.envs.echo:AsyncEcho",
    "connect4": "envfleet.envs.connect4:Connect4",
    "connect4-easy": "envfleet.envs.levels:Connect4Easy",
    "connect4-medium": "envfleet.envs.levels:Connect4Medium",
    "connect4-hard": "envfleet.envs.levels:Connect4Hard",
}


def resolve_env(name: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Turn a short name or "module:attribute" into a factory; Gymnasium ids and callables pass through.

    Nothing is registered: the lookup imports the one module it needs, when it needs it.

    Example:
        >>> resolve_env("tmaze")().length
        10
        >>> resolve_env("CartPole-v1")
        'CartPole-v1'
        >>> resolve_env("CartPoel-v1")
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: there is no environment 'CartPoel-v1'. Close names: CartPole-v1, ...
    """
    if callable(name):
        return name
    target = SHORT_NAMES.get(name.lower(), name)
    if ":" in target and "/" not in target:
        return _load(name, target)
    import gymnasium as gym

    if _in_registry(target):
        return target
    known = [*SHORT_NAMES, *gym.registry]
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    hint = f"Close names: {', '.join(close)}" if close else 'Give a Gymnasium id, a short name or "module:attribute"'
    raise BadArgument(f"there is no environment {name!r}. {hint}")


def _load(name: str, target: str) -> str | Callable[..., Any]:
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadArgument(f"the environment {name!r} cannot be loaded: {error}") from error
    # Gymnasium's own "module:Id-v0" form: the module registers the id when it is imported.
    if not hasattr(module, attribute):
        if _in_registry(attribute):
            return attribute
        raise BadArgument(f"the environment {name!r} cannot be loaded: {module_name} has no {attribute!r}")
    factory: Callable[..., Any] = getattr(module, attribute)
    return factory


def _in_registry(name: str) -> bool:
    import gymnasium as gym

    try:
        gym.spec(name)
    except gym.error.Error:  # no such id; the caller suggests near ones
        return False
    except ModuleNotFoundError:  # "plugin:Id-v0" whose plugin is absent
        return False
    return True
