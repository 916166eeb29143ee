"""A passive T-maze: the cue is shown once, the choice comes L steps later. Without memory, half the goals are missed."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.envs.task_env import HasTask
from envfleet.errors import BadArgument
from envfleet.tasks.task_space import TaskList, as_number

RIGHT, UP, LEFT, DOWN = range(4)


class TMaze(HasTask, gym.Env[NDArray[np.float32], np.int64]):
    """Walk a corridor of `length` cells, then turn to the side that was shown in the very first observation.

    The observation is (at the start, cue, at the junction); the cue is ±1 at the first step and 0 ever after. Each
    step that lags behind walking straight costs 1/length, and the right turn at the last step pays 1. An agent
    with memory reaches 1.0; one without cannot do better than 0.5 on average. The task is the side: 1 is up, -1 is down.

    Example:
        >>> env = TMaze(length=3)
        >>> observation, _ = env.reset(seed=0)
        >>> side = UP if observation[1] > 0 else DOWN
        >>> sum(float(env.step(np.int64(action))[1]) for action in [RIGHT, RIGHT, RIGHT, side])
        1.0
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - the attribute Gymnasium reads

    def __init__(self, length: int = 10) -> None:
        if length < 1:
            raise BadArgument(f"TMaze(length={length}): the corridor needs at least one cell")
        self.length = length
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(4)
        self.task_space = TaskList([1, -1], vector=as_number)
        self.task = 1
        self._x = 0
        self._time = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Show the cue and stand at the start."""
        super().reset(seed=seed)
        info = self._begin_task(self.np_random, options)
        self._x = 0
        self._time = 0
        return self._observe(), info

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Walk one cell, or at the last step choose a side."""
        self._time += 1
        last = self._time == self.length + 1
        if last:
            chosen = {UP: 1, DOWN: -1}.get(int(action), 0)
            at_junction = self._x == self.length
            reward = 1.0 if at_junction and chosen == self.task else 0.0
            return self._observe(), reward, True, False, {}
        self._x = min(max(self._x + (int(action) == RIGHT) - (int(action) == LEFT), 0), self.length)
        reward = 0.0 if self._x == self._time else -1.0 / self.length
        return self._observe(), reward, False, False, {}

    def _observe(self) -> NDArray[np.float32]:
        cue = self.task if self._time == 0 else 0
        return np.array([self._time == 0, cue, self._x == self.length], dtype=np.float32)
