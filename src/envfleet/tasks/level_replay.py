"""Prioritised level replay, and its robust form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument
from envfleet.tasks.curriculum import Curriculum, TaskResult, stored_numbers
from envfleet.tasks.task_space import task_key, task_text

Floats = NDArray[np.float64]


class PLR(Curriculum):
    """Prioritised level replay: levels whose values were predicted worst come again, by rank; others are drawn anew.

    With probability `replay`, once `capacity` allows, a level of the buffer is replayed: by the rank of its score (`value_error`) and by how long
    ago it was played (`staleness`). Else a new level is drawn. `robust=True` does not learn from new levels: they are only scored.

    Example:
        >>> plr = PLR(["a", "b", "c"], replay=1.0, min_levels=2)
        >>> plr.update([TaskResult(0, "a", 0, 1, value_error=5.0), TaskResult(1, "b", 0, 1, value_error=0.1)])
        >>> plr.probabilities()["a"] > 0.8, plr.trains_on("c"), PLR(["a"], robust=True).trains_on("a")
        (True, True, False)
    """

    def __init__(
        self,
        tasks: Any,
        replay: float = 0.5,
        temperature: float = 0.1,
        staleness: float = 0.1,
        capacity: int = 256,
        min_levels: int = 8,
        robust: bool = False,
    ) -> None:
        super().__init__(tasks)
        if not 0.0 <= replay <= 1.0 or not 0.0 <= staleness <= 1.0 or not temperature > 0 or not 1 <= min_levels <= capacity:
            raise BadArgument(
                f"PLR(replay={replay}, temperature={temperature}, staleness={staleness}, capacity={capacity}, min_levels={min_levels}): "
                "probabilities from 0 to 1, a temperature above 0, and 1 <= min_levels <= capacity are needed"
            )
        self.replay, self.temperature, self.staleness = replay, temperature, staleness
        self.capacity, self.min_levels, self.robust = capacity, min_levels, robust
        self.levels: list[Any] = []
        self.scores: list[float] = []
        self.played: list[int] = []  # when each was last played
        self._clock = 0

    def _place(self, task: Any) -> int | None:
        key = task_key(task)
        return next((i for i, level in enumerate(self.levels) if task_key(level) == key), None)

    def update(self, results: Sequence[TaskResult]) -> None:
        """Score the levels; the worst is left out when the buffer is full."""
        for result in results:
            if result.value_error is None or not np.isfinite(result.value_error):
                continue  # nothing to rank it by
            self._clock += 1
            place = self._place(result.task)
            if place is None:
                if len(self.levels) == self.capacity:
                    place = int(np.argmin(self.scores))
                    if self.scores[place] >= result.value_error:
                        continue
                    self.levels[place] = result.task
                else:
                    place = len(self.levels)
                    self.levels.append(result.task)
                    self.scores.append(0.0)
                    self.played.append(0)
            self.scores[place], self.played[place] = float(result.value_error), self._clock

    def weights(self) -> Floats:
        """How likely each level of the buffer is to be replayed."""
        ranks = np.empty(len(self.scores))
        ranks[np.argsort(-np.asarray(self.scores), kind="stable")] = np.arange(1, len(self.scores) + 1)
        by_score = (1.0 / ranks) ** (1.0 / self.temperature)
        age = self._clock - np.asarray(self.played, float)
        by_age = age / age.sum() if age.sum() > 0 else np.full(len(age), 1.0 / len(age))
        weights: Floats = (1.0 - self.staleness) * by_score / by_score.sum() + self.staleness * by_age
        return weights

    def assign(self, slots: Sequence[int], rng: np.random.Generator) -> list[Any]:
        """Replay or draw."""
        out = []
        for _ in slots:
            if len(self.levels) >= min(self.min_levels, self.space.size or self.min_levels) and rng.random() < self.replay:
                out.append(self.levels[int(rng.choice(len(self.levels), p=self.weights()))])
            else:
                out.append(self.space.sample(rng))
        return out

    def trains_on(self, task: Any) -> bool:
        """All levels; with `robust` those that were scored before."""
        return not self.robust or self._place(task) is not None

    def probabilities(self) -> dict[str, float]:
        """Of the levels in the buffer, if they were replayed now."""
        return {task_text(level): float(w) for level, w in zip(self.levels, self.weights())} if self.levels else {}

    def state_dict(self) -> dict[str, Any]:
        """The buffer."""
        return {"levels": list(self.levels), "scores": list(self.scores), "played": list(self.played), "clock": self._clock}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a buffer; one that cannot have been stored is refused."""
        levels, clock = list(state.get("levels", ())), int(stored_numbers(state, "clock", (), 0))
        scores = stored_numbers(state, "scores", (len(levels),), 0).tolist()
        played = stored_numbers(state, "played", (len(levels),), 0, clock).tolist()
        if len(levels) > self.capacity or np.isnan(scores).any():
            raise BadArgument(
                f"the stored curriculum is damaged: {len(levels)} levels of at most {self.capacity}, scores {scores}"
            )
        if strange := [level for level in levels if not self.space.contains(level)]:
            raise BadArgument(f"the stored curriculum has a level that is no task of {self.space!r}: {task_text(strange[0])}")
        self.levels, self.scores = levels, [float(score) for score in scores]
        self.played, self._clock = [int(when) for when in played], clock
