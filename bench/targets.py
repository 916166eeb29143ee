"""The targets, as rows: what was to be reached, what was measured, met or not."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from bench.cases import EVERY_PEER, IN_PROCESS, PROCESS_PER_ENV
from bench.envs import SLEEP_CEILING_PER_SLOT
from bench.stats import Estimate, Slice, estimate, ratio
from bench.store import HERE, Record

PUFFER = "PufferLib Serial"
_RLLIB = "RLlib two runners"


@dataclasses.dataclass(frozen=True)
class Row:
    """One target. `at_most`: a cost that must not be above the goal."""

    case: str
    what: str
    goal: float
    measured: Estimate | None
    unit: str = ""
    at_most: bool = False
    note: str = ""

    @property
    def met(self) -> str:
        """The end of the interval that is nearer to the goal decides."""
        if self.measured is None or not self.measured.count:
            return "not measured"
        nearer, middle = (self.measured.low if self.at_most else self.measured.high), self.measured.median
        if middle <= self.goal if self.at_most else middle >= self.goal:
            return "met"
        # The rule is the interval, but a noisy run has wide ones: who reads must see which of the two it was.
        reached = nearer <= self.goal if self.at_most else nearer >= self.goal
        return "met (interval only)" if reached else "**not met**"


class Results:
    """Records by case, and ratios between contestants."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.records = {name: Record.of(case) for name, case in raw["cases"].items() if "error" not in case}

    def slices(self, case: str, name: str) -> dict[int, Slice]:
        record = self.records.get(case)
        if record is None:
            return {}
        if name == PUFFER:
            over, factor = _puffer()["ratios"].get(case, ("", 1.0))
            base = record.slices.get(over, {})
            return {
                turn: dataclasses.replace(one, seconds=one.seconds / factor, cpu_ns=one.cpu_ns / factor)
                for turn, one in base.items()
            }
        return record.slices.get(name, {})

    def rate(self, case: str, name: str) -> float:
        return estimate([one.rate for one in self.slices(case, name).values()]).median

    def ratio(self, case: str, ours: str, theirs: str) -> Estimate | None:
        mine, other = self.slices(case, ours), self.slices(case, theirs)
        return ratio(mine, other) if mine and other else None

    def best(self, case: str, names: Iterable[str]) -> str | None:
        found = [name for name in names if self.slices(case, name)]
        return max(found, key=lambda name: self.rate(case, name), default=None)

    def values(self, case: str) -> dict[str, Any]:
        return self.records[case].values if case in self.records else {}


def _puffer() -> dict[str, Any]:
    known: dict[str, Any] = json.loads((HERE / "peers" / "pufferlib.json").read_text())
    return known


def rows(raw: Mapping[str, Any]) -> list[Row]:
    """All targets in the order of the issue that set them."""
    found = Results(raw)
    parts = (_cartpole, _policy, _cartpole_peers, _ant, _serial, _images, _uneven, _auto, _busy, _many_slots, _others)
    return [row for part in parts for row in part(found)]


def _cartpole(found: Results) -> Iterable[Row]:
    for name, goals in (("ours shm-share", (0.75, 0.92, 0.95)), ("ours shm", (0.50, 0.80, 0.90))):
        for slots, goal in zip((8, 64, 256), goals):
            case = f"cartpole-{slots}"
            yield Row(case, f"{name}, step, of the limit", goal, found.ratio(case, name, "limit"), note=_meeting(found, case))


def _meeting(found: Results, case: str) -> str:
    """What a barrier after every batch leaves of the limit on this machine: no `step` of all slots can do better."""
    measured = found.ratio(case, "limit meeting", "limit")
    return f"two plain loops that meet after every batch: {measured.median:.2f}" if measured else ""


def _policy(found: Results) -> Iterable[Row]:
    for name in ("shm-share", "shm", "auto"):
        for slots in (8, 64, 256):
            case, ours = f"policy-{slots}", f"policy {name}"
            yield Row(case, f"ours {name} with an MLP policy, over SyncVectorEnv", 1.5,
                      found.ratio(case, ours, "policy gymnasium Sync"), "×")  # fmt: skip
            yield Row(case, f"ours {name} with an MLP policy, over ours serial", 1.0,
                      found.ratio(case, ours, "policy serial"), "×")  # fmt: skip


def _against(found: Results, case: str, ours: str, peers: Iterable[str], goal: float) -> Iterable[Row]:
    for peer in peers:
        yield Row(case, f"{ours}, over {peer}", goal, found.ratio(case, ours, peer), "×")


def _best_peer(found: Results, case: str, ours: str, peers: Iterable[str], goal: float) -> Row:
    best = found.best(case, peers)
    note = "its rate is derived from a run on another machine" if best == PUFFER else ""
    measured = found.ratio(case, ours, best) if best else None
    return Row(case, f"{ours}, over the best peer ({best or 'none ran'})", goal, measured, "×", note=note)


def _cartpole_peers(found: Results) -> Iterable[Row]:
    case = "cartpole-64"
    ours = found.best(case, ("ours shm-share", "ours shm")) or "ours shm-share"
    yield from _against(found, case, ours, PROCESS_PER_ENV, 10.0)
    yield _best_peer(found, case, ours, (*EVERY_PEER, _RLLIB, PUFFER), 1.8)


def _ant(found: Results) -> Iterable[Row]:
    ways = ("ours shm", "ours shm-share", "ours shm-async", "ours shm-share-async")
    for slots, goal in ((8, 0.85), (64, 0.95), (256, 0.95)):
        case = f"ant-{slots}"
        for name in ways:
            note = "" if name.endswith("async") else _meeting(found, case)
            yield Row(case, f"{name}, of the limit", goal, found.ratio(case, name, "limit"), note=note)
    ours = found.best("ant-64", ways) or ways[0]
    yield from _against(found, "ant-64", ours, (*EVERY_PEER, _RLLIB, PUFFER), 1.3)


