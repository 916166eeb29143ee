"""Unlock: a chain of locks. Three of its ten tasks can be learned at first, and each one that is mastered makes the next learnable."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.envs.task_env import HasTask
from envfleet.errors import BadArgument
from envfleet.tasks.task_space import TaskList


class Unlock(HasTask, gym.Env[NDArray[np.float32], np.int64]):
    """Open locks, one key (action) per step; the task is the number of the last lock.

    Tasks 0 to 2 are one lock each. Task k from 3 on is all locks from 0 to k, in order. Opening the last one pays 1 and ends the episode. A wrong key
    jams the locks: nothing opens until the episode ends, after `horizon` steps, with a return of 0. The keys are the same in every
    episode. Random keys solve one episode in 8 of tasks 0 to 2, and one in 8 ** (k + 1) of task k: it is learned by a policy that
    opens the locks before. The observation is the lock, one-hot (zeros when jammed), and the task as a number from 0 to 1.

    Example:
        >>> env = Unlock()
        >>> _, info = env.reset(seed=0, options={"task": 3})
        >>> [env.step(np.int64(key))[1:3] for key in env.keys[:4]]
        [(0.0, False), (0.0, False), (0.0, False), (1.0, True)]
    """

    def __init__(self, num_tasks: int = 10, num_keys: int = 8, horizon: int = 200) -> None:
        if num_tasks < 4 or num_keys < 2 or horizon < num_tasks:
            raise BadArgument(
                f"Unlock(num_tasks={num_tasks}, num_keys={num_keys}, horizon={horizon}): "
                "num_tasks from 4, num_keys from 2 and a horizon from num_tasks up are needed"
            )
        self.num_tasks, self.horizon = num_tasks, horizon
        self.keys: list[int] = np.random.default_rng(0).integers(num_keys, size=num_tasks).tolist()  # lock -> what opens it
        self.task_space = TaskList(range(num_tasks))
        self.observation_space = gym.spaces.Box(0.0, 1.0, (num_tasks + 1,), np.float32)
        self.action_space = gym.spaces.Discrete(num_keys)
        self._lock, self._jammed, self._time = 0, False, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Stand before the first lock of the task."""
        super().reset(seed=seed)
        info = self._begin_task(self.np_random, options)
        self._lock, self._jammed, self._time = (self.task if self.task < 3 else 0), False, 0
        return self._observe(), info

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Try a key."""
        self._time += 1
        self._jammed = self._jammed or int(action) != self.keys[self._lock]
        solved = not self._jammed and self._lock == self.task
        self._lock += not (self._jammed or solved)
        return self._observe(), float(solved), solved, not solved and self._time >= self.horizon, {}

    def _observe(self) -> NDArray[np.float32]:
        out = np.zeros(self.num_tasks + 1, np.float32)
        out[self._lock] = not self._jammed
        out[-1] = self.task / (self.num_tasks - 1)
        return out
