"""Gymnasium's classic environments in C++: the same states to the bit, the same spaces. The time limit is Gymnasium's wrapper.

The bits are those of the pinned Gymnasium and NumPy. Pictures are not drawn: use Gymnasium's own classes to look at an episode.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import ArrayLike, NDArray

from envfleet.errors import BadArgument
from envfleet.native.native_env import NativeEnv

#: Options of `reset` that Gymnasium's classes have for other starts.
_START_OPTIONS = frozenset({"low", "high", "x_init", "y_init"})


class NativeClassic(NativeEnv):
    """One of Gymnasium's classic environments; `state` is what Gymnasium's class has under this name."""

    #: How many numbers the state has, at the beginning of its bytes.
    _num_state: int

    def _bounds(self, low: ArrayLike, high: ArrayLike) -> None:
        self.observation_space: gym.Space[Any] = gym.spaces.Box(np.asarray(low, np.float32), np.asarray(high, np.float32))

    @property
    def state(self) -> NDArray[np.float64]:
        """The state, a copy; assigning another sets it."""
        return self.state_view[: 8 * self._num_state].view(np.float64).copy()

    @state.setter
    def state(self, value: ArrayLike) -> None:
        self.state_view[: 8 * self._num_state].view(np.float64)[:] = value

    def use_options(self, options: dict[str, Any]) -> None:
        """Other bounds for the start are refused."""
        if refused := sorted(_START_OPTIONS & options.keys()):
            raise BadArgument(f"reset option {refused[0]!r}: native environments begin as by default; use another backend for it")


class NativeCartPole(NativeClassic):
    """CartPole-v1.

    Example:
        >>> NativeCartPole().reset(seed=1)[0].tolist() == gym.make("CartPole-v1").reset(seed=1)[0].tolist()
        True
    """

    _num_state = 4

    def __init__(self, sutton_barto_reward: bool = False, render_mode: str | None = None) -> None:
        super().__init__(name="CartPole-v1", render_mode=render_mode, sutton_barto_reward=sutton_barto_reward)
        high = np.array([4.8, math.inf, 24 * 2 * math.pi / 360, math.inf], np.float32)
        self._bounds(-high, high)


class NativeMountainCar(NativeClassic):
    """MountainCar-v0.

    Example:
        >>> NativeMountainCar().reset(seed=1)[0].tolist() == gym.make("MountainCar-v0").reset(seed=1)[0].tolist()
        True
    """

    _num_state = 2

    def __init__(self, render_mode: str | None = None, goal_velocity: float = 0) -> None:
        super().__init__(name="MountainCar-v0", render_mode=render_mode, goal_velocity=goal_velocity)
        self._bounds([-1.2, -0.07], [0.6, 0.07])


class NativeMountainCarContinuous(NativeClassic):
    """MountainCarContinuous-v0.

    Example:
        >>> env = NativeMountainCarContinuous()
        >>> env.reset(seed=1)[0].tolist() == gym.make("MountainCarContinuous-v0").reset(seed=1)[0].tolist()
        True
    """

    _num_state = 2

    def __init__(self, render_mode: str | None = None, goal_velocity: float = 0) -> None:
        super().__init__(name="MountainCarContinuous-v0", render_mode=render_mode, goal_velocity=goal_velocity)
        self._bounds([-1.2, -0.07], [0.6, 0.07])

    @property
    def state(self) -> NDArray[Any]:
        """The state, a copy; assigning another sets it. It is float64 after a reset and float32 after a step, as in Gymnasium's class."""
        return self.state_view[:16].view(np.float64).astype(np.float32 if self._is_float32[0] else np.float64)

    @state.setter
    def state(self, value: ArrayLike) -> None:
        given = np.asarray(value)
        self.state_view[:16].view(np.float64)[:] = given
        self._is_float32[0] = given.dtype == np.float32

    @property
    def _is_float32(self) -> NDArray[np.int64]:
        return self.state_view[24:32].view(np.int64)


class NativeAcrobot(NativeClassic):
    """Acrobot-v1.

    Example:
        >>> NativeAcrobot().reset(seed=1)[0].tolist() == gym.make("Acrobot-v1").reset(seed=1)[0].tolist()
        True
    """

    _num_state = 4

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(name="Acrobot-v1", render_mode=render_mode)
        high = np.array([1.0, 1.0, 1.0, 1.0, 4 * math.pi, 9 * math.pi], np.float32)
        self._bounds(-high, high)


class NativePendulum(NativeClassic):
    """Pendulum-v1.

    Example:
        >>> NativePendulum().reset(seed=1)[0].tolist() == gym.make("Pendulum-v1").reset(seed=1)[0].tolist()
        True
    """

    _num_state = 2

    def __init__(self, render_mode: str | None = None, g: float = 10.0) -> None:
        super().__init__(name="Pendulum-v1", render_mode=render_mode, g=g)
        high = np.array([1.0, 1.0, 8.0], np.float32)
        self._bounds(-high, high)