def _serial(found: Results) -> Iterable[Row]:
    for slots in (8, 64, 256):
        case = f"cartpole-{slots}"
        yield Row(case, "ours serial, over the plain loop", 1.0, found.ratio(case, "ours serial", "plain"), "×")
    yield _best_peer(found, "null-64", "ours serial", (*IN_PROCESS, PUFFER), 3.0)


def _images(found: Results) -> Iterable[Row]:
    for case, size in (("image-64", 84 * 84 * 4), ("bigimage-64", 210 * 160 * 3)):
        ours = found.best(case, ("ours shm-share", "ours shm")) or "ours shm"
        best = _best_peer(found, case, ours, (*EVERY_PEER, PUFFER), 1.5)
        yield dataclasses.replace(best, note=f"{best.note + '; ' if best.note else ''}one copy, {size:,} bytes a step")
        yield from _against(found, case, ours, PROCESS_PER_ENV, 20.0)


def _uneven(found: Results) -> Iterable[Row]:
    for slots in (8, 64, 256):
        case = f"unevencpu-{slots}"
        yield Row(case, "ours shm-async, of the limit", 0.95, found.ratio(case, "ours shm-async", "limit"))
    yield from _against(found, "unevencpu-64", "ours shm-async", ("Tianshou async",), 1.2)
    ceiling = 64 * SLEEP_CEILING_PER_SLOT
    for name, bare in (("thread", ("bare threads", "bare queues")), ("aio", ("bare coroutines",))):
        slices = found.slices("unevensleep-64", f"ours {name}-async")
        measured = ratio(slices, ceiling) if slices else None
        seen = {one: found.slices("unevensleep-64", one) for one in bare}
        note = ", ".join(f"{one}: {ratio(many, ceiling).median:.2f}" for one, many in seen.items() if many)
        yield Row("unevensleep-64", f"ours {name}-async, of the ceiling", 0.90, measured, note=note)


def _auto(found: Results) -> Iterable[Row]:
    grid = ("ours serial", "ours shm", "ours shm-share", "ours thread")
    for case in ("cartpole-8", "cartpole-64", "cartpole-256", "ant-64", "null-64", "image-64", "unevensleep-64"):
        best = found.best(case, grid)
        plan = found.records[case].raw.get("plans", {}).get("ours auto", "") if case in found.records else ""
        measured = found.ratio(case, "ours auto", best) if best else None
        yield Row(case, f"auto, of the best grid point ({best})", 0.90, measured, note=plan)
        yield Row(case, "auto, over ours serial", 1.0, found.ratio(case, "ours auto", "ours serial"), "×")


#: Envs that cannot leave their worker: what they are is in a C library's memory.
_TIED = ("Ant-v5",)


def _busy(found: Results) -> Iterable[Row]:
    for row in found.values("busy").get("rows", []):
        name, slots, loops, start = row["env"], row["slots"], row["loops"], row["when"] == "start"
        if not start and name in _TIED and slots < 64:
            continue  # nothing to be done for few slots that cannot be moved
        goal = 0.9 if start else 0.8 if name in _TIED else 0.85
        when = "from the start" if start else "coming later"
        what = f"auto, {name}, {slots} slots, {loops} busy loops {when}, of serial"
        yield Row("busy", what, goal, estimate(row["shares"]), note=row["plan"].partition(":")[0])


def _many_slots(found: Results) -> Iterable[Row]:
    awake = [row for row in found.values("parent").get("rows", []) if row["how"] == "awake"]
    fewest = min((row["workers"] for row in awake), default=0)
    by_slots = {row["slots"]: row for row in awake if row["workers"] == fewest}
    per_slot = growth = None
    if 4096 in by_slots:
        many, fewer = by_slots[4096], by_slots[1024]
        per_slot = Estimate(*(many[key] / 4096 for key in ("step_ns", "low_ns", "high_ns")), 60)
        growth = Estimate(many["ns_per_slot"] / fewer["ns_per_slot"], many["low_ns"] / 4 / fewer["high_ns"],
                          many["high_ns"] / 4 / fewer["low_ns"], 60)  # fmt: skip
    yield Row("parent", "parent's CPU per slot and step at 4,096 slots", 150.0, per_slot, " ns", at_most=True)
    yield Row("parent", "the same, over that at 1,024 slots", 1.0, growth, "×", at_most=True)
    beyond = found.values("memory").get("beyond_env", {}).get("shm")
    memory = None if beyond is None else Estimate(beyond / 1000, beyond / 1000, beyond / 1000, 1)
    yield Row("memory", "memory per CartPole slot beyond the env, shm", 20.0, memory, " KB", at_most=True)


def _others(found: Results) -> Iterable[Row]:
    seconds = found.values("startup").get("seconds", {})
    slots = found.values("startup").get("slots", 256)
    for method in ("fork", "forkserver"):
        measured = estimate(seconds[method]) if method in seconds else None
        yield Row("startup", f"{slots} CartPole slots ready, {method}", 1.0, measured, " s", at_most=True)
    slow = estimate(seconds["slow constructor"]) if "slow constructor" in seconds else None
    yield Row("startup", "64 slots, constructor of 1 s, 8 workers", 10.0, slow, " s", at_most=True)
    costs = found.values("statistics").get("cost_ns")
    cost = estimate(costs) if costs else None
    yield Row("statistics", "statistics on every step, CPU per slot-step", 100.0, cost, " ns", at_most=True)
