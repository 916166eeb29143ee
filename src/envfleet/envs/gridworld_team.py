"""The grid of several agents as one environment: one learner moves the whole team. It has a native version."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.envs.gridmodel import MOVES, GridModel, Reward
from envfleet.errors import BadArgument


class GridWorldTeam(gym.Env[NDArray[np.float32], NDArray[np.int64]]):
    """The world of `GridWorldEnvParallel`, with the same arguments, as an environment with one action for all agents.

    An observation has a row for each agent: what the parallel environment gives as `observation`, then its `action_mask`. The reward is
    the sum of the agents' rewards; `agent_rewards` has them one by one, `inside` says who is still on the grid. Who has left is not
    moved any more. The episode terminates when all have arrived, and is truncated after `max_cycles`.

    Example:
        >>> env = GridWorldTeam(size=4, num_obstacles=1, render_mode="ansi")
        >>> obs, _ = env.reset(seed=3)
        >>> obs.shape, env.action_space
        ((2, 63), MultiDiscrete([5 5]))
        >>> print(env.render())
        B...
        .A..
        ...#
        ..ba
    """

    metadata = {"render_modes": ["ansi", "rgb_array"], "render_fps": 8}  # noqa: RUF012 - the attribute Gymnasium reads

    def __init__(
        self,
        size: int = 5,
        num_agents: int = 2,
        num_obstacles: int = 3,
        max_cycles: int = 50,
        view: int = 2,
        reward: Reward = "shaped",
        min_distance: int | None = None,
        compass: bool = True,
        render_mode: str | None = None,
    ) -> None:
        if max_cycles < 1:
            raise BadArgument(f"max_cycles={max_cycles}: give a whole number from 1 up")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise BadArgument(f"render_mode={render_mode!r}: choose 'ansi', 'rgb_array' or None")
        self.world = GridModel(size, num_agents, num_obstacles, view, reward, min_distance, compass)
        self.max_cycles, self.render_mode = max_cycles, render_mode
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (num_agents, self.world.features + len(MOVES)), np.float32)
        self.action_space = gym.spaces.MultiDiscrete([len(MOVES)] * num_agents)
        self.agent_rewards: NDArray[np.float64] = np.zeros(num_agents)
        self._cycles = 0

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Which agents are still on the grid."""
        return np.array(self.world.inside, bool)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """A new grid; the same one for the same seed."""
        super().reset(seed=seed)
        self.world.reset(self.np_random)
        self.agent_rewards, self._cycles = np.zeros(self.world.num_agents), 0
        return self._observe(), {}

    def step(self, action: NDArray[np.int64]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """One move of every agent that is on the grid."""
        acting = {i: int(action[i]) for i, inside in enumerate(self.world.inside) if inside}
        rewards, _ = self.world.cycle(acting)
        self._cycles += 1
        total = 0.0
        for i in range(self.world.num_agents):
            self.agent_rewards[i] = rewards.get(i, 0.0)
            total += rewards.get(i, 0.0)
        ended = not any(self.world.inside)
        return self._observe(), total, ended, not ended and self._cycles >= self.max_cycles, {}

    def _observe(self) -> NDArray[np.float32]:
        agents = range(self.world.num_agents)
        return np.stack([np.concatenate([self.world.observe(i), self.world.mask(i)]) for i in agents]).astype(np.float32)

    def render(self) -> Any:
        """The grid as text or as pixels, by `render_mode`."""
        if self.render_mode == "rgb_array":
            return self.world.picture()
        return self.world.text() if self.render_mode == "ansi" else None
