"""`envfleet inspect DIR`: statistics of a dataset and a picture of its returns and lengths."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from envfleet.cli.options import add_shared, picture

HELP = "show what is in a dataset"
DESCRIPTION = (
    "Prints the statistics of a dataset directory (Parquet or Minari, complete or still being written) and draws returns "
    "and lengths."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="a dataset directory")
    parser.add_argument("--plot", type=picture, metavar="PNG", help="where to draw (default: DIR/_returns.png)")
    parser.add_argument("--no-plot", action="store_true", help="print only")
    add_shared(parser, "json")


def run(args: argparse.Namespace) -> int:
    """Read episode by episode, print, draw."""
    from envfleet.cli.plot import can_draw
    from envfleet.rollout.datasets.open_dataset import iter_rollouts
    from envfleet.rollout.datasets.parquet import read_run
    from envfleet.rollout.stats import StatsBuilder
    from envfleet.util.jsonable import to_jsonable

    builder = StatsBuilder()
    returns: list[float] = []
    lengths: list[int] = []
    shapes: dict[str, str] = {}
    for rollout in iter_rollouts(args.directory):
        builder.add(rollout)
        if not rollout.failed:
            shapes = shapes or _shapes(rollout)
            returns.append(rollout.episode_return)
            lengths.append(len(rollout))
    stats = builder.stats()
    wanted = not args.no_plot and returns and can_draw()
    plot = args.plot or args.directory / "_returns.png" if wanted else None
    if plot is not None:
        _draw(plot, str(args.directory), returns, lengths)
    about = read_run(args.directory)
    if args.json:
        found = {"run": about, "columns": shapes, **dataclasses.asdict(stats), "plot": plot}
        print(json.dumps(to_jsonable(found, unknown=str, nan=False), indent=1))
        return 0
    settings = ", ".join(f"{name} {value}" for name, value in about.items() if value is not None)
    print(f"{args.directory}" + (f" ({settings})" if settings else ""))
    for name, shape in shapes.items():
        print(f"  {name}: {shape}")
    print(stats)
    for kept in sorted(args.directory.glob("_*.damaged-*")):
        print(f"kept as damaged: {kept}")
    if plot is not None:
        print(f"plot: {plot}")
    return 0


def _shapes(rollout: Any) -> dict[str, str]:
    from envfleet.util.trees import tree_leaves

    arrays = rollout.arrays()
    leaves = [leaf for name in ("observations", "actions") for leaf in tree_leaves(arrays[name], name)]
    return {path: f"{leaf.dtype} {list(leaf.shape[1:])} per step" for path, leaf in leaves}


def _draw(path: Path, title: str, returns: list[float], lengths: list[int]) -> None:
    """Returns in order with their running mean, and histograms of returns and lengths."""
    import numpy as np

    from envfleet.cli.plot import draw

    def course(axes: Any) -> None:
        width = min(len(returns), max(10, len(returns) // 20))
        mean = np.convolve(returns, np.ones(width) / width, mode="valid")
        axes.plot(returns, ".", markersize=2, alpha=0.5, label="one episode")
        axes.plot(np.arange(len(mean)) + width - 1, mean, label=f"moving mean of {width} episodes")
        axes.set(xlabel="episode", ylabel="return")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=7)

    def spread(axes: Any) -> None:
        axes.hist(returns, bins=40)
        axes.set(xlabel="return", ylabel="episodes")

    def long(axes: Any) -> None:
        axes.hist(lengths, bins=40)
        axes.set(xlabel="length (steps)", ylabel="episodes")

    draw(path, title, (course, spread, long))
