"""`envfleet tune ENV`: try every backend and worker count, print the grid, draw it, and compare it with `auto`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

from envfleet.errors import BackendMissing, BadArgument


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "tune",
        help="find the best backend and worker count for an environment",
        description="Measures steps per second of every backend and worker count for an environment on this machine, "
        "prints the grid with the best of each size marked, and what backend='auto' would choose.",
    )
    parser.add_argument("env", help="a Gymnasium id")
    parser.add_argument("--num-envs", default="8,64", help="slot counts, comma-separated (default: 8,64)")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each setting is measured (default: 1)")
    parser.add_argument("--out", type=Path, help="write the plot (PNG) here (default: tune-ENV.png)")
    parser.add_argument("--no-plot", action="store_true", help="print the table only")
    parser.add_argument("--json", action="store_true", help="print the grid as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Measure, print, plot."""
    from envfleet.cli.tuning import Point, tune
    from envfleet.core.construct import make

    try:
        counts = [int(word) for word in args.num_envs.split(",")]
    except ValueError:
        raise BadArgument(f"--num-envs {args.num_envs!r}: give whole numbers separated by commas") from None
    if min(counts) < 1 or args.seconds <= 0:
        raise BadArgument("--num-envs and --seconds must be above 0")

    def tell(point: Point) -> None:
        if not args.json:
            found = f"{point.steps_per_s:>12,.0f} steps/s  start {point.start_s:5.2f} s"
            print(f"{point.num_slots:>6} slots  {point.name:<18} {point.problem or found}", flush=True)

    points = tune(args.env, counts, args.seconds, tell)
    plans = {}
    for count in counts:
        with make(args.env, count, backend="auto") as fleet:
            plans[count] = str(fleet.plan)
    if args.json:
        grid = [{**dataclasses.asdict(point), "name": point.name} for point in points]
        print(json.dumps({"env": args.env, "grid": grid, "auto": plans}, indent=1))
        return 0
    for count in counts:
        best = max((point for point in points if point.num_slots == count), key=lambda point: point.steps_per_s)
        print(f"{count} slots: best is {best.name} with {best.steps_per_s:,.0f} steps/s; auto takes {plans[count]}")
    if not args.no_plot:
        where = args.out or Path(f"tune-{args.env.replace('/', '-')}.png")
        _plot(points, args.env, where)
        print(f"plot: {where}")
    return 0


def _plot(points: list[Any], title: str, where: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendMissing("the plot", extra="datasets")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    counts = sorted({point.num_slots for point in points})
    figure, axes = plt.subplots(1, len(counts), figsize=(5 * len(counts), 4.2), squeeze=False)
    for axis, count in zip(axes[0], counts):
        mine = [point for point in points if point.num_slots == count and not point.problem]
        best = max(point.steps_per_s for point in mine)
        axis.barh(
            [point.name for point in mine],
            [point.steps_per_s for point in mine],
            color=["#2a7f62" if point.steps_per_s == best else "#9db4c0" for point in mine],
        )
        axis.invert_yaxis()
        axis.set_title(f"{title}, {count} slots")
        axis.set_xlabel("steps per second")
    figure.tight_layout()
    try:
        figure.savefig(where, dpi=110)
    except OSError as problem:
        raise BadArgument(f"--out {where}: {problem}") from None
    finally:
        plt.close(figure)
