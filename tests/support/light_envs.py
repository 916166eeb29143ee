"""Environments in a module of their own, so that workers that import it need not import SB3 or PyTorch."""

from __future__ import annotations

import gymnasium as gym
import numpy as np


class Custom(gym.Env):
    """Counts; ends by termination at 5 or by truncation at 4, and tells what it was reset with."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    action_space = gym.spaces.Discrete(3)

    def __init__(self, limit=5, truncates=False, nested=False):
        self.limit, self.truncates, self.nested = limit, truncates, nested
        self.render_mode = "rgb_array"
        box = gym.spaces.Box(-100, 100, (2,), np.float32)
        self.observation_space = gym.spaces.Dict(a=box, b=gym.spaces.Discrete(10)) if nested else box

    def see(self):
        box = np.array([self.time, self.start], np.float32)
        return {"a": box, "b": self.time} if self.nested else box

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start = int(self.np_random.integers(50)) + (options or {}).get("offset", 0)
        self.time = 0
        return self.see(), {"seed": seed, "options": options}

    def step(self, action):
        if action == 2:
            raise RuntimeError("no such door")
        self.time += 1
        ended = self.time == self.limit
        return self.see(), 0.1, ended and not self.truncates, ended and self.truncates, {"time": self.time}

    def render(self):
        return np.full((4, 6, 3), self.time, np.uint8)

    def double(self, value, plus=0):
        return 2 * value + plus + self.limit
