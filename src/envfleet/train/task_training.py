"""Tasks in a training run: who gets which, what came of it, and which are held out for evaluation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.adapters.meta_envs import split_tasks
from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument
from envfleet.rollout.segments.segment import Segment
from envfleet.tasks.alp_gmm import ALPGMM
from envfleet.tasks.curriculum import Curriculum, TaskResult
from envfleet.tasks.level_replay import PLR
from envfleet.tasks.list_curricula import SFL, DomainRandomisation, LearningProgress, Levels
from envfleet.tasks.task_source import TaskSource
from envfleet.tasks.task_space import TaskList, task_text
from envfleet.train.build import factory_of
from envfleet.train.config import PPOConfig

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
    probe = factory_of(env, config)()
    try:
        space = probe.get_wrapper_attr("task_space")
        train, held_out = split_tasks(probe, config.num_train_tasks, config.num_eval_tasks, config.seed)
    finally:
        probe.close()
    curriculum = CURRICULA[config.curriculum](
        TaskList(train, vector=space.vector if space.vector_size else None) if train else space
    )
    return Tasks(TaskSource(curriculum, seed=config.seed), held_out)


def steps_for_rollouts(config: PPOConfig, env: Any) -> int:
    """`num_steps` for `num_rollouts_per_iter`: as many outer episodes of every slot as it takes."""
    assert config.num_rollouts_per_iter is not None
    probe = factory_of(env, config)()
    try:
        horizon = getattr(probe.unwrapped, "horizon", None) or getattr(getattr(probe, "spec", None), "max_episode_steps", None)
        horizon = horizon or _attribute(probe, "_max_episode_steps")
    finally:
        probe.close()
    if horizon is None:
        raise BadArgument("num_rollouts_per_iter: the environment does not say how long its episodes are; give num_steps instead")
    return -(-config.num_rollouts_per_iter // config.num_envs) * config.episodes_per_task * int(horizon)


def _attribute(env: Any, name: str) -> Any:
    try:
        return env.get_wrapper_attr(name)
    except AttributeError:
        return None


class TaskResults:
    """Turns segments into results of tickets, in the order of tickets, and into numbers for logs."""

    def __init__(self, source: TaskSource, fleet: Fleet, success_return: float | None = None) -> None:
        self.source, self.fleet, self.success_return = source, fleet, success_return
        self._error = np.zeros((2, fleet.num_envs))  # [sum and count, slot] of |advantage| in the running episode

    def learned(self, segment: Segment) -> NDArray[np.bool_] | None:
        """[T, B] rows that are learned from; None: all. Robust PLR only looks at levels that it has not seen."""
        tickets = segment.episode * segment.num_slots + segment.slots
        trains = {int(ticket): self.source.trains_on(int(ticket)) for ticket in np.unique(tickets)}
        return None if all(trains.values()) else np.vectorize(trains.__getitem__, otypes=[bool])(tickets)

    def take(self, segment: Segment, advantage: NDArray[np.float64] | None) -> dict[str, float]:
        """Give the results of a segment to the curriculum; returns the numbers of its tasks."""
        by_task, inner = defaultdict(list), []
        returns_column = segment.columns.get("inner_returns")
        begin = np.zeros(segment.num_slots, np.int64)
        for (t, b), total, length in zip(segment.end_index.tolist(), segment.end_return.tolist(), segment.end_length.tolist()):
            ticket = int(segment.episode[t, b]) * segment.num_slots + b
            error = self._value_error(advantage, begin[b], t + 1, b, ends=True)
            begin[b] = t + 1
            # A fault cut it short, so that its return means nothing; or the environment failed with the task and ran another.
            if not segment.scored[t, b] or segment.task[t, b] < 0:
                self.source.drop([ticket])
                continue
            task = self.source.task(ticket)
            success = None if self.success_return is None else float(total >= self.success_return)
            self.source.add(TaskResult(ticket, task, total, length, success, error))
            by_task[task_text(task)].append(total)
            if returns_column is not None:  # they come with the first observation of the next episode
                after = returns_column[t + 1, b] if t + 1 < segment.num_steps else segment.bootstrap_columns["inner_returns"][b]
                inner.append(after)
        for b in range(segment.num_slots):
            self._value_error(advantage, begin[b], segment.num_steps, b, ends=False)
        self.source.advance()
        return self._numbers(by_task, inner)

    def _value_error(self, advantage: Any, first: int, last: int, slot: int, ends: bool) -> float | None:
        """Mean |advantage| of the running episode, with what earlier segments had of it; cleared where it ends."""
        if advantage is None:
            return None
        self._error[:, slot] += np.abs(advantage[first:last, slot]).sum(), last - first
        total, count = self._error[:, slot]
        if ends:
            self._error[:, slot] = 0.0
        return float(total / max(count, 1))

    def _numbers(self, by_task: dict[str, list[float]], inner: list[Any]) -> dict[str, float]:
        row: dict[str, float] = {}
        space = self.source.curriculum.space
        if space.size is not None and space.size <= MOST_NAMES:
            row |= {f"return/{name}": float(np.mean(totals)) for name, totals in sorted(by_task.items())}
        if inner:
            means = np.mean(inner, axis=0)
            row |= {f"inner_return/{i + 1}": float(value) for i, value in enumerate(means)}
        chances = self.source.probabilities()
        if len(chances) <= MOST_NAMES and not isinstance(self.source.curriculum, DomainRandomisation):
            row |= {f"probability/{name}": value for name, value in chances.items()}
        return row

    def forget(self, slots: NDArray[np.int64]) -> None:
        """The running episodes of these slots are not continued."""
        self._error[:, slots] = 0.0

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores."""
        return {"source": self.source.state_dict(), "error": self._error.copy()}

    def load(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint stored."""
        self.source.load_state_dict(state["source"])
        self._error = np.array(state["error"])
