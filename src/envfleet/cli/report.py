"""`envfleet report DIR [DIR …]`: the page about a run again, or one page about several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from envfleet.errors import BadArgument

HELP = "write the report of a run again, or compare runs"
DESCRIPTION = (
    "Writes report.html of a run folder again from its metrics, also while the run is going on or after it was killed. With "
    "several run folders: one page with their curves over steps and over time, the settings that differ and the results. "
    "The page is one file without scripts that needs no network."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="run folders of `envfleet train`")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write (default: DIR/report.html; several runs: comparison.html)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from envfleet.train.html_report import write_comparison, write_report

    if args.out is not None:
        if args.out.is_dir():
            raise BadArgument(f"--out {args.out} is a directory: give the name of a file")
        args.out.parent.mkdir(parents=True, exist_ok=True)
    if len(args.folders) == 1:
        path = write_report(args.folders[0], path=args.out)
    else:
        path = write_comparison(args.folders, args.out or Path("comparison.html"))
    print(f"report: {path}")
    return 0
