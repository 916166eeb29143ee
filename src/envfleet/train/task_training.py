"""Tasks in a training run: who gets which, what came of it, and which are held out for evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.adapters.meta_envs import split_tasks
from envfleet.errors import BadArgument
from envfleet.rollout.segments.segment import Segment
from envfleet.rollout.segments.segment_results import tickets_of
from envfleet.tasks.alp_gmm import ALPGMM
from envfleet.tasks.curriculum import Curriculum, TaskResult
from envfleet.tasks.level_replay import PLR
from envfleet.tasks.list_curricula import SFL, DomainRandomisation, LearningProgress, Levels
from envfleet.tasks.task_source import TaskSource
from envfleet.tasks.task_space import TaskList, task_text
from envfleet.train.build import factory_of
from envfleet.train.config import PPOConfig
from envfleet.train.evaluate import INNER_RETURNS
from envfleet.train.task_board import TaskBoard

#: Names of the setting `curriculum`.
CURRICULA: dict[str, Callable[[Any], Curriculum]] = {
    "uniform": DomainRandomisation,
    "levels": Levels,
    "learning_progress": LearningProgress,
    "sfl": SFL,
    "plr": PLR,
    "robust_plr": lambda tasks: PLR(tasks, robust=True),
    "alp_gmm": ALPGMM,
}
MOST_NAMES = 20  # tasks that have columns of their own in the logs


@dataclass(frozen=True)
class Tasks:
    """The tasks of a run: where training tasks come from, and the list that only evaluation uses."""

    source: TaskSource
    held_out: list[Any]


def tasks_of(config: PPOConfig, env: Any) -> Tasks:
    """What a config with `env_type="meta"` says. One environment is built here to see its tasks, and closed."""
    probe = _probe(config, env)
    try:
        space = probe.get_wrapper_attr("task_space")
        train, held_out = split_tasks(probe, config.num_train_tasks, config.num_eval_tasks, config.seed)
    finally:
        probe.close()
    curriculum = CURRICULA[config.curriculum](
        TaskList(train, vector=space.vector if space.vector_size else None) if train else space
    )
    return Tasks(TaskSource(curriculum, config.seed, config.success_return), held_out)


def steps_for_rollouts(config: PPOConfig, env: Any) -> int:
    """`num_steps` for `num_rollouts_per_iter`: as many outer episodes of every slot as it takes."""
    assert config.num_rollouts_per_iter is not None
    probe = _probe(config, env)
    try:
        horizon = getattr(probe.unwrapped, "horizon", None) or getattr(getattr(probe, "spec", None), "max_episode_steps", None)
        horizon = horizon or _attribute(probe, "_max_episode_steps")
    finally:
        probe.close()
    if horizon is None:
        raise BadArgument("num_rollouts_per_iter: the environment does not say how long its episodes are; give num_steps instead")
    return -(-config.num_rollouts_per_iter // config.num_envs) * config.episodes_per_task * int(horizon)


def _probe(config: PPOConfig, env: Any) -> Any:
    try:
        return factory_of(env, config)()
    except TypeError as error:  # keywords that it does not have
        raise BadArgument(f"{config.env_name} cannot be made (env_kwargs={config.env_kwargs}): {error}") from error


def _attribute(env: Any, name: str) -> Any:
    try:
        return env.get_wrapper_attr(name)
    except AttributeError:
        return None


def few_tasks(source: TaskSource) -> bool:
    """Whether every task can have a column of its own."""
    size = source.curriculum.space.size
    return size is not None and size <= MOST_NAMES


def task_numbers(source: TaskSource, board: TaskBoard, segment: Segment, results: list[TaskResult]) -> dict[str, float]:
    """The tasks of a segment as numbers for logs: returns by task and by inner episode, and what the curriculum prefers.

    Where there are too many tasks for that, the quantiles of all their returns on the board, and the range of the probabilities.
    """
    row: dict[str, float] = {}
    by_task = defaultdict(list)
    for result in results:
        by_task[task_text(result.task)].append(result.episode_return)
    if few_tasks(source):
        row |= {f"return/{name}": float(np.mean(totals)) for name, totals in sorted(by_task.items())}
    else:
        row |= {f"task_return/{name}": value for name, value in board.quantiles().items()}
    row |= _inner_numbers(segment, {result.ticket for result in results})
    chances = source.probabilities()
    if chances and not isinstance(source.curriculum, DomainRandomisation):
        if len(chances) > MOST_NAMES:
            values = list(chances.values())
            chances = {"least likely": min(values), "median": float(np.median(values)), "likeliest": max(values)}
        row |= {f"probability/{name}": value for name, value in chances.items()}
    return row


def _inner_numbers(segment: Segment, tickets: set[int]) -> dict[str, float]:
    """Mean return of inner episodes, over the outer episodes of these tickets."""
    if INNER_RETURNS not in segment.columns or not tickets:
        return {}
    # They come with the first observation of the next episode.
    after = np.concatenate([segment.columns[INNER_RETURNS][1:], segment.bootstrap_columns[INNER_RETURNS][None]])
    t, b = segment.end_index[np.isin(tickets_of(segment)[tuple(segment.end_index.T)], list(tickets))].T
    found = after[t, b]
    played = ~np.isnan(found)  # an environment that was made anew, or an outer episode that was cut off, does not know them
    means = np.where(played, found, 0.0).sum(axis=0) / np.maximum(played.sum(axis=0), 1)
    return {f"inner_return/{i + 1}": float(means[i]) for i in np.flatnonzero(played.any(axis=0)).tolist()}
