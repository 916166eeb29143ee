"""What a centralised critic reads beside its agent's own observation: the whole environment's `state()`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from envfleet.errors import BadArgument
from envfleet.networks.features import Features, Inputs

#: Keys of an observation that carries the state along, as learning sees it. Acting sees the own observation alone.
OWN, CENTRAL = "own observation", "state()"


class CentralFeatures(Features):
    """Features of an agent's own observation, and the flattened state as the input `central` where it comes along.

    Example:
        >>> features = CentralFeatures(gym.spaces.Box(-1, 1, (2,)), gym.spaces.Box(-1, 1, (3, 2)))
        >>> inputs = features({OWN: np.zeros((5, 2)), CENTRAL: np.zeros((5, 3, 2))})
        >>> inputs["vector"].shape, inputs["central"].shape, sorted(features(np.zeros((5, 2))))
        ((5, 2), (5, 6), ['vector'])
    """

    def __init__(self, space: gym.Space[Any], state_space: gym.Space[Any]) -> None:
        super().__init__(space)
        if state_space.shape is None or not isinstance(state_space, gym.spaces.Box):
            raise BadArgument(f"a centralised critic reads states that are arrays; state() is of {state_space}")
        self.state_shape = tuple(state_space.shape)
        self.state_size = int(np.prod(self.state_shape, dtype=int))

    def __call__(self, observation: Any) -> Inputs:
        """Read observations with any leading axes."""
        if not isinstance(observation, dict) or OWN not in observation:
            return super().__call__(observation)
        inputs = super().__call__(observation[OWN])
        state = np.asarray(observation[CENTRAL])
        lead = state.shape[: state.ndim - len(self.state_shape)]
        inputs["central"] = state.astype(np.float32, copy=False).reshape(*lead, self.state_size)
        return inputs

    def mask(self, observation: Any) -> Any:
        """Return the mask inside the own observation, if there is one."""
        carries = isinstance(observation, dict) and OWN in observation
        return super().mask(observation[OWN] if carries else observation)
