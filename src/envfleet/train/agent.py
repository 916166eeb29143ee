"""A trained agent read from a run folder: acts, and can be evaluated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.errors import BadArgument
from envfleet.networks.actor_critic import ActorCritic
from envfleet.networks.features import Inputs
from envfleet.networks.network_policy import Policy
from envfleet.train.build import assignments_of, env_list, one_env, state_space_of, stored_policy
from envfleet.train.checkpoint import load
from envfleet.train.config import PPOConfig
from envfleet.train.evaluate import Evaluation, Evaluator
from envfleet.train.settings import parse
from envfleet.train.task_training import tasks_of


@dataclass
class Agent:
    """The policies of a run, as a checkpoint holds them: one where the environment has one agent."""

    config: PPOConfig
    policies: dict[str, Policy]
    update: int
    env: Any
    agents: tuple[str, ...] = ()  # empty where the environment has one
    elo: float | None = None  # rating of a run with self-play
    fps: int = 30

    @property
    def net(self) -> ActorCritic:
        """The network of the only policy."""
        return self.policy().net

    @property
    def normaliser(self) -> Callable[[Inputs], Inputs] | None:
        """The observation normaliser of the only policy."""
        return self.policy().normaliser

    def policy(self, num_slots: int = 1, deterministic: bool = True, seed: int = 0) -> Policy:
        """Return something that acts: `policy.choose(obs)`, or the policy of a `Collector`."""
        if self.agents:
            raise BadArgument(f"this run has the agents {', '.join(self.agents)}: evaluate() plays them together")
        (only,) = self.policies.values()
        return only.fork(num_slots, None if deterministic else np.random.default_rng(seed))

    def evaluate(
        self,
        num_episodes: int = 100,
        seed: int | None = None,
        deterministic: bool = True,
        frames: list[Any] | None = None,
        opponents: Any = None,
        *,
        episodes: int | None = None,
    ) -> Evaluation:
        """Play episodes on an environment of their own, of held-out tasks where the run has some; for `opponents` of many agents see
        `Evaluator.run`.

        `episodes` is an old spelling of `num_episodes`.
        """
        num_episodes = num_episodes if episodes is None else episodes
        tasks = tasks_of(self.config, self.env).held_out if self.config.env_type == "meta" else []
        evaluator = Evaluator([self.env], self.config, seed, render=frames is not None, tasks=tasks)
        try:
            self.fps = int(evaluator.metadata.get("render_fps", 30))
            return evaluator.run(self.policies, num_episodes, deterministic, opponents, frames)
        finally:
            evaluator.close()


class TeamAgent(Agent):
    """The agent of a run with many agents. `evaluate` gives a `TeamEvaluation`."""


def load_agent(where: str | Path, which: str = "final", env: Any = None) -> Agent:
    """Read the agent of a run folder or checkpoint file; `env` replaces the environment it was trained on.

    A run with many agents gives a `TeamAgent`, which evaluates in the same way. An environment that was given as a
    callable is not stored: pass it again.

    Example:
        >>> import tempfile
        >>> from envfleet.train import PPOConfig, PPOTrainer
        >>> folder = tempfile.mkdtemp()
        >>> with PPOTrainer(PPOConfig(env="CartPole-v1", total_steps=64, num_steps=64, out=folder, tensorboard=False)) as trainer:
        ...     result = trainer.train()
        >>> len(load_agent(folder).evaluate(num_episodes=2).returns)
        2
    """
    state = load(where, which)
    config, team = config_of(state), state["team"]
    chosen = env_list(env if env is not None else config.env)[0]
    with one_env(chosen, config, with_state=config.centralised_critic) as fleet:
        assigned, space = assignments_of(config, fleet), state_space_of(config, fleet)
    policies = {each.name: stored_policy(team["policies"][each.name], each, config, space) for each in assigned}
    kind = TeamAgent if team["agents"] else Agent
    elo = float(team["pool"]["rating"]) if team["pool"] is not None else None
    return kind(config, policies, int(state["update"]), chosen, tuple(team["agents"]), elo)


def config_of(state: dict[str, Any]) -> PPOConfig:
    """Return the config a checkpoint was written with."""
    values = {name: value for name, value in state["config"].items() if name != "columns"}
    return PPOConfig(**{name: parse(name, value) for name, value in values.items()})
