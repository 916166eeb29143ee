"""Small environments of many agents for the trainer's tests. Importable by workers."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv


class Clock(ParallelEnv):
    """Two agents see the time and their number; episodes end by truncation only, after `limit` steps."""

    metadata = {"name": "clock_v0", "is_parallelizable": True}  # noqa: RUF012

    def __init__(self, limit=5, render_mode=None):
        self.limit, self.render_mode = limit, render_mode
        self.possible_agents = ["clock_0", "clock_1"]
        self.agents = []

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def see(self):
        seen = {agent: np.array([self.time / 4, i], np.float32) for i, agent in enumerate(self.possible_agents)}
        return {agent: seen[agent] for agent in self.agents}

    def state(self):
        return np.array([self.time, self.limit], np.float32)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.time = 0
        return self.see(), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.time += 1
        late = self.time >= self.limit
        obs = self.see()
        reward = {agent: float(self.time + 10 * i) for i, agent in enumerate(self.agents)}
        ended, cut = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, late)
        infos = {agent: {} for agent in self.agents}
        if late:
            self.agents = []
        return obs, reward, ended, cut, infos

    def close(self):
        pass


class Crowd(ParallelEnv):
    """Agents come and go at times of their own; whoever answers the bit it sees earns a point."""

    metadata = {"name": "crowd_v0", "is_parallelizable": True}  # noqa: RUF012

    def __init__(self, limit=12, render_mode=None):
        self.limit, self.render_mode = limit, render_mode
        self.possible_agents = [f"one_{i}" for i in range(3)]
        self.agents = []

    def observation_space(self, agent):
        return spaces.Dict(observation=spaces.Box(0, 1, (3,), np.float32), action_mask=spaces.Box(0, 1, (3,), np.int8))

    def action_space(self, agent):
        return spaces.Discrete(3)

    def see(self, agent):
        bit = self.bits[agent]
        return {"observation": np.array([bit, 1 - bit, self.time / 12], np.float32), "action_mask": np.array([1, 1, 0], np.int8)}

    def reset(self, seed=None, options=None):
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.time = 0
        self.agents = self.possible_agents[:2]
        self.bits = {agent: int(self.rng.integers(2)) for agent in self.agents}
        return {agent: self.see(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        lived = list(self.agents)
        for agent in lived:
            if actions[agent] == 2:
                raise RuntimeError("a masked action was taken")
        self.time += 1
        reward = {agent: float(actions[agent] == self.bits[agent]) for agent in lived}
        cut = {agent: self.time >= self.limit for agent in lived}
        dead = {agent: bool(self.rng.random() < 0.15) and not cut[agent] for agent in lived}
        self.bits = {agent: int(self.rng.integers(2)) for agent in self.possible_agents}
        self.agents = [agent for agent in lived if not dead[agent] and not cut[agent]]
        if self.agents:
            absent = [agent for agent in self.possible_agents if agent not in lived]
            self.agents += [agent for agent in absent if self.rng.random() < 0.3]
            self.agents.sort()
        obs = {agent: self.see(agent) for agent in sorted({*lived, *self.agents})}
        known = {agent: reward.get(agent, 0.0) for agent in obs}
        return (obs, known, {a: dead.get(a, False) for a in obs}, {a: cut.get(a, False) for a in obs}, {a: {} for a in obs})

    def close(self):
        pass


class Turns(AECEnv):
    """Two players take turns; each is told the other's last bit and must repeat it two turns of its own later."""

    metadata = {"name": "turns_v0", "is_parallelizable": False}  # noqa: RUF012

    def __init__(self, limit=9, render_mode=None):
        super().__init__()
        self.limit, self.render_mode = limit, render_mode
        self.possible_agents = ["turn_0", "turn_1"]

    def observation_space(self, agent):
        return spaces.Box(-10, 10, (3,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def observe(self, agent):
        return np.array([self.time / 5, self.said, self.possible_agents.index(agent)], np.float32)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self.time, self.said = 0, 0
        self.agent_selection = self.agents[0]

    def step(self, action):
        if self.terminations[self.agent_selection] or self.truncations[self.agent_selection]:
            self._was_dead_step(action)
            return
        agent = self.agent_selection
        other = self.possible_agents[1 - self.possible_agents.index(agent)]
        self._cumulative_rewards[agent] = 0.0
        self.rewards = {agent: 1.0 + self.time, other: 0.5}  # the other earns something while it waits
        self.said, self.time = int(action), self.time + 1
        if self.time == self.limit:
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = other
        self._accumulate_rewards()

    def close(self):
        pass


class Odd(Clock):
    """Its agents differ in what they see and do."""

    def observation_space(self, agent):
        return spaces.Box(-np.inf, np.inf, (2 if agent == "clock_0" else 3,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2 if agent == "clock_0" else 4)

    def see(self):
        seen = {"clock_0": np.zeros(2, np.float32), "clock_1": np.ones(3, np.float32)}
        return {agent: seen[agent] for agent in self.agents}


class OddBox(Odd):
    """… and one of them acts in a Box."""

    def action_space(self, agent):
        return spaces.Discrete(2) if agent == "clock_0" else spaces.Box(-1, 1, (2,), np.float32)


class Breaks(Clock):
    """Fails in the third step of an episode, as often as `left` says (in this process)."""

    left = 0

    def step(self, actions):
        if self.time == 2 and Breaks.left:
            Breaks.left -= 1
            raise RuntimeError("broken")
        return super().step(actions)


class One(gym.Env):
    """One agent only, for what is refused there."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
