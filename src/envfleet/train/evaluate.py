"""Evaluation: policies on environments of their own, episodes with seeds of their own, every episode counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument
from envfleet.multiagent.groups import AgentGroup
from envfleet.multiagent.policy_map import part_of
from envfleet.networks.network_policy import Policy
from envfleet.networks.team import TeamPolicy, mask_of
from envfleet.rollout.policy_protocol import Ask
from envfleet.rollout.segments.agent_segment import ACTIVE, AGENT_STEP
from envfleet.train.build import assignments_of, one_env
from envfleet.train.config import PPOConfig
from envfleet.util.seeding import episode_seed, stream
from envfleet.util.trees import tree_map

Opponent = Callable[[Any, Any, np.random.Generator], Any]
"""(observation of one agent, its mask of legal actions or None, random numbers) → action"""

Played = tuple[NDArray[np.float64], int, NDArray[np.bool_]]
"""One episode: the agents' returns [A], its length, and which agents the policies played [A]"""

INNER_RETURNS = "inner_returns"  # the column of environments with inner episodes
SLOT = np.zeros(1, np.int64)  # the only slot of a fleet of one


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found. `returns` and `lengths` have one entry per episode, in the order of their seeds.

    Example:
        >>> Evaluation.of([1.0, 3.0], [10, 20]).mean_return
        2.0
    """

    mean_return: float
    std_return: float
    min_return: float
    max_return: float
    mean_length: float
    num_episodes: int
    returns: list[float]
    lengths: list[int]
    inner_returns: list[list[float]] = field(default_factory=list)  # per episode, those of its inner episodes, if it has some

    @property
    def mean_inner_returns(self) -> list[float]:
        """Mean return of the first inner episode, of the second …: how an agent adapts to a task.

        Over those that were played: where an outer episode was cut off, the returns of the rest are NaN.
        """
        columns = ([value for value in column if not np.isnan(value)] for column in zip(*self.inner_returns))
        return [float(np.mean(column)) if column else float("nan") for column in columns]

    @classmethod
    def of(cls, returns: list[float], lengths: list[int], **more: Any) -> Evaluation:
        """Summarise episodes."""
        r = np.array(returns)
        mean, std, low, high = (float(value) for value in (r.mean(), r.std(), r.min(), r.max()))
        return cls(mean, std, low, high, float(np.mean(lengths)), len(returns), returns, lengths, **more)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class TeamEvaluation(Evaluation):
    """`returns` are means over the agents that the policies played; `agent_returns` has those of all agents.

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


def random_opponent(space: gym.Space[Any]) -> Opponent:
    """An opponent that plays any legal action.

    Example:
        >>> int(random_opponent(gym.spaces.Discrete(3))(None, np.array([0, 0, 1]), np.random.default_rng(0)))
        2
    """

    def play(observation: Any, mask: Any, rng: np.random.Generator) -> Any:
        if isinstance(space, gym.spaces.Discrete):
            legal = np.arange(space.n) if mask is None else np.flatnonzero(mask)
            return rng.choice(legal) + space.start
        space.seed(int(rng.integers(2**31)))
        return space.sample()

    return play


