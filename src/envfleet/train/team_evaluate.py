"""Evaluation with many agents: trained policies at one table, alone or against opponents, every agent's return kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument
from envfleet.multiagent.policy_map import assign_policies, part_of
from envfleet.networks.team import TeamPolicy, mask_of
from envfleet.rollout.policy_protocol import Ask
from envfleet.rollout.segments.agent_segment import ACTIVE, AGENT_STEP
from envfleet.slots.factories import resolve
from envfleet.train.config import PPOConfig
from envfleet.train.evaluate import Evaluation
from envfleet.train.team_learner import player_from, state_space_of
from envfleet.util.seeding import episode_seed, stream
from envfleet.util.trees import tree_map

Opponent = Callable[[Any, Any, np.random.Generator], Any]
"""(observation of one agent, its mask of legal actions or None, random numbers) → action"""


@dataclass(frozen=True)
class TeamEvaluation(Evaluation):
    """`returns` are means over the agents that the policies played; `agent_returns` has everybody's.

    With opponents, `wins`, `draws` and `losses` count the episodes in which the policies' mean return was above, equal to
    or below that of the opponents.
    """

    agent_returns: dict[str, list[float]] = field(default_factory=dict)
    wins: int = 0
    draws: int = 0
    losses: int = 0

    @property
    def mean_agent_returns(self) -> dict[str, float]:
        """Every agent's mean return."""
        return {agent: float(np.mean(values)) for agent, values in self.agent_returns.items()}


