"""Curricula of the package Syllabus (`pip install syllabus-rl`) as curricula of ours. Nothing of it is imported here."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from envfleet.errors import BadArgument
from envfleet.tasks.curriculum import Curriculum, TaskResult, success_of
from envfleet.tasks.task_space import TaskList, TaskSampler

_NEEDED = ("sample", "update_on_episode", "update_task_progress", "task_space")


class SyllabusCurriculum(Curriculum):
    """Asks an object with the interface of `syllabus.core.Curriculum` which task comes next.

    Such an object draws from the global random numbers of NumPy and Python. They are seeded for each call and put back afterwards, so that what is
    assigned depends on the seed and the results alone.

    Where the object has `state_dict` and `load_state_dict`, a checkpoint holds that state. Else it holds all calls that were made, and a resumed run
    repeats them on a new object. That is exact, but it grows with the episodes, in memory and in every checkpoint, by about 100 bytes each: what
    else such an object knows is hidden in its attributes, and nothing of a checkpoint is unpickled. For runs of millions of episodes, give the object these two methods.

    Args:
        curriculum: has `sample(k)`, `update_on_episode`, `update_task_progress`, and a `task_space` with `encode` and `decode`.
            One that needs an update per step is refused.

    Example:
        >>> from types import SimpleNamespace
        >>> space = SimpleNamespace(tasks=["easy", "hard"], encode=["easy", "hard"].index, decode=["easy", "hard"].__getitem__)
        >>> always_hard = SimpleNamespace(sample=lambda k: [1] * k, task_space=space, update_on_episode=None, update_task_progress=None)
        >>> SyllabusCurriculum(always_hard).assign([0, 1], np.random.default_rng(0))
        ['hard', 'hard']
    """

    def __init__(self, curriculum: Any) -> None:
        name = type(curriculum).__name__
        if missing := [each for each in _NEEDED if not hasattr(curriculum, each)]:
            raise BadArgument(f"SyllabusCurriculum: {name} has no {', '.join(missing)}; give a Curriculum object of Syllabus")
        if getattr(curriculum, "requires_step_updates", False):
            raise BadArgument(
                f"SyllabusCurriculum: {name} needs an update at every step (requires_step_updates), and curricula get results of episodes here; "
                "for level replay there is envfleet.tasks.PLR"
            )
        self.curriculum = curriculum
        self._theirs = curriculum.task_space
        tasks = getattr(self._theirs, "tasks", None)
        super().__init__(TaskList(tasks) if tasks else TaskSampler(lambda rng: self._sample(int(rng.integers(2**32)))))
        self._stored = all(callable(getattr(curriculum, each, None)) for each in ("state_dict", "load_state_dict"))
        # [seed] of a sample, [ticket, task, return, length, success] of a result; kept only where the object cannot be stored.
        self._calls: list[list[Any]] = []

    def assign(self, slots: Sequence[int], rng: np.random.Generator) -> list[Any]:
        """Sample a task for each slot."""
        seeds = [int(rng.integers(2**32)) for _ in slots]
        self._note(*([seed] for seed in seeds))
        return [self._sample(seed) for seed in seeds]

    def _sample(self, seed: int) -> Any:
        if hasattr(self._theirs, "seed"):
            self._theirs.seed(seed % 2**31)
        with _seeded(seed):
            found = self.curriculum.sample(1)
        task = self._theirs.decode(found[0])
        return task.item() if isinstance(task, np.generic) else task

    def update(self, results: Sequence[TaskResult]) -> None:
        """Hand the results on: first the progress of the task, then the episode."""
        for result in results:
            call = [result.ticket, result.task, result.episode_return, result.length, success_of(result)]
            self._note(call)
            self._update(*call)

    def _note(self, *calls: list[Any]) -> None:
        if not self._stored:
            self._calls += calls

    def _update(self, ticket: int, task: Any, episode_return: float, length: int, success: float) -> None:
        encoded = self._theirs.encode(task)
        with _seeded(ticket % 2**32):
            self.curriculum.update_task_progress(encoded, success, env_id=0)
            self.curriculum.update_on_episode(episode_return, length, encoded, success, env_id=0)

    def state_dict(self) -> dict[str, Any]:
        """The object's own state, or the calls so far."""
        return {"state": self.curriculum.state_dict()} if self._stored else {"calls": [list(call) for call in self._calls]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the object's own state, or repeat the calls; the object must be new."""
        if "state" in state:
            if not self._stored:
                raise BadArgument("the checkpoint has the state of a curriculum with load_state_dict, which this one has not")
            self.curriculum.load_state_dict(state["state"])
            return
        for call in state["calls"]:
            self._note(list(call))
            if len(call) == 1:
                self._sample(int(call[0]))
            else:
                self._update(*call)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Global random numbers from a seed inside, and as they were afterwards."""
    numpys, pythons = np.random.get_state(), random.getstate()
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)
