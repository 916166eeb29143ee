"""Checks of what environments return, and their description. Helpers of the slot life."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np


def snapshot_value(value: Any) -> Any:
    """A copy of the containers and arrays in a value, because envs reuse and change what they return.

    Other objects are passed on as they are.
    """
    kind = type(value)
    if kind is dict:
        return {key: snapshot_value(item) for key, item in value.items()}
    if kind is list:
        return [snapshot_value(item) for item in value]
    if kind is tuple:
        return tuple(snapshot_value(item) for item in value)
    if isinstance(value, np.ndarray):
        return value.copy()
    return value


def is_many_agents(env: Any) -> bool:
    """Whether an env is PettingZoo's: AEC or parallel, by its class or by what it has."""
    pettingzoo = sys.modules.get("pettingzoo")
    if pettingzoo is not None and isinstance(env, (pettingzoo.AECEnv, pettingzoo.ParallelEnv)):
        return True
    spaces = (getattr(env, "observation_space", None), getattr(env, "action_space", None))
    return hasattr(env, "possible_agents") and all(callable(space) for space in spaces)


def describe(env: Any) -> dict[str, Any]:
    """What the parent needs to know about an env: spaces, metadata, render mode, spec, declared columns."""
    observation_space, action_space = getattr(env, "observation_space", None), getattr(env, "action_space", None)
    if not isinstance(observation_space, gym.Space) or not isinstance(action_space, gym.Space):
        old = " (they are of the old package `gym`: wrap the env by shimmy, or port it)" if _is_of_gym(observation_space) else ""
        raise TypeError(f"{type(env).__name__} has no observation_space and action_space of Gymnasium{old}")
    try:
        columns = attribute(env, "envfleet_columns")
    except AttributeError:
        columns = {}
    return {
        **(env.about_agents() if hasattr(env, "about_agents") else {}),  # an AgentEnv: see envfleet.multiagent
        "observation_space": observation_space,
        "action_space": action_space,
        "metadata": dict(getattr(env, "metadata", None) or {}),
        "render_mode": getattr(env, "render_mode", None),
        "spec": getattr(env, "spec", None),
        "columns": dict(columns),
        "identity": (os.getpid(), id(getattr(env, "unwrapped", env))),  # two slots must not have the same object
    }


def attribute(env: Any, name: str) -> Any:
    """An attribute of an env, looked for through its wrappers."""
    return env.get_wrapper_attr(name) if hasattr(env, "get_wrapper_attr") else getattr(env, name)


def reset_parameters(env: Any) -> tuple[list[str], list[str]]:
    """Which of `seed` and `options` the env's reset takes, and which of them it has no default for.

    Example:
        >>> class Old:
        ...     def reset(self, seed, options=None): ...
        >>> reset_parameters(Old())
        (['seed', 'options'], ['seed'])
    """
    try:
        parameters = inspect.signature(env.reset).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return [], []
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = {name: parameters[name] for name in ("seed", "options") if name in parameters}
    takes = ["seed", "options"] if any_name else list(known)
    return takes, [name for name, parameter in known.items() if parameter.default is parameter.empty]


def task_routes(env: Any) -> tuple[bool, Callable[[Any], Any] | None]:
    """How a task is passed to this env: `reset(task=…)` if it takes that, else `set_task(…)`, else reset's options."""
    try:
        takes = "task" in inspect.signature(env.reset).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        takes = False
    if takes:
        return True, None
    try:
        set_task = attribute(env, "set_task")
    except AttributeError:  # an environment without tasks
        return False, None
    return False, set_task if callable(set_task) else None


def unpack_result(result: Any, count: int, phase: str) -> Any:
    """The values a step or reset returned; a wrong number of them is refused."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(f'{phase}() is "async def": run this env with backend="aio"')
    if not isinstance(result, (tuple, list)) or len(result) != count:
        names = "(obs, reward, terminated, truncated, info)" if phase == "step" else "(obs, info)"
        got = f"{len(result)} values" if isinstance(result, (tuple, list)) else type(result).__name__
        raise TypeError(f"{phase}() returned {got}, not {names}{_old_api(result, phase)}")
    return result


def _is_of_gym(space: Any) -> bool:
    return type(space).__module__.partition(".")[0] == "gym"


def _old_api(result: Any, phase: str) -> str:
    """What to do about an env of the old Gym API; "" if it is not that."""
    if phase == "step" and isinstance(result, (tuple, list)) and len(result) == 4:
        return ': this is the old Gym API. Return terminated and truncated (a time limit) instead of "done"'
    if phase == "reset" and not (isinstance(result, (tuple, list)) and len(result) > 2):
        return ": if this is the observation alone, as in the old Gym API, return it with a dict: `return obs, {}`"
    return ""


def checked_info(info: Any) -> dict[str, Any]:
    """An info; anything but a dict is refused."""
    if not isinstance(info, dict):
        raise TypeError(f"info is {type(info).__name__}, not a dict")
    return info


def number_of(reward: Any) -> float:
    """A reward as a float: what NumPy would store in a float array, and nothing else."""
    try:
        return float(reward)
    except (TypeError, ValueError):
        array = np.asarray(reward)
        if array.size == 1 and array.dtype.kind in "fiub":
            return float(array.item())
        raise TypeError(f"reward is {reward!r}, not a number") from None
