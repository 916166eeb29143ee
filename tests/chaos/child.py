"""Cases in processes of their own, with a watchdog: a case that hangs or dies is a failure with its stacks.

A case is {"call": "module:function", "args": {…}, "limit_s": …}; its function gives a dict, or fails with an exception.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "ENVFLEET_CHAOS_TOKEN"
_SPARE_S = 20.0  # how long a process may take to start and to end, beyond its cases


def main() -> None:
    """In the child: run the cases that come on stdin, one line of JSON for each on what was stdout."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what envs and libraries print is not a result
    for case in json.loads(sys.stdin.read()):
        faulthandler.dump_traceback_later(case["limit_s"], exit=True)
        lines.write(json.dumps({"begin": True}) + "\n")
        lines.flush()
        started = time.monotonic()
        result = _run(case)
        faulthandler.cancel_dump_traceback_later()
        lines.write(json.dumps({**result, "seconds": time.monotonic() - started}) + "\n")
        lines.flush()


def _run(case: dict[str, Any]) -> dict[str, Any]:
    module, _, name = case["call"].partition(":")
    try:
        function = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return {"problems": [], **(function(**case["args"]) or {})}
    except BaseException as error:
        where = "".join(traceback.format_tb(error.__traceback__, limit=-5))
        return {"problems": [f"{type(error).__name__}: {_words(error)}\n{where[-2000:]}"]}


def _words(error: BaseException) -> str:
    try:
        return f"{error!s:.2500}"
    except BaseException:
        return "(cannot be told)"


def run_cases(cases: list[dict[str, Any]], variables: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run cases one after another in one child; a case that ends the child is failed, the rest goes on in another."""
    results: list[dict[str, Any]] = []
    while len(results) < len(cases):
        results += _one_child(cases[len(results) :], variables or {})
    return results


def _one_child(cases: list[dict[str, Any]], variables: dict[str, str]) -> list[dict[str, Any]]:
    token = uuid.uuid4().hex
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables, TOKEN: token}
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.child"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, cwd=ROOT, env=env, start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = child.communicate(json.dumps(cases), timeout=sum(c["limit_s"] for c in cases) + _SPARE_S)
            ended = f"the process ended with code {child.returncode}"
        except subprocess.TimeoutExpired as late:
            child.kill()
            out = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else (late.stdout or "")
            ended = "the process did not end"
            child.communicate()
        errors.seek(0)
        words = errors.read()[-6000:]
    results = _results(out, len(cases), f"{ended}\n{words}")
    left = left_processes(token)
    if left and results:
        results[-1]["problems"].append(f"left: processes {left}")
    return results


def _results(out: str, count: int, ended: str) -> list[dict[str, Any]]:
    results = [line for line in map(json.loads, out.splitlines()) if "begin" not in line]
    if len(results) < count:  # the next case ended its process
        results.append({"problems": [f"died or hung: {ended}"], "seconds": 0.0, "died": True})
    return results


def left_processes(token: str, within_s: float = 8.0) -> list[str]:
    """Processes that carry the token and do not end by themselves; they are ended here."""
    deadline = time.monotonic() + within_s
    while (found := _with_token(token)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid, _ in found:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
    return [f"{pid} ({what})" for pid, what in found]


def _with_token(token: str) -> list[tuple[int, str]]:
    found, sought = [], f"{TOKEN}={token}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if sought in (entry / "environ").read_bytes().split(b"\0"):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if fields[0] != "Z":
                        found.append((int(entry.name), f"state {fields[0]}, parent {fields[1]}"))
            except OSError:
                continue  # it ended, or is not ours
    return found


def run_batches(batches: Iterable[tuple[list[dict[str, Any]], dict[str, str]]], jobs: int = 2) -> list[Any]:
    """`run_cases` of several batches, a few at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda batch: run_cases(*batch), batches))


if __name__ == "__main__":
    main()
