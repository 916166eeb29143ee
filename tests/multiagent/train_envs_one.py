"""An environment with one agent, for what is refused there."""

import gymnasium as gym
import numpy as np


class One(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
