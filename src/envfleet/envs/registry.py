"""Environments by name: the short names of envfleet, multi-agent packages, "module:attribute", Gymnasium ids."""

from __future__ import annotations

import copy
import difflib
import functools
import importlib
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from envfleet.errors import BadArgument, MissingExtra

SHORT_NAMES = {
    "tmaze": "envfleet.envs.tmaze:TMaze",
    # families of tasks; also as "AntDir-v0" and "envfleet/AntDir-v0"
    "gridnavi": "envfleet.envs.gridnavi:GridNavi",
    "unlock": "envfleet.envs.unlock:Unlock",
    "unlock-continuous": "envfleet.envs.unlock:UnlockContinuous",
    "pointrobot": "envfleet.envs.point_robot:PointRobot",
    "pointrobot-sparse": "envfleet.envs.point_robot:PointRobotSparse",
    "pointrobot-semicircle": "envfleet.envs.point_robot:PointRobotSemicircle",
    "antdir": "envfleet.envs.mujoco_tasks:AntDir",
    "antdir-forwardbackward": "envfleet.envs.mujoco_tasks:AntForwardBackward",
    "antgoal": "envfleet.envs.mujoco_tasks:AntGoal",
    "halfcheetahvel": "envfleet.envs.mujoco_tasks:HalfCheetahVel",
    "halfcheetahdir": "envfleet.envs.mujoco_tasks:HalfCheetahDir",
    "cartpole-novel": "envfleet.envs.hidden_velocity:cartpole_no_velocity",
    "cage2": "envfleet.envs.cage2.env:Cage2Env",
    "catch": "envfleet.envs.catch:PixelCatch",
    "echo": "envfleet.envs.echo:Echo",
    "asyncecho": "envfleet.envs.echo:AsyncEcho",
    "connect4": "envfleet.envs.connect4:Connect4",
    "connect4-easy": "envfleet.envs.connect4:Connect4Easy",
    "connect4-medium": "envfleet.envs.connect4:Connect4Medium",
    "connect4-hard": "envfleet.envs.connect4:Connect4Hard",
    "gridworld-team": "envfleet.envs.gridworld_team:GridWorldTeam",
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
    "UnlockContinuous": "unlock-continuous",
    "PointRobot": "pointrobot",
    "PointRobotSparse": "pointrobot-sparse",
    "PointRobotSemicircle": "pointrobot-semicircle",
    "AntDir": "antdir",
    "AntForwardBackward": "antdir-forwardbackward",
    "AntGoal": "antgoal",
    "HalfCheetahVel": "halfcheetahvel",
    "HalfCheetahDir": "halfcheetahdir",
    "Cage2": "cage2",
}

#: Environments that exist in C++ too, for `backend="native"` -> the class. Gymnasium's keep their spec: time limit, arguments.
NATIVE = {
    "CartPole-v1": "envfleet.envs.native_classic:NativeCartPole",
    "MountainCar-v0": "envfleet.envs.native_classic:NativeMountainCar",
    "MountainCarContinuous-v0": "envfleet.envs.native_classic:NativeMountainCarContinuous",
    "Acrobot-v1": "envfleet.envs.native_classic:NativeAcrobot",
    "Pendulum-v1": "envfleet.envs.native_classic:NativePendulum",
    "gridnavi": "envfleet.envs.native_games:NativeGridNavi",
    "gridworld-team": "envfleet.envs.native_games:NativeGridWorld",
    "connect4": "envfleet.envs.native_games:NativeConnect4",
    "connect4-easy": "envfleet.envs.native_games:NativeConnect4Easy",
    "connect4-medium": "envfleet.envs.native_games:NativeConnect4Medium",
    "connect4-hard": "envfleet.envs.native_games:NativeConnect4Hard",
    "Ant-v5": "envfleet.envs.native_mujoco:NativeAnt",
    "HalfCheetah-v5": "envfleet.envs.native_mujoco:NativeHalfCheetah",
    "antdir": "envfleet.envs.native_mujoco:NativeAntDir",
    "antdir-forwardbackward": "envfleet.envs.native_mujoco:NativeAntForwardBackward",
    "antgoal": "envfleet.envs.native_mujoco:NativeAntGoal",
    "halfcheetahvel": "envfleet.envs.native_mujoco:NativeHalfCheetahVel",
    "halfcheetahdir": "envfleet.envs.native_mujoco:NativeHalfCheetahDir",
    "cage2": "envfleet.envs.cage2.native_cage2:NativeCage2Env",
}

#: Packages of multi-agent environments: "pettingzoo:classic/tictactoe_v3" is a module of theirs.
MULTIAGENT = ("pettingzoo", "mpe2")


#: Packages whose environments a batch engine runs: "gymnax:CartPole-v1".
ENGINES = ("gymnax", "envpool")


def resolve_env(name: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """Turn a short name or "module:attribute" into a factory; Gymnasium ids and callables pass through.

    "gymnax:…" and "envpool:…" pass through too: a batch engine builds those. Nothing is registered: the lookup imports the one module it needs, when it needs it. A name that leads to a module of
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
    if not isinstance(name, str):
        raise BadArgument(f"env={name!r}: give a name, an id or a callable that builds an environment")
    if name.startswith("native:"):
        return _native(name.removeprefix("native:"))
    name = _short(name)
    target = SHORT_NAMES.get(name.lower(), name)
    package, _, path = target.partition(":")
    if path and package in ENGINES:
        return target
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


def has_native_version(env: Any) -> bool:
    """Whether an environment that is given by name exists in C++ too.

    Example:
        >>> has_native_version("envfleet/Cage2-v0"), has_native_version("Blackjack-v1")
        (True, False)
    """
    return isinstance(env, str) and _short(env) in NATIVE


def _short(name: str) -> str:
    return IDS.get(name.removeprefix("envfleet/").removesuffix("-v0"), name)


def native_version(env: Any, kwargs: Mapping[str, Any] | None = None) -> tuple[Any, Mapping[str, Any] | None]:
    """The native version of an environment that is given by name or spec, and the arguments it still needs; others as they are.

    Example:
        >>> native_version("CartPole-v1")[0].max_episode_steps
        500
    """
    import gymnasium as gym

    name = env if isinstance(env, str) else env.id if isinstance(env, gym.envs.registration.EnvSpec) else None
    short = _short(name) if name is not None else None
    if short not in NATIVE:
        if name is not None and not name.startswith("native:"):
            instead = "'gridworld-team' steps its agents as one; " if name.startswith("gridworld") else ""
            raise BadArgument(
                f"{name!r} has no native version: {instead}backend 'native' has {', '.join(NATIVE)}, and libraries of yours as "
                "'native:my_env.so' (docs/native.md)"
            )
        return env, kwargs
    from envfleet.native.library import own_library

    own_library()  # one line where it was not built, instead of a failure of every slot
    if short in SHORT_NAMES:
        build: Any = _load(short, NATIVE[short])
        return functools.partial(build, **(kwargs or {})), None
    spec = copy.deepcopy(gym.spec(env) if isinstance(env, str) else env)
    spec.entry_point, spec.disable_env_checker, spec.vector_entry_point = NATIVE[short], True, None
    return spec, kwargs


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


def _native(path: str) -> Callable[..., Any]:
    """The environment of a native library: "my_env.so", or "my_envs.so:Name" where it has several."""
    from envfleet.native.native_env import NativeEnv

    library, _, env = path.partition(":")
    return functools.partial(NativeEnv, os.path.abspath(library), env or None)


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
