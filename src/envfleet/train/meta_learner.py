"""`Learner`: the loop that meta-learning scripts know: collect rollouts of tasks, then update, until enough steps were made.

Rollouts are collected by a `Collector`, so that twelve rollouts over six workers are twelve tickets, fixed before the first one starts, and not the first
twelve that finish. The update is the trainer's: the rollouts of an iteration are the columns of one segment.
"""

from __future__ import annotations

import enum
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.adapters.fleet_view import SingleAgentView
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument, LedgerWarning, RolloutError, SpacesDiffer, SplitsDifferWarning
from envfleet.rollout.collector import Collector
from envfleet.rollout.episodes.episode import Rollout, Rollouts
from envfleet.rollout.segments.segment import RaggedSegment
from envfleet.rollout.sequence_replay import SequenceReplay
from envfleet.slots.factories import pickled
from envfleet.slots.layout import same_rows
from envfleet.train.build import choose_device, env_list, factory_of
from envfleet.train.checkpoint import plain, read, write
from envfleet.train.config import PPOConfig
from envfleet.train.evaluate import Evaluation, Evaluator
from envfleet.train.settings import settings_from_mapping, yaml_sections
from envfleet.train.task_training import Tasks, tasks_of
from envfleet.train.team_learner import TeamLearner
from envfleet.util.text import short

