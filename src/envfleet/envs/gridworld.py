"""A cooperative grid world for several agents, as a PettingZoo AEC environment and as its parallel twin.

Both drive one `GridModel`, and the AEC one moves the world when the last agent of a cycle has acted: under equal actions
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
from envfleet.envs.registry import missing_multiagent
from envfleet.errors import BadArgument

try:
    from pettingzoo import AECEnv
    from pettingzoo import ParallelEnv as PettingZooParallelEnv
except ImportError as missing:
    raise missing_multiagent("pettingzoo") from missing

Observation = dict[str, npt.NDArray[Any]]


class _Grid:
    """What both environments share: the spaces, the seed, the count of cycles and the one world update."""

    metadata: dict[str, Any] = {  # noqa: RUF012 (PettingZoo has it so)
        "name": "gridworld_v0",
        "render_modes": ["rgb_array", "ansi"],
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
            raise BadArgument(f"render_mode={render_mode!r}: choose 'rgb_array', 'ansi' or None")
        self._world = GridModel(size, num_agents, num_obstacles, view, reward, min_distance, compass)
        self.max_cycles, self.render_mode = max_cycles, render_mode
        self.possible_agents = [f"agent_{i}" for i in range(num_agents)]
        self.agents: list[str] = []
        self._number = {agent: i for i, agent in enumerate(self.possible_agents)}
        self._cycles = 0
        self._rng: np.random.Generator | None = None
        self.observation_spaces = {agent: self._observation_space() for agent in self.possible_agents}
        self.action_spaces = {agent: spaces.Discrete(len(MOVES)) for agent in self.possible_agents}
        self.state_space = spaces.Box(0.0, 1.0, (size * size + 5 * num_agents,), np.float32)

    def _observation_space(self) -> spaces.Dict:
        return spaces.Dict(
            {
                "observation": spaces.Box(-1.0, 1.0, (self._world.features,), np.float32),
                "action_mask": spaces.Box(0, 1, (len(MOVES),), np.int8),
            }
        )

    def observation_space(self, agent: str) -> spaces.Dict:
        """The same Dict for every agent: `observation` and `action_mask`."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        """Stay, up, down, left, right."""
        return self.action_spaces[agent]

    def observe(self, agent: str) -> Observation:
        """What an agent sees now."""
        number = self._number[agent]
        return {"observation": self._world.observe(number), "action_mask": self._world.mask(number)}

    def state(self) -> npt.NDArray[np.float32]:
        """The whole world, for a critic that sees it all."""
        return self._world.state()

    def render(self) -> Any:
        """The grid as pixels or as text, by `render_mode`."""
        if self.render_mode == "rgb_array":
            return self._world.picture()
        return self._world.text() if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Nothing is held open."""

    def _begin(self, seed: int | None) -> None:
        if seed is not None or self._rng is None:
            self._rng, _ = seeding.np_random(seed)
        self._world.reset(self._rng)
        self.agents = list(self.possible_agents)
        self._cycles = 0

    def _update(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """One cycle of the world: rewards, terminations, truncations and infos of the agents that lived in it."""
        numbers = {self._number[agent]: int(actions[agent]) for agent in self.agents}
        rewards, arrived = self._world.cycle(numbers)
        self._cycles += 1
        out_of_time = self._cycles >= self.max_cycles
        terminations = {agent: self._number[agent] in arrived for agent in self.agents}
        truncations = {agent: out_of_time and not terminations[agent] for agent in self.agents}
        infos: dict[str, dict[str, Any]] = {
            agent: {"is_success": terminations[agent]} if terminations[agent] or truncations[agent] else {}
            for agent in self.agents
        }
        return {agent: rewards[self._number[agent]] for agent in self.agents}, terminations, truncations, infos


class GridWorldEnvMultiAgent(_Grid, AECEnv):  # type: ignore[misc]
    """Agents walk to goals of their own round obstacles and each other; who arrives is done (AEC).

    Observations are Dicts: `observation` (own cell, where the goal is from there, what is blocked and who stands within
    `view` cells, and with `compass` which moves shorten the way to the goal) and `action_mask` (which moves are free; a move that is not is a stay, never an error). An agent ends by
    itself: terminated when it reaches its goal, truncated after `max_cycles`; `info["is_success"]` then says which.

    Rewards: "sparse" gives 1 at the goal and nothing else. "shaped" adds 0.1 for every cell nearer to the goal round the
    obstacles (-0.1 for every farther) and -0.01 for each cycle.

    Args:
        size: cells a side.
        num_agents: how many agents, each with a goal.
        num_obstacles: cells that cannot be entered; the rest stays connected.
        max_cycles: the limit of an episode, in moves of each agent.
        view: how many cells an agent sees in each direction.
        reward: "shaped" or "sparse".
        min_distance: how far goals are at least, in steps (default: `size`; nearer where a crowded grid has none).
        compass: agents know the way round the obstacles (each other they must still avoid); without it they have to find
            it from what they see.
        render_mode: "rgb_array", "ansi" or None.

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

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """A new grid; the same one for the same seed."""
        self._begin(seed)
        self.rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]
        self._chosen: dict[str, Any] = {}
        self._skip_agent_selection = None  # of PettingZoo's dead steps: nothing is left of the last episode

    def step(self, action: Any) -> None:
        """Take the selected agent's action; the world moves when the last one of the cycle is in."""
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._chosen[agent] = action
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        if len(self._chosen) < len(self.agents):
            self.agent_selection = self.agents[self.agents.index(agent) + 1]
            return
        self.rewards, self.terminations, self.truncations, self.infos = self._update(self._chosen)
        self._chosen = {}
        self._accumulate_rewards()
        alive = [agent for agent in self.agents if not (self.terminations[agent] or self.truncations[agent])]
        self.agent_selection = (alive or self.agents)[0]
        self._deads_step_first()


class GridWorldEnvParallel(_Grid, PettingZooParallelEnv):  # type: ignore[misc]
    """The parallel twin of `GridWorldEnvMultiAgent`: the same world, all agents at once.

    Example:
        >>> env = GridWorldEnvParallel(size=6, num_agents=3)
        >>> observations, infos = env.reset(seed=1)
        >>> observations["agent_0"]["action_mask"]
        array([1, 1, 1, 1, 1], dtype=int8)
        >>> sorted(env.step(dict.fromkeys(env.agents, 0))[1])
        ['agent_0', 'agent_1', 'agent_2']
    """

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Observation], dict[str, dict[str, Any]]]:
        """A new grid; the same one for the same seed."""
        self._begin(seed)
        return {agent: self.observe(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[dict[str, Observation], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        """One cycle; needs an action of every live agent, others are ignored."""
        absent = [agent for agent in self.agents if agent not in actions]
        if absent:
            raise BadArgument(f"no action for {', '.join(absent)}: every live agent acts in every cycle")
        if not self.agents:
            return {}, {}, {}, {}, {}
        rewards, terminations, truncations, infos = self._update(actions)
        observations = {agent: self.observe(agent) for agent in self.agents}
        self.agents = [agent for agent in self.agents if not (terminations[agent] or truncations[agent])]
        return observations, rewards, terminations, truncations, infos


def env(**kwargs: Any) -> GridWorldEnvMultiAgent:
    """The AEC environment, under the name PettingZoo's modules have for it."""
    return GridWorldEnvMultiAgent(**kwargs)


def parallel_env(**kwargs: Any) -> GridWorldEnvParallel:
    """The parallel environment, under the name PettingZoo's modules have for it."""
    return GridWorldEnvParallel(**kwargs)
