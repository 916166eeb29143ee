"""`envfleet sweep ENV --workers 1,2,4,8 --backends serial,thread,shm`: throughput by worker count, as table and plot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from envfleet.cli.tuning import Point
from envfleet.errors import BackendMissing, BadArgument


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command's arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "sweep",
        help="throughput by number of workers",
        description="Measures the steps per second of an environment for every worker count on every backend, prints a "
        "table and saves a plot. `serial` has one worker, the caller, and is measured once.",
    )
    parser.add_argument("env", help="a Gymnasium id")
    parser.add_argument("--workers", default="1,2,4,8", help="worker counts (default: 1,2,4,8)")
    parser.add_argument("--backends", default="serial,thread,shm", help="backends (default: serial,thread,shm)")
    parser.add_argument("--num-envs", type=int, help="environments (default: the largest worker count, at least 8)")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each setting is measured (default: 1)")
    parser.add_argument("--out", type=Path, metavar="PNG", help="where to draw (default: sweep-ENV.png)")
    parser.add_argument("--no-plot", action="store_true", help="print only")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, print, draw; 1 when no setting could be run."""
    from envfleet.cli.collect import _env
    from envfleet.cli.tuning import measure

    try:
        workers = sorted({int(word) for word in args.workers.split(",")})
    except ValueError:
        raise BadArgument(f"--workers {args.workers!r}: give whole numbers separated by commas") from None
    if workers[0] < 1 or args.seconds <= 0:
        raise BadArgument("--workers and --seconds must be above 0")
    backends = [word.strip() for word in args.backends.split(",") if word.strip()]
    num_envs = args.num_envs or max(8, workers[-1])
    env = _env(args.env)
    points: dict[tuple[str, int], Point] = {}
    print(f"{args.env}, {num_envs} environments, steps per second")
    print(f"{'backend':<10}" + "".join(f"{count:>12}" for count in workers) + "   workers", flush=True)
    for backend in backends:
        print(f"{backend:<10}", end="", flush=True)
        for count in workers[:1] if backend == "serial" else workers:
            point = measure(env, num_envs, (backend, count, True), args.seconds)
            points[backend, count] = point
            print(f"{'failed' if point.problem else f'{point.steps_per_s:,.0f}':>12}", end="", flush=True)
        print()
    for (backend, count), point in points.items():
        if point.problem:
            print(f"{backend} with {count} workers: {point.problem}")
    good = [point for point in points.values() if not point.problem]
    if not good:
        return 1
    best = max(good, key=lambda point: point.steps_per_s)
    print(f"best: {best.name} with {best.steps_per_s:,.0f} steps/s")
    if not args.no_plot:
        path = args.out or Path(f"sweep-{args.env.replace('/', '-').replace(':', '-')}.png")
        draw(points, path, f"{args.env}, {num_envs} environments")
        print(f"picture: {path}")
    return 0


def draw(points: dict[tuple[str, int], Point], path: Path, title: str) -> None:
    """Draw a line per backend; serial, which has one worker, as a level to compare with."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise BackendMissing("matplotlib", extra="datasets") from missing
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for backend in dict.fromkeys(backend for backend, _ in points):
        found = [(count, p.steps_per_s) for (name, count), p in points.items() if name == backend and not p.problem]
        if not found:
            continue
        if backend == "serial":
            axes.axhline(found[0][1], linestyle="--", label="serial", color="grey")
        else:
            axes.plot(*zip(*found), marker="o", label=backend)
    axes.set(xlabel="workers", ylabel="steps per second", title=title)
    axes.set_ylim(bottom=0)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
