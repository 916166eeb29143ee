"""`AttributeTasks`: any environment whose attributes are the task, such as CartPole with poles of other lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from envfleet.envs.task_env import HasTask
from envfleet.errors import BadArgument
from envfleet.tasks.task_space import TaskSampler, TaskSpace


class AttributeTasks(HasTask, gym.Wrapper[Any, Any, Any, Any], gym.utils.RecordConstructorArgs):
    """Sets attributes of the innermost environment at every reset; a task is a dict attribute -> value.

    Args:
        env: the environment.
        tasks: bounds per attribute, `{"length": (0.3, 1.0)}`, from which tasks are drawn uniformly; or a `TaskSpace` of such dicts.
        after: called with the innermost environment when the attributes are set, for values that follow from them.

    Example:
        >>> def heavier(cartpole):
        ...     cartpole.polemass_length = cartpole.masspole * cartpole.length
        >>> env = AttributeTasks(gym.make("CartPole-v1"), {"length": (0.3, 1.0)}, after=heavier)
        >>> _, info = env.reset(seed=0, options={"task": {"length": 0.8}})
        >>> env.unwrapped.length, info["task"]
        (0.8, {'length': 0.8})
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        tasks: Mapping[str, tuple[float, float]] | TaskSpace,
        after: Callable[[Any], None] | None = None,
    ) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, tasks=tasks, after=after)
        gym.Wrapper.__init__(self, env)
        self._after = after
        self._before: dict[str, Any] = {}  # the environment's own values of what tasks have set
        self.task_space = tasks if isinstance(tasks, TaskSpace) else _uniform(tasks)
        for name in self.task_space.sample(np.random.default_rng(0)):
            if not hasattr(env.unwrapped, name):
                raise BadArgument(f"{type(env.unwrapped).__name__} has no attribute {name!r} that a task could set")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Set the attributes, then reset."""
        inner = self.env.unwrapped
        if seed is not None and not self._was_set:  # the task is drawn before the environment is reset
            inner.np_random, _ = gym.utils.seeding.np_random(seed)
        told = self._begin_task(inner.np_random, options)
        for name, value in {**self._before, **self.task}.items():  # what this task does not set is as it was
            if name not in self._before:
                if not hasattr(inner, name):
                    raise BadArgument(f"{type(inner).__name__} has no attribute {name!r} that a task could set")
                self._before[name] = getattr(inner, name)
            setattr(inner, name, value)
        if self._after is not None:
            self._after(inner)
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, {**info, **told}


def _uniform(bounds: Mapping[str, tuple[float, float]]) -> TaskSampler:
    low, high = ({name: float(pair[i]) for name, pair in bounds.items()} for i in (0, 1))
    if not bounds or any(low[name] >= high[name] for name in bounds):
        raise BadArgument(f"tasks={dict(bounds)}: give name=(low, high) with low below high, at least one")
    return TaskSampler(partial(_draw, low, high), partial(_within, low, high), vector=partial(_values, list(low)))


def _draw(low: dict[str, float], high: dict[str, float], rng: np.random.Generator) -> dict[str, float]:
    return {name: float(rng.uniform(low[name], high[name])) for name in low}


def _within(low: dict[str, float], high: dict[str, float], task: Any) -> bool:
    return isinstance(task, Mapping) and task.keys() == low.keys() and all(low[n] <= task[n] <= high[n] for n in low)


def _values(names: list[str], task: Mapping[str, float]) -> list[float]:
    return [task[name] for name in names]