_COUNTS = ("num_env_steps", "num_lost_rollouts", "num_iterations", "_learned_steps", "_ticket")  # what a file of a learner has


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
        num_init_rollouts_pool: rollouts with random actions that fill `policy_storage` before training (default: what the section
            `train` says, else 0).
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
        self,
        config: PPOConfig | Mapping[str, Any] | str | Path,
        num_init_rollouts_pool: int | None = None,
        storage_steps: int = 1_000_000,
    ) -> None:
        stored_pool = 0
        if not isinstance(config, PPOConfig):
            config, stored_pool = _read_config(config)
        pool = stored_pool if num_init_rollouts_pool is None else num_init_rollouts_pool
        if isinstance(pool, bool) or not isinstance(pool, int) or pool < 0:
            raise BadArgument(f"num_init_rollouts_pool={pool!r}: give a whole number from 0 up")
        self.num_init_rollouts_pool, self._storage_steps = pool, storage_steps
        self.config = config
        self._own: Fleet | None = None
        self._evaluator: Evaluator | None = None
        self.init_env()

    def init_env(self, **env: Any) -> None:
        """Begin anew with the family of the config: its tasks are drawn here, once. `env`: settings of the section `env` that are to be others.

        Example:
            >>> config = {"env": {"env_type": "meta", "env_name": "GridNavi-v0"}, "train": {"num_rollouts_per_iter": 4}}
            >>> learner = Learner(config)
            >>> learner.init_env(num_train_tasks=15, num_eval_tasks=6)
            >>> len(learner.train_tasks)
            15
        """
        # From what was given, so that another family has the preset that a new learner would have.
        config = PPOConfig(**self.config.given | settings_from_mapping({"env": env}, "init_env: ")) if env else self.config
        if config.env_type != "meta":
            raise BadArgument("a Learner needs env_type='meta': a family of tasks")
        family, *others = env_list(config.env)
        if others:
            raise BadArgument(f"env={config.env_name!r}: a Learner needs one family, not {len(others) + 1}")
        tasks = tasks_of(config, family)
        self.close()
        self.config, self._env = config, family
        self.tasks: Tasks = tasks
        self.policy_storage = SequenceReplay(self._storage_steps)
        self.num_env_steps = 0
        self.num_lost_rollouts = 0  # failed for good: all attempts of their tickets
        self.num_iterations = 0
        self._learned_steps = 0
        self._ticket = 0
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
        this process plays them one after the other. The tickets are the same in both: seeds, and tasks too unless a `curriculum` chooses
        them, which knows the results of the tickets before the last 2N, of N workers. A rollout whose environment fails in every
        attempt is left out and counted in `num_lost_rollouts`; the first time there is a warning.
        """
        if isinstance(num_rollouts, bool) or not isinstance(num_rollouts, (int, np.integer)) or num_rollouts < 1:
            raise BadArgument(f"num_rollouts={num_rollouts!r}: give a whole number from 1 up")
        fleet = self._single() if parallel_env is None else self._fleet_of(parallel_env)
        # Made for this call: nothing here may keep the workers of a `parallel_env` that the caller drops.
        collector = Collector(
            fleet,
            None if random_actions else self._policy(fleet),
            seed=self.config.seed,
            tasks=self.tasks.source,
            # Random actions follow from seed, episode and step alone, so that each worker may go on at its own pace. A policy asks one
            # stream of random numbers for whole batches: which slots are in one must not depend on time.
            mode="async" if random_actions else "sync",
            random_actions=random_actions,
            timing=False,
            first_ticket=self._ticket,
        )
        end, before, rollouts = self._ticket + num_rollouts, self.num_env_steps, Rollouts()
        self._latest = Rollouts()  # what is left after an interrupt is not learned from a second time
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LedgerWarning)  # it would come in every iteration: `_note_lost` says it once
            for rollout in collector.episodes(num_rollouts):  # counted one by one: what a fault or an interrupt leaves is kept
                self._ticket = rollout.episode + 1
                self.num_env_steps += len(rollout)
                self.policy_storage.add_rollout(rollout)
                rollouts.append(rollout)
        self._ticket = end
        self._note_lost(num_rollouts - len(rollouts), collector)
        if not random_actions:
            self._latest = rollouts
        return self.num_env_steps - before

    def _note_lost(self, lost: int, collector: Collector) -> None:
        if lost and not self.num_lost_rollouts:
            warnings.warn(
                f"{lost} rollouts failed in every attempt and are left out, which may bias what is learned: {collector.ledger}. "
                "More of them are only counted, in num_lost_rollouts",
                LedgerWarning,
                stacklevel=3,
            )
        self.num_lost_rollouts += lost

    def _single(self) -> Fleet:
        if self._own is None:
            self._own = make(factory_of(self._env, self.config), 1, backend="serial", on_end="wait")
        return self._own

    def _fleet_of(self, parallel_env: Any) -> Fleet:
        fleet, own = getattr(parallel_env, "fleet", None), self._single().layout
        if not isinstance(fleet, Fleet):
            raise BadArgument(f"parallel_env={short(parallel_env)}: give what make_parallel_env or ParallelEnvManager gives")
        for name, mine in {"observation": own.observation_space, "action": own.action_space, **own.columns}.items():
            given = fleet.layout
            theirs = {"observation": given.observation_space, "action": given.action_space, **given.columns}.get(name, mine)
            if not same_rows(mine, theirs):  # of another family, or with another number of inner episodes
                what = f"{name}: parallel_env has {theirs}, this learner has {mine}"
                raise SpacesDiffer(f"{what}; give both the same family, episodes_per_task and oracle")
        self._warn_of_other_splits(parallel_env)
        return fleet

    def _warn_of_other_splits(self, parallel_env: SingleAgentView) -> None:
        """The learner sends its own tasks. Whoever evaluates on those that `parallel_env` holds out must not be misled."""
        held_out = {pickled(task, "the task") for task in getattr(parallel_env, "eval_tasks", ())}
        shared = held_out & {pickled(task, "the task") for task in (self.train_tasks if held_out else ())}
        if shared:
            warnings.warn(
                f"{len(shared)} of the {len(held_out)} tasks that parallel_env holds out are training tasks of this learner: give both the "
                f"same seed (the learner's is {self.config.seed}), num_train_tasks and num_eval_tasks",
                SplitsDifferWarning,
                stacklevel=4,
            )

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
        """Improve the agent on the rollouts that were collected last, at most `num_rollouts_per_iter`; returns the losses."""
        if not self._latest:
            raise BadArgument("there are no rollouts of the agent to learn from: collect_rollouts_parallel(…) first")
        if len(self._latest) > self.num_rollouts_per_iter:
            raise BadArgument(
                f"{len(self._latest)} rollouts were collected; this agent learns from at most num_rollouts_per_iter="
                f"{self.num_rollouts_per_iter}"
            )
        done = self._learned_steps / self.config.total_steps  # random rollouts do not move the schedules
        self._learned_steps += sum(len(rollout) for rollout in self._latest)
        return self.agent().learn(
            segment_of(self._latest, self.num_rollouts_per_iter),
            self.config.coefficients(min(done, 1.0) * self.config.num_updates),
        )

    def train(self, parallel_env: SingleAgentView | None = None) -> list[dict[str, float]]:
        """Collect and update until `total_steps`; returns a row of numbers per iteration. Called again, it goes on.

        An iteration learns from the rollouts that it got; where all of them failed, training stops with `RolloutError`.
        """
        if self.num_init_rollouts_pool and not self.num_iterations:
            self.collect_rollouts_parallel(self.num_init_rollouts_pool, random_actions=True, parallel_env=parallel_env)
        rows = []
        began = self.num_env_steps
        while self.num_env_steps - began < self.config.total_steps:
            self.collect_rollouts_parallel(self.num_rollouts_per_iter, parallel_env=parallel_env)
            returns = [rollout.episode_return for rollout in self._latest]
            if not returns:
                raise RolloutError(
                    f"all {self.num_rollouts_per_iter} rollouts of iteration {self.num_iterations} failed in every attempt, so there is "
                    "nothing to learn from: see the warnings and the environment's own errors (fleet.faults)"
                )
            losses = self.update() or {}  # one of the user's own may return nothing
            self.num_iterations += 1
            row = {"step": self.num_env_steps, "return": float(np.mean(returns)), "num_lost_rollouts": self.num_lost_rollouts}
            rows.append({**row, **losses})
        return rows

    def evaluate(self, num_episodes: int = 100, deterministic: bool = True) -> Evaluation:
        """Play held-out tasks (any task, where none are held out) on an environment and random numbers of their own."""
        if self._evaluator is None:
            self._evaluator = Evaluator([self._env], self.config, tasks=self.eval_tasks)
        return self._evaluator.run(self.agent().policies, num_episodes, deterministic)

    def save(self, path: str | Path) -> Path:
        """Write agent, curriculum and counts to a file; `load` goes on from it with the same tasks. `policy_storage` is not in it."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        state = {
            "config": self.config.to_dict(),
            "team": self.agent().state(),
            "tasks": self.tasks.source.state_dict(),
            "counts": counts,
        }
        write(Path(path), state)
        return Path(path)

    def load(self, path: str | Path) -> None:
        """Take over what `save` wrote, in a learner of the same config."""
        state = read(path)
        given, stored = self.config.to_dict(), state["config"]
        if differ := [name for name, value in given.items() if name in stored and plain(stored[name]) != plain(value)]:
            names = ", ".join(f"{name}={stored[name]!r}" for name in differ)
            raise BadArgument(f"{path} is of a learner with {names}: give this one the same settings")
        self.agent().load(state["team"])
        self.tasks.source.load_state_dict(state["tasks"])
        for name in _COUNTS:
            setattr(self, name, int(state["counts"][name]))
        self._latest = Rollouts()

    def close(self) -> None:
        """Close the environments that this object made."""
        own, self._own = self._own, None
        if own is not None:
            own.close()
        evaluator, self._evaluator = self._evaluator, None
        if evaluator is not None:
            evaluator.close()


