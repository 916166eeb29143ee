"""`python -m bench`: measure ours, the limit and the peers side by side, and write down what came out."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import report, store
from bench.cases import Case, cases, quick_cases
from bench.stats import MAX_FOREIGN
from envfleet.cli.options import positive
from envfleet.slots import compiled_core

QUICK_PAIRS, QUICK_SECONDS = 2, 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Run; 0 when every case gave a result, 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    _add_arguments(parser)
    args = parser.parse_args(argv)
    # A case is a session of its own, so nobody ends it but we: also when this program is told to end.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    return run(args)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a smoke run of under a minute; its numbers mean nothing")
    parser.add_argument("--only", metavar="REGEX", help="only cases whose name matches, such as 'cartpole|ant-64'")
    parser.add_argument("--pairs", type=positive, help="slices of each contestant (default: 25)")
    parser.add_argument("--seconds", type=float, help="length of a slice (default: 0.15)")
    parser.add_argument("--out", metavar="FILE", help="results file (default: bench/results/<date>.json)")
    parser.add_argument("--resume", action="store_true", help="go on with --out, or the latest results: only missing cases")
    parser.add_argument("--report", action="store_true", help="measure nothing: write tables and plots from results")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/performance.md and docs/images alone")
    parser.add_argument("--list", action="store_true", help="list the cases and how long they take")
    parser.add_argument("--peers-everywhere", action="store_true", help="peers at 8 and 256 slots too: several times as long")


def run(args: argparse.Namespace) -> int:
    """Run with parsed arguments."""
    # Many short turns rather than few long ones: what the host does to a core changes within a second.
    pairs = args.pairs or (QUICK_PAIRS if args.quick else 25)
    seconds = args.seconds or (QUICK_SECONDS if args.quick else 0.15)
    chosen = [
        case for case in (quick_cases() if args.quick else cases(args.peers_everywhere)) if re.search(args.only or "", case.name)
    ]
    if (core := compiled_core.status()) != "present":
        print(
            f"bench: the compiled core is {core}. The results are those of the Python version, which is slower", file=sys.stderr
        )
    if args.list:
        for case in chosen:
            print(f"{case.name:<16} ~{case.seconds(pairs, seconds):4.0f} s  {', '.join(case.contestants)}")
        print(f"about {sum(case.seconds(pairs, seconds) for case in chosen) / 60:.0f} min on a quiet machine")
        return 0
    path, results = _results(args)
    options = {"quick": args.quick, "pairs": pairs, "seconds": seconds, "peers_everywhere": args.peers_everywhere,
               "max_foreign": 1.0 if args.quick else MAX_FOREIGN}  # fmt: skip
    results["about"]["options"] = options
    if not args.report:
        _run_cases(chosen, options, path, results)
    print(report.as_text(results))
    if not args.no_docs and not args.quick:
        report.write_docs(results)
        print(f"written into {report.DOCS}")
    print(f"results: {path}")
    return 1 if any("error" in raw for raw in results["cases"].values()) else 0


def _results(args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    taken_up = Path(args.out) if args.out else store.latest_path()
    if (args.resume or args.report) and taken_up is not None and taken_up.exists():
        return taken_up, json.loads(taken_up.read_text())
    return Path(args.out) if args.out else store.new_path(), {"about": store.about(), "cases": {}}


def _run_cases(chosen: list[Case], options: dict[str, Any], path: Path, results: dict[str, Any]) -> None:
    left = [case for case in chosen if results["cases"].get(case.name, {"error": ""}).get("error") is not None]
    need = sum(case.seconds(options["pairs"], options["seconds"]) for case in left)
    print(f"{len(left)} cases, about {need / 60:.0f} min on a quiet machine", flush=True)
    began = time.perf_counter()
    for case in left:
        raw = _in_own_process(case, options)
        results["cases"][case.name] = raw
        results["about"]["took_s"] = round(results["about"].get("took_s", 0) + time.perf_counter() - began, 1)
        began = time.perf_counter()
        store.save(path, results)
        print(report.case_line(raw), flush=True)


def _in_own_process(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    limit_s = 120 + 4 * case.seconds(options["pairs"], options["seconds"])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "case.json"
        root = store.HERE.parent
        paths = [str(root), str(root / "src"), os.environ.get("PYTHONPATH", "")]
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.one_case", case.name, json.dumps(options), str(out)],
            cwd=root, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end_group(process)
            return {"case": case.name, "error": f"no result after {limit_s:.0f} s"}
        except BaseException:
            _end_group(process)
            raise
        _end_group(process)  # what a peer may have left behind
        if not out.exists():
            last = errors.strip().splitlines()[-1:] or ["no message"]
            return {"case": case.name, "error": f"exit code {process.returncode}: {last[0]}"}
        raw: dict[str, Any] = json.loads(out.read_text())
        return raw


def _end_group(process: subprocess.Popen[str]) -> None:
    """The case's process and what it forked; our own workers end by themselves when it goes."""
    try:
        os.killpg(process.pid, signal.SIGKILL)  # its own session, so its pid is its group
    except (ProcessLookupError, PermissionError):
        pass  # all gone
    process.wait()


if __name__ == "__main__":
    sys.exit(main())
