"""`envfleet tune ENV`: measures every backend and worker count, where `backend="auto"` estimates."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from envfleet.cli.options import add_shared, picture, positives, seconds, words
from envfleet.errors import BadArgument, FleetError
from envfleet.util.machine import usable_cpus
from envfleet.util.text import first_line

HELP = "find the best backend and worker count for an environment"
DESCRIPTION = (
    "Measures steps per second of every backend and worker count for an environment on this machine, prints a line for "
    "each and the best of each size, draws them, and says what backend='auto' would choose. --workers and --backends "
    "choose what is measured. `envfleet sweep` is the same with --workers 1,2,4,8 --backends serial,thread,shm."
)

#: (backend, workers, isolate)
Setting = tuple[str, int | None, bool]


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_shared(parser, "env")
    add_shared(
        parser,
        "num_envs",
        type=positives,
        help="slot counts, comma-separated (default: 8,64; with --workers the largest of these, at least 8)",
    )
    add_shared(parser, "num_workers", type=positives, help="worker counts, comma-separated (default: those that may be faster)")
    parser.add_argument("--backends", type=words, metavar="NAMES", help="backends, comma-separated (default: all)")
    parser.add_argument("--seconds", type=seconds, default=1.0, help="how long each setting is measured")
    parser.add_argument("--out", type=picture, metavar="PNG", help="where to draw (default: tune-ENV.png)")
    parser.add_argument("--no-plot", action="store_true", help="print only")
    add_shared(parser, "json")


def run(args: argparse.Namespace) -> int:
    """Measure, print, draw; 1 when no setting could be run."""
    from envfleet.cli.plot import can_draw, draw
    from envfleet.core.construct import make
    from envfleet.envs.registry import resolve_env
    from envfleet.slots.factories import resolve

    def show(point: Point) -> None:
        if not args.json:
            found = f"{point.steps_per_s:>12,.0f} steps/s  start {point.start_s:5.2f} s"
            print(f"{point.num_slots:>6} slots  {point.name:<18} {point.problem or found}", flush=True)

    for backend in args.backends or ():
        if backend not in (choices := ("serial", "shm", "pipe", "thread", "aio")):
            raise BadArgument(f"--backends {backend}: choose some of {', '.join(choices)}")
    env = resolve(resolve_env(args.env))
    with make(env, 1) as fleet:
        fleet.reset(seed=0)  # an environment that cannot be made is one error here, not one for every setting
    plot = not args.no_plot and not args.json and can_draw()
    counts = args.num_envs or ([max(8, *args.num_workers)] if args.num_workers else [8, 64])
    points = tune(env, counts, args.seconds, show, args.num_workers, args.backends)
    good = [point for point in points if not point.problem]
    if not good:
        return 1
    plans = {}
    for count in counts:
        with make(env, count, backend="auto") as fleet:
            plans[count] = str(fleet.plan)
    if args.json:
        grid = [{**dataclasses.asdict(point), "name": point.name} for point in points]
        print(json.dumps({"env": args.env, "grid": grid, "auto": plans}, indent=1))
        return 0
    for best in best_of(good):
        print(
            f"best: {best.name} with {best.steps_per_s:,.0f} steps/s on {best.num_slots} slots; auto takes {plans[best.num_slots]}"
        )
    if plot:
        path = args.out or Path(f"tune-{args.env.replace('/', '-').replace(':', '-')}.png")
        draw(path, args.env, [functools.partial(_bars, good, best) for best in best_of(good)], height=4.2)
        print(f"plot: {path}")
    return 0


def best_of(points: Sequence[Point]) -> list[Point]:
    """The fastest setting of every slot count."""
    counts = dict.fromkeys(point.num_slots for point in points)
    return [max((p for p in points if p.num_slots == count), key=lambda point: point.steps_per_s) for count in counts]


def _bars(points: Sequence[Point], best: Point, axes: Any) -> None:
    shown = [point for point in points if point.num_slots == best.num_slots]
    colours = ["#2a7f62" if point is best else "#9db4c0" for point in shown]
    axes.barh([point.name for point in shown], [point.steps_per_s for point in shown], color=colours)
    axes.invert_yaxis()
    axes.set(title=f"{best.num_slots} slots", xlabel="steps per second (green: the fastest)", ylabel="backend × workers")
    axes.xaxis.set_major_formatter(lambda rate, _: f"{rate / 1000:g}k" if rate >= 1000 else f"{rate:g}")


def grid(num_slots: int, cpus: int, workers: Sequence[int] | None = None, backends: Sequence[str] | None = None) -> list[Setting]:
    """The settings to try: those asked for, else those that may pay.

    Example:
        >>> grid(4, 2)[:3]
        [('serial', None, True), ('shm', 1, True), ('shm', 2, True)]
        >>> grid(4, 2, workers=[1, 2], backends=["serial", "thread"])
        [('serial', None, True), ('thread', 1, True), ('thread', 2, True)]
    """
    counts = sorted({count for count in (1, 2, cpus - 1, cpus, 2 * cpus) if 1 <= count <= num_slots})
    out: list[Setting] = [("serial", None, True)]
    if workers or backends:
        others = [backend for backend in backends or ("shm", "pipe", "thread", "aio") if backend != "serial"]
        asked: list[Setting] = [(backend, count, True) for backend in others for count in workers or counts]
        return [*(out if backends is None or "serial" in backends else []), *asked]
    out += [("shm", count, True) for count in counts]
    out += [("shm", count, False) for count in counts if 2 <= count <= cpus]
    out += [("pipe", cpus, True)] if num_slots >= cpus else []
    out += [("thread", count, True) for count in sorted({min(num_slots, cpus), min(num_slots, 64)})]
    return [*out, ("aio", min(num_slots, 64), True)]


def measure(env: Any, num_slots: int, setting: Setting, seconds: float = 1.0) -> Point:
    """Steps per second of one setting, with random actions made beforehand and rows read in place."""
    from envfleet.core.construct import make

    backend, workers, isolate = setting
    start = time.perf_counter()
    options: dict[str, Any] = {"backend": backend, "num_workers": None if backend == "serial" else workers}
    if backend == "shm":
        options["isolate"] = isolate
    try:
        with make(env, num_slots, **options) as fleet:
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
            return Point(backend, workers, isolate, num_slots, statistics.median(rates), start_s)
    except FleetError as problem:
        return Point(backend, workers, isolate, num_slots, 0.0, 0.0, first_line(problem))


def tune(
    env: Any,
    num_slots: Iterable[int] = (8, 64),
    seconds: float = 1.0,
    on_point: Callable[[Point], None] = lambda point: None,
    workers: Sequence[int] | None = None,
    backends: Sequence[str] | None = None,
) -> list[Point]:
    """Measure the grid for some slot counts; `on_point` is called with each point as it is found."""
    points = []
    for count in num_slots:
        for setting in grid(count, usable_cpus(), workers, backends):
            points.append(measure(env, count, setting, seconds))
            on_point(points[-1])
    return points
