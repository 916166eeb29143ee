"""ALP-GMM: a curriculum over continuous tasks, by absolute learning progress."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument
from envfleet.tasks.curriculum import Curriculum, TaskResult, stored_numbers
from envfleet.tasks.task_space import TaskBox
from envfleet.util.extras import from_extra

Floats = NDArray[np.float64]
_PARTS = 8  # of a dimension, in `probabilities`


class ALPGMM(Curriculum):
    """Continuous tasks where the return changes fast: a mixture of Gaussians over (task, absolute learning progress).

    The progress of a result is how far its return is from that of the nearest earlier task. Every `fit_every` results a mixture is fitted to
    the last `window`; a Gaussian is drawn by its mean progress, a task from it. `explore` of the tasks are uniform, and the first
    `fit_every` all are.

    Example:
        >>> alp = ALPGMM(TaskBox([0.0], [1.0]), fit_every=50, explore=0.1)
        >>> rng = np.random.default_rng(0)
        >>> for ticket in range(200):
        ...     (task,) = alp.assign([0], rng)
        ...     alp.update([TaskResult(ticket, task, ticket * float(task[0] > 0.7), 1)])
        >>> bool(np.mean([alp.assign([0], rng)[0][0] > 0.6 for _ in range(200)]) > 0.6)
        True
    """

    space: TaskBox

    def __init__(
        self, tasks: Any, fit_every: int = 100, window: int = 400, max_components: int = 6, explore: float = 0.2, seed: int = 0
    ) -> None:
        super().__init__(tasks)
        if not isinstance(self.space, TaskBox):
            raise BadArgument(f"ALPGMM needs a TaskBox, not {self.space!r}")
        if fit_every < 10 or window < fit_every or max_components < 1 or not 0.0 <= explore <= 1.0:
            raise BadArgument(
                f"ALPGMM(fit_every={fit_every}, window={window}, max_components={max_components}, explore={explore}): "
                "10 <= fit_every <= window, max_components >= 1 and an explore from 0 to 1 are needed"
            )
        self.fit_every, self.window, self.max_components, self.explore, self.seed = (
            fit_every,
            window,
            max_components,
            explore,
            seed,
        )
        self.history: deque[list[float]] = deque(maxlen=10 * window)  # task numbers (scaled to 0..1), return
        self.progress: deque[list[float]] = deque(maxlen=window)  # task numbers, progress
        self.mixture: dict[str, Floats] | None = None
        self.num_results = 0

    def _scaled(self, task: Any) -> Floats:
        low, high = np.ravel(self.space.low), np.ravel(self.space.high)
        return (np.ravel(np.asarray(task, float)) - low) / (high - low)

    def update(self, results: Sequence[TaskResult]) -> None:
        """Measure the progress, and fit when it is time."""
        for result in results:
            if not np.isfinite(result.episode_return):
                continue  # nothing can be fitted to it
            at = self._scaled(result.task)
            if self.history:
                before = np.asarray(self.history)
                nearest = int(np.argmin(((before[:, :-1] - at) ** 2).sum(axis=1)))
                self.progress.append([*at.tolist(), abs(result.episode_return - before[nearest, -1])])
            self.history.append([*at.tolist(), float(result.episode_return)])
            self.num_results += 1
            if self.num_results % self.fit_every == 0:
                self.mixture = fit_mixture(np.asarray(self.progress), self.max_components, self.seed + self.num_results)

    def assign(self, slots: Sequence[int], rng: np.random.Generator) -> list[Any]:
        """Uniform, or from the Gaussian that progress chooses."""
        return [self._draw(rng) for _ in slots]

    def _draw(self, rng: np.random.Generator) -> Any:
        if self.mixture is None or rng.random() < self.explore:
            return self.space.sample(rng)
        mean, cov = self.mixture["mean"], self.mixture["cov"]
        interest = np.maximum(mean[:, -1], 0.0)
        p = interest / interest.sum() if interest.sum() > 0 else None
        one = int(rng.choice(len(mean), p=p))
        at = np.clip(rng.multivariate_normal(mean[one, :-1], cov[one, :-1, :-1]), 0.0, 1.0)
        low, high = self.space.low, self.space.high
        value = np.clip(low + at.reshape(low.shape) * (high - low), low, high)  # rounding may put a bound outside
        return value if low.shape else float(value)

    def probabilities(self) -> dict[str, float]:
        """How likely the next task is to be in each of a few equal parts of the space, dimension by dimension."""
        lows, highs = np.ravel(self.space.low), np.ravel(self.space.high)
        found: dict[str, float] = {}
        for d, edges in enumerate(np.linspace(lows, highs, _PARTS + 1).T):
            shares = np.full(_PARTS, 1 / _PARTS)
            if self.mixture is not None:
                shares = self.explore * shares + (1.0 - self.explore) * self._mixture_shares(d)
            name = f"dimension {d} " if len(lows) > 1 else ""
            found |= {f"{name}{a:.3g} to {b:.3g}": float(share) for a, b, share in zip(edges, edges[1:], shares)}
        return found

    def _mixture_shares(self, dimension: int) -> Floats:
        """[part] of the space, of what is drawn from the mixture; what is drawn outside is moved to the bounds."""
        assert self.mixture is not None
        mean, cov = self.mixture["mean"], self.mixture["cov"]
        interest = np.maximum(mean[:, -1], 0.0)
        weights = interest / interest.sum() if interest.sum() > 0 else np.full(len(mean), 1 / len(mean))
        deviation = np.sqrt(np.maximum(cov[:, dimension, dimension], 1e-12))
        inner = [
            [(1.0 + math.erf((k / _PARTS - m) / (s * math.sqrt(2.0)))) / 2.0 for m, s in zip(mean[:, dimension], deviation)]
            for k in range(1, _PARTS)
        ]
        below = np.array([[0.0] * len(mean), *inner, [1.0] * len(mean)])
        return np.asarray(np.diff(below @ weights))

    def state_dict(self) -> dict[str, Any]:
        """Results and the mixture."""
        return {
            "history": [list(row) for row in self.history],
            "progress": [list(row) for row in self.progress],
            "mixture": None if self.mixture is None else dict(self.mixture),
            "num_results": self.num_results,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them over; what cannot have been stored is refused."""
        size = int(np.size(self.space.low)) + 1
        rows = {name: list(state.get(name, ())) for name in ("history", "progress")}
        rows = {name: stored_numbers(state, name, (len(r), size)).tolist() if r else [] for name, r in rows.items()}
        stored = state.get("mixture")
        if stored is not None:
            count = max(len(stored.get("mean", ())), 1)  # an empty one is refused too
            shapes = {"mean": (count, size), "cov": (count, size, size)}
            stored = {name: stored_numbers(stored, name, shape) for name, shape in shapes.items()}
        num_results = int(stored_numbers(state, "num_results", (), 0))
        self.history = deque(rows["history"], maxlen=self.history.maxlen)
        self.progress = deque(rows["progress"], maxlen=self.progress.maxlen)
        self.mixture, self.num_results = stored, num_results


def fit_mixture(points: Floats, max_components: int, seed: int) -> dict[str, Floats]:
    """The mixture of at most so many Gaussians that describes the points best (by Akaike's criterion): means and covariances."""
    with from_extra("curricula"):
        from sklearn.mixture import GaussianMixture
    most = min(max_components, len(points) // 5)
    fits = [GaussianMixture(count, random_state=seed % 2**32, reg_covar=1e-5).fit(points) for count in range(1, max(most, 1) + 1)]
    best = min(fits, key=lambda fit: float(fit.aic(points)))
    return {"mean": np.array(best.means_), "cov": np.array(best.covariances_)}