class Evaluator:
    """One environment of each kind in this process, kept between evaluations.

    Episode i has the same seed in every evaluation. An environment with one agent is the case of a team of one.
    """

    def __init__(
        self, envs: Sequence[Any], config: PPOConfig, seed: int | None = None, render: bool = False, tasks: Sequence[Any] = ()
    ) -> None:
        self.config, self.seed = config, config.seed if seed is None else seed
        self.tasks = list(tasks)  # dealt to the episodes in turn; without them the environment draws its own
        self._fleets = [one_env(env, config, render, config.centralised_critic) for env in envs]
        self.agents = tuple(self._fleets[0].agents)
        self._groups = self._fleets[0].groups
        self._assigned = assignments_of(config, self._fleets[0])

    def run(
        self,
        policies: Mapping[str, Policy],
        episodes: int,
        deterministic: bool = True,
        opponents: Any = None,
        frames: list[Any] | None = None,
    ) -> Evaluation:
        """Play `episodes` episodes of every environment; with `frames`, pictures of the first one are appended to it.

        Without opponents the policies play all agents. With `opponents="random"`, or a function of (observation, mask,
        rng), the policies play one side: the agents of one policy, or one agent where all share a policy. The side
        changes with every episode. A dict agent → opponent fixes which agents are played by opponents.
        """
        if isinstance(episodes, bool) or not isinstance(episodes, (int, np.integer)) or episodes < 1:
            raise BadArgument(f"num_episodes={episodes!r}: give a whole number from 1 up")
        played: list[Played] = []
        self._inner: list[list[float]] = []
        for fleet in self._fleets:
            policy = self._fork(policies, deterministic)
            for episode in range(episodes):
                filming = None if played else frames
                played.append(self._play(fleet, policy, episode, self._against(opponents, episode), filming))
        return self._summary(played)

    def _fork(self, policies: Mapping[str, Policy], deterministic: bool) -> Policy | TeamPolicy:
        # Random numbers of its own: an evaluation during training must not change what training draws.
        rng = None if deterministic else stream(self.seed, "eval-policy")
        forked = {each.name: policies[each.name].fork(each.count, rng) for each in self._assigned}
        return TeamPolicy(self._assigned, forked) if self.agents else forked[self._assigned[0].name]

    def _play(
        self, fleet: Fleet, policy: Policy | TeamPolicy, episode: int, against: dict[str, Opponent], frames: list[Any] | None
    ) -> Played:
        tasks = [self.tasks[episode % len(self.tasks)]] if self.tasks else None
        batch = fleet.reset(seed=[episode_seed(self.seed, "eval", 0, episode)], tasks=tasks)
        rng = stream(self.seed, "eval-opponents", episode) if against else None
        ours = np.array([agent not in against for agent in self.agents] or [True])
        acted = np.zeros((1, len(ours)), np.int64)
        step = 0
        while True:
            if frames is not None:
                frames.append(fleet.render(0))
            columns = {name: getattr(batch, name) for name in fleet.layout.columns}
            if self.agents:
                columns |= {ACTIVE: batch.active & ours, AGENT_STEP: acted.copy()}
                acted += batch.active
            ask = Ask(
                obs=batch.obs,
                slots=SLOT,
                episode=np.array([episode]),
                step=np.array([step]),
                columns=columns,
                reward=None if self.agents else batch.reward,
            )
            actions = policy.act(ask).actions
            for agent, opponent in against.items():
                self._answer(agent, opponent, batch, columns, rng, actions)
            batch = fleet.step(actions)
            if self.agents:
                acted[batch.terminated | batch.truncated] = 0
            step += 1
            if batch.ended[0]:
                if INNER_RETURNS in fleet.layout.columns:
                    self._inner.append(getattr(batch, INNER_RETURNS)[0].tolist())
                returns = np.array(batch.ep_return[0], dtype=np.float64, ndmin=1)
                return returns, int(batch.length[0]), ours

    # -- opponents -------------------------------------------------------------------------------------------------

    def _against(self, opponents: Any, episode: int) -> dict[str, Opponent]:
        """Which agents are played by an opponent in this episode."""
        if opponents is None:
            return {}
        if not self.agents:
            raise BadArgument(f"opponents: {self.config.env_name} has one agent and no opponents")
        if not isinstance(opponents, Mapping):
            sides = [each.agents for each in self._assigned]
            sides = sides if len(sides) > 1 else [(name,) for name in self.agents]
            opponents = dict.fromkeys([name for name in self.agents if name not in sides[episode % len(sides)]], opponents)
        against: dict[str, Opponent] = {}
        for name, given in opponents.items():
            if name not in self.agents:
                raise BadArgument(f"opponents: there is no agent {name!r}; the agents are {', '.join(self.agents)}")
            if given != "random" and not callable(given):
                raise BadArgument(f'opponent {given!r}: "random", or a function of (observation, mask, rng) is needed')
            against[name] = random_opponent(self._group_of(name).action_space) if given == "random" else given
        return against

    def _group_of(self, agent: str) -> AgentGroup:
        return next(group for group in self._groups if agent in group.agents)

    def _answer(self, agent: str, opponent: Opponent, batch: Any, columns: dict[str, Any], rng: Any, out: Any) -> None:
        """Write an opponent's action into `out`, if its agent must act."""
        if not batch.active[0, self.agents.index(agent)]:
            return
        group, num_groups = self._group_of(agent), len(self._groups)
        at = 0, group.agents.index(agent)
        observation = tree_map(lambda leaf: leaf[at], part_of(batch.obs, group.name, num_groups))
        mask = mask_of(columns, group.name, num_groups)
        part_of(out, group.name, num_groups)[at] = opponent(observation, None if mask is None else mask[at], rng)

    def _summary(self, played: list[Played]) -> Evaluation:
        returns, lengths, ours = (np.array(each) for each in zip(*played))  # [episodes, A], [episodes], [episodes, A]
        mine = np.where(ours, returns, 0.0).sum(axis=1) / np.maximum(ours.sum(axis=1), 1)
        if not self.agents:
            return Evaluation.of(mine.tolist(), lengths.tolist(), inner_returns=self._inner)
        theirs = np.where(ours, 0.0, returns).sum(axis=1) / np.maximum((~ours).sum(axis=1), 1)
        ahead = np.sign(mine - theirs)[ours.any(axis=1) & ~ours.all(axis=1)].tolist()
        by_agent = {agent: returns[:, i].tolist() for i, agent in enumerate(self.agents)}
        games = {"wins": ahead.count(1.0), "draws": ahead.count(0.0), "losses": ahead.count(-1.0)}
        return TeamEvaluation.of(mine.tolist(), lengths.tolist(), agent_returns=by_agent, **games)

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the environment."""
        return self._fleets[0].metadata

    def close(self) -> None:
        """Close the environments."""
        for fleet in self._fleets:
            fleet.close()
