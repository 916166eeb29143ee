"""PointRobot: a point in the plane walks to a goal that it is not told."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.envs.task_env import HasTask
from envfleet.errors import BadArgument
from envfleet.tasks.task_space import TaskBox, TaskSampler, TaskSpace


class PointRobot(HasTask, gym.Env[NDArray[np.float32], NDArray[np.float32]]):
    """Move by up to 0.1 in x and y per step; the task is the goal (x, y).

    `reward="dense"`: minus the distance, goals anywhere in the square [-1, 1]². `"sparse"`: 1 - distance within `radius` of the goal, 0
    outside, goals on the upper half of the unit circle. `"semicircle"`: the same goals, and 1 within `radius`, 0 outside.

    Example:
        >>> env = PointRobot("semicircle")
        >>> _, info = env.reset(seed=0, options={"task": (0.0, 1.0)})
        >>> float(sum(env.step(np.array([0.0, 1.0], np.float32))[1] for _ in range(10)))
        2.0
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - the attribute Gymnasium reads

    def __init__(
        self, reward: Literal["dense", "sparse", "semicircle"] = "dense", horizon: int = 20, radius: float = 0.2
    ) -> None:
        if reward not in ("dense", "sparse", "semicircle"):
            raise BadArgument(f"PointRobot(reward={reward!r}): choose 'dense', 'sparse' or 'semicircle'")
        if horizon < 1 or not radius > 0:
            raise BadArgument(f"PointRobot(horizon={horizon}, radius={radius}): both must be above 0")
        self.reward, self.horizon, self.radius = reward, horizon, radius
        self.task_space: TaskSpace = TaskBox([-1.0, -1.0], [1.0, 1.0])
        if reward != "dense":
            self.task_space = TaskSampler(_on_semicircle, _is_on_semicircle, vector=np.asarray)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._at = np.zeros(2)
        self._time = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Stand at the origin."""
        super().reset(seed=seed)
        info = self._begin_task(self.np_random, options)
        self._at, self._time = np.zeros(2), 0
        return self._at.astype(np.float32), info

    def step(self, action: NDArray[np.float32]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move."""
        self._at = self._at + 0.1 * np.clip(np.asarray(action, np.float64), -1.0, 1.0)
        self._time += 1
        distance = math.hypot(self._at[0] - self.task[0], self._at[1] - self.task[1])
        if self.reward == "dense":
            reward = -distance
        else:
            near = 1.0 - distance if self.reward == "sparse" else 1.0
            reward = near if distance <= self.radius else 0.0
        return self._at.astype(np.float32), reward, False, self._time >= self.horizon, {}


def _on_semicircle(rng: np.random.Generator) -> tuple[float, float]:
    angle = float(rng.uniform(0.0, math.pi))
    return math.cos(angle), math.sin(angle)


def _is_on_semicircle(task: Any) -> bool:
    try:
        x, y = (float(value) for value in task)
    except (TypeError, ValueError):
        return False
    return abs(math.hypot(x, y) - 1.0) < 1e-3 and y >= -1e-9


PointRobotSparse = partial(PointRobot, "sparse")
PointRobotSemicircle = partial(PointRobot, "semicircle", horizon=60)
