"""A curriculum over easy, medium and hard, whose proportions follow what the agent already masters.

The collector asks for a task when it issues a ticket; feedback goes in as episodes come out.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import envfleet as ef
from envfleet.rollout import Collector

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


class Proportions:
    """Draw levels in proportion to what is still to be learnt: 1 - success rate, smoothed."""

    def __init__(self):
        self.success = dict.fromkeys(TARGETS, 0.5)

    def __call__(self, ticket):
        weights = np.array([1.05 - self.success[level] for level in TARGETS])
        return str(np.random.default_rng(ticket).choice(list(TARGETS), p=weights / weights.sum()))

    def learn(self, level, won):
        self.success[level] += 0.1 * (won - self.success[level])


levels = Proportions()
counts = dict.fromkeys(TARGETS, 0)
with ef.make(Reach, num_envs=8, backend="serial") as fleet:
    for rollout in Collector(fleet, random_actions=True, seed=0, tasks=levels).episodes(300):
        counts[rollout.task] += 1
        levels.learn(rollout.task, rollout.episode_return)
print("episodes:", counts, " success:", {name: round(value, 2) for name, value in levels.success.items()})
assert counts["hard"] > counts["easy"]  # what is mastered is practised less
