"""Unlock: a chain of locks. Three of its ten tasks can be learned at first, and each one that is mastered makes the next learnable."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.envs.task_env import HasTask
from envfleet.errors import BadArgument
from envfleet.tasks.task_space import TaskBox, TaskList, TaskSpace


class Unlock(HasTask, gym.Env[NDArray[np.float32], np.int64]):
    """Open locks, one key (action) per step; the task is the number of the last lock.

    Tasks 0 to 2 are one lock each. Task k from 3 on is all locks from 0 to k, in order. Opening the last one pays 1 and ends the episode. A wrong key
    jams the locks: nothing opens until the episode ends, after `horizon` steps, with a return of 0. A lock shows one of `num_signs` signs, drawn anew
    whenever an episode comes to it, and each sign of a lock has a key, the same in every episode. Random keys solve one episode in 8 of tasks 0 to 2, and one
    in 8 ** (k + 1) of task k: it is learned by a policy that opens the locks before. The observation is the sign of the lock, one-hot
    (zeros when jammed), and the task as a number from 0 to 1.

    With `continuous`, tasks are the numbers from 0 to `num_tasks`, and the last lock is their whole part.

    Example:
        >>> env = Unlock()
        >>> _, info = env.reset(seed=0, options={"task": 3})
        >>> [env.step(np.int64(env.right_key))[1:3] for _ in range(4)]
        [(0.0, False), (0.0, False), (0.0, False), (1.0, True)]
    """

    def __init__(
        self, num_tasks: int = 10, num_keys: int = 8, horizon: int = 100, continuous: bool = False, num_signs: int = 8
    ) -> None:
        if num_tasks < 4 or num_keys < 2 or horizon < num_tasks or num_signs < 1:
            raise BadArgument(
                f"Unlock(num_tasks={num_tasks}, num_keys={num_keys}, horizon={horizon}, num_signs={num_signs}): "
                "num_tasks from 4, num_keys from 2, a horizon from num_tasks and num_signs from 1 up are needed"
            )
        self.num_tasks, self.horizon, self.num_signs = num_tasks, horizon, num_signs
        # [lock][sign]: what opens it
        self.keys: list[list[int]] = np.random.default_rng(0).integers(num_keys, size=(num_tasks, num_signs)).tolist()
        self.task_space: TaskSpace = TaskBox(0.0, num_tasks) if continuous else TaskList(range(num_tasks))
        self.observation_space = gym.spaces.Box(0.0, 1.0, (num_tasks * num_signs + 1,), np.float32)
        self.action_space = gym.spaces.Discrete(num_keys)
        self._lock, self._sign, self._last, self._jammed, self._time = 0, 0, 0, False, 0

    @property
    def right_key(self) -> int:
        """What opens the lock that the episode is at."""
        return self.keys[self._lock][self._sign]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Stand before the first lock of the task."""
        super().reset(seed=seed)
        info = self._begin_task(self.np_random, options)
        self._last = min(int(self.task), self.num_tasks - 1)
        self._jammed, self._time = False, 0
        self._stand_at(self._last if self._last < 3 else 0)
        return self._observe(), info

    def _stand_at(self, lock: int) -> None:
        self._lock, self._sign = lock, int(self.np_random.integers(self.num_signs))

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Try a key."""
        self._time += 1
        self._jammed = self._jammed or int(action) != self.right_key
        solved = not self._jammed and self._lock == self._last
        if not (self._jammed or solved):
            self._stand_at(self._lock + 1)
        return self._observe(), float(solved), solved, not solved and self._time >= self.horizon, {}

    def _observe(self) -> NDArray[np.float32]:
        out = np.zeros(self.num_tasks * self.num_signs + 1, np.float32)
        out[self._lock * self.num_signs + self._sign] = not self._jammed
        out[-1] = self._last / (self.num_tasks - 1)
        return out


UnlockContinuous = partial(Unlock, continuous=True)
