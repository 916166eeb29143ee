"""CartPole whose velocities are hidden: the pole's speed has to be inferred from earlier observations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray


def _positions(observation: NDArray[np.float32]) -> NDArray[np.float32]:
    return observation[[0, 2]]


def cartpole_no_velocity(**kwargs: Any) -> gym.Env[Any, Any]:
    """Make CartPole-v1 that shows the cart's position and the pole's angle only.

    Example:
        >>> cartpole_no_velocity().reset(seed=0)[0].shape
        (2,)
    """
    env = gym.make("CartPole-v1", **kwargs)
    space: Any = env.observation_space
    shown = gym.spaces.Box(_positions(space.low), _positions(space.high), dtype=np.float32)
    return gym.wrappers.TransformObservation(env, _positions, shown)
