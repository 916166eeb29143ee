"""Curricula: which task comes next. One interface for all of them.

A curriculum lives in the parent. It is asked when an episode is assigned and told the results of episodes, in the order of their
tickets, so that what it does depends on its seed and the results alone, whatever the number of workers.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from envfleet.errors import BadArgument
from envfleet.tasks.task_space import TaskSpace, as_task_space


@dataclass(frozen=True)
class TaskResult:
    """How an episode went. `success` is from 0 to 1; `value_error` is the mean size of its advantages, where a trainer knows them.

    Example:
        >>> TaskResult(ticket=0, task="easy", episode_return=1.0, length=10).success is None
        True
    """

    ticket: int
    task: Any
    episode_return: float
    length: int
    success: float | None = None
    value_error: float | None = None


class Curriculum(abc.ABC):
    """Chooses tasks, learns from results, and can be stored.

    Example:
        >>> class Alternating(Curriculum):
        ...     def assign(self, slots, rng):
        ...         return [self.space.values[slot % 2] for slot in slots]
        >>> Alternating(["left", "right"]).assign([0, 1, 2], np.random.default_rng(0))
        ['left', 'right', 'left']
    """

    def __init__(self, tasks: Any) -> None:
        self.space: TaskSpace = as_task_space(tasks)

    @abc.abstractmethod
    def assign(self, slots: Sequence[int], rng: np.random.Generator) -> list[Any]:
        """A task for the next episode of each slot."""

    def update(self, results: Sequence[TaskResult]) -> None:
        """Take results, in the order of their tickets."""

    def probabilities(self) -> dict[str, float]:
        """How likely each task is to be assigned now, for logs; of continuous tasks, parts of the space. {} where it is not known."""
        return {}

    def trains_on(self, task: Any) -> bool:
        """Whether episodes of this task are learned from; robust PLR says no for levels that it has not seen."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint stores: plain values and arrays."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""


def stored_numbers(
    state: Mapping[str, Any], name: str, shape: tuple[int, ...], low: float = -np.inf, high: float = np.inf, gaps: bool = False
) -> Any:
    """An array of a stored curriculum; one that is missing, of another shape, outside its bounds or not finite is refused.

    With `gaps` it may have NaN, where there is no value.
    """
    if name not in state:
        raise BadArgument(f"the stored curriculum has no {name!r}: it is damaged, or of another curriculum")
    try:
        values = np.array(state[name])
        numbers = np.asarray(values, float)
    except (TypeError, ValueError) as error:
        raise BadArgument(f"the stored curriculum is damaged: {name} has something that is no number ({error})") from None
    if numbers.shape != shape:
        raise BadArgument(
            f"the stored curriculum is of {name} {list(numbers.shape)}, this one of {list(shape)}: it has other tasks or settings"
        )
    given = numbers[~np.isnan(numbers)] if gaps else numbers
    if not (np.isfinite(given) & (given >= low) & (given <= high)).all():
        raise BadArgument(f"the stored curriculum is damaged: {name} must have finite numbers from {low:g} to {high:g}")
    return values


def success_of(result: TaskResult) -> float:
    """The success of a result; without one, whether the return is above 0."""
    return float(result.episode_return > 0) if result.success is None else float(result.success)
