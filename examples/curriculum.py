"""A curriculum over easy, medium and hard, whose proportions follow what the agent already masters.

The collector asks the task source when it issues a ticket, and hands the results of episodes back to it.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import envfleet as ef
from envfleet.rollout import Collector
from envfleet.tasks import TaskSource
from envfleet.tasks.list_curricula import ListCurriculum

TARGETS = {"easy": 3, "medium": 6, "hard": 12}


class Reach(gym.Env):
    """Walk right to the target; a step to the left costs, and so does time."""

    def __init__(self):
        self.observation_space = spaces.Box(-50, 50, (2,), np.float64)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t, self.target = 0, 0, TARGETS[options["task"]]
        return np.array([self.x, self.target], dtype=float), {}

    def step(self, action):
        self.x, self.t = self.x + (1 if action else -1), self.t + 1
        won = self.x >= self.target
        return np.array([self.x, self.target], dtype=float), float(won), won, self.t >= 30, {}


class Proportions(ListCurriculum):
    """Draw levels in proportion to what is still to be learnt: 1 - success rate, smoothed."""

    stored = ("counts", "success")  # what a checkpoint holds

    def __init__(self, tasks):
        super().__init__(tasks)
        self.success = np.full(self.size, 0.5)

    def take(self, index, result):
        self.success[index] += 0.1 * (result.episode_return - self.success[index])

    def weights(self):
        left = 1.05 - self.success
        return left / left.sum()


source = TaskSource(Proportions(list(TARGETS)), seed=0)
counts = dict.fromkeys(TARGETS, 0)
with ef.make(Reach, num_envs=8, backend="serial") as fleet:
    for rollout in Collector(fleet, random_actions=True, seed=0, tasks=source).episodes(300):
        counts[rollout.task] += 1
print("episodes:", counts, " chances:", {name: round(value, 2) for name, value in source.probabilities().items()})
assert counts["hard"] > counts["easy"]  # what is mastered is practised less
