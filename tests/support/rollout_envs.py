"""Environments and a policy for the collector's tests: every episode follows from its seed."""

import os
import signal
import time

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Walk(gym.Env):
    """Observation and length come from the seed; the reward depends on the action. `slow`: ten times as long."""

    def __init__(self, slow=False):
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Discrete(3)
        self.factor = 10 if slow else 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.limit = 0, self.factor * int(self.np_random.integers(2, 9))
        return self.np_random.normal(size=3), {"limit": self.limit}

    def step(self, action):
        self.t += 1
        end = self.t >= self.limit
        return (self.np_random.normal(size=3), float(action), end and self.t % 2 == 0, end and self.t % 2 == 1, {"t": self.t})


class StuckAtThree(Walk):
    """The third step takes a minute."""

    def __init__(self, stuck=True):
        super().__init__(slow=stuck)
        self.stuck = stuck

    def step(self, action):
        if self.stuck and self.t == 2:
            time.sleep(60)
        return super().step(action)


class Frozen:
    """Every row by itself; random numbers by (episode, step)."""

    version = 7

    def act(self, ask):
        logits = np.stack([row[0] * np.array([1.0, -1.0, 0.5]) for row in ask.obs])
        weights = np.exp(logits)
        share = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
        action = (ask.uniform(1) > share).sum(axis=1).clip(0, 2)
        return action, {"logprob": np.log(share[np.arange(len(ask)), action]).astype(np.float32)}


class Fragile(Walk):
    """One step in twenty fails, by a generator that no seed reaches."""

    dice = np.random.default_rng(5)

    def __init__(self, chance=0.05, slow=False):
        super().__init__(slow)
        self.chance = chance

    def step(self, action):
        if self.dice.random() < self.chance:
            raise RuntimeError("snap")
        return super().step(action)


class KillsItself(Walk):
    """Ends its process at a step, once: a file says that it was done."""

    def __init__(self, path, at=9):
        super().__init__()
        self.path, self.left = path, at

    def step(self, action):
        self.left -= 1
        if self.left == 0 and not os.path.exists(self.path):
            open(self.path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
