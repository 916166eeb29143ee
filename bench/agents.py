"""Many agents: agent-steps per second of our fleets, the limit of this machine, SuperSuit and AgileRL, in one run.

    python bench/agents.py                     all cases with the targets, met or missed (some 4 minutes, quiet machine)
    python bench/agents.py --only spread-64    one case
    python bench/agents.py --quick             everything once, to see that it runs; no figure of it is worth anything

Contestants take turns in short slices, and a ratio is the median over slices of the same round. An agent-step is one action of
one agent that the environment took. The limit is one process per core that loops over its own environments and tells nobody.
AgileRL runs in a venv of its own (`python -m bench.peers.install agilerl`) and is left out where that is not there.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from bench.agents_contestants import GAMES, OURS, AgentLimit, AgileRL, Batched, Ours, PerEnv, SuperSuit  # noqa: E402
from bench.contestants import Contestant  # noqa: E402
from bench.peers import remote  # noqa: E402
from bench.stats import MAX_FOREIGN, Slice, estimate, ratio, short, take_turns  # noqa: E402
from bench.targets import Row  # noqa: E402

warnings.filterwarnings("ignore", category=DeprecationWarning)


# -- the run -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    env: str
    slots: int
    contestants: tuple[str, ...]


RACE = ("limit", *OURS, "SuperSuit 0 cpus", "SuperSuit 2 cpus", "AgileRL async (2 agents)")
INFERENCE = ("per-env inference", *(f"batched, {name}" for name in OURS))
CASES = (
    Case("spread-64", "spread", 64, RACE),
    Case("spread-8", "spread", 8, RACE),
    Case("twoagents-64", "twoagents", 64, RACE),
    Case("twoagents-8", "twoagents", 8, RACE),
    Case("connect-four-64", "connect_four", 64, INFERENCE),
    Case("connect-four-raw-64", "connect_four_raw", 64, INFERENCE),
)


def build(name: str, case: Case) -> Contestant | str:
    """The contestant, or why it cannot take part."""
    env, slots = case.env, case.slots
    try:
        if name == "limit":
            return AgentLimit(env, slots)
        if name in OURS:
            return Ours(env, slots, **OURS[name])
        if name.startswith("SuperSuit"):
            return SuperSuit(env, slots, int(name.split()[1]))
        if name == "per-env inference":
            return PerEnv(env, slots)
        if name.startswith("batched, "):
            return Batched(env, slots, **OURS[name.removeprefix("batched, ")])
    except ModuleNotFoundError as missing:
        return f"{missing.name} is not installed"
    venv, script, mode = remote.PEERS[name]
    if isinstance(why := remote.builder(name), str):
        return why
    return AgileRL(remote.VENVS / venv / "bin" / "python", script, mode, env, slots)


def race(case: Case, rounds: int, seconds: float, max_foreign: float) -> dict[str, dict[int, Slice]]:
    """Slices by contestant and round."""
    open_now: dict[str, Contestant] = {}
    failed: list[str] = []
    try:
        for name in case.contestants:
            one = build(name, case)
            if isinstance(one, str):
                print(f"  {name}: left out, {one}", flush=True)
                continue
            open_now[name] = one
            one.run(min(0.2, seconds))  # warm up
        time.sleep(0.05)  # workers that spin have gone to sleep by now
        runs = {name: one.run for name, one in open_now.items()}
        slices, thrown = take_turns(
            runs, rounds, seconds, max_foreign, on_error=lambda name, error: failed.append(f"{name}: {error}")
        )
    finally:
        for one in open_now.values():
            one.close()
    foreign = estimate([one.foreign for each in slices.values() for one in each.values()]).median
    print(f"  {thrown} slices measured again; strangers used {foreign:.0%} of the CPUs in the rest", *failed, sep="\n  ")
    return {name: each for name, each in slices.items() if each}


def table(case: Case, slices: dict[str, dict[int, Slice]]) -> None:
    base = case.contestants[0]
    print(f"  {'':28s} agent-steps/s   of {base}")
    for name, each in slices.items():
        rate = estimate([one.rate for one in each.values()])
        print(f"  {name:28s} {short(rate.median):>12s}    {ratio(each, slices[base])}", flush=True)


def best(slices: dict[str, dict[int, Slice]], names: list[str]) -> str | None:
    found = [name for name in names if name in slices]
    return max(found, key=lambda name: estimate([one.rate for one in slices[name].values()]).median, default=None)


def targets(case: Case, slices: dict[str, dict[int, Slice]]) -> list[Row]:
    """What was to be reached; "ours" is the fastest of our ways, and the row says which."""
    if (ours := best(slices, [name for name in slices if "ours" in name])) is None:
        return []
    goals: list[tuple[str, float]] = []
    peers = [name for name in slices if name.startswith(("SuperSuit", "AgileRL"))]
    if case.env == "spread":
        goals = [("limit", 0.9 if case.slots == 64 else 0.75), *((peer, 1.0) for peer in peers)]
    elif case.env == "twoagents":
        goals = [(peer, 5.0) for peer in peers]
    elif case.env in GAMES:
        goals = [("per-env inference", 3.0)]
    return [
        Row(case.name, f"{ours} over {other}", goal, ratio(slices[ours], slices[other]))
        for other, goal in goals
        if other in slices
    ]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    parser.add_argument("--pairs", type=int, default=11, help="rounds in which every contestant runs once")
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a slice")
    parser.add_argument("--without", default="^$", metavar="REGEX", help="contestants to leave out")
    parser.add_argument("--quick", action="store_true", help="one short round on any machine")
    args = parser.parse_args(words)
    rounds, seconds, max_foreign = (1, 0.05, 1.0) if args.quick else (args.pairs, args.seconds, MAX_FOREIGN)
    rows: list[Row] = []
    for case in CASES:
        if re.search(args.only, case.name):
            print(f"{case.name}:", flush=True)
            kept = tuple(name for name in case.contestants if not re.search(args.without, name))
            case = dataclasses.replace(case, contestants=kept)
            slices = race(case, rounds, seconds, max_foreign)
            table(case, slices)
            rows += targets(case, slices)
    print("targets:")
    for row in rows:
        print(f"  {row.case:16s} {row.what:48s} at least {row.goal:<5g} {row.measured!s:22s} {row.met}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
