"""`Learner`: the loop that meta-learning scripts know: collect rollouts of tasks, then update, until enough steps were made.

Rollouts are collected by a `Collector`, so that twelve rollouts over six workers are twelve tickets, fixed before the first one starts, and not the first
twelve that finish. The update is the trainer's: the rollouts of an iteration are the columns of one segment.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.adapters.fleet_view import SingleAgentView
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument
from envfleet.rollout.collector import Collector
from envfleet.rollout.episodes.episode import Rollout, Rollouts
from envfleet.rollout.segments.segment import RaggedSegment
from envfleet.rollout.sequence_replay import SequenceReplay
from envfleet.train.build import choose_device, env_list, factory_of
from envfleet.train.config import PPOConfig
from envfleet.train.evaluate import Evaluation, Evaluator
from envfleet.train.settings import settings_from_mapping, settings_from_yaml
from envfleet.train.task_training import Tasks, tasks_of
from envfleet.train.team_learner import TeamLearner


class AGENT_ARCHS(enum.StrEnum):
    """The architectures of an agent.

    Example:
        >>> AGENT_ARCHS.Memory == "memory"
        True
    """

    Markov = "markov"
    Memory = "memory"
    Memory_Markov = "memory_markov"


class Learner:
    """Meta-learning with PPO over a family of tasks; `update` may be replaced by one of your own.

    Args:
        config: a `PPOConfig`, a mapping with the sections `env` and `train`, or the path of a YAML file of these.
        num_init_rollouts_pool: rollouts with random actions that fill `policy_storage` before training.
        storage_steps: how many steps `policy_storage` keeps.

    Example:
        >>> config = {"env": {"env_type": "meta", "env_name": "GridNavi-v0", "max_rollouts_per_task": 2, "num_parallel_workers": 2},
        ...           "train": {"num_rollouts_per_iter": 4, "total_steps": 240, "agent_arch": "memory"}}
        >>> learner = Learner(config)
        >>> learner.collect_rollouts_parallel(num_rollouts=4, random_actions=True)
        120
        >>> len(learner.policy_storage), len(learner.train())
        (4, 2)
        >>> learner.close()
    """

    def __init__(
        self, config: PPOConfig | Mapping[str, Any] | str | Path, num_init_rollouts_pool: int = 0, storage_steps: int = 1_000_000
    ) -> None:
        if isinstance(config, (str, Path)):
            config = PPOConfig(**settings_from_yaml(config))
        elif isinstance(config, Mapping):
            config = PPOConfig(**settings_from_mapping(config))
        if config.env_type != "meta":
            raise BadArgument("a Learner needs env_type='meta': a family of tasks")
        self.num_init_rollouts_pool = num_init_rollouts_pool
        self.policy_storage = SequenceReplay(storage_steps)
        self.num_env_steps = 0
        self.num_iterations = 0
        self._learned_steps = 0
        self._ticket = 0
        self._own: Fleet | None = None
        self._evaluator: Evaluator | None = None
        self.init_env(config)

    def init_env(self, config: PPOConfig) -> None:
        """Take the family of a config: its tasks are drawn here, once."""
        self.close()
        self.config = config
        self._env = env_list(config.env)[0]
        self.tasks: Tasks = tasks_of(config, self._env)
        self.num_rollouts_per_iter = config.num_rollouts_per_iter or config.num_envs
        self._agent: TeamLearner | None = None
        self._latest: Rollouts = Rollouts()

    @property
    def train_tasks(self) -> list[Any]:
        """The training tasks, where they are a list."""
        return list(getattr(self.tasks.source.curriculum.space, "values", []))

    @property
    def eval_tasks(self) -> list[Any]:
        """The tasks that only evaluation uses."""
        return self.tasks.held_out

    # -- collecting ------------------------------------------------------------------------------------------------

    def collect_rollouts_parallel(
        self, num_rollouts: int, random_actions: bool = False, parallel_env: SingleAgentView | None = None
    ) -> int:
        """Collect so many rollouts into `policy_storage`; returns their environment steps.

        `parallel_env` is what `make_parallel_env` or `ParallelEnvManager` gives; each of its workers proceeds at its own pace. Without it one environment in
        this process plays them one after the other. The tickets are the same in both: tasks and seeds.
        """
        if num_rollouts < 1:
            raise BadArgument(f"num_rollouts={num_rollouts}: give 1 or more")
        fleet = self._single() if parallel_env is None else parallel_env.fleet
        # Made for this call: nothing here may keep the workers of a `parallel_env` that the caller drops.
        collector = Collector(
            fleet,
            None if random_actions else self._policy(fleet),
            seed=self.config.seed,
            tasks=self.tasks.source,
            random_actions=random_actions,
            timing=False,
            first_ticket=self._ticket,
        )
        end, before, rollouts = self._ticket + num_rollouts, self.num_env_steps, Rollouts()
        for rollout in collector.episodes(num_rollouts):  # counted one by one: what a fault or an interrupt leaves is kept
            self._ticket = rollout.episode + 1
            self.num_env_steps += len(rollout)
            self.policy_storage.add_rollout(rollout)
            rollouts.append(rollout)
        self._ticket = end
        self._latest = Rollouts() if random_actions else rollouts
        return self.num_env_steps - before

    def _single(self) -> Fleet:
        if self._own is None:
            self._own = make(factory_of(self._env, self.config), 1, backend="serial", on_end="wait")
        return self._own

    def _policy(self, fleet: Fleet) -> Any:
        (only,) = self.agent(fleet).policies.values()
        return only.fork(fleet.num_envs, only.rng)

    # -- learning --------------------------------------------------------------------------------------------------

    def agent(self, fleet: Fleet | None = None) -> TeamLearner:
        """The agent: its network, optimiser and statistics; built when it is first needed."""
        if self._agent is None:
            # Every rollout of an iteration is a column of the segment, as slots are elsewhere.
            sized = PPOConfig(**{**_given(self.config), "num_envs": self.num_rollouts_per_iter, "num_rollouts_per_iter": None})
            self._agent = TeamLearner(sized, fleet or self._single(), choose_device(self.config.device))
        return self._agent

    def update(self) -> dict[str, float]:
        """Improve the agent on the rollouts that were collected last; returns the losses."""
        if not self._latest:
            raise BadArgument("there are no rollouts of the agent to learn from: collect_rollouts_parallel(…) first")
        if len(self._latest) != self.num_rollouts_per_iter:
            raise BadArgument(
                f"{len(self._latest)} rollouts were collected; this agent learns from num_rollouts_per_iter={self.num_rollouts_per_iter}"
            )
        done = self._learned_steps / self.config.total_steps  # random rollouts do not move the schedules
        self._learned_steps += sum(len(rollout) for rollout in self._latest)
        return self.agent().learn(segment_of(self._latest), self.config.coefficients(min(done, 1.0) * self.config.num_updates))

    def train(self, parallel_env: SingleAgentView | None = None) -> list[dict[str, float]]:
        """Collect and update until `total_steps`; returns a row of numbers per iteration. Called again, it goes on."""
        if self.num_init_rollouts_pool and not self.num_iterations:
            self.collect_rollouts_parallel(self.num_init_rollouts_pool, random_actions=True, parallel_env=parallel_env)
        rows = []
        began = self.num_env_steps
        while self.num_env_steps - began < self.config.total_steps:
            self.collect_rollouts_parallel(self.num_rollouts_per_iter, parallel_env=parallel_env)
            returns = [rollout.episode_return for rollout in self._latest]
            losses = self.update()
            self.num_iterations += 1
            rows.append({"step": self.num_env_steps, "return": float(np.mean(returns)), **losses})
        return rows

    def evaluate(self, num_episodes: int = 100, deterministic: bool = True) -> Evaluation:
        """Play held-out tasks (any task, where none are held out) on an environment and random numbers of their own."""
        if self._evaluator is None:
            self._evaluator = Evaluator([self._env], self.config, tasks=self.eval_tasks)
        return self._evaluator.run(self.agent().policies, num_episodes, deterministic)

    def close(self) -> None:
        """Close the environments that this object made."""
        own, self._own = self._own, None
        if own is not None:
            own.close()
        evaluator, self._evaluator = self._evaluator, None
        if evaluator is not None:
            evaluator.close()


def _given(config: PPOConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.to_dict()}


def segment_of(rollouts: Sequence[Rollout]) -> RaggedSegment:
    """Whole episodes side by side, as a segment: column b is rollout b."""
    lengths = np.array([len(rollout) for rollout in rollouts])
    steps, count = int(lengths.max()), len(rollouts)
    first = np.stack([np.asarray(rollout.observations)[0] for rollout in rollouts])
    action = np.stack([np.asarray(rollout.actions)[0] for rollout in rollouts])
    segment = RaggedSegment.empty(steps, count, obs=first, action=action)
    ends, final = [], []
    for b, rollout in enumerate(rollouts):
        length, obs = len(rollout), np.asarray(rollout.observations)
        segment.obs[:length, b], segment.action[:length, b] = obs[:length], rollout.actions
        segment.reward[:length, b], segment.scored[:length, b] = rollout.rewards, True
        segment.terminated[:length, b], segment.truncated[:length, b] = rollout.terminated, rollout.truncated
        segment.step[:length, b], segment.episode[:, b] = np.arange(length), rollout.episode
        for name, values in rollout.extras.items():
            room = segment.extras.setdefault(name, np.zeros((steps, count, *np.shape(values)[1:]), np.asarray(values).dtype))
            room[:length, b] = values
        ends.append((length - 1, b))
        final.append(obs[length])
    segment.lengths = lengths
    segment.end_index = np.array(ends)
    segment.final_obs = np.stack(final)
    segment.end_return = np.array([rollout.episode_return for rollout in rollouts])
    segment.end_length = lengths
    return segment
