"""`TaskSpace`: the tasks of a family of environments, as values.

A task is a value (a number, a tuple, an array, a dict) that is drawn once, in the parent, and sent with a reset. It is never an index
into a table that every worker draws for itself: with such tables "task 3" means another goal in each worker.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from envfleet.errors import BadArgument
from envfleet.util.seeding import stream
from envfleet.util.text import short

Vector = NDArray[np.float32]


def task_key(task: Any) -> Any:
    """A hashable value that is equal for equal tasks: for counting by task, and to see whether two are the same.

    Example:
        >>> task_key(np.array([1.0, 2.0])) == task_key([1.0, 2.0]), task_key({"b": 1, "a": [2]})
        (True, (('a', (2,)), ('b', 1)))
    """
    if isinstance(task, (np.ndarray, np.generic)):
        task = task.tolist()
    if isinstance(task, Mapping):
        return tuple(sorted((str(name), task_key(value)) for name, value in task.items()))
    if isinstance(task, (list, tuple)):
        return tuple(task_key(value) for value in task)
    try:
        hash(task)
    except TypeError:
        return repr(task)
    return task


def task_text(task: Any) -> str:
    """A task as text, for logs and tables.

    Example:
        >>> task_text(np.array([0.123456, 2.0])), task_text({"length": 0.5}), task_text("hard")
        ('0.1235 2', 'length=0.5', 'hard')
    """
    if isinstance(task, Mapping):
        return " ".join(f"{name}={task_text(value)}" for name, value in task.items())
    if isinstance(task, (list, tuple)) or (isinstance(task, np.ndarray) and task.ndim):
        return " ".join(task_text(value) for value in task)
    return f"{task:.4g}" if isinstance(task, (float, np.floating)) else str(task)


def as_number(task: Any) -> list[Any]:
    """The vector of a task that is a number. Here and not a lambda: environments are copied by pickle when slots move.

    Example:
        >>> as_number(3)
        [3]
    """
    return [task]


class TaskSpace(abc.ABC):
    """The tasks of a family.

    Example:
        >>> from envfleet.envs.gridnavi import GridNavi
        >>> GridNavi().task_space.size
        21
    """

    #: How many there are; None: as many as one likes.
    size: int | None = None
    #: Length of `vector`.
    vector_size: int = 0

    @abc.abstractmethod
    def sample(self, rng: np.random.Generator) -> Any:
        """One task."""

    @abc.abstractmethod
    def contains(self, task: Any) -> bool:
        """Whether this is a task of the family."""

    def vector(self, task: Any) -> Vector:
        """The task as numbers: what an oracle sees, and what a curriculum over continuous tasks models."""
        raise BadArgument(f"{type(self).__name__} cannot turn its tasks into numbers: give it vector=…")

    def checked(self, task: Any) -> Any:
        """The task itself; one that is not of the family is refused."""
        if not self.contains(task):
            raise BadArgument(f"task {short(task)} is not in {self!r}")
        return task

    def split(self, num_train: int, num_eval: int, seed: int) -> tuple[list[Any], list[Any]]:
        """Training tasks and evaluation tasks; no task is in both.

        Example:
            >>> train, held_out = TaskList(range(10)).split(6, 4, seed=0)
            >>> sorted(train + held_out) == list(range(10))
            True
            >>> TaskList([1, -1]).split(50, 20, seed=0)
            Traceback (most recent call last):
            ...
            envfleet.errors.BadArgument: num_train_tasks=50 and num_eval_tasks=20: the family has 2 tasks
        """
        for name, count in (("num_train_tasks", num_train), ("num_eval_tasks", num_eval)):
            if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < (name == "num_train_tasks"):
                raise BadArgument(f"{name}={count!r}: give a whole number from {int(name == 'num_train_tasks')} up")
        if self.size is not None and num_train + num_eval > self.size:
            raise BadArgument(f"num_train_tasks={num_train} and num_eval_tasks={num_eval}: the family has {self.size} tasks")
        drawn = self._distinct(num_train + num_eval, stream(seed, "tasks"))
        return drawn[:num_train], drawn[num_train:]

    def _distinct(self, count: int, rng: np.random.Generator) -> list[Any]:
        found: dict[Any, Any] = {}
        for _ in range(100 * count + 100):
            if len(found) == count:
                return list(found.values())
            task = self.sample(rng)
            found.setdefault(task_key(task), task)
        raise BadArgument(
            f"{self!r} has fewer than {count} different tasks: {len(found)} were found in {100 * count + 100} draws"
        )


class TaskList(TaskSpace):
    """A finite list of tasks.

    Example:
        >>> space = TaskList(["easy", "medium", "hard"])
        >>> space.size, space.vector("hard").tolist(), space.contains("harder")
        (3, [0.0, 0.0, 1.0], False)
    """

    def __init__(self, values: Sequence[Any], vector: Callable[[Any], ArrayLike] | None = None) -> None:
        self.values = list(values)
        if not self.values:
            raise BadArgument("a TaskList needs at least one task")
        self._index = {task_key(value): i for i, value in enumerate(self.values)}
        if len(self._index) != len(self.values):
            raise BadArgument("a TaskList has one task twice")
        self.size = len(self.values)
        self._vector = vector
        self.vector_size = self.size if vector is None else int(np.size(vector(self.values[0])))

    def __repr__(self) -> str:
        shown = ", ".join(short(value) for value in self.values[:4])
        return f"TaskList([{shown}{', …' if len(self.values) > 4 else ''}])"

    def sample(self, rng: np.random.Generator) -> Any:
        """One of the list, all equally likely."""
        return self.values[int(rng.integers(len(self.values)))]

    def contains(self, task: Any) -> bool:
        """Whether it is in the list."""
        return task_key(task) in self._index

    def index(self, task: Any) -> int:
        """The place of a task in the list."""
        return self._index[task_key(self.checked(task))]

    def vector(self, task: Any) -> Vector:
        """What the list was given for it; without that, one-hot."""
        if self._vector is not None:
            return np.ravel(np.asarray(self._vector(task), np.float32))
        out = np.zeros(len(self.values), np.float32)
        out[self.index(task)] = 1.0
        return out

    def _distinct(self, count: int, rng: np.random.Generator) -> list[Any]:
        return [self.values[i] for i in rng.permutation(len(self.values))[:count]]


class TaskBox(TaskSpace):
    """Tasks that are numbers or vectors between bounds, drawn uniformly.

    Example:
        >>> space = TaskBox([-1, -1], [1, 1])
        >>> space.contains([0.5, 2.0]), space.vector_size, TaskBox(0.0, 3.0).contains(1.5)
        (False, 2, True)
    """

    def __init__(self, low: ArrayLike, high: ArrayLike) -> None:
        self.low, self.high = np.asarray(low, np.float64), np.asarray(high, np.float64)
        if (
            self.low.shape != self.high.shape
            or not (self.low < self.high).all()
            or not np.isfinite(self.low).all()
            or not np.isfinite(self.high).all()
        ):
            raise BadArgument(
                f"TaskBox({self.low.tolist()}, {self.high.tolist()}): give finite bounds of one shape, each low below its high"
            )
        self.vector_size = int(self.low.size)

    def __repr__(self) -> str:
        return f"TaskBox({self.low.tolist()}, {self.high.tolist()})"

    def sample(self, rng: np.random.Generator) -> Any:
        """A float, or an array."""
        value = rng.uniform(self.low, self.high)
        return value if self.low.shape else float(value)

    def contains(self, task: Any) -> bool:
        """Whether it has the shape and is within the bounds."""
        try:
            value = np.asarray(task, np.float64)
        except (TypeError, ValueError):
            return False
        return value.shape == self.low.shape and bool(((value >= self.low) & (value <= self.high)).all())

    def vector(self, task: Any) -> Vector:
        """The numbers themselves."""
        return np.ravel(np.asarray(task, np.float32))


class TaskSampler(TaskSpace):
    """Tasks that a function draws: `sample(rng) -> task`.

    Example:
        >>> space = TaskSampler(lambda rng: {"length": float(rng.uniform(0.3, 1.0))}, vector=lambda task: [task["length"]])
        >>> space.vector({"length": 0.5}).tolist(), len(space.split(5, 2, seed=0)[0])
        ([0.5], 5)
    """

    def __init__(
        self,
        sample: Callable[[np.random.Generator], Any],
        contains: Callable[[Any], bool] | None = None,
        vector: Callable[[Any], ArrayLike] | None = None,
    ) -> None:
        self._sample, self._contains, self._vector = sample, contains, vector
        self.vector_size = 0 if vector is None else int(np.size(vector(sample(np.random.default_rng(0)))))

    def __repr__(self) -> str:
        return f"TaskSampler({getattr(self._sample, '__name__', self._sample)})"

    def sample(self, rng: np.random.Generator) -> Any:
        """What the function draws."""
        return self._sample(rng)

    def contains(self, task: Any) -> bool:
        """What the function says; without one, anything is a task."""
        return True if self._contains is None else bool(self._contains(task))

    def vector(self, task: Any) -> Vector:
        """What the function says."""
        return super().vector(task) if self._vector is None else np.ravel(np.asarray(self._vector(task), np.float32))


def as_task_space(tasks: Any) -> TaskSpace:
    """A task space from what users pass: itself, a list of tasks, or a function `sample(rng)`.

    Example:
        >>> as_task_space([1, 2]), as_task_space(lambda rng: rng.random()).size
        (TaskList([1, 2]), None)
    """
    if isinstance(tasks, TaskSpace):
        return tasks
    if isinstance(tasks, (list, tuple, range)):
        return TaskList(tasks)
    if callable(tasks):
        return TaskSampler(tasks)
    raise BadArgument(f"tasks={short(tasks)}: give a TaskSpace, a list of tasks, or a function sample(rng)")
