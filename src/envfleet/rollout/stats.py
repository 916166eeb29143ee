"""Statistics of episodes, computed from their records and from nothing else."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from envfleet.util.text import duration

if TYPE_CHECKING:
    from envfleet.rollout.episodes.episode import Rollout
    from envfleet.rollout.timing import Verdict

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
PERCENTILES = (50, 90, 95, 99)
MOST_ROWS = 20  # environments a printed table lists
_NAN = float("nan")


class LatencyHistogram:
    """Durations in logarithmic bins, so that percentiles cost the same after ten steps and after ten billion.

    A percentile is accurate to 2.5 %: bins are that wide, from 100 ns to 1000 s. One histogram can keep a row
    per slot.

    Example:
        >>> histogram = LatencyHistogram()
        >>> histogram.add([0.010] * 99 + [0.5])
        >>> abs(histogram.percentile(50) - 0.010) < 0.0003
        True
    """

    LOW_S, WIDTH, BINS = 1e-7, 1.025, 933

    def __init__(self, num_rows: int = 1) -> None:
        self.counts = np.zeros((num_rows, self.BINS), dtype=np.int64)  # [row, bin]
        self.total_s = np.zeros(num_rows)
        self.max_s = np.zeros(num_rows)

    def add(self, seconds: Any, rows: Any = 0) -> None:
        """Count durations; `rows` says whose each is."""
        seconds = np.asarray(seconds, dtype=np.float64)
        if not seconds.size:
            return
        rows = np.broadcast_to(np.asarray(rows), seconds.shape)
        bins = np.log(np.maximum(seconds, self.LOW_S) / self.LOW_S) / np.log(self.WIDTH)
        np.add.at(self.counts, (rows, np.minimum(bins.astype(np.int64), self.BINS - 1)), 1)
        np.add.at(self.total_s, rows, seconds)
        np.maximum.at(self.max_s, rows, seconds)

    def percentile(self, percent: float, row: int | None = None) -> float:
        """Seconds below which `percent` of the durations lie, of all rows or one; NaN without any."""
        counts = self.counts.sum(axis=0) if row is None else self.counts[row]
        total = int(counts.sum())
        if not total:
            return _NAN
        position = int(np.searchsorted(np.cumsum(counts), total * percent / 100.0, side="left"))
        middle = self.LOW_S * self.WIDTH ** (position + 0.5)
        return float(min(middle, self.max_s.max() if row is None else self.max_s[row]))

    def count(self, row: int | None = None) -> int:
        """How many durations were counted."""
        return int(self.counts.sum() if row is None else self.counts[row].sum())


@dataclass(frozen=True)
class EnvStats:
    """The same numbers for the episodes of one environment name."""

    count: int
    num_failed: int
    mean_return: float
    std_return: float
    min_return: float
    max_return: float
    mean_length: float
    std_length: float
    total_steps: int


@dataclass(frozen=True)
class Stats:
    """Statistics of a set of episodes. Means are over the successful ones; failures are counted separately.

    Example:
        >>> from envfleet.rollout.episodes.episode import Rollout
        >>> easy, hard = Rollout(env_name="easy", rewards=[1.0, 2.0]), Rollout(env_name="hard", rewards=[0.0])
        >>> stats = Stats.of([easy, hard])
        >>> stats.mean_return, stats.total_steps, stats.env_breakdown
        (1.5, 3, {'easy': 3.0, 'hard': 0.0})
    """

    num_episodes: int
    num_failed: int
    failures: dict[str, int]  # reason → count
    mean_return: float
    std_return: float
    min_return: float
    max_return: float
    return_quantiles: dict[float, float]
    mean_length: float
    std_length: float
    min_length: int
    max_length: int
    length_quantiles: dict[float, float]
    total_steps: int
    failed_steps: int
    env_breakdown: dict[str, float]  # env name → mean return; NaN if all of its rollouts failed
    per_env: dict[str, EnvStats]
    wall_s: float
    steps_per_s: float
    episodes_per_s: float
    latency_s: dict[str, float] = field(default_factory=dict)  # "p50", "p90", "p95", "p99", "max", "mean"
    seconds: dict[str, float] = field(
        default_factory=dict
    )  # of executors: agent, env, network, waiting, idle; all workers together

    @classmethod
    def of(cls, rollouts: Iterable[Rollout], wall_s: float | None = None, num_workers: int | None = None) -> Stats:
        """Compute them; `wall_s` is the time all took together, taken from the records when not given."""
        builder = StatsBuilder()
        for rollout in rollouts:
            builder.add(rollout)
        return builder.stats(wall_s, num_workers)

    @property
    def verdict(self) -> Verdict:
        """Where the time of an executor went, and one sentence on what to do."""
        from envfleet.rollout.timing import Verdict

        return Verdict(self.seconds, [], mode="clients")

    @property
    def line(self) -> str:
        """Steps, speed, mean return and mean length in one line."""
        means = f"return {self.mean_return:.4g} ± {self.std_return:.4g}, length {self.mean_length:.4g} ± {self.std_length:.4g}"
        return f"{self.total_steps:,} steps ({self.steps_per_s:,.0f} steps/s), {means}"

    def rows(self) -> list[tuple[str, str]]:
        """(name, value) pairs for printing."""
        quantiles = " ".join(f"{value:.4g}" for value in self.return_quantiles.values())
        lengths = " ".join(f"{value:.4g}" for value in self.length_quantiles.values())
        shown = [
            ("episodes", f"{self.num_episodes}" + (f" (+{self.num_failed} failed)" if self.num_failed else "")),
            ("steps", f"{self.total_steps}"),
            ("return", f"{self.mean_return:.4g} ± {self.std_return:.4g}"),
            ("return min, max", f"{self.min_return:.4g}, {self.max_return:.4g}"),
            ("return 5/25/50/75/95 %", quantiles),
            ("length", f"{self.mean_length:.4g} ± {self.std_length:.4g}  [{self.min_length}, {self.max_length}]"),
            ("length 5/25/50/75/95 %", lengths),
            ("throughput", f"{self.steps_per_s:,.0f} steps/s, {self.episodes_per_s:,.4g} episodes/s"),
        ]
        if self.latency_s:
            shown.append(("step latency", "  ".join(f"{k} {duration(v)}" for k, v in self.latency_s.items())))
        if self.seconds:
            shown.append(("time", str(self.verdict).replace("\n", "; ")))
        shown += [(f"failed: {reason}", str(count)) for reason, count in self.failures.items()]
        return shown

    def _env_rows(self) -> list[tuple[str, ...]]:
        """A table of the environments, its head first; empty when there is only one."""
        if len(self.per_env) <= 1:
            return []
        rows: list[tuple[str, ...]] = [("env", "count", "failed", "return", "std", "length")]
        for name, env in list(self.per_env.items())[:MOST_ROWS]:
            means = (f"{value:.4g}" for value in (env.mean_return, env.std_return, env.mean_length))
            rows.append((name, str(env.count), str(env.num_failed), *means))
        return rows

    def __str__(self) -> str:
        rows, table = self.rows(), self._env_rows()
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows] + [""] * bool(table)
        wide = max((len(row[0]) for row in table), default=0)
        lines += [f"{name:<{wide}}  " + " ".join(f"{cell:>10}" for cell in cells) for name, *cells in table]
        if len(self.per_env) > MOST_ROWS:
            lines.append(f"… and {len(self.per_env) - MOST_ROWS} more in .per_env")
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        tables = [Table(show_header=False, title="rollouts")]
        for cells in self.rows():
            tables[0].add_row(*cells)
        if env_rows := self._env_rows():
            tables.append(Table(*env_rows[0], title="per environment"))
            for row in env_rows[1:]:
                tables[1].add_row(*row)
        return Group(*tables)


class StatsBuilder:
    """Statistics of a stream: keeps sixteen bytes per episode, not the records.

    Example:
        >>> from envfleet.rollout.episodes.episode import Rollout
        >>> builder = StatsBuilder()
        >>> builder.add(Rollout(rewards=[1.0] * 3))
        >>> builder.stats().mean_length
        3.0
    """

    def __init__(self) -> None:
        self._returns: dict[str, array[float]] = {}
        self._lengths: dict[str, array[int]] = {}
        self._failed: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        self._failed_steps = 0
        self._seconds: Counter[str] = Counter()
        self._busy_s = 0.0
        self._latency = LatencyHistogram()
        self._first_s, self._last_s = float("inf"), float("-inf")

    def add(self, rollout: Rollout) -> None:
        """Count one rollout."""
        name = rollout.env_name
        self._returns.setdefault(name, array("d"))
        self._lengths.setdefault(name, array("q"))
        if rollout.started_s:
            self._first_s = min(self._first_s, rollout.started_s)
            self._last_s = max(self._last_s, rollout.started_s + rollout.wall_s)
        self._seconds.update(rollout.seconds)
        self._busy_s += rollout.wall_s
        if len(rollout.step_latencies):
            self._latency.add(rollout.step_latencies)
        if rollout.error is not None:
            self._failed[name] += 1
            self._reasons[type(rollout.error.__cause__ or rollout.error).__name__] += 1
            self._failed_steps += len(rollout)
            return
        self.count(name, rollout.episode_return, len(rollout))

    def count(self, env_name: str, episode_return: float, length: int) -> None:
        """Count an episode of which only the return and the length are known."""
        self._returns.setdefault(env_name, array("d")).append(episode_return)
        self._lengths.setdefault(env_name, array("q")).append(length)

    def stats(self, wall_s: float | None = None, num_workers: int | None = None) -> Stats:
        """The statistics of what was added so far; `num_workers` of an executor shows for how long they were idle."""
        returns = {name: np.array(values) for name, values in self._returns.items()}
        lengths = {name: np.array(values, dtype=np.int64) for name, values in self._lengths.items()}
        all_returns = np.concatenate([np.zeros(0), *returns.values()])
        all_lengths = np.concatenate([np.zeros(0, dtype=np.int64), *lengths.values()])
        if wall_s is None:
            wall_s = max(0.0, self._last_s - self._first_s) if self._last_s >= self._first_s else 0.0
        per_env = {
            name: EnvStats(count=len(returns[name]), num_failed=self._failed[name], **_summary(returns[name], lengths[name]))
            for name in returns
        }
        seconds: dict[str, float] = dict(self._seconds)
        if seconds and num_workers is not None:
            seconds["idle"] = max(0.0, num_workers * wall_s - self._busy_s)
        latency: dict[str, float] = {}
        if timed := self._latency.count():
            latency = {f"p{p}": self._latency.percentile(p) for p in PERCENTILES}
            latency |= {"max": float(self._latency.max_s[0]), "mean": float(self._latency.total_s[0]) / timed}
        steps = int(all_lengths.sum()) + self._failed_steps
        return Stats(
            num_episodes=len(all_returns),
            num_failed=self._failed.total(),
            failures=dict(self._reasons),
            return_quantiles=_quantiles(all_returns),
            min_length=int(all_lengths.min()) if len(all_lengths) else 0,
            max_length=int(all_lengths.max()) if len(all_lengths) else 0,
            length_quantiles=_quantiles(all_lengths),
            failed_steps=self._failed_steps,
            env_breakdown={name: env.mean_return for name, env in per_env.items()},
            per_env=per_env,
            wall_s=wall_s,
            steps_per_s=steps / wall_s if wall_s > 0 else _NAN,
            episodes_per_s=len(all_returns) / wall_s if wall_s > 0 else _NAN,
            latency_s=latency,
            seconds=seconds,
            **_summary(all_returns, all_lengths),
        )


def _summary(returns: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> dict[str, Any]:
    """The fields that `Stats` and `EnvStats` share; NaN without an episode."""
    count = len(returns)
    return {
        "mean_return": float(returns.mean()) if count else _NAN,
        "std_return": float(returns.std()) if count else _NAN,
        "min_return": float(returns.min()) if count else _NAN,
        "max_return": float(returns.max()) if count else _NAN,
        "mean_length": float(lengths.mean()) if count else _NAN,
        "std_length": float(lengths.std()) if count else _NAN,
        "total_steps": int(lengths.sum()),
    }


def _quantiles(values: npt.NDArray[Any]) -> dict[float, float]:
    if not len(values):
        return dict.fromkeys(QUANTILES, _NAN)
    return {q: float(value) for q, value in zip(QUANTILES, np.quantile(values, QUANTILES))}
