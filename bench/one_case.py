"""One case in a process of its own, so that nothing of it (memory, threads, a crash) reaches the next."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from bench.cases import Case, builder
from bench.contestants import Contestant
from bench.stats import Watch, take_turns
from bench.store import as_json


def run_case(case: Case, pairs: int, seconds: float, quick: bool, max_foreign: float) -> dict[str, Any]:
    """Measure the case: everything that goes into the results file."""
    began = time.perf_counter()
    raw: dict[str, Any] = {"case": case.name, "env": case.env, "slots": case.slots, "skipped": {}, "failed": {}}
    if case.measure is not None:
        watch = Watch()
        raw["values"] = case.measure(quick)
        raw["foreign"] = round(watch.stop()[1], 4)
    else:
        _race(case, pairs, seconds, max_foreign, raw)
    raw["took_s"] = round(time.perf_counter() - began, 1)
    return raw


def _race(case: Case, pairs: int, seconds: float, max_foreign: float, raw: dict[str, Any]) -> None:
    open_now: dict[str, Contestant] = {}
    raw["start_s"], raw["plans"] = {}, {}
    try:
        for name in case.contestants:
            build = builder(name)
            if isinstance(build, str):
                raw["skipped"][name] = build
                continue
            before = time.perf_counter()
            try:
                one = open_now[name] = build(case.env, case.slots)
                raw["start_s"][name] = round(time.perf_counter() - before, 3)
                one.run(
                    min(0.3, case.slice_s(name, seconds))
                )  # warm up: caches, the first checks of wrappers, our runners' arming
            except Exception as error:
                raw["failed"][name] = f"{type(error).__name__}: {error}"
                if name in open_now:
                    _close(open_now.pop(name))
                continue
            if hasattr(one, "plan"):
                raw["plans"][name] = one.plan
        time.sleep(0.05)  # workers that spin have gone to sleep by now
        watch = Watch()
        time.sleep(0.3)
        raw["idle_cpu"] = round(watch.stop()[0] / 0.3e9, 4)  # cores that contestants use while none is measured

        def note(name: str, error: Exception) -> None:
            raw["failed"][name] = f"{type(error).__name__}: {error}"

        runs = {name: one.run for name, one in open_now.items()}
        lengths = {name: case.slice_s(name, seconds) for name in runs}
        slices, raw["thrown"] = take_turns(runs, pairs, lengths, max_foreign, on_error=note)
        raw["slices"] = as_json(slices)
    finally:
        for one in open_now.values():
            _close(one)


def _close(one: Contestant) -> None:
    try:
        one.close()
    except Exception as error:  # a peer's trouble in closing says nothing about its speed
        print(f"  closing {type(one).__name__}: {error}", file=sys.stderr)


def _end_with(parent: int) -> None:
    """End this session when the program that started it is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main(words: list[str]) -> int:
    """Case name, options as JSON, file for the result."""
    from bench.cases import cases, quick_cases

    warnings.simplefilter("ignore")
    if os.getpgid(0) == os.getpid():  # started as a session of its own
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    name, options, out = words[0], json.loads(words[1]), Path(words[2])
    known = quick_cases() if options["quick"] else cases(options["peers_everywhere"])
    case = next(one for one in known if one.name == name)
    raw = run_case(case, options["pairs"], options["seconds"], options["quick"], options["max_foreign"])
    out.write_text(json.dumps(raw))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
