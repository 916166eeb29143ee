"""Measure throughput so that it can be trusted on a machine that is not alone: interleaved slices, ratios of pairs.

A slice is a short run of one contestant, with the CPU its process tree used and the share of all CPUs that strangers
used meanwhile. Contestants take turns, so that what drifts (frequency, neighbours) hits all of them; a ratio is the
median over pairs of slices from the same round, with a bootstrap interval.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

#: A slice during which strangers used more than this share of all CPUs is measured again.
MAX_FOREIGN = 0.06

#: Measures for about that many seconds and gives (steps, seconds); seconds may be less than asked for.
Run = Callable[[float], tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Slice:
    """One short run: steps done, wall seconds, CPU nanoseconds of the process tree, share of CPU of strangers."""

    steps: int
    seconds: float
    cpu_ns: float
    foreign: float

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds

    @property
    def ns_per_step(self) -> float:
        """CPU nanoseconds per step, all processes of the tree together."""
        return self.cpu_ns / max(1, self.steps)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A median with its bootstrap interval.

    Example:
        >>> print(Estimate(1.0, 0.95, 1.052, 15))
        1.00 [0.95, 1.05]
    """

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{short(self.median)} [{short(self.low)}, {short(self.high)}]"


def short(value: float) -> str:
    """A number as people read it.

    Example:
        >>> short(0.954), short(12.34), short(1234567.0)
        ('0.95', '12.3', '1.23M')
    """
    size = abs(value)
    for limit, scale, unit in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= limit:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.2f}" if size < 10 else f"{value:.3g}" if size < 1000 else f"{value:.0f}"


def estimate(values: Sequence[float], draws: int = 2000, level: float = 0.95) -> Estimate:
    """The median of values and a bootstrap interval of it (drawn from a fixed seed).

    Example:
        >>> estimate([1.0, 1.0, 1.0]).median
        1.0
    """
    data = np.asarray(values, float)
    if not len(data):
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    picks = np.random.default_rng(0).integers(0, len(data), (draws, len(data)))
    low, high = np.quantile(np.median(data[picks], axis=1), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(np.median(data)), float(low), float(high), len(data))


def ratio(ours: Mapping[int, Slice], theirs: Mapping[int, Slice] | float) -> Estimate:
    """Ours over theirs: the median over the rounds both have, or over a constant rate."""
    if isinstance(theirs, float):
        return estimate([one.rate / theirs for one in ours.values()])
    return estimate([ours[i].rate / theirs[i].rate for i in ours if i in theirs])


def difference_ns(more: Mapping[int, Slice], less: Mapping[int, Slice]) -> Estimate:
    """CPU nanoseconds per step that `more` costs beyond `less`: the median over the rounds both have."""
    return estimate([more[i].ns_per_step - less[i].ns_per_step for i in more if i in less])


# -- who uses the CPU -------------------------------------------------------------------------------------------


def descendants(root: int) -> list[int]:
    """The process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                text = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue  # it ended meanwhile
            children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def tree_cpu_ns(pids: Sequence[int]) -> float:
    """CPU nanoseconds these processes have used so far, all their threads; those that are gone count nothing."""
    total = 0
    for pid in pids:
        try:
            total += time.clock_gettime_ns(((~pid) << 3) | 2)  # the kernel's id of a process's CPU clock
        except OSError:
            continue  # it ended meanwhile
    return float(total)


def tree_pss_bytes(root: int) -> int:
    """Memory of a process and all below it, pages shared between them counted once."""
    total = 0
    for pid in descendants(root):
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue  # it ended meanwhile
        total += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total * 1024


class Watch:
    """From construction to `stop`: CPU of our own tree, and the share of all CPUs that strangers used."""

    def __init__(self, root: int | None = None) -> None:
        self._pids = descendants(root or os.getpid())
        self._cpu = tree_cpu_ns(self._pids)
        self._idle_s = idle_seconds()
        self._start = time.perf_counter()

    def stop(self) -> tuple[float, float]:
        """(CPU nanoseconds of our tree, share of strangers from 0 to 1). Stolen time counts as strangers'."""
        wall = time.perf_counter() - self._start
        idle = idle_seconds() - self._idle_s
        cpu_ns = tree_cpu_ns(self._pids) - self._cpu
        total = wall * (os.cpu_count() or 1)
        return cpu_ns, min(1.0, max(0.0, (total - idle - cpu_ns / 1e9) / total))


def idle_seconds() -> float:
    """Seconds that the machine's CPUs have been idle, summed."""
    first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(first[4]) + int(first[5])) / os.sysconf("SC_CLK_TCK")


# -- taking turns -----------------------------------------------------------------------------------------------


def measure_slice(run: Run, seconds: float) -> Slice:
    """One slice of a contestant."""
    watch = Watch()
    steps, took = run(seconds)
    cpu_ns, foreign = watch.stop()
    return Slice(steps, took, cpu_ns, foreign)


def take_turns(
    runs: Mapping[str, Run],
    rounds: int,
    seconds: float | Mapping[str, float],
    max_foreign: float = MAX_FOREIGN,
    max_repeats: int | None = None,
    on_error: Callable[[str, Exception], Any] | None = None,
) -> tuple[dict[str, dict[int, Slice]], int]:
    """Slices of all contestants by name and round, and how many were thrown away.

    Each round begins with another contestant. A slice with more than `max_foreign` is thrown away and measured again;
    after `max_repeats` repetitions in all (default: half as many as there are slices) the rest is taken as it comes, with its share
    recorded. A contestant that raises is left out from then on, and `on_error` is told.
    """
    left = len(runs) * rounds // 2 if max_repeats is None else max_repeats
    slices: dict[str, dict[int, Slice]] = {name: {} for name in runs}
    thrown = 0
    alive = list(runs)
    for turn in range(rounds):
        shift = turn % max(1, len(alive))
        for name in alive[shift:] + alive[:shift]:
            length = seconds if isinstance(seconds, (int, float)) else seconds[name]
            try:
                one = measure_slice(runs[name], length)
                while one.foreign > max_foreign and left > 0:
                    left -= 1
                    thrown += 1
                    one = measure_slice(runs[name], length)
            except Exception as error:
                if on_error is None:
                    raise
                on_error(name, error)
                alive = [other for other in alive if other != name]
                continue
            slices[name][turn] = one
    return slices, thrown
