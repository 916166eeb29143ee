"""Families of tasks over Gymnasium's MuJoCo environments: AntDir, AntGoal, HalfCheetahVel, HalfCheetahDir.

They follow the settings of the meta-learning literature: 200 steps per episode, no end by falling over, and for Ant the 27
numbers of its fourth version (without contact forces).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from envfleet.envs.task_env import RewardTask
from envfleet.errors import BadArgument
from envfleet.tasks.task_space import TaskBox, TaskList, TaskSampler, TaskSpace, as_number
from envfleet.util.extras import from_extra


def _mujoco(name: str, horizon: int, **options: Any) -> gym.Env[Any, Any]:
    if horizon < 1:
        raise BadArgument(f"horizon={horizon}: give a whole number from 1 up")
    with from_extra("mujoco"):
        import mujoco  # noqa: F401 - Gymnasium's own message names another package
    return gym.make(name, max_episode_steps=horizon, disable_env_checker=True, **options)


def _ant(horizon: int, render_mode: str | None) -> gym.Env[Any, Any]:
    return _mujoco(
        "Ant-v5", horizon, terminate_when_unhealthy=False, include_cfrc_ext_in_observation=False, render_mode=render_mode
    )


class AntDir(RewardTask):
    """Run in a direction; the task is its angle in radians.

    `directions="forward-backward"` has the two tasks 0 and pi (0° and 180°); "uniform" has every angle; a whole number has so many, evenly
    spread.

    Example:
        >>> env = AntDir("forward-backward")
        >>> env.task_space.values, env.observation_space.shape
        ([0.0, 3.141592653589793], (27,))
    """

    def __init__(
        self,
        directions: Literal["uniform", "forward-backward"] | int = "uniform",
        horizon: int = 200,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(_ant(horizon, render_mode))
        self.task_space = direction_tasks(directions)

    def task_reward(self, obs: Any, action: Any, info: dict[str, Any]) -> float:
        """Speed in the direction, minus the cost of control, plus 1."""
        ahead = math.cos(self.task) * info["x_velocity"] + math.sin(self.task) * info["y_velocity"]
        return float(ahead + info["reward_ctrl"] + info["reward_survive"])


class AntGoal(RewardTask):
    """Run to a place; the task is (x, y), within 3 of the start."""

    def __init__(self, horizon: int = 200, render_mode: str | None = None) -> None:
        super().__init__(_ant(horizon, render_mode))
        self.task_space = goal_tasks()

    def task_reward(self, obs: Any, action: Any, info: dict[str, Any]) -> float:
        """Minus the distance in x and in y, minus a fifth of the cost of control."""
        away = abs(info["x_position"] - self.task[0]) + abs(info["y_position"] - self.task[1])
        return float(-away + 0.2 * info["reward_ctrl"])


class HalfCheetahVel(RewardTask):
    """Run at a speed; the task is the speed, from 0 to 3."""

    def __init__(self, horizon: int = 200, max_speed: float = 3.0, render_mode: str | None = None) -> None:
        super().__init__(_mujoco("HalfCheetah-v5", horizon, render_mode=render_mode))
        self.task_space = speed_tasks(max_speed)

    def task_reward(self, obs: Any, action: Any, info: dict[str, Any]) -> float:
        """Minus the difference in speed, minus half the cost of control."""
        return float(-abs(info["x_velocity"] - self.task) + 0.5 * info["reward_ctrl"])


class HalfCheetahDir(RewardTask):
    """Run forward or backward; the task is 1 or -1."""

    def __init__(self, horizon: int = 200, render_mode: str | None = None) -> None:
        super().__init__(_mujoco("HalfCheetah-v5", horizon, render_mode=render_mode))
        self.task_space = two_ways()

    def task_reward(self, obs: Any, action: Any, info: dict[str, Any]) -> float:
        """Speed in the direction, minus the cost of control."""
        return float(self.task * info["x_velocity"] + info["reward_ctrl"])


def direction_tasks(directions: Literal["uniform", "forward-backward"] | int) -> TaskSpace:
    """The tasks of AntDir."""
    if directions == "uniform":
        return TaskSampler(_angle_in_radians, _is_number, vector=_heading)
    if directions == "forward-backward":
        return TaskList([0.0, math.pi], vector=_heading)
    if isinstance(directions, int) and not isinstance(directions, bool) and directions > 0:
        return TaskList([2.0 * math.pi * i / directions for i in range(directions)], vector=_heading)
    raise BadArgument(f"directions={directions!r}: 'uniform', 'forward-backward', or how many")


def goal_tasks() -> TaskSpace:
    """The tasks of AntGoal."""
    return TaskSampler(_point_in_disc, _is_in_disc, vector=np.asarray)


def speed_tasks(max_speed: float) -> TaskSpace:
    """The tasks of HalfCheetahVel."""
    return TaskBox(0.0, max_speed)


def two_ways() -> TaskSpace:
    """The tasks of HalfCheetahDir."""
    return TaskList([1, -1], vector=as_number)


def _heading(angle: float) -> list[float]:
    return [math.cos(angle), math.sin(angle)]


def _is_number(task: Any) -> bool:
    return isinstance(task, (int, float, np.number)) and not isinstance(task, bool) and math.isfinite(task)


def _angle_in_radians(rng: np.random.Generator) -> float:
    return float(rng.uniform(0.0, 2.0 * math.pi))


def _is_in_disc(task: Any) -> bool:
    return _is_pair(task) and math.hypot(*task) <= 3.0 + 1e-6


def _is_pair(task: Any) -> bool:
    return isinstance(task, (list, tuple, np.ndarray)) and len(task) == 2 and all(_is_number(value) for value in task)


def _point_in_disc(rng: np.random.Generator) -> tuple[float, float]:
    angle, far = float(rng.uniform(0.0, 2.0 * math.pi)), 3.0 * math.sqrt(float(rng.uniform()))
    return far * math.cos(angle), far * math.sin(angle)


AntForwardBackward = partial(AntDir, "forward-backward")
