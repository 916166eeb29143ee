"""`TaskBoard`: how well each task goes, for views and reports, also where there are too many tasks to show all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from envfleet.tasks.curriculum import TaskResult
from envfleet.tasks.task_space import task_text

MAX_TASKS = 500  # that are kept: those that ended last
NUM_EPISODES = 10  # of a task that its return is the mean of
QUANTILES = {"10 %": 0.1, "50 %": 0.5, "90 %": 0.9}


class TaskBoard:
    """The mean return of each task over its last episodes.

    Example:
        >>> board = TaskBoard()
        >>> board.add(TaskResult(i, f"level {i}", float(i), 1) for i in range(11))
        >>> board.best(2), board.worst(1), board.quantiles()["50 %"]
        ({'level 10': 10.0, 'level 9': 9.0}, {'level 0': 0.0}, 5.0)
    """

    def __init__(self) -> None:
        self._returns: dict[str, deque[float]] = {}

    def __len__(self) -> int:
        return len(self._returns)

    def add(self, results: Iterable[TaskResult]) -> None:
        """Take results; the task of the newest is the last to be forgotten."""
        for result in results:
            name = task_text(result.task)
            returns = self._returns.pop(name, None) or deque(maxlen=NUM_EPISODES)
            returns.append(result.episode_return)
            self._returns[name] = returns
        while len(self._returns) > MAX_TASKS:
            del self._returns[next(iter(self._returns))]

    def state(self) -> dict[str, list[float]]:
        """The returns that are kept, for a checkpoint."""
        return {name: list(returns) for name, returns in self._returns.items()}

    def load(self, state: dict[str, list[float]]) -> None:
        """Take over what `state` gave."""
        self._returns = {name: deque(returns, maxlen=NUM_EPISODES) for name, returns in state.items()}

    def means(self) -> dict[str, float]:
        """All tasks that are kept, the best first."""
        found = {name: float(np.mean(returns)) for name, returns in self._returns.items()}
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def best(self, count: int) -> dict[str, float]:
        """So many tasks with the highest returns."""
        return dict(list(self.means().items())[:count])

    def worst(self, count: int) -> dict[str, float]:
        """So many tasks with the lowest returns, the lowest first."""
        return dict(list(self.means().items())[::-1][:count])

    def quantiles(self) -> dict[str, float]:
        """Of the tasks' mean returns; {} as long as there are none."""
        means = list(self.means().values())
        return {name: float(np.quantile(means, share)) for name, share in QUANTILES.items()} if means else {}
