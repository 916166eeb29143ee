"""Environment clients in every dialect, for the executor tests."""

import threading
from types import SimpleNamespace

import numpy as np
from gymnasium import spaces


class Counter:
    """Gymnasium dialect: counts up to `length`, reward 1 a step; observations share one array."""

    def __init__(self, length=3, fail_at=None, fail_times=10**9):
        self.length, self.fail_at, self.fail_times = length, fail_at, fail_times
        self.action_space = spaces.Discrete(4)
        self.t = 0
        self._obs = np.zeros(2)
        self.resets = []
        self.closed = False

    def reset(self, seed=None, options=None):
        self.resets.append((seed, options))
        self.t = 0
        self._obs[:] = 0
        return self._obs, {"begin": True}

    def step(self, action):
        if self.t == self.fail_at and self.fail_times > 0:
            self.fail_times -= 1
            raise RuntimeError("the motor burnt out")
        self.t += 1
        self._obs[:] = (self.t, action)
        return self._obs, 1.0, self.t >= self.length, False, {"t": self.t}

    def close(self):
        self.closed = True


class OldGym(Counter):
    def reset(self):
        return super().reset()[0]

    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        info["TimeLimit.truncated"] = terminated
        return obs, reward, terminated, info


class OpenEnvStyle(Counter):
    def reset(self, seed=None):
        return SimpleNamespace(observation=super().reset()[0], reward=None, done=False)

    def step(self, action):
        obs, reward, terminated, _, _ = super().step(action)
        return SimpleNamespace(observation=obs, reward=reward, done=terminated)


class AsyncClient(Counter):
    async def reset(self, seed=None, options=None):
        return super().reset(seed, options)

    async def step(self, action):
        return super().step(action)


def stay(obs, done):
    return 1


def our_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("envfleet")]
