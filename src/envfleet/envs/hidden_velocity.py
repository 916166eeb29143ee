"""CartPole whose velocities are hidden: the pole's speed has to be inferred from what was seen before."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument


class HideColumns(gym.ObservationWrapper[NDArray[np.float32], Any, NDArray[np.float32]], gym.utils.RecordConstructorArgs):
    """Keep only some entries of a flat observation, so that the problem needs memory.

    Example:
        >>> env = HideColumns(gym.make("CartPole-v1"), keep=(0, 2))
        >>> env.observation_space.shape
        (2,)
    """

    def __init__(self, env: gym.Env[Any, Any], keep: tuple[int, ...]) -> None:
        gym.utils.RecordConstructorArgs.__init__(self, keep=keep)
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1:
            raise BadArgument(f"HideColumns needs a flat Box observation, not {space}")
        self._keep = np.array(keep)
        self.observation_space = gym.spaces.Box(space.low[self._keep], space.high[self._keep], dtype=np.float32)

    def observation(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the kept entries."""
        kept: NDArray[np.float32] = observation[self._keep]
        return kept


def cartpole_no_velocity(**kwargs: Any) -> gym.Env[Any, Any]:
    """Make CartPole-v1 that shows the cart's position and the pole's angle only.

    Example:
        >>> cartpole_no_velocity().reset(seed=0)[0].shape
        (2,)
    """
    return HideColumns(gym.make("CartPole-v1", **kwargs), keep=(0, 2))
