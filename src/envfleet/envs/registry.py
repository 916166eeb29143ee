"""Short names of the environments that come with envfleet, and a helpful error for names nobody knows."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from envfleet.errors import BackendMissing, BadArgument

SHORT_NAMES = {
    "tmaze": "envfleet.envs.tmaze:TMaze",
    "cartpole-novel": "envfleet.envs.hidden_velocity:cartpole_no_velocity",
    "catch": "envfleet.envs.catch:PixelCatch",
    "echo": "envfleet.envs.echo:Echo",
    "asyncecho": "envfleet.envs.echo:AsyncEcho",
    "connect4": "envfleet.envs.connect4:Connect4",
    "connect4-easy": "envfleet.envs.connect4_levels:Connect4Easy",
    "connect4-medium": "envfleet.envs.connect4_levels:Connect4Medium",
    "connect4-hard": "envfleet.envs.connect4_levels:Connect4Hard",
    # many agents: ours, then PettingZoo's and MPE2's as they are
    "gridworld-aec": "envfleet.envs.gridworld:GridWorldEnvMultiAgent",
    "gridworld-parallel": "envfleet.envs.gridworld:GridWorldEnvParallel",
    "connect4-aec": "envfleet.envs.connect4_aec:Connect4AEC",
    "tictactoe": "pettingzoo.classic.tictactoe.tictactoe:env",
    "connect-four": "pettingzoo.classic.connect_four.connect_four:env",
    "rps": "pettingzoo.classic.rps.rps:parallel_env",
    "simple-spread": "mpe2.simple_spread.simple_spread:parallel_env",
    "simple-push": "mpe2.simple_push.simple_push:parallel_env",
}

#: Packages of multi-agent environments: "pettingzoo:classic/tictactoe_v3" is a module of theirs.
MULTIAGENT = ("pettingzoo", "mpe2")


def missing_multiagent(package: str) -> BackendMissing:
    """The error for a package of multi-agent environments that is not installed."""
    return BackendMissing(package, extra="multiagent")


def is_ours_to_find(name: str) -> bool:
    """Whether a name is found here: a short name, or a module of a multi-agent package.

    Example:
        >>> is_ours_to_find("tmaze"), is_ours_to_find("pettingzoo:classic/rps_v2"), is_ours_to_find("CartPole-v1")
        (True, True, False)
    """
    return name.lower() in SHORT_NAMES or name.partition(":")[0].partition(".")[0] in MULTIAGENT


def resolve_env(name: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Turn a short name or "module:attribute" into a factory; Gymnasium ids and callables pass through.

    Nothing is registered: the lookup imports the one module it needs, when it needs it. A name that leads to a module of
    multi-agent environments, such as "pettingzoo:classic/tictactoe_v3" or "mpe2:simple_spread_v3", gives that module's
    `parallel_env`, or its `env` if there is none; "pettingzoo.classic.rps_v2:env" asks for one of them by name.

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
    package, _, path = target.partition(":")
    if path and package in MULTIAGENT:
        # "classic/tictactoe-v3", as PettingZoo's registry has it, is the module classic/tictactoe_v3.
        return _load(name, f"{package}.{path.replace('/', '.').replace('-v', '_v')}:")
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
    except BackendMissing:
        raise
    except ImportError as error:
        if error.name in MULTIAGENT:
            raise missing_multiagent(error.name) from error
        raise BadArgument(f"the environment {name!r} cannot be loaded: {error}") from error
    found: Any = getattr(module, attribute, None) if attribute else module
    if isinstance(found, ModuleType):
        found = getattr(found, "parallel_env", None) or getattr(found, "env", None)
    # Gymnasium's own "module:Id-v0" form: the module registers the id when it is imported.
    if found is None and attribute and _in_registry(attribute):
        return attribute
    if not callable(found):
        wanted = repr(attribute) if attribute else "parallel_env or env"
        raise BadArgument(f"the environment {name!r} cannot be loaded: {module_name} has no {wanted}")
    factory: Callable[..., Any] = found
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
