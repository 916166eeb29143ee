"""What an agent with memory is told of its previous step: action, reward and whether an episode ended.

The environment's observation alone does not say what was done and what it brought. It is added here, in the parent, for all slots at once.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument


class PreviousStep:
    """Turns actions and rewards into numbers: discrete actions one-hot, others flat, then the reward. Zeros where an episode is fresh.

    Example:
        >>> previous = PreviousStep(gym.spaces.Discrete(3))
        >>> previous(np.array([2, 1]), np.array([0.5, 1.0]), fresh=np.array([False, True])).tolist()
        [[0.0, 0.0, 1.0, 0.5], [0.0, 0.0, 0.0, 0.0]]
    """

    def __init__(self, action_space: gym.Space[Any]) -> None:
        self._space = action_space
        if isinstance(action_space, (gym.spaces.Box, gym.spaces.MultiBinary)):
            self._size = int(np.prod(action_space.shape, dtype=int))
            self._axes = len(action_space.shape)
        elif isinstance(action_space, gym.spaces.Discrete):
            self._counts, self._start = np.array([int(action_space.n)]), np.array([int(action_space.start)])
        elif isinstance(action_space, gym.spaces.MultiDiscrete) and len(action_space.shape) == 1:
            self._counts, self._start = np.asarray(action_space.nvec), np.asarray(action_space.start)
        else:
            raise BadArgument(
                f"previous actions of {action_space} cannot be told: Box, Discrete, MultiDiscrete or MultiBinary is needed"
            )
        self._one_hot = not isinstance(action_space, (gym.spaces.Box, gym.spaces.MultiBinary))
        if self._one_hot:
            self._size = int(self._counts.sum())
        self.size = self._size + 1

    def actions(self, count: int) -> NDArray[Any]:
        """Room for the last action of so many slots."""
        return np.zeros((count, *(self._space.shape or ())), self._space.dtype)

    def __call__(self, action: NDArray[Any], reward: NDArray[Any], fresh: NDArray[np.bool_]) -> NDArray[np.float32]:
        """[..., size] from actions [..., *shape] and rewards [...] of the step before."""
        out = np.zeros((*np.shape(reward), self.size), np.float32)
        action = np.asarray(action)
        if self._one_hot:
            parts = action.reshape(*out.shape[:-1], len(self._counts)) - self._start
            offsets = np.cumsum(self._counts) - self._counts
            np.put_along_axis(out, (np.clip(parts, 0, self._counts - 1) + offsets).astype(np.int64), 1.0, axis=-1)
        else:
            out[..., : self._size] = action.reshape(*out.shape[:-1], self._size)
        out[..., -1] = reward
        out[fresh] = 0.0
        return out
