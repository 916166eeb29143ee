"""Environments that misbehave, for servers under test; importable by the server's workers."""

import os
import threading
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Misbehaving(gymnasium.Env):
    """Does what the action says: 0 steps, 1 raises, 2 hangs, 3 kills its process, 4 gives NaN; counts its builds."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(6)

    def __init__(self):
        self.n = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        if options and options.get("fail"):
            raise ValueError("asked to fail in reset")
        return np.array([0.0, os.getpid(), id(self) % 1000]), {"options": options or {}, "seed": seed}

    def step(self, action):
        self.n += 1
        if action == 1:
            raise ValueError("asked to raise")
        if action == 2:
            time.sleep(60)
        if action == 3:
            os._exit(7)
        if action == 5:
            time.sleep(0.5)
        value = float("nan") if action == 4 else 1.0
        return np.array([self.n, os.getpid(), value]), value, False, self.n >= 5, {}


class Pixels(gymnasium.Env):
    """Observations of some size, to see how they travel."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._frame(0), {}

    def step(self, action):
        return self._frame(int(10 * action[0])), float(action.sum()), False, False, {}

    def _frame(self, n):
        return ((np.arange(84 * 84 * 4) + n) % 256).astype(np.uint8).reshape(84, 84, 4)


class Hidden(gymnasium.Env):
    """Keeps something across resets, which the next session must not see."""

    observation_space = spaces.Discrete(1000)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.total = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.total, {}

    def step(self, action):
        self.total += 1
        return self.total, 0.0, False, False, {}


class Homesick(gymnasium.Env):
    """Refuses to be touched by another thread than the one that built it; action 1 takes its time."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.home = threading.get_ident()

    def _stay(self):
        if threading.get_ident() != self.home:
            raise RuntimeError("another thread")

    def reset(self, *, seed=None, options=None):
        self._stay()
        return 0, {}

    def step(self, action):
        self._stay()
        if action:
            time.sleep(0.02)
        return int(action), float(action), False, False, {}

    def close(self):
        self._stay()
