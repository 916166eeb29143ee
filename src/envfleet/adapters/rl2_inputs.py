"""`RL2Inputs`: a vector environment whose observations also tell the previous action, reward and end, for agents with memory."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from envfleet.errors import BadArgument
from envfleet.tasks.previous_step import PreviousStep


class RL2Inputs(VectorWrapper):
    """Adds (previous action, previous reward, previous end) to flat observations. The first observation after an end has the last step of the
    episode before, with the end marked; only `reset` clears it.

    `autoreset_mode="SameStep"` is needed: an observation is then always what the next action is for.

    Example:
        >>> import envfleet as ef
        >>> envs = RL2Inputs(ef.make_vec("CartPole-v1", num_envs=2, backend="serial", autoreset_mode="SameStep"))
        >>> envs.reset(seed=0)[0].shape, envs.step(np.array([0, 1]))[0][:, 4:].tolist()
        ((2, 8), [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]])
        >>> envs.close()
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        inner = env.single_observation_space
        if not isinstance(inner, gym.spaces.Box) or len(inner.shape) != 1:
            raise BadArgument(f"RL2Inputs needs flat observations; {inner} can be flattened by gymnasium's FlattenObservation")
        mode = env.metadata.get("autoreset_mode")
        if mode is not gym.vector.AutoresetMode.SAME_STEP:
            raise BadArgument(
                f"RL2Inputs needs autoreset_mode='SameStep', not {mode}: an ended row would be told to act once more"
            )
        self._previous = PreviousStep(env.single_action_space)
        extra = self._previous.size + 1
        low, high = np.append(inner.low, np.full(extra, -np.inf)), np.append(inner.high, np.full(extra, np.inf))
        self.single_observation_space = gym.spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """First observations; nothing came before them."""
        obs, infos = self.env.reset(seed=seed, options=options)
        nothing = np.zeros((self.num_envs, self._previous.size + 1), np.float32)
        return np.concatenate([obs, nothing], axis=1).astype(np.float32), infos

    def step(self, actions: Any) -> tuple[NDArray[np.float32], Any, Any, Any, dict[str, Any]]:
        """Step, and add what was done and what came of it."""
        obs, reward, terminated, truncated, infos = self.env.step(actions)
        told = self._previous(np.asarray(actions), reward, np.zeros(self.num_envs, bool))
        ended = (terminated | truncated).astype(np.float32)[:, None]
        return np.concatenate([obs, told, ended], axis=1).astype(np.float32), reward, terminated, truncated, infos