class RandomOpponent:
    """Plays any legal action.

    Example:
        >>> play = RandomOpponent(gym.spaces.Discrete(3))
        >>> int(play(None, np.array([0, 0, 1]), np.random.default_rng(0)))
        2
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space

    def __call__(self, observation: Any, mask: Any, rng: np.random.Generator) -> Any:
        """Return an action."""
        if isinstance(self.space, gym.spaces.Discrete):
            legal = np.arange(self.space.n) if mask is None else np.flatnonzero(mask)
            return rng.choice(legal) + self.space.start
        self.space.seed(int(rng.integers(2**31)))
        return self.space.sample()


class TeamEvaluator:
    """One environment in this process, kept between evaluations. Episode i has the same seed in every evaluation."""

    def __init__(self, env: Any, config: PPOConfig, seed: int | None = None, render: bool = False) -> None:
        import envfleet as ef

        self.config, self.seed = config, config.seed if seed is None else seed
        kwargs = {**config.env_kwargs, **({"render_mode": "rgb_array"} if render else {})}
        self._fleet = ef.make(
            resolve(env, kwargs),
            1,
            backend="serial",
            columns=config.columns or None,
            on_end="wait",
            with_state=config.centralised_critic,
        )
        fleet = self._fleet
        self.agents = tuple(fleet.agents)
        self.seats = assign_policies(config.policies, fleet.agents, fleet.groups)
        self._central = state_space_of(fleet) if config.centralised_critic else None

    def run(
        self,
        players: Mapping[str, dict[str, Any]],
        episodes: int,
        deterministic: bool = True,
        opponents: Any = None,
        frames: list[Any] | None = None,
    ) -> TeamEvaluation:
        """Play `episodes` episodes. `players` has what `Side.freeze` returned, per policy.

        Without opponents the policies play all agents. `opponents="random"`, or a function of (observation, mask, rng), plays
        against them: one policy's agents are ours (one agent, where all share one policy), another in every
        episode, in turn. A dict agent → opponent seats them by name.
        """
        rng = None if deterministic else stream(self.seed, "eval-policy")
        seats, groups = self.seats, len(self._fleet.groups)
        made = {
            each.name: player_from(players[each.name], each, self.config, each.count, rng, self._central)
            for each in seats
        }
        policy = TeamPolicy(seats, made, len(self.agents), groups)
        returns: list[NDArray[np.float64]] = []
        lengths: list[int] = []
        tables = []
        for episode in range(episodes):
            against = self._against(opponents, episode)
            filming = frames if episode == 0 else None
            total, length = self._play(policy, episode, against, filming)
            returns.append(total)
            lengths.append(length)
            tables.append(np.array([agent not in against for agent in self.agents]))
        return self._summary(np.array(returns), lengths, np.array(tables))

    def _against(self, opponents: Any, episode: int) -> dict[str, Opponent]:
        """Who is played by an opponent in this episode."""
        if opponents is None:
            return {}
        if isinstance(opponents, Mapping):
            unknown = [name for name in opponents if name not in self.agents]
            if unknown:
                raise BadArgument(
                    f"opponents: there is no agent {unknown[0]!r}; the agents are {', '.join(self.agents)}"
                )
            return {name: self._opponent(one, name) for name, one in opponents.items()}
        sides = [each.agents for each in self.seats] if len(self.seats) > 1 else [(name,) for name in self.agents]
        ours = sides[episode % len(sides)]
        return {name: self._opponent(opponents, name) for name in self.agents if name not in ours}

    def _opponent(self, given: Any, agent: str) -> Opponent:
        if given == "random":
            group = next(group for group in self._fleet.groups if agent in group.agents)
            return RandomOpponent(group.action_space)
        if not callable(given):
            raise BadArgument(f'opponent {given!r}: "random", or a function of (observation, mask, rng) is needed')
        chosen: Opponent = given
        return chosen

    def _play(
        self, policy: TeamPolicy, episode: int, against: dict[str, Opponent], frames: list[Any] | None
    ) -> tuple[NDArray[np.float64], int]:
        fleet = self._fleet
        batch = fleet.reset(seed=[episode_seed(self.seed, "eval", 0, episode)])
        rng = stream(self.seed, "eval-opponents", episode)
        ours = np.array([[agent not in against for agent in self.agents]])
        acted = np.zeros(ours.shape, np.int64)
        step = 0
        while True:
            if frames is not None:
                frames.append(fleet.render(0))
            columns = {name: getattr(batch, name) for name in fleet.layout.columns}
            ask = Ask(
                obs=batch.obs,
                slots=np.zeros(1, np.int64),
                episode=np.array([episode]),
                step=np.array([step]),
                columns={**columns, ACTIVE: batch.active & ours, AGENT_STEP: acted},
            )
            actions = policy.act(ask).actions
            for agent, opponent in against.items():
                self._answer(agent, opponent, batch, columns, rng, actions)
            acted += batch.active
            batch = fleet.step(actions)
            acted[batch.terminated | batch.truncated] = 0
            step += 1
            if batch.ended[0]:
                return np.array(batch.ep_return[0], dtype=np.float64), int(batch.length[0])

    def _answer(
        self, agent: str, opponent: Opponent, batch: Any, columns: dict[str, Any], rng: np.random.Generator, out: Any
    ) -> None:
        index = self.agents.index(agent)
        if not batch.active[0, index]:
            return
        groups = self._fleet.groups
        group = next(group for group in groups if agent in group.agents)
        place = group.agents.index(agent)
        observation = tree_map(lambda leaf: leaf[0, place], part_of(batch.obs, group.name, len(groups)))
        mask = mask_of(columns, group.name, len(groups))
        action = opponent(observation, None if mask is None else mask[0, place], rng)
        part_of(out, group.name, len(groups))[0, place] = action

    def _summary(self, returns: NDArray[np.float64], lengths: list[int], ours: NDArray[np.bool_]) -> TeamEvaluation:
        mine = np.where(ours, returns, 0.0).sum(axis=1) / np.maximum(ours.sum(axis=1), 1)
        plain = Evaluation.of(mine.tolist(), lengths)
        ahead = np.zeros(0)
        if not ours.all():
            theirs = np.where(ours, 0.0, returns).sum(axis=1) / np.maximum((~ours).sum(axis=1), 1)
            both = ours.any(axis=1) & ~ours.all(axis=1)
            ahead = np.sign(mine - theirs)[both]
        return TeamEvaluation(
            **plain.to_dict(),
            agent_returns={agent: returns[:, i].tolist() for i, agent in enumerate(self.agents)},
            wins=int((ahead > 0).sum()),
            draws=int((ahead == 0).sum()),
            losses=int((ahead < 0).sum()),
        )

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the environment."""
        return self._fleet.metadata

    def close(self) -> None:
        """Close the environment."""
        self._fleet.close()
