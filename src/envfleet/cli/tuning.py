"""Measure a grid of backends and worker counts for one environment: what `backend="auto"` guesses, found by trying."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from envfleet.core.construct import make
from envfleet.errors import FleetError
from envfleet.util.machine import usable_cpus


@dataclasses.dataclass(frozen=True)
class Point:
    """One setting of the grid and what it reached; `steps_per_s` 0 with `problem` when it could not be run."""

    backend: str
    num_workers: int | None
    isolate: bool
    num_slots: int
    steps_per_s: float
    start_s: float
    problem: str = ""

    @property
    def name(self) -> str:
        """The setting in a few characters."""
        workers = f" ×{self.num_workers}" if self.num_workers else ""
        return f"{self.backend}{workers}{'' if self.isolate else ' +parent'}"


def grid(num_slots: int, cpus: int) -> list[tuple[str, int | None, bool]]:
    """The settings worth trying: (backend, workers, isolate).

    Example:
        >>> grid(4, 2)[:3]
        [('serial', None, True), ('shm', 1, True), ('shm', 2, True)]
    """
    workers = sorted({count for count in (1, 2, cpus - 1, cpus, 2 * cpus) if 1 <= count <= num_slots})
    out: list[tuple[str, int | None, bool]] = [("serial", None, True)]
    out += [("shm", count, True) for count in workers]
    out += [("shm", count, False) for count in workers if 2 <= count <= cpus]
    out += [("pipe", cpus, True)] if num_slots >= cpus else []
    out += [("thread", count, True) for count in sorted({min(num_slots, cpus), min(num_slots, 64)})]
    return [*out, ("aio", min(num_slots, 64), True)]


def measure(
    env: Any, num_slots: int, setting: tuple[str, int | None, bool], seconds: float = 1.0, **options: Any
) -> Point:
    """Steps per second of one setting, with random actions made beforehand and rows read in place."""
    backend, workers, isolate = setting
    start = time.perf_counter()
    try:
        extra: dict[str, Any] = {} if backend in ("serial", "auto") else {"num_workers": workers}
        with make(
            env, num_slots, backend=backend, isolate=isolate if backend == "shm" else None, **extra, **options
        ) as fleet:
            start_s = time.perf_counter() - start
            space = fleet.action_space
            space.seed(0)
            actions = [space.sample() for _ in range(32)]
            fleet.reset(seed=0)
            for action in actions[:4]:
                fleet.step(action, copy=False)
            rates, begun = [], time.perf_counter()
            while time.perf_counter() - begun < seconds:
                slice_start, steps = time.perf_counter(), 0
                while time.perf_counter() - slice_start < seconds / 5:
                    fleet.step(actions[steps % 32], copy=False)
                    steps += 1
                rates.append(steps * num_slots / (time.perf_counter() - slice_start))
            return Point(backend, workers, isolate, num_slots, float(np.median(rates)), start_s)
    except FleetError as problem:
        return Point(backend, workers, isolate, num_slots, 0.0, 0.0, str(problem).splitlines()[0])


def tune(
    env: Any,
    num_slots: Iterable[int] = (8, 64),
    seconds: float = 1.0,
    tell: Callable[[Point], None] = lambda point: None,
    **options: Any,
) -> list[Point]:
    """Measure the whole grid for some slot counts; `tell` hears of each point as it is found."""
    points = []
    for count in num_slots:
        for setting in grid(count, usable_cpus()):
            point = measure(env, count, setting, seconds, **options)
            points.append(point)
            tell(point)
    return points
