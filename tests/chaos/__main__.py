"""`python -m tests.chaos --minutes 10 --seed 1 [--backend shm] [--only K]`: random fleets, random mischief, every row checked."""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import threading
import time
from typing import Any

from .child import run_cases
from .scenario import KINDS, WAYS

LIMIT_S = 160.0
_SUMS = ("rows", "fault_rows", "faults", "calls", "kills", "stops", "mischiefs", "interrupts")


def case_of(
    number: int, seed: int, kinds: list[tuple[str, str]], ops: int, budget_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    """Scenario `number` of a run: (case, environment variables)."""
    way, theme = kinds[number % len(kinds)]
    own = random.Random(f"{seed}/{number}").randrange(10**9)
    args = {"way": way, "theme": theme, "seed": own, "ops": ops, "budget_s": budget_s}
    compiled = random.Random(f"{seed}/{number}/core").choice("10")
    return {"call": "scenario:scenario", "args": args, "limit_s": LIMIT_S}, {"ENVFLEET_COMPILED": compiled}


class Run:
    """Scenarios, two at a time, until the time is over; what they found."""

    def __init__(self, seed: int, kinds: list[tuple[str, str]], minutes: float, ops: int, budget_s: float) -> None:
        self.seed, self.kinds, self.ops, self.budget_s = seed, kinds, ops, budget_s
        self.until = time.monotonic() + 60 * minutes
        self.numbers = itertools.count()
        self.found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self.failed: list[tuple[int, str, list[str]]] = []
        self._lock = threading.Lock()

    def work(self) -> None:
        """One of the two."""
        while time.monotonic() < self.until:
            with self._lock:
                number = next(self.numbers)
            self.one(number)

    def one(self, number: int) -> None:
        """Run a scenario and keep what it found."""
        case, variables = case_of(number, self.seed, self.kinds, self.ops, self.budget_s)
        (result,) = run_cases([case], variables)
        kind = case["args"]["way"], case["args"]["theme"]
        with self._lock:
            self.found.setdefault(kind, []).append(result)
            if result["problems"]:
                core = "compiled" if variables["ENVFLEET_COMPILED"] == "1" else "python"
                self.failed.append((number, f"{kind[0]} / {kind[1]} ({core})", result["problems"]))
                print(f"FAILED --seed {self.seed} --only {number}: {kind}, {core}: {result['problems'][0][:300]}", flush=True)

    def report(self) -> int:
        """The table; 1 when something failed."""
        everything = [result for results in self.found.values() for result in results]
        print(f"\n{'scenario':28} {'runs':>5} {'rows':>8} {'faults':>7} {'kills':>6} {'interr.':>8} {'failed':>7}")
        for (way, theme), results in sorted(self.found.items()):
            sums = {name: sum(result.get(name, 0) for result in results) for name in _SUMS}
            failed = sum(bool(result["problems"]) for result in results)
            told = sums["fault_rows"] + sums["faults"]
            print(f"{way + ' / ' + theme:28} {len(results):5} {sums['rows']:8} {told:7} {sums['kills'] + sums['stops']:6} "
                  f"{sums['interrupts']:8} {failed:7}")  # fmt: skip
        self._summary(everything)
        return 1 if self.failed else 0

    def _summary(self, results: list[dict[str, Any]]) -> None:
        problems = [problem for result in results for problem in result["problems"]]
        print("\n| what | count |\n|---|---|")
        for name in _SUMS:
            print(f"| {name.replace('_', ' ')} | {sum(result.get(name, 0) for result in results):,} |")
        for name in ("worst_recv_s", "worst_close_s"):
            print(f"| {name.replace('_', ' ')} | {max((r.get(name, 0.0) for r in results), default=0.0):.1f} |")
        for name, word in (("wrong rows", "wrong:"), ("hangs", "hang"), ("left-overs", "left:"), ("late", "late:")):
            print(f"| {name} | {sum(word in problem[:200] for problem in problems)} |")
        print(f"| scenarios | {len(results)} |\n| failed scenarios | {len(self.failed)} |")
        for number, kind, said in self.failed:
            print(f"\n--seed {self.seed} --only {number}   {kind}")
            for problem in said:
                print("   ", problem[:1500].replace("\n", "\n    "))


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="default: drawn, and printed")
    parser.add_argument("--backend", default=None, help=f"only ways that begin so: {', '.join(WAYS)}")
    parser.add_argument("--theme", default=None)
    parser.add_argument("--only", type=int, default=None, help="run scenario K of the seed again")
    parser.add_argument("--ops", type=int, default=150, help="operations in a scenario")
    parser.add_argument("--budget", type=float, default=8.0, help="seconds after which a scenario begins no more of them")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    kinds = [k for k in KINDS if (not given.backend or k[0].startswith(given.backend)) and given.theme in (None, k[1])]
    if not kinds:
        parser.error(f"no such scenarios; ways: {', '.join(WAYS)}")
    print(f"seed {seed}, {len(kinds)} kinds of scenario, {given.jobs} at a time, {os.cpu_count()} cores", flush=True)
    run = Run(seed, kinds, given.minutes, given.ops, given.budget)
    if given.only is not None:
        run.one(given.only)
        return run.report()
    workers = [threading.Thread(target=run.work) for _ in range(given.jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return run.report()


if __name__ == "__main__":
    sys.exit(main())
