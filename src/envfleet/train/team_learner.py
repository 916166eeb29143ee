"""Many agents in the trainer: a network, a learner and statistics per policy, under the one update."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument
from envfleet.multiagent.groups import groups_of
from envfleet.multiagent.policy_map import Seats, assign_policies
from envfleet.networks.network_policy import NotFinite, Policy
from envfleet.networks.team import TeamPolicy
from envfleet.rollout.segments.agent_segment import STATE, AgentSegment
from envfleet.rollout.segments.segment import Segment
from envfleet.train.agent import build_net, filled, normaliser_for
from envfleet.train.config import PPOConfig
from envfleet.train.normalise import RewardNormaliser
from envfleet.train.objective import Coefficients
from envfleet.train.selfplay import Pool
from envfleet.train.transitions import Transitions
from envfleet.train.update import Learner
from envfleet.util.seeding import stream


def check_policies(config: PPOConfig, env: Any) -> None:
    """Refuse what no run could begin with, before any worker is started: one environment is built here to see.

    Environments of one agent are left alone: nothing is built unless PettingZoo is in use or policies are asked for.
    """
    asked = config.policies != "shared" or config.self_play or config.centralised_critic
    if not asked and (isinstance(env, str) or "pettingzoo" not in sys.modules):
        return
    agents: list[str] = []
    if not isinstance(env, str):  # Gymnasium ids have one agent
        built = env(**config.env_kwargs)
        try:
            agents = [str(agent) for agent in getattr(built, "possible_agents", ())]
            if agents:
                spaces = [[space(agent) for agent in built.possible_agents] for space in _space_functions(built)]
                assign_policies(config.policies, agents, groups_of(agents, *spaces))
        finally:
            built.close()
    if asked and not agents:
        raise BadArgument(
            f"{config.env_name} has one agent: policies, centralised_critic and self_play are for environments with many"
        )


def _space_functions(env: Any) -> tuple[Any, Any]:
    return env.observation_space, env.action_space


def state_space_of(fleet: Fleet) -> Any:
    """The space of `state()`, which a fleet made with `with_state=True` has as a column."""
    return fleet.layout.columns[STATE]


def player_from(
    state: dict[str, Any],
    seats: Seats,
    config: PPOConfig,
    rows: int,
    rng: np.random.Generator | None,
    state_space: Any = None,
) -> Policy:
    """Return a policy that acts as `Side.freeze` kept it, on the CPU."""
    net = build_net(seats.observation_space, seats.action_space, config, torch.device("cpu"), state_space)
    normaliser = filled(net, state, config, f"policy {seats.name}")
    return Policy(net, rows, rng, normaliser, skip_nan=config.on_nan == "skip")


class Side:
    """One policy with all that is learned and kept for it."""

    def __init__(self, seats: Seats, number: int, config: PPOConfig, device: torch.device, state_space: Any) -> None:
        self.seats, self.config, self.device, self.state_space = seats, config, device, state_space
        spaces = seats.observation_space, seats.action_space
        self.net = build_net(*spaces, config, device, state_space, key=(number,))
        self.observations = normaliser_for(self.net, config)
        columns = config.num_envs * seats.count
        self.rewards = RewardNormaliser(columns, config.gamma) if config.normalize_reward else None
        rng = stream(config.seed, "minibatches", number)
        self.learner = Learner(self.net, config.update(), columns, rng, self.observations, self.rewards)
        self.policy = Policy(
            self.net,
            columns,
            stream(config.seed, "actions", number),
            self.observations,
            skip_nan=config.on_nan == "skip",
        )
        # Sequences of agents are as long as they are: rounded up, so that every minibatch gets a whole piece.
        pieces = -(-config.num_minibatches // columns)
        self.multiple = (config.sequence_length or pieces) if self.net.num_cores else 1

    # -- past selves -----------------------------------------------------------------------------------------------

    def freeze(self) -> dict[str, Any]:
        """Return copies of what acting needs."""
        net = {name: value.detach().cpu().clone() for name, value in self.net.state_dict().items()}
        return {"net": net, "observations": self.observations.state() if self.observations else None}

    def thawed(self, state: dict[str, Any], rng: np.random.Generator | None) -> Policy:
        """Return a policy from what `freeze` returned."""
        return player_from(state, self.seats, self.config, len(self.policy.state), rng, self.state_space)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        assert self.policy.rng is not None
        return {
            **self.freeze(),
            "rewards": self.rewards.state() if self.rewards else None,
            "optimiser": self.learner.optimiser.state(),
            "memory": {"actor": self.policy.state, "learner": self.learner.state},
            "rng": {
                "actions": self.policy.rng.bit_generator.state,
                "minibatches": self.learner.rng.bit_generator.state,
            },
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        assert self.policy.rng is not None
        self.net.load_state_dict(state["net"])
        self.learner.optimiser.load(state["optimiser"])
        if self.observations is not None:
            self.observations.load(state["observations"])
        if self.rewards is not None:
            self.rewards.load(state["rewards"])
        self.policy.state = np.array(state["memory"]["actor"])
        self.learner.state = state["memory"]["learner"].to(self.device)
        self.policy.rng.bit_generator.state = state["rng"]["actions"]
        self.learner.rng.bit_generator.state = state["rng"]["minibatches"]


class Team:
    """All policies of a run. To the trainer it is a learner (`learn`), and `policy` is what the collector asks."""

    def __init__(self, config: PPOConfig, fleet: Fleet, device: torch.device) -> None:
        self.config = config
        self.agents = tuple(fleet.agents)
        seats = assign_policies(config.policies, fleet.agents, fleet.groups)
        space = state_space_of(fleet) if config.centralised_critic else None
        self.sides = {each.name: Side(each, i, config, device, space) for i, each in enumerate(seats)}
        counts = config.num_envs, len(self.agents)
        groups = len(fleet.groups)
        self.transitions = Transitions(seats, *counts, groups, central=config.centralised_critic)
        self.pool: Pool | None = None
        if config.self_play:
            self.pool = Pool(
                seats,
                *counts,
                size=config.self_play_pool,
                past=config.self_play_past,
                seed=config.seed,
                freeze=lambda: {name: side.freeze() for name, side in self.sides.items()},
                build=lambda name, state, rng: self.sides[name].thawed(state, rng),
            )
            self.pool.snapshot(0)
        policies = {name: side.policy for name, side in self.sides.items()}
        self.policy = TeamPolicy(seats, policies, counts[1], groups, self.pool)
        self.num_updates = 0

    def learn(self, segment: Segment, now: Coefficients) -> dict[str, float]:
        """Improve every policy on its own agents' transitions; losses are means over the policies."""
        assert isinstance(segment, AgentSegment)
        parts = self.transitions.cut(segment, {name: side.multiple for name, side in self.sides.items()})
        found: dict[str, dict[str, float]] = {}
        for name, side in self.sides.items():
            if not parts[name].num_scored:  # nobody of this policy finished a transition
                continue
            try:
                found[name] = side.learner.learn(parts[name], now)
            except NotFinite as error:
                raise NotFinite(f"policy {name}: {error}", error.rows) from error
        self.num_updates += 1
        if self.pool is not None:
            self.pool.record(segment)
            if self.num_updates % self.config.self_play_every == 0:
                self.pool.snapshot(self.num_updates)
        return self._losses(found)

    def _losses(self, found: dict[str, dict[str, float]]) -> dict[str, float]:
        names = sorted({name for losses in found.values() for name in losses})
        mean = {name: float(np.mean([one[name] for one in found.values() if name in one])) for name in names}
        if len(self.sides) > 1:
            for policy, losses in found.items():
                mean |= {f"{name}/{policy}": losses[name] for name in ("policy_loss", "value_loss") if name in losses}
        mean["agent_steps_dropped"] = float(self.transitions.num_dropped)
        return mean

    def metrics(self, segment: Segment) -> dict[str, float]:
        """Mean return of every agent over the episodes that ended in this segment, and the ratings."""
        assert isinstance(segment, AgentSegment)
        row: dict[str, float] = {}
        t, b = segment.end_index[:, 0], segment.end_index[:, 1]
        whole = segment.end_returns[segment.scored[t, b]]
        if len(whole):
            row |= {f"return/{agent}": float(value) for agent, value in zip(self.agents, whole.mean(axis=0))}
        return row | (self.pool.metrics() if self.pool is not None else {})

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {
            "agents": list(self.agents),
            "num_updates": self.num_updates,
            "policies": {name: side.state() for name, side in self.sides.items()},
            "transitions": self.transitions.state(),
            "pool": self.pool.state() if self.pool is not None else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        if list(self.agents) != state["agents"]:
            raise BadArgument(f"the run was trained with the agents {state['agents']}, not {list(self.agents)}")
        self.num_updates = self.policy.version = int(state["num_updates"])
        for name, side in self.sides.items():
            side.load(state["policies"][name])
        self.transitions.load(state["transitions"])
        if self.pool is not None and state["pool"] is not None:
            self.pool.load(state["pool"])

    def forget(self, slots: NDArray[np.int64]) -> None:
        """The running episodes of these slots are not continued."""
        self.transitions.forget(slots)
        for side in self.sides.values():
            columns = (slots[:, None] * side.seats.count + np.arange(side.seats.count)).reshape(-1)
            if side.learner.state.numel():
                side.learner.state[:, torch.from_numpy(columns)] = 0.0
            if side.rewards is not None:
                side.rewards.running[columns] = 0.0
