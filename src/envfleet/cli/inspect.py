"""`envfleet inspect DIR`: statistics of a dataset and a picture of its returns and lengths."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.errors import BackendMissing
from envfleet.util.jsonable import to_jsonable


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command's arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="show what is in a dataset",
        description="Prints the statistics of a dataset directory (Parquet or Minari, complete or still being written) "
        "and draws returns and lengths.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a dataset directory")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="where to draw (default: DIR/_returns.png)")
    parser.add_argument("--no-plot", action="store_true", help="print only")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Read episode by episode, print, draw."""
    from envfleet.rollout.datasets.open_dataset import iter_rollouts
    from envfleet.rollout.datasets.parquet import read_run
    from envfleet.rollout.stats import StatsBuilder

    builder = StatsBuilder()
    returns: list[float] = []
    lengths: list[int] = []
    shapes: dict[str, str] = {}
    for rollout in iter_rollouts(args.directory):
        builder.add(rollout)
        if not shapes and not rollout.failed:
            shapes = _shapes(rollout)
        if not rollout.failed:
            returns.append(rollout.episode_return)
            lengths.append(len(rollout))
    stats = builder.stats()
    plot = None if args.no_plot or not returns else args.plot or args.directory / "_returns.png"
    if plot is not None:
        draw(np.array(returns), np.array(lengths), plot, str(args.directory))
    if args.json:
        found = {"run": read_run(args.directory), "columns": shapes, **dataclasses.asdict(stats), "plot": plot}
        print(json.dumps(to_jsonable(found, unknown=str, nan=False), indent=1))
        return 0
    told = ", ".join(f"{name} {value}" for name, value in read_run(args.directory).items() if value is not None)
    print(f"{args.directory}" + (f" ({told})" if told else ""))
    for name, shape in shapes.items():
        print(f"  {name}: {shape}")
    print(stats)
    for kept in sorted(args.directory.glob("_*.damaged-*")):
        print(f"kept as damaged: {kept}")
    if plot is not None:
        print(f"picture: {plot}")
    return 0


def _shapes(rollout: Any) -> dict[str, str]:
    from envfleet.util.trees import tree_leaves

    arrays = rollout.arrays()
    leaves = [leaf for name in ("observations", "actions") for leaf in tree_leaves(arrays[name], name)]
    return {path: f"{leaf.dtype} {list(leaf.shape[1:])} a step" for path, leaf in leaves}


def draw(returns: npt.NDArray[Any], lengths: npt.NDArray[Any], path: Path, title: str) -> None:
    """Draw returns in order with their running mean, and histograms of returns and lengths."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise BackendMissing("matplotlib", extra="datasets") from missing
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    course, spread, long = figure.subplots(1, 3)
    figure.suptitle(title, fontsize=9)
    course.plot(returns, ".", markersize=2, alpha=0.5)
    width = max(1, min(len(returns), len(returns) // 20))
    mean = np.convolve(returns, np.ones(width) / width, mode="valid")
    course.plot(np.arange(len(mean)) + width - 1, mean)
    course.set(xlabel="episode", ylabel="return")
    spread.hist(returns, bins=40)
    spread.set(xlabel="return", ylabel="episodes")
    long.hist(lengths, bins=40)
    long.set(xlabel="length (steps)", ylabel="episodes")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
