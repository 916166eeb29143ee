"""What a run learns: a network, a learner and statistics per policy. A single agent is a team of one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument
from envfleet.multiagent.policy_map import SHARED, Assignment
from envfleet.networks.network_policy import NotFinite, Policy
from envfleet.networks.team import TeamPolicy
from envfleet.rollout.segments.agent_segment import AgentSegment
from envfleet.rollout.segments.segment import Segment
from envfleet.train.build import assignments_of, build_net, one_env, state_space_of, stored_policy
from envfleet.train.config import PPOConfig
from envfleet.train.objective import Coefficients
from envfleet.train.selfplay import Pool
from envfleet.train.transitions import Transitions
from envfleet.train.update import PolicyLearner
from envfleet.util.seeding import stream


def check_policies(config: PPOConfig, env: Any) -> None:
    """Refuse policies that do not fit the agents, before any worker is started: one environment is built to see them.

    Nothing is built for an environment of one agent, unless PettingZoo is in use or policies are asked for.
    """
    asked = config.policies != SHARED or config.self_play or config.centralised_critic
    if not asked and (isinstance(env, str) or "pettingzoo" not in sys.modules):
        return
    if not isinstance(env, str):  # Gymnasium ids have one agent
        with one_env(env, config) as fleet:
            if fleet.agents:
                assignments_of(config, fleet)
                return
    if asked:
        raise BadArgument(
            f"{config.env_name} has one agent: policies, centralised_critic and self_play are for environments with many"
        )


class TrainedPolicy:
    """One policy with everything that is learned and kept for it. It has a row for each of its agents in each slot."""

    def __init__(
        self, assigned: Assignment, config: PPOConfig, device: torch.device, state_space: Any, key: tuple[int, ...]
    ) -> None:
        self.assigned, self.config, self.state_space = assigned, config, state_space
        self.net = build_net(assigned, config, device, state_space, key)
        self.num_rows = config.num_envs * assigned.count
        self.learner = PolicyLearner(self.net, config, self.num_rows, stream(config.seed, "minibatches", *key))
        self.observations, self.rewards = self.learner.observations, self.learner.rewards
        self.rng = stream(config.seed, "actions", *key)
        self.policy = Policy(self.net, self.num_rows, self.rng, self.observations, skip_nan=config.on_nan == "skip")
        self.policy.num_threads = config.num_threads
        # The sequences of many agents vary in length. They are rounded up, so that every minibatch gets a whole piece.
        pieces = -(-config.num_minibatches // self.num_rows)
        self.multiple = (config.sequence_length or pieces) if self.net.num_cores else 1

    def freeze(self) -> dict[str, Any]:
        """Return copies of what acting needs."""
        net = {name: value.detach().cpu().clone() for name, value in self.net.state_dict().items()}
        return {"net": net, "observations": self.observations.state() if self.observations else None}

    def thaw(self, state: dict[str, Any], rng: np.random.Generator) -> Policy:
        """Return a policy from what `freeze` returned."""
        return stored_policy(state, self.assigned, self.config, self.state_space).fork(self.num_rows, rng)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return {
            **self.freeze(),
            "rewards": self.rewards.state() if self.rewards else None,
            "optimiser": self.learner.optimiser.state(),
            "memory": {"actor": self.policy.state, "learner": self.learner.state, "last_action": self.policy.last_action},
            "rng": {"actions": self.rng.bit_generator.state, "minibatches": self.learner.rng.bit_generator.state},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        self.net.load_state_dict(state["net"])
        self.learner.optimiser.load(state["optimiser"])
        if self.observations is not None:
            self.observations.load(state["observations"])
        if self.rewards is not None:
            self.rewards.load(state["rewards"])
        self.policy.state = np.array(state["memory"]["actor"])
        self.policy.last_action = np.array(state["memory"].get("last_action", self.policy.last_action))
        self.learner.state = state["memory"]["learner"].to(self.net.device)
        self.rng.bit_generator.state = state["rng"]["actions"]
        self.learner.rng.bit_generator.state = state["rng"]["minibatches"]

    def forget(self, slots: NDArray[np.int64]) -> None:
        """Clear what belongs to the running episodes of these slots."""
        count = self.assigned.count
        rows = (slots[:, None] * count + np.arange(count)).reshape(-1)
        if self.learner.state.numel():
            self.learner.state[:, torch.from_numpy(rows)] = 0.0
        if self.rewards is not None:
            self.rewards.running[rows] = 0.0


class TeamLearner:
    """All policies of a run. `learn` improves them; `policy` is what the collector calls.

    Where an environment has one agent, `agents` is empty and the segment is learned from as it is: its columns are the
    rows of the only policy, which answers the collector itself.
    """

    def __init__(self, config: PPOConfig, fleet: Fleet, device: torch.device) -> None:
        self.config = config
        self.agents = tuple(fleet.agents)
        if self.agents and config.previous_step:
            raise BadArgument("previous_step is for environments with one agent")
        assigned, space = assignments_of(config, fleet), state_space_of(config, fleet)
        # The random streams of a single agent have no number.
        keys: list[tuple[int, ...]] = [(number,) if self.agents else () for number in range(len(assigned))]
        self.trained = {each.name: TrainedPolicy(each, config, device, space, key) for each, key in zip(assigned, keys)}
        self.policies = {name: one.policy for name, one in self.trained.items()}
        self.transitions: Transitions | None = None
        self.pool: Pool | None = None
        self.policy: Policy | TeamPolicy
        if not self.agents:
            (self.policy,) = self.policies.values()
            return
        self.transitions = Transitions(assigned, config.num_envs, central=config.centralised_critic)
        if config.self_play:
            self.pool = Pool(
                assigned,
                config.num_envs,
                size=config.self_play_pool,
                past=config.self_play_past,
                seed=config.seed,
                freeze=lambda: {name: one.freeze() for name, one in self.trained.items()},
                build=lambda name, state, rng: self.trained[name].thaw(state, rng),
            )
            self.pool.snapshot(0)
        self.policy = TeamPolicy(assigned, self.policies, self.pool)

    @property
    def flat(self) -> torch.Tensor:
        """A copy of all parameters, as one vector."""
        return torch.cat([one.learner.flat.detach() for one in self.trained.values()])

    @property
    def is_fused(self) -> bool:
        """Whether every policy is learned by compiled code, which has threads of its own."""
        return all(one.learner.fused is not None for one in self.trained.values())

    def learn(self, segment: Segment, now: Coefficients) -> dict[str, float]:
        """Improve every policy on the transitions of its agents; losses are means over the policies."""
        found: dict[str, dict[str, float]] = {}
        for name, part in self._parts(segment).items():
            if not part.num_scored:  # no agent of this policy finished a transition
                continue
            try:
                found[name] = self.trained[name].learner.learn(part, now)
            except NotFinite as error:
                if not self.agents:
                    raise
                raise NotFinite(f"policy {name}: {error}", error.rows) from error
        self.policy.version += 1
        if self.pool is not None:
            assert isinstance(segment, AgentSegment)
            self.pool.record(segment)
            if self.policy.version % self.config.self_play_every == 0:
                self.pool.snapshot(self.policy.version)
        return self._losses(found)

    @property
    def advantage(self) -> NDArray[np.float64] | None:
        """[T, B] of the last segment, where there is one policy."""
        return next(iter(self.trained.values())).learner.advantage if len(self.trained) == 1 and not self.agents else None

    def _parts(self, segment: Segment) -> dict[str, Segment]:
        """What each policy learns from."""
        if self.transitions is None:
            return dict.fromkeys(self.trained, segment)
        assert isinstance(segment, AgentSegment)
        return dict(self.transitions.cut(segment, {name: one.multiple for name, one in self.trained.items()}))

    def _losses(self, found: dict[str, dict[str, float]]) -> dict[str, float]:
        names = dict.fromkeys(name for losses in found.values() for name in losses)
        mean = {name: float(np.mean([one[name] for one in found.values() if name in one])) for name in names}
        if len(self.trained) > 1:
            for policy, losses in found.items():
                mean |= {f"{name}/{policy}": losses[name] for name in ("policy_loss", "value_loss") if name in losses}
        if self.transitions is not None:
            mean["agent_steps_dropped"] = float(self.transitions.num_dropped)
        return mean

    def metrics(self, segment: Segment) -> dict[str, float]:
        """Mean return of every agent over the episodes that ended in this segment, and the ratings."""
        row: dict[str, float] = {}
        if isinstance(segment, AgentSegment):
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
            "num_updates": self.policy.version,
            "policies": {name: one.state() for name, one in self.trained.items()},
            "transitions": self.transitions.state() if self.transitions is not None else None,
            "pool": self.pool.state() if self.pool is not None else None,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        if list(self.agents) != state["agents"]:
            raise BadArgument(f"the run was trained with the agents {state['agents']}, not {list(self.agents)}")
        self.policy.version = int(state["num_updates"])
        for name, one in self.trained.items():
            one.load(state["policies"][name])
        if self.transitions is not None:
            self.transitions.load(state["transitions"])
        if self.pool is not None and state["pool"] is not None:
            self.pool.load(state["pool"])

    def forget(self, slots: NDArray[np.int64]) -> None:
        """The running episodes of these slots are not continued: clear what belongs to them."""
        if self.transitions is not None:
            self.transitions.forget(slots)
        for one in self.trained.values():
            one.forget(slots)
