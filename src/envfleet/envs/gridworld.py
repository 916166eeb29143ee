"""A cooperative grid world for several agents, as a PettingZoo parallel environment and as its AEC twin.

The AEC twin is PettingZoo's own conversion: the world moves when the last agent of a cycle has acted. Under equal actions
the two give equal observations, rewards and flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.utils import seeding

from envfleet.envs.gridmodel import MOVES, GridModel, Reward
from envfleet.errors import BadArgument
from envfleet.util.extras import from_extra

with from_extra("multiagent"):
    from pettingzoo import ParallelEnv as PettingZooParallelEnv
    from pettingzoo.utils.conversions import parallel_to_aec_wrapper

Observation = dict[str, npt.NDArray[Any]]
Flags = dict[str, bool]
Infos = dict[str, dict[str, Any]]


class GridWorldEnvParallel(PettingZooParallelEnv):  # type: ignore[misc]
    """Each agent walks to its own goal around obstacles and other agents; an agent that arrives terminates (parallel).

    Observations are Dicts: `observation` (own cell, where the goal is from there, what is blocked and who stands within
    `view` cells, and with `compass` which moves shorten the way to the goal) and `action_mask` (which moves are free; a
    blocked move has no effect). Agents end one by one: terminated at their goal, truncated after `max_cycles`;
    `info["is_success"]` says which.

    Rewards: "sparse" gives 1 at the goal and nothing else. "shaped" adds 0.1 for every cell nearer to the goal round the
    obstacles (-0.1 for every farther) and -0.01 for each cycle.

    Args:
        size: cells per side.
        num_agents: how many agents, each with a goal.
        num_obstacles: cells that cannot be entered; the rest stays connected.
        max_cycles: the limit of an episode, in moves of each agent.
        view: how many cells an agent sees in each direction.
        reward: "shaped" or "sparse".
        min_distance: how far goals are at least, in steps (default: `size`; nearer where a crowded grid has none).
        compass: agents know the way round the obstacles (each other they must still avoid); without it they have to find
            it from what they see.
        render_mode: "rgb_array", "ansi", "human" (`render` prints the text) or None.

    Example:
        >>> env = GridWorldEnvParallel(size=6, num_agents=3)
        >>> observations, infos = env.reset(seed=1)
        >>> observations["agent_0"]["action_mask"]
        array([1, 1, 1, 1, 1], dtype=int8)
        >>> sorted(env.step(dict.fromkeys(env.agents, 0))[1])
        ['agent_0', 'agent_1', 'agent_2']
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 (PettingZoo has it so)
        "name": "gridworld_v0",
        "render_modes": ["human", "rgb_array", "ansi"],
        "is_parallelizable": True,
        "render_fps": 8,
    }

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
            raise BadArgument(f"render_mode={render_mode!r}: choose 'human', 'rgb_array', 'ansi' or None")
        self._world = GridModel(size, num_agents, num_obstacles, view, reward, min_distance, compass)
        self.max_cycles, self.render_mode = max_cycles, render_mode
        self.possible_agents = [f"agent_{i}" for i in range(num_agents)]
        self.agents: list[str] = []
        self._number = {agent: i for i, agent in enumerate(self.possible_agents)}
        self._cycles = 0
        self._rng: np.random.Generator | None = None
        seen: dict[str, spaces.Space[Any]] = {
            "observation": spaces.Box(-1.0, 1.0, (self._world.features,), np.float32),
            "action_mask": spaces.Box(0, 1, (len(MOVES),), np.int8),
        }
        self.observation_spaces = {agent: spaces.Dict(seen) for agent in self.possible_agents}
        self.action_spaces = {agent: spaces.Discrete(len(MOVES)) for agent in self.possible_agents}
        self.state_space = spaces.Box(0.0, 1.0, (size * size + 5 * num_agents,), np.float32)

    def observation_space(self, agent: str) -> spaces.Dict:
        """The same Dict for every agent: `observation` and `action_mask`."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        """Stay, up, down, left, right."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Observation], Infos]:
        """A new grid; the same one for the same seed."""
        if seed is not None or self._rng is None:
            self._rng, _ = seeding.np_random(seed)
        self._world.reset(self._rng)
        self.agents = list(self.possible_agents)
        self._cycles = 0
        return {agent: self.observe(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Observation], dict[str, float], Flags, Flags, Infos]:
        """One cycle; needs an action of every live agent, others are ignored."""
        absent = [agent for agent in self.agents if agent not in actions]
        if absent:
            raise BadArgument(f"no action for {', '.join(absent)}: every live agent acts in every cycle")
        if not self.agents:
            return {}, {}, {}, {}, {}
        by_number, arrived = self._world.cycle({self._number[agent]: int(actions[agent]) for agent in self.agents})
        self._cycles += 1
        rewards = {agent: by_number[self._number[agent]] for agent in self.agents}
        terminated = {agent: self._number[agent] in arrived for agent in self.agents}
        truncated = {agent: self._cycles >= self.max_cycles and not terminated[agent] for agent in self.agents}
        ended = [agent for agent in self.agents if terminated[agent] or truncated[agent]]
        infos: Infos = {agent: {"is_success": terminated[agent]} if agent in ended else {} for agent in self.agents}
        observations = {agent: self.observe(agent) for agent in self.agents}
        self.agents = [agent for agent in self.agents if agent not in ended]
        return observations, rewards, terminated, truncated, infos

    def observe(self, agent: str) -> Observation:
        """What an agent sees now."""
        number = self._number[agent]
        return {"observation": self._world.observe(number), "action_mask": self._world.mask(number)}

    def state(self) -> npt.NDArray[np.float32]:
        """The whole world, for a critic that sees it all."""
        return self._world.state()

    def render(self) -> Any:
        """The grid as pixels, as text or printed, by `render_mode`."""
        if self.render_mode == "rgb_array":
            return self._world.picture()
        if self.render_mode == "human":
            print(self._world.text())
        return self._world.text() if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Nothing is held open."""


class GridWorldEnvMultiAgent(parallel_to_aec_wrapper):  # type: ignore[misc]
    """The AEC twin of `GridWorldEnvParallel`, with the same arguments: agents act one after the other.

    Example:
        >>> env = GridWorldEnvMultiAgent(size=4, num_obstacles=1, render_mode="ansi")
        >>> env.reset(seed=3)
        >>> print(env.render())
        B...
        .A..
        ...#
        ..ba
        >>> for agent in env.agent_iter():
        ...     observation, reward, terminated, truncated, info = env.last()
        ...     ended = terminated or truncated
        ...     env.step(None if ended else env.action_space(agent).sample(observation["action_mask"]))
        >>> env.agents
        []
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(GridWorldEnvParallel(*args, **options))


#: The two under the names PettingZoo's modules have for them.
env, parallel_env = GridWorldEnvMultiAgent, GridWorldEnvParallel
