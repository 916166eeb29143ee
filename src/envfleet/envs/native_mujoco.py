"""Ant-v5, HalfCheetah-v5 and the families of tasks over them, stepped by MuJoCo's library in threads of ours: for `backend="native"`.

Observations, rewards and ends are those of the classes in Python to the bit, on the installed versions of MuJoCo and NumPy.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from envfleet.envs.mujoco_tasks import direction_tasks, goal_tasks, speed_tasks, two_ways
from envfleet.errors import BadArgument
from envfleet.native.mujoco_engine import Engine, Settings, engine_for
from envfleet.native.native_env import NativeEnv
from envfleet.tasks.task_space import TaskList, TaskSpace


class NativeMujoco(NativeEnv):
    """What all of them are: an engine, and the spaces that its model gives. It draws no pictures."""

    def __init__(self, settings: Settings, render_mode: str | None = None, refused: Any = (), task_size: int = 0) -> None:
        if render_mode is not None or refused:
            what = f"render_mode={render_mode!r}" if render_mode is not None else ", ".join(sorted(refused))
            raise BadArgument(f"{type(self).__name__} does not take {what}: with other backends the environment does")
        if settings.frame_skip < 1 or settings.horizon < 0:
            raise BadArgument(f"frame_skip={settings.frame_skip}: give a whole number from 1 up")
        self._settings = settings
        self._engine: Engine = engine_for(settings)
        low, high = self._engine.action_bounds
        super().__init__(name="MuJoCo", obs_size=self._engine.obs_size, action_size=len(low), task_size=task_size)
        self.action_space: gym.Space[Any] = gym.spaces.Box(low, high, dtype=np.float32)

    @property
    def kind(self) -> str:
        """With the engine's settings."""
        return f"{super().kind} {self._settings}"

    def share(self) -> int:
        """The engine's block."""
        return self._engine.address

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._engine = engine_for(state["_settings"])
        super().__setstate__(state)


class NativeAnt(NativeMujoco):
    """Ant-v5, with the arguments of Gymnasium's class.

    Example:
        >>> NativeAnt().reset(seed=1)[0].tolist() == gym.make("Ant-v5").reset(seed=1)[0].tolist()
        True
    """

    def __init__(
        self,
        xml_file: str = "ant.xml",
        frame_skip: int = 5,
        forward_reward_weight: float = 1.0,
        ctrl_cost_weight: float = 0.5,
        contact_cost_weight: float = 5e-4,
        healthy_reward: float = 1.0,
        main_body: int | str = 1,
        terminate_when_unhealthy: bool = True,
        healthy_z_range: tuple[float, float] = (0.2, 1.0),
        contact_force_range: tuple[float, float] = (-1.0, 1.0),
        reset_noise_scale: float = 0.1,
        exclude_current_positions_from_observation: bool = True,
        include_cfrc_ext_in_observation: bool = True,
        render_mode: str | None = None,
        **refused: Any,
    ) -> None:
        low_z, high_z = healthy_z_range
        low_force, high_force = contact_force_range
        settings = Settings(
            "Ant",
            xml_file,
            frame_skip,
            float(forward_reward_weight),
            float(ctrl_cost_weight),
            float(contact_cost_weight),
            float(healthy_reward),
            main_body,
            bool(terminate_when_unhealthy),
            (float(low_z), float(high_z)),
            (float(low_force), float(high_force)),
            float(reset_noise_scale),
            2 * bool(exclude_current_positions_from_observation),
            bool(include_cfrc_ext_in_observation),
        )
        super().__init__(settings, render_mode, refused)


class NativeHalfCheetah(NativeMujoco):
    """HalfCheetah-v5, with the arguments of Gymnasium's class."""

    def __init__(
        self,
        xml_file: str = "half_cheetah.xml",
        frame_skip: int = 5,
        forward_reward_weight: float = 1.0,
        ctrl_cost_weight: float = 0.1,
        reset_noise_scale: float = 0.1,
        exclude_current_positions_from_observation: bool = True,
        render_mode: str | None = None,
        **refused: Any,
    ) -> None:
        settings = Settings(
            "HalfCheetah",
            xml_file,
            frame_skip,
            float(forward_reward_weight),
            float(ctrl_cost_weight),
            reset_noise_scale=float(reset_noise_scale),
            num_skipped_positions=int(bool(exclude_current_positions_from_observation)),
        )
        super().__init__(settings, render_mode, refused)


class NativeTasks(NativeMujoco):
    """A family of tasks: the reward depends on the task, and an episode has `horizon` steps."""

    def __init__(self, tasks: TaskSpace, settings: Settings, render_mode: str | None = None, task_size: int = 1) -> None:
        if settings.horizon < 1:
            raise BadArgument(f"horizon={settings.horizon}: give a whole number from 1 up")
        self.task_space, self.horizon = tasks, settings.horizon
        super().__init__(settings, render_mode, task_size=task_size)

    def set_task(self, task: Any) -> None:
        """Choose the task of the next episode; refused if it is not of the family."""
        super().set_task(self.task_space.checked(task))

    @property
    def task(self) -> Any:
        """The task of the episode that runs."""
        numbers = self.state_view.view(np.float64)[2 : 2 + self.task_size].tolist()
        return numbers[0] if self.task_size == 1 else tuple(numbers)

    @property
    def task_vector(self) -> Any:
        """The task that runs, as numbers."""
        return self.task_space.vector(self.task)


def _ant(kind: str, horizon: int, tasks: tuple[float, ...] = ()) -> Settings:
    return Settings(kind, "ant.xml", horizon=horizon, num_skipped_positions=2, tasks=tasks)


def _half_cheetah(kind: str, horizon: int, tasks: tuple[float, ...] = (), max_speed: float = 3.0) -> Settings:
    return Settings(
        kind, "half_cheetah.xml", ctrl_cost_weight=0.1, horizon=horizon, num_skipped_positions=1, tasks=tasks, max_speed=max_speed
    )


class NativeAntDir(NativeTasks):
    """AntDir: run in a direction; the task is its angle in radians."""

    def __init__(
        self,
        directions: Literal["uniform", "forward-backward"] | int = "uniform",
        horizon: int = 200,
        render_mode: str | None = None,
    ) -> None:
        tasks = direction_tasks(directions)
        values = tuple(tasks.values) if isinstance(tasks, TaskList) else ()
        super().__init__(tasks, _ant("AntDir", horizon, values), render_mode)


class NativeAntGoal(NativeTasks):
    """AntGoal: run to a place; the task is (x, y), within 3 of the start."""

    def __init__(self, horizon: int = 200, render_mode: str | None = None) -> None:
        super().__init__(goal_tasks(), _ant("AntGoal", horizon), render_mode, task_size=2)


class NativeHalfCheetahVel(NativeTasks):
    """HalfCheetahVel: run at a speed; the task is the speed, from 0 to `max_speed`."""

    def __init__(self, horizon: int = 200, max_speed: float = 3.0, render_mode: str | None = None) -> None:
        settings = _half_cheetah("HalfCheetahVel", horizon, max_speed=float(max_speed))
        super().__init__(speed_tasks(max_speed), settings, render_mode)


class NativeHalfCheetahDir(NativeTasks):
    """HalfCheetahDir: run forward or backward; the task is 1 or -1."""

    def __init__(self, horizon: int = 200, render_mode: str | None = None) -> None:
        super().__init__(two_ways(), _half_cheetah("HalfCheetahDir", horizon, (1.0, -1.0)), render_mode)


NativeAntForwardBackward = partial(NativeAntDir, "forward-backward")
