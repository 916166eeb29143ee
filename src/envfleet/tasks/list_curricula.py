"""Curricula over a list of tasks: uniform, levels in order, learning progress, learnability."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument
from envfleet.tasks.curriculum import Curriculum, TaskResult, stored_numbers, success_of
from envfleet.tasks.task_space import TaskList, task_text

Floats = NDArray[np.float64]


def _named(space: TaskList, weights: Floats) -> dict[str, float]:
    return {task_text(task): float(weight) for task, weight in zip(space.values, weights)}


class DomainRandomisation(Curriculum):
    """Every task equally likely, always.

    Example:
        >>> curriculum = DomainRandomisation(["a", "b"])
        >>> curriculum.assign([0, 1, 2], np.random.default_rng(0)), curriculum.probabilities()
        (['b', 'b', 'b'], {'a': 0.5, 'b': 0.5})
    """

    def assign(self, slots: Sequence[int], rng: np.random.Generator) -> list[Any]:
        """Draw from the space."""
        return [self.space.sample(rng) for _ in slots]

    def probabilities(self) -> dict[str, float]:
        """Uniform."""
        if not isinstance(self.space, TaskList):
            return {}
        count = len(self.space.values)
        return _named(self.space, np.full(count, 1.0 / count))


class ListCurriculum(Curriculum):
    """The base of curricula over a list of tasks: subclasses say how likely each one is."""

    space: TaskList

    def __init__(self, tasks: Any) -> None:
        super().__init__(tasks)
        if not isinstance(self.space, TaskList):
            raise BadArgument(f"{type(self).__name__} needs a list of tasks, not {self.space!r}")
        self.size = len(self.space.values)
        self.counts = np.zeros(self.size, np.int64)  # results per task

    @abc.abstractmethod
    def weights(self) -> Floats:
        """How likely each task is; they sum to 1."""

    def assign(self, slots: Sequence[int], rng: np.random.Generator) -> list[Any]:
        """Draw by the weights."""
        chosen = rng.choice(self.size, len(slots), p=self.weights())
        return [self.space.values[i] for i in chosen.tolist()]

    def update(self, results: Sequence[TaskResult]) -> None:
        """Count, and hand each result to `take`. One without a finite return and success is left out: it would stay in the means."""
        for result in results:
            if not np.isfinite([result.episode_return, success_of(result)]).all():
                continue
            index = self.space.index(result.task)
            self.counts[index] += 1
            self.take(index, result)

    def take(self, index: int, result: TaskResult) -> None:
        """One result of the task at `index`."""

    def probabilities(self) -> dict[str, float]:
        """The weights by name."""
        return _named(self.space, self.weights())

    #: The arrays that a checkpoint holds.
    stored: tuple[str, ...] = ("counts",)

    def state_dict(self) -> dict[str, Any]:
        """The arrays of `stored`."""
        return {name: np.array(getattr(self, name)) for name in self.stored}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over; those of another list of tasks are refused, and what cannot have been stored."""
        loaded = {name: self._stored(state, name) for name in self.stored}
        for name, values in loaded.items():
            setattr(self, name, values)

    def _stored(self, state: Mapping[str, Any], name: str) -> Any:
        low, high = {"counts": (0.0, np.inf), "recent": (-np.inf, np.inf)}.get(
            name, (0.0, 1.0)
        )  # the others are means of success
        return stored_numbers(state, name, np.shape(getattr(self, name)), low, high, gaps=name == "recent")


class Levels(ListCurriculum):
    """Levels in order, easy first: the next one opens when the last is mastered.

    A level is mastered when the mean of its last `window` values is at least `threshold`: of success, or of the return with
    `by="return"`. Open levels that are not mastered share `1 - review`, mastered ones share `review`.

    Example:
        >>> levels = Levels(["easy", "medium", "hard"], threshold=0.5, window=2)
        >>> levels.probabilities()
        {'easy': 1.0, 'medium': 0.0, 'hard': 0.0}
        >>> levels.update([TaskResult(i, "easy", 1.0, 10, success=1.0) for i in range(2)])
        >>> levels.probabilities()
        {'easy': 0.2, 'medium': 0.8, 'hard': 0.0}
    """

    stored = ("counts", "recent", "mastered")

    def __init__(
        self,
        tasks: Any,
        threshold: float | Sequence[float] = 0.8,
        window: int = 20,
        review: float = 0.2,
        by: Literal["success", "return"] = "success",
    ) -> None:
        super().__init__(tasks)
        if window < 1 or not 0.0 <= review < 1.0:
            raise BadArgument(
                f"Levels(window={window}, review={review}): a window from 1 up and a review from 0 to below 1 are needed"
            )
        self.thresholds = np.broadcast_to(np.asarray(threshold, float), (self.size,))
        self.review, self.by = review, by
        self.recent = np.full((self.size, window), np.nan)  # [level, window] the last values of each
        self.mastered = np.zeros(self.size, np.bool_)

    def take(self, index: int, result: TaskResult) -> None:
        """Remember the value; a level that was mastered stays so."""
        value = result.episode_return if self.by == "return" else success_of(result)
        self.recent[index] = np.append(self.recent[index, 1:], value)
        self.mastered[index] |= bool(np.mean(self.recent[index]) >= self.thresholds[index])  # NaN until the window is full

    def weights(self) -> Floats:
        """The first level that is not mastered, and those before it."""
        open_level = int(np.argmin(self.mastered)) if not self.mastered.all() else self.size
        out = np.zeros(self.size)
        if open_level == self.size:
            return np.full(self.size, 1.0 / self.size)
        out[:open_level] = self.review / max(open_level, 1)
        out[open_level] = 1.0 - out[:open_level].sum()
        return out


