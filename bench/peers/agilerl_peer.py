"""AgileRL: AsyncPettingZooVecEnv over parallel envs of two agents; env steps are counted, not agent steps.

`env` is "spread" (MPE2's simple_spread with two agents) or anything else for two agents without work.
"""

import sys
import time

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv
from serve import serve


class TwoAgents(ParallelEnv):
    metadata = {"name": "two_agents"}  # noqa: RUF012  # PettingZoo declares it so

    def __init__(self):
        self.possible_agents = ["a", "b"]
        self.agents = list(self.possible_agents)
        self.render_mode = None
        self._obs = {agent: np.ones(4, np.float32) for agent in self.agents}

    def observation_space(self, agent):
        return spaces.Box(0.0, 1.0, (4,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return self._obs, {agent: {} for agent in self.agents}

    def step(self, actions):
        each = self.possible_agents
        no = dict.fromkeys(each, False)
        return self._obs, dict.fromkeys(each, 1.0), no, dict(no), {agent: {} for agent in each}


def spread():
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(N=2)


def vectorised(make, slots):
    from agilerl.vector.pz_async_vec_env import AsyncPettingZooVecEnv

    vec = AsyncPettingZooVecEnv([make for _ in range(slots)])
    vec.reset()
    return vec.step, {agent: np.zeros(slots, np.int64) for agent in make().possible_agents}


def plain(make, slots):
    envs = [make() for _ in range(slots)]
    for env in envs:
        env.reset()

    def step(actions):
        for env in envs:
            env.step(actions)
            if not env.agents:
                env.reset()

    return step, dict.fromkeys(envs[0].possible_agents, 0)


if __name__ == "__main__":
    mode, name, slots = sys.argv[1], sys.argv[2], int(sys.argv[3])
    step, actions = (plain if mode == "plain" else vectorised)(spread if name == "spread" else TwoAgents, slots)

    def run(seconds):
        end, steps = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            step(actions)
            steps += slots
        return steps

    serve(run)
