"""Environments by name: the short names of envfleet, multi-agent packages, "module:attribute", Gymnasium ids."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from envfleet.errors import BadArgument, MissingExtra

SHORT_NAMES = {
    "tmaze": "envfleet.envs.tmaze:TMaze",
    # families of tasks; also as "AntDir-v0" and "envfleet/AntDir-v0"
    "gridnavi": "envfleet.envs.gridnavi:GridNavi",
    "unlock": "envfleet.envs.unlock:Unlock",
    "pointrobot": "envfleet.envs.point_robot:PointRobot",
    "pointrobot-sparse": "envfleet.envs.point_robot:PointRobotSparse",
    "pointrobot-semicircle": "envfleet.envs.point_robot:PointRobotSemicircle",
    "antdir": "envfleet.envs.mujoco_tasks:AntDir",
    "antdir-forwardbackward": "envfleet.envs.mujoco_tasks:AntForwardBackward",
    "antgoal": "envfleet.envs.mujoco_tasks:AntGoal",
    "halfcheetahvel": "envfleet.envs.mujoco_tasks:HalfCheetahVel",
    "halfcheetahdir": "envfleet.envs.mujoco_tasks:HalfCheetahDir",
    "cartpole-novel": "envfleet.envs.hidden_velocity:cartpole_no_velocity",
    "catch": "envfleet.envs.catch:PixelCatch",
    "echo": "envfleet.envs.echo:Echo",
    "asyncecho": "envfleet.envs.echo:AsyncEcho",
    "connect4": "envfleet.envs.connect4:Connect4",
    "connect4-easy": "envfleet.envs.connect4:Connect4Easy",
    "connect4-medium": "envfleet.envs.connect4:Connect4Medium",
    "connect4-hard": "envfleet.envs.connect4:Connect4Hard",
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

#: Environments of ours that Gymnasium knows as "envfleet/…-v0", and our own functions without the prefix too -> their short names.
IDS = {
    "TMaze": "tmaze",
    "GridNavi": "gridnavi",
    "Unlock": "unlock",
    "PointRobot": "pointrobot",
    "PointRobotSparse": "pointrobot-sparse",
    "PointRobotSemicircle": "pointrobot-semicircle",
    "AntDir": "antdir",
    "AntForwardBackward": "antdir-forwardbackward",
    "AntGoal": "antgoal",
    "HalfCheetahVel": "halfcheetahvel",
    "HalfCheetahDir": "halfcheetahdir",
}

#: Packages of multi-agent environments: "pettingzoo:classic/tictactoe_v3" is a module of theirs.
MULTIAGENT = ("pettingzoo", "mpe2")


def resolve_env(name: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Turn a short name or "module:attribute" into a factory; Gymnasium ids and callables pass through.

    Nothing is registered: the lookup imports the one module it needs, when it needs it. A name that leads to a module of
    multi-agent environments, such as "pettingzoo:classic/tictactoe_v3" or "mpe2:simple_spread_v3", gives that module's
    `parallel_env`, or its `env` if there is none; "pettingzoo.classic.rps_v2:env" asks for one of them by name.

    Example:
        >>> resolve_env("tmaze")().length, resolve_env("envfleet/TMaze-v0")().length
        (10, 10)
        >>> resolve_env("CartPole-v1")
        'CartPole-v1'
        >>> resolve_env("CartPoel-v1")
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: unknown environment 'CartPoel-v1': ... Close names: CartPole-v1, ...
    """
    if callable(name):
        return name
    name = IDS.get(name.removeprefix("envfleet/").removesuffix("-v0"), name)
    target = SHORT_NAMES.get(name.lower(), name)
    package, _, path = target.partition(":")
    if path and package in MULTIAGENT:
        # "classic/tictactoe-v3", as PettingZoo's registry has it, is the module classic/tictactoe_v3.
        return _load(name, f"{package}.{path.replace('/', '.').replace('-v', '_v')}:")
    if path and "/" not in target:
        return _load(name, target)
    problem = _register_problem(target)
    if problem is None:
        return target
    import gymnasium as gym

    close = difflib.get_close_matches(name, [*SHORT_NAMES, *gym.registry], n=3, cutoff=0.6)
    hint = f"Close names: {', '.join(close)}" if close else 'Give a Gymnasium id, a short name or "module:attribute"'
    raise BadArgument(f"unknown environment {name!r}: {problem if problem.endswith('?') else problem.rstrip('.') + '.'} {hint}")


def spec_of(name: str) -> Any:
    """The Gymnasium spec that builds the environment of this name anywhere; None if it is not a Gymnasium environment.

    Example:
        >>> spec_of("tmaze").make().unwrapped.length, spec_of("CartPole-v1").max_episode_steps
        (10, 500)
    """
    import gymnasium as gym

    found = resolve_env(name)
    if isinstance(found, str):
        return gym.spec(found.rpartition(":")[2])
    built = found()
    if hasattr(built, "close"):
        built.close()
    return gym.envs.registration.EnvSpec(name, SHORT_NAMES.get(name.lower(), name)) if isinstance(built, gym.Env) else None


def _load(name: str, target: str) -> str | Callable[..., Any]:
    """What "module:attribute" names: a factory, a module of multi-agent environments, or an id the module registers."""
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except MissingExtra:
        raise
    except ImportError as error:
        if error.name in MULTIAGENT:
            raise MissingExtra(error.name, extra="multiagent") from error
        raise BadArgument(f"the environment {name!r} cannot be loaded: {error}") from error
    found: Any = getattr(module, attribute, None) if attribute else module
    if isinstance(found, ModuleType):
        found = getattr(found, "parallel_env", None) or getattr(found, "env", None)
    # Gymnasium's own "module:Id-v0" form: the module registers the id when it is imported.
    if found is None and attribute and _register_problem(attribute) is None:
        return attribute
    if not callable(found):
        wanted = repr(attribute) if attribute else "parallel_env or env"
        raise BadArgument(f"the environment {name!r} cannot be loaded: {module_name} has no {wanted}")
    factory: Callable[..., Any] = found
    return factory


def _register_problem(name: str) -> str | None:
    """Why Gymnasium does not know an id ("Id-v0", "module:Namespace/Id-v0"); None when it does."""
    import gymnasium as gym

    module, _, bare = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        gym.spec(bare)
    except (gym.error.Error, ImportError) as unknown:
        return str(unknown)
    return None


def register() -> None:
    """Tell Gymnasium the ids of `IDS`; called when `envfleet.envs` is imported. Classes are imported when one is made."""
    from gymnasium.envs.registration import register as add
    from gymnasium.envs.registration import registry

    for name, short in IDS.items():
        if f"envfleet/{name}-v0" not in registry:
            add(f"envfleet/{name}-v0", entry_point=SHORT_NAMES[short])