def _read_config(config: Mapping[str, Any] | str | Path) -> tuple[PPOConfig, Any]:
    """The settings of a file or a mapping, and its `num_init_rollouts_pool`, which is not a setting of the trainer's."""
    if not isinstance(config, (Mapping, str, Path)):
        raise BadArgument(
            f"config={config!r}: give a PPOConfig, a mapping with the sections env and train, or the path of a YAML file"
        )
    where = f"{config}: " if isinstance(config, (str, Path)) else ""
    sections = yaml_sections(config) if isinstance(config, (str, Path)) else config
    if isinstance(sections.get("train"), Mapping):
        sections = {**sections, "train": dict(sections["train"])}
        pool = sections["train"].pop("num_init_rollouts_pool", 0)
    else:
        pool = 0
    return PPOConfig(**settings_from_mapping(sections, where)), pool


def _given(config: PPOConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.to_dict()}


def segment_of(rollouts: Sequence[Rollout], num_columns: int) -> RaggedSegment:
    """Whole episodes side by side, as a segment: column b is rollout b. Columns without a rollout are empty."""
    count = num_columns
    lengths = np.array([len(rollout) for rollout in rollouts] + [0] * (count - len(rollouts)))
    steps = int(lengths.max())
    first = np.stack([np.asarray(rollouts[0].observations)[0]] * count)
    action = np.stack([np.asarray(rollouts[0].actions)[0]] * count)
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
    segment.end_length = lengths[: len(rollouts)]
    return segment
