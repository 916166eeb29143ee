"""What every environment with tasks has: `task_space`, `set_task`, and `task`, the one that runs."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from envfleet.tasks.task_space import TaskSpace


class HasTask:
    """Keeps the task of an environment. A fleet calls `set_task` before a reset that carries a task.

    A task stays until it is replaced. Where none was ever set, every reset draws one from the environment's own random numbers.
    `reset(options={"task": …})` sets one too, as environments without a fleet are used.
    """

    task_space: TaskSpace
    task: Any = None
    _was_set = False

    def set_task(self, task: Any) -> None:
        """Choose the task of the next episode; refused if it is not of the family."""
        self.task = self.task_space.checked(task)
        self._was_set = True

    def _begin_task(self, rng: np.random.Generator, options: dict[str, Any] | None) -> dict[str, Any]:
        """The task of the episode that begins; returns the info that tells it."""
        if options is not None and options.get("task") is not None:
            self.set_task(options["task"])
        elif not self._was_set:
            self.task = self.task_space.sample(rng)
        return {"task": self.task}

    @property
    def task_vector(self) -> Any:
        """The task that runs, as numbers."""
        return self.task_space.vector(self.task)


class RewardTask(HasTask, gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose reward depends on a task: subclasses make it and say how, in `task_reward`."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        env.unwrapped.spec = None  # that of the inner environment would build it without the task; `gymnasium.make` sets ours

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """The registered spec, where `gymnasium.make` built it."""
        return self.env.unwrapped.spec

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, with the task."""
        obs, info = self.env.reset(seed=seed, options=options)
        return obs, {**info, **self._begin_task(self.env.unwrapped.np_random, options)}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment; the reward is the task's."""
        obs, _, terminated, truncated, info = self.env.step(action)
        return obs, self.task_reward(obs, action, info), terminated, truncated, info

    def task_reward(self, obs: Any, action: Any, info: dict[str, Any]) -> float:
        """The reward of a step."""
        raise AssertionError("a subclass defines it")
