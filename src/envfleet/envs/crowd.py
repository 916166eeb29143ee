"""An environment whose agents appear and end at random, by a seeded generator. For tests."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from envfleet.util.extras import from_extra

with from_extra("multiagent"):
    from pettingzoo import ParallelEnv
    from pettingzoo.utils.conversions import parallel_to_aec


class Crowd(ParallelEnv[str, Any, Any]):  # type: ignore[misc]
    """Walkers that appear and end; with `mixed`, also guards, which have other spaces.

    Each step an agent dies with probability `death` (terminated, or truncated one time in four) and each absent one is born
    with probability `birth`. The episode ends when no agent is left, or by truncation of all after `max_cycles`.
    A new agent gets a reward before its first action. With `birth` and `death` 0 all ends are truncations.

    Example:
        >>> env = Crowd(num_agents=3, death=0.0, birth=0.0, max_cycles=2)
        >>> obs, infos = env.reset(seed=0)
        >>> for _ in range(2):
        ...     *_, terminated, truncated, infos = env.step({agent: 0 for agent in env.agents})
        >>> env.agents, all(truncated.values()), any(terminated.values())
        ([], True, False)
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "crowd", "render_modes": ["rgb_array"], "is_parallelizable": True}

    def __init__(
        self,
        num_agents: int = 4,
        death: float = 0.15,
        birth: float = 0.2,
        max_cycles: int = 12,
        mixed: bool = False,
        render_mode: str | None = None,
    ) -> None:
        kinds = ["guard" if mixed and i % 3 == 1 else "walker" for i in range(num_agents)]
        self.possible_agents = [f"{kind}_{i}" for i, kind in enumerate(kinds)]
        self.agents: list[str] = []
        self.death, self.birth, self.max_cycles = death, birth, max_cycles
        self.render_mode = render_mode
        self._rng = np.random.default_rng()
        self._time = 0
        walker = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        guard = spaces.Dict(watch=spaces.Box(0, 255, (2, 2), np.uint8), action_mask=spaces.Box(0, 1, (3,), np.int8))
        self.observation_spaces = {a: guard if "guard" in a else walker for a in self.possible_agents}
        self.action_spaces = {a: spaces.Discrete(3 if "guard" in a else 5) for a in self.possible_agents}
        self.state_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation_space(self, agent: str) -> Any:
        """What this agent sees."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Any:
        """What this agent can do."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        """Some are there at once, one at least. A task `{"max_cycles": n}` sets the length of the episode."""
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        if options and "task" in options:
            self.max_cycles = int(options["task"]["max_cycles"])
        self._time = 0
        everyone = self.birth == 0.0
        here = self._rng.random(len(self.possible_agents)) < 0.6
        here[int(self._rng.integers(len(here)))] = True
        self.agents = [agent for agent, there in zip(self.possible_agents, here) if there or everyone]
        return {agent: self._see(agent, 0) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        """All agents act; then some end and some appear."""
        if set(actions) != set(self.agents):
            raise ValueError(f"actions of {sorted(actions)}, but {sorted(self.agents)} are here")
        self._time += 1
        last = self._time >= self.max_cycles
        rewards, terminated, truncated, infos, obs = {}, {}, {}, {}, {}
        staying = []
        for agent in self.possible_agents:
            chance = float(self._rng.random())
            if agent in actions:
                dies = chance < self.death
                rewards[agent] = float(actions[agent]) + chance
                terminated[agent] = dies and chance >= self.death / 4
                truncated[agent] = (dies and chance < self.death / 4) or (last and not dies)
                infos[agent] = {"chance": chance} if chance > 0.9 else {}
                obs[agent] = self._see(agent, int(actions[agent]))
                if not dies and not last:
                    staying.append(agent)
            elif chance < self.birth and not last:
                rewards[agent], terminated[agent], truncated[agent], infos[agent] = 0.5, False, False, {}
                obs[agent] = self._see(agent, 0)
                staying.append(agent)
        self.agents = staying
        return obs, rewards, terminated, truncated, infos

    def _see(self, agent: str, action: int) -> Any:
        number = self.possible_agents.index(agent)
        if agent.startswith("guard"):
            mask = (self._rng.random(3) < 0.7).astype(np.int8)
            mask[number % 3] = 1
            return {"watch": self._rng.integers(0, 256, (2, 2), np.uint8), "action_mask": mask}
        return np.array([self._time, number, action, self._rng.random()], np.float32)

    def state(self) -> Any:
        """How long it has been, and how many are there."""
        return np.array([self._time, len(self.agents)], np.float32)

    def render(self) -> Any:
        """A picture as bright as the crowd is large."""
        return np.full((4, 4, 3), len(self.agents), np.uint8)

    def close(self) -> None:
        """Nothing to close."""


def crowd_aec(**options: Any) -> Any:
    """The same crowd, one agent at a time: an AECEnv whose transitions are those of `Crowd`.

    Example:
        >>> env = crowd_aec(num_agents=2)
        >>> env.reset(seed=1)
        >>> env.agent_selection in env.possible_agents
        True
    """
    return parallel_to_aec(Crowd(**options))
