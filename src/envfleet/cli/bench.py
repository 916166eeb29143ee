"""`envfleet bench`: the benchmark of the checkout, with the same options as `python -m bench`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from envfleet.errors import FleetError

#: The checkout this module lies in, when it does: src/envfleet/cli/bench.py.
_CHECKOUT = Path(__file__).resolve().parents[3]


class NoBenchHere(FleetError):
    """The benchmark is part of the source checkout, not of the installed package."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options, for `envfleet bench` and `python -m bench` alike."""
    parser.add_argument("--quick", action="store_true", help="a smoke run of under a minute; its numbers mean nothing")
    parser.add_argument("--only", metavar="REGEX", help="only cases whose name matches, such as 'cartpole|ant-64'")
    parser.add_argument("--pairs", type=_positive, help="slices of each contestant (default: 25)")
    parser.add_argument("--seconds", type=float, help="length of a slice (default: 0.15)")
    parser.add_argument("--out", metavar="FILE", help="results file (default: bench/results/<date>.json)")
    parser.add_argument(
        "--resume", action="store_true", help="go on with --out, or the latest results: only missing cases"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing: write tables and plots from results")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/performance.md and docs/images alone")
    parser.add_argument("--list", action="store_true", help="list the cases and how long they take")
    parser.add_argument(
        "--peers-everywhere", action="store_true", help="peers at 8 and 256 slots too: several times as long"
    )


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure throughput here",
        description="Measures our backends, the machine's limit and the installed peers in turns, and prints ratios.",
    )
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Hand over to the checkout's `bench`."""
    if not (_CHECKOUT / "bench" / "__main__.py").is_file():
        raise NoBenchHere(
            "the benchmark is part of the source checkout, not of the installed package: "
            "clone the repository and run `make bench` in it"
        )
    if str(_CHECKOUT) not in sys.path:
        sys.path.insert(0, str(_CHECKOUT))
    code = importlib.import_module("bench.__main__").run(args)
    assert isinstance(code, int)
    return code


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number from 1 up")
    return value
