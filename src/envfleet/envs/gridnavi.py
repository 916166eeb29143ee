"""GridNavi: find a hidden goal in a grid. The smallest environment in which exploring once pays in every later episode."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.envs.task_env import HasTask
from envfleet.errors import BadArgument
from envfleet.tasks.task_space import TaskList

_MOVES = np.array([(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0)])


def _one_hot(size: int, goal: Any) -> NDArray[np.float64]:
    return np.concatenate([np.eye(size)[goal[0]], np.eye(size)[goal[1]]])


class GridNavi(HasTask, gym.Env[NDArray[np.float32], np.int64]):
    """Walk a `size` x `size` grid from the corner (0, 0); the task is the goal's cell (x, y).

    Actions: stay, up, right, down, left. Every step on the goal pays 1, every other costs 0.1; an episode has `horizon` steps, and
    reaching the goal does not end it. The observation is the position, one-hot in x and in y. The goal is not seen. Goals are all
    cells but the 2 x 2 corner of the start: 21 in a 5 x 5 grid. With the goal known, 11.07 per episode is the most (mean over goals).

    Example:
        >>> env = GridNavi()
        >>> _, info = env.reset(seed=0, options={"task": (2, 0)})
        >>> [float(env.step(np.int64(action))[1]) for action in (2, 2, 0)]
        [-0.1, 1.0, 1.0]
    """

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012 - the attribute Gymnasium reads

    def __init__(self, size: int = 5, horizon: int = 15, render_mode: str | None = None) -> None:
        if size < 3 or horizon < 1:
            raise BadArgument(f"GridNavi(size={size}, horizon={horizon}): a size from 3 and a horizon from 1 up are needed")
        self.size, self.horizon, self.render_mode = size, horizon, render_mode
        goals = [(x, y) for x in range(size) for y in range(size) if x > 1 or y > 1]
        self.task_space = TaskList(goals, vector=partial(_one_hot, size))
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2 * size,), np.float32)
        self.action_space = gym.spaces.Discrete(5)
        self._at = np.zeros(2, np.int64)
        self._time = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Stand in the corner."""
        super().reset(seed=seed)
        info = self._begin_task(self.np_random, options)
        self._at, self._time = np.zeros(2, np.int64), 0
        return self._observe(), info

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Walk one cell; the walls hold."""
        if not 0 <= action < len(_MOVES):
            raise BadArgument(f"action {action} is not in {self.action_space}")
        self._at = np.clip(self._at + _MOVES[int(action)], 0, self.size - 1)
        self._time += 1
        found = self._at[0] == self.task[0] and self._at[1] == self.task[1]
        return self._observe(), 1.0 if found else -0.1, False, self._time >= self.horizon, {}

    def _observe(self) -> NDArray[np.float32]:
        out = np.zeros(2 * self.size, np.float32)
        out[self._at[0]] = out[self.size + self._at[1]] = 1.0
        return out

    def render(self) -> str | None:
        """The grid as text: A the agent, G the goal."""
        if self.render_mode != "ansi":
            return None
        cells = [["·"] * self.size for _ in range(self.size)]
        if self.task is not None:
            cells[self.task[1]][self.task[0]] = "G"
        cells[self._at[1]][self._at[0]] = "A"
        return "\n".join("".join(row) for row in reversed(cells))