class LearningProgress(ListCurriculum):
    """Tasks whose success is changing, up or down, are the likeliest.

    Two moving means of the success of each task, a fast and a slow one; the weight is how far they are apart. A change of a rare success counts more than
    one of a frequent success, else a mastered task that fails once would weigh as much as a new one that succeeds once: a mean p counts as
    p (1 - theta) / (p + theta (1 - 2 p)); `theta=0.5` leaves it as it is. `still` is added to every distance: where little
    changes anywhere, all tasks are tried, and not the one whose mean is the last to settle. `explore` is shared by all.

    Example:
        >>> lp = LearningProgress(["a", "b"], explore=0.1)
        >>> lp.update([TaskResult(i, "b", 0.0, 1, success=1.0) for i in range(5)])
        >>> lp.probabilities()["b"] > 0.9
        True
    """

    stored = ("counts", "fast", "slow")

    def __init__(
        self, tasks: Any, fast: float = 0.2, slow: float = 0.04, explore: float = 0.1, theta: float = 0.1, still: float = 0.01
    ) -> None:
        super().__init__(tasks)
        if not 0.0 < slow < fast <= 1.0 or not 0.0 < explore <= 1.0 or not 0.0 < theta <= 0.5 or not still >= 0.0:
            raise BadArgument(
                f"LearningProgress(fast={fast}, slow={slow}, explore={explore}, theta={theta}, still={still}): "
                "0 < slow < fast <= 1, 0 < explore <= 1, 0 < theta <= 0.5, still >= 0"
            )
        self._fast, self._slow, self.explore, self.theta, self.still = fast, slow, explore, theta, still
        self.fast, self.slow = np.zeros(self.size), np.zeros(self.size)

    def take(self, index: int, result: TaskResult) -> None:
        """Move both means."""
        success = success_of(result)
        self.fast[index] += self._fast * (success - self.fast[index])
        self.slow[index] += self._slow * (success - self.slow[index])

    def _counted(self, p: Floats) -> Floats:
        return p * (1.0 - self.theta) / (p + self.theta * (1.0 - 2.0 * p))

    def weights(self) -> Floats:
        """How far the means are apart, and a share for all."""
        apart = np.abs(self._counted(self.fast) - self._counted(self.slow)) + self.still
        even = np.full(self.size, 1.0 / self.size)
        return even if apart.sum() < 1e-6 else self.explore * even + (1.0 - self.explore) * apart / apart.sum()


class SFL(ListCurriculum):
    """Sampling for learnability: tasks that succeed half of the time are the likeliest, by p (1 - p).

    p is a moving mean of success that begins at one half, so that every task is tried. `explore` is shared by all.

    Example:
        >>> sfl = SFL(["never", "sometimes"])
        >>> sfl.update([TaskResult(i, "never", 0.0, 1, success=0.0) for i in range(40)])
        >>> sfl.probabilities()["sometimes"] > 0.9
        True
    """

    stored = ("counts", "p")

    def __init__(self, tasks: Any, rate: float = 0.1, explore: float = 0.1) -> None:
        super().__init__(tasks)
        if not 0.0 < rate <= 1.0 or not 0.0 < explore <= 1.0:
            raise BadArgument(f"SFL(rate={rate}, explore={explore}): both must be above 0 and at most 1")
        self.rate, self.explore = rate, explore
        self.p = np.full(self.size, 0.5)

    def take(self, index: int, result: TaskResult) -> None:
        """Move the mean."""
        self.p[index] += self.rate * (success_of(result) - self.p[index])

    def weights(self) -> Floats:
        """By p (1 - p), and a share for all."""
        learnable = self.p * (1.0 - self.p)
        even = np.full(self.size, 1.0 / self.size)
        return even if learnable.sum() < 1e-9 else self.explore * even + (1.0 - self.explore) * learnable / learnable.sum()
