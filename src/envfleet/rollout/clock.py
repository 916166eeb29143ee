"""Where a collector's time goes: policy, environments, waiting for the slowest, moving data. And what to do about it."""

from __future__ import annotations

import math
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.rollout.stats import LatencyHistogram

SAMPLE_S = 0.005  # the shortest pause between two looks at the workers
#: What measuring may cost. A round sent slot by slot takes some milliseconds more. A look takes 0.1 ms, and where every
#: core is busy some milliseconds, for which the interpreter lock may be kept from the collector. Both are measured
#: themselves, and done as seldom as this share of the time asks for.
SHARE = 0.004
_FREE_LOOKS = 20  # the first come without regard to their cost, so that short collections have a verdict, too


@dataclass(frozen=True)
class SlotTime:
    """One slot's share: how long its environment worked, per step and at worst."""

    slot: int
    steps: int
    busy_s: float
    mean_s: float
    p99_s: float
    evidence: int = 1_000_000  # measurements this rests on


@dataclass(frozen=True)
class Verdict:
    """Where the time went, and one sentence on what to do.

    Example:
        >>> verdict = Verdict({"policy": 7.0, "env": 2.0, "slowest": 0.5, "transfer": 0.5}, [], num_workers=2)
        >>> verdict.sentence
        'policy-bound: 70 % of the time goes to the policy: batch it, make it smaller, or use mode="overlap"'
    """

    seconds: dict[str, float]  # policy, env, slowest, transfer
    slots: list[SlotTime]
    num_workers: int = 1
    mode: str = "sync"

    @property
    def total_s(self) -> float:
        """All of the collector's time."""
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        """Fraction of the time that went to a part."""
        return self.seconds[part] / self.total_s if self.total_s > 0 else 0.0

    @property
    def straggler(self) -> SlotTime | None:
        """A slot that takes three times as long a step as the middle one, and a quarter of the time for itself.

        The second condition keeps a slot out that met the operating system's other business more often than its share.
        """
        timed = [slot for slot in self.slots if slot.steps and slot.evidence >= 5]
        if not timed or len(self.slots) < 3:
            return None
        slowest = max(timed, key=lambda slot: slot.mean_s)
        middle = float(np.median([slot.mean_s for slot in self.slots if slot.steps]))
        weighs = slowest.busy_s > 0.25 * self.total_s
        return slowest if weighs and slowest.mean_s > 3.0 * middle else None

    @property
    def sentence(self) -> str:
        """What holds the collection back, and the next move."""
        percent = {part: f"{100 * self.share(part):.0f} %" for part in self.seconds}
        straggler = self.straggler
        if self.total_s == 0:
            return "nothing was collected yet"
        largest = max(self.seconds, key=lambda part: self.seconds[part])
        if largest == "policy":
            return (
                f"policy-bound: {percent['policy']} of the time goes to the policy: "
                'batch it, make it smaller, or use mode="overlap"'
            )
        if straggler is not None and self.share("slowest") + self.share("env") > 0.3:
            return (
                f"one straggler: slot {straggler.slot} p99 {1e3 * straggler.p99_s:.3g} ms, mean "
                f'{1e3 * straggler.mean_s:.3g} ms a step: use mode="async", or look at what its environment does'
            )
        if largest == "slowest":
            remedy = "lower at_least, or more slots than workers" if self.mode == "async" else 'use mode="async"'
            return f"uneven: {percent['slowest']} of the time workers wait for the slowest: {remedy}"
        if largest == "env":
            return (
                f"env-bound: {percent['env']} of the time the environments work: more workers, or a faster environment"
            )
        return (
            f"overhead-bound: {percent['transfer']} of the time goes to moving data: more environments a worker, "
            'or backend="serial"'
        )

    def __str__(self) -> str:
        parts = "  ".join(f"{part} {100 * self.share(part):.0f} %" for part in self.seconds)
        lines = [self.sentence, f"{parts}  ({self.total_s:.3g} s)"]
        if self.slots:
            lines.append(f"{'slot':>5} {'steps':>9} {'busy s':>9} {'mean ms':>9} {'p99 ms':>9}")
            for slot in sorted(self.slots, key=lambda slot: -slot.busy_s)[:8]:
                mean, worst = f"{1e3 * slot.mean_s:9.3g}", f"{1e3 * slot.p99_s:9.3g}"
                lines.append(f"{slot.slot:>5} {slot.steps:>9} {slot.busy_s:>9.3g} {mean} {worst}")
        return "\n".join(lines)

    def __rich__(self) -> Any:
        from rich.table import Table

        parts = "  ".join(f"{part} {100 * self.share(part):.0f} %" for part in self.seconds)
        table = Table("slot", "steps", "busy s", "mean ms", "p99 ms", title=self.sentence, caption=parts)
        for slot in sorted(self.slots, key=lambda slot: -slot.busy_s)[:16]:
            numbers = (f"{slot.busy_s:.3g}", f"{1e3 * slot.mean_s:.3g}", f"{1e3 * slot.p99_s:.3g}")
            table.add_row(str(slot.slot), str(slot.steps), *numbers)
        return table


@dataclass
class _Samples:
    """What the looks at the workers saw; shared with the sampling thread, which knows nothing else."""

    pulses: Any
    num_workers: int
    busy_s: npt.NDArray[np.float64]  # [slot] every look stands for the pause before it
    evidence: npt.NDArray[np.int64]  # [slot] looks that found a worker in this slot
    calls: LatencyHistogram  # per slot: how long a call had lasted when last seen
    looks: int = 0
    pause_s: float = SAMPLE_S
    cost_s: float = 0.0  # of a look, of late: from the moment it was due to its end
    waiting_s: float = 0.0  # of looks while the collector waited for the fleet
    handing_s: float = 0.0  # of those: no worker was at work, so rows were on their way
    waiting_busy_s: float = 0.0  # workers at work, summed over the others
    waiting: bool = False
    paused: bool = False  # the caller has the word: whatever workers do then is not our waiting
    stop: threading.Event = field(default_factory=threading.Event)

    def look(self, seen: dict[int, tuple[int, float, float]]) -> None:
        now = time.monotonic()
        self.looks += 1
        waiting = self.waiting
        at_work = 0
        for worker, pulse in enumerate(self.pulses()):
            slot, _, since = pulse.read()
            before = seen.get(worker)
            if before is not None and (before[0], before[1]) != (slot, since):
                self.calls.add([before[2]], before[0])  # that call is over: keep how long it was seen to last
                del seen[worker]
            if slot >= 0:
                self.busy_s[slot] += self.pause_s
                self.evidence[slot] += 1
                at_work += 1
                seen[worker] = (slot, since, now - since)
        if waiting:
            self.waiting_s += self.pause_s
            self.handing_s += self.pause_s * (at_work == 0)
            self.waiting_busy_s += self.pause_s * at_work

    def spent(self, seconds: float) -> None:
        """A look took so long: sets the pause before the next one."""
        self.cost_s += (seconds - self.cost_s) / min(self.looks + 1, 20)
        if self.looks > _FREE_LOOKS:
            self.pause_s = min(1.0, max(SAMPLE_S, self.cost_s / SHARE))


def _sample(samples: _Samples) -> None:
    seen: dict[int, tuple[int, float, float]] = {}
    due = time.monotonic() + samples.pause_s
    while not samples.stop.wait(max(0.0, due - time.monotonic())):
        if not samples.paused:
            samples.look(seen)
        now = time.monotonic()
        samples.spent(now - due)
        due = now + samples.pause_s


class Clock:
    """The stopwatch of one collector: adds up its own phases, and looks at the workers now and then.

    Workers publish which slot they are in and since when. A thread looks there while something is being collected; on
    the serial backend, which has no workers, some rounds are sent slot by slot and timed. Both happen as often as
    `SHARE` of the time allows, and no more than every 5 ms or fourth round.
    """

    def __init__(self, fleet: Any, on: bool = True, mode: str = "sync") -> None:
        self.on, self.mode = on, mode
        self.policy_s = self.send_s = self.wait_s = self.book_s = 0.0
        self.rounds = 0
        self._timing = False  # whether this round's slots are timed one by one
        self._num_timed = 0  # rounds so far that were
        self._quickest_s = {False: math.inf, True: math.inf}  # round without and with such timing
        self._before_s = 0.0
        self.steps = np.zeros(fleet.num_envs, dtype=np.int64)  # [slot]
        backend = fleet._backend
        self.serial = fleet.plan.backend == "serial"
        self._blind = not self.serial and not backend.pulses  # it steps in the caller's thread, all slots at once
        self._timed = LatencyHistogram(fleet.num_envs)  # serial only
        self.samples = _Samples(
            pulses=lambda: backend.pulses,
            num_workers=max(1, fleet.plan.num_workers),
            busy_s=np.zeros(fleet.num_envs),
            evidence=np.zeros(fleet.num_envs, dtype=np.int64),
            calls=LatencyHistogram(fleet.num_envs),
        )
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self.samples.stop.set)

    def start(self) -> None:
        """Begin to look; while nothing is collected nobody looks."""
        if self.on and not self.serial and not self._blind and self._thread is None:
            self.samples.stop.clear()
            self._thread = threading.Thread(target=_sample, args=(self.samples,), name="envfleet-clock", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Stop looking."""
        if self._thread is not None:
            self.samples.stop.set()
            self._thread.join()
            self._thread = None

    def begin_round(self) -> bool:
        """Count a round; True when its slots are to be timed one by one: three early ones, then what `SHARE` allows."""
        total_s = self.send_s + self.wait_s
        if self.rounds:
            quickest = self._quickest_s
            quickest[self._timing] = min(quickest[self._timing], total_s - self._before_s)
        self._before_s = total_s
        self.rounds += 1
        self._timing = self.on and self.serial and self._is_due(total_s)
        return self._timing

    def _is_due(self, total_s: float) -> bool:
        if self.rounds in (2, 4, 8) or self.rounds % 4:
            return self.rounds in (2, 4, 8)
        # The quickest rounds of both kinds are compared: in the others the operating system had a hand.
        extra_s = max(0.0, self._quickest_s[True] - self._quickest_s[False]) * self._num_timed
        return extra_s <= SHARE * (self.policy_s + total_s + self.book_s)

    def timed(self, slots: Any, seconds: list[float]) -> None:
        """Count steps that were timed one by one."""
        self._num_timed += 1
        self._timed.add(seconds, slots)

    def verdict(self) -> Verdict:
        """What was measured so far."""
        samples = self.samples
        if self.serial or self._blind:
            env, slowest = self.send_s + self.wait_s, 0.0
            transfer = self.book_s
        else:
            looked = max(SAMPLE_S, samples.waiting_s)
            handing = samples.handing_s / looked
            working = samples.waiting_busy_s / (looked * samples.num_workers)
            env, slowest = self.wait_s * working, self.wait_s * max(0.0, 1.0 - handing - working)
            transfer = self.send_s + self.book_s + self.wait_s * handing
        seconds = {"policy": self.policy_s, "env": env, "slowest": slowest, "transfer": transfer}
        slots = [self._slot(slot) for slot in range(len(self.steps))] if self.on else []
        return Verdict(seconds, slots, samples.num_workers, self.mode)

    def _slot(self, slot: int) -> SlotTime:
        steps = int(self.steps[slot])
        if self.serial:
            count = self._timed.count(slot)
            # Of few samples the middle one: a pause by the operating system must not make a straggler.
            few = 0 < count < 50
            mean = self._timed.percentile(50, slot) if few else float(self._timed.total_s[slot]) / max(1, count)
            worst = self._timed.percentile(99, slot) if count else 0.0
            return SlotTime(slot, steps, mean * steps, mean, worst, count)
        busy = float(self.samples.busy_s[slot])
        calls = self.samples.calls
        # Calls nobody saw were shorter than the pause between two looks: rank 99 % among all steps, seen or
        # not.
        seen = calls.count(slot)
        unseen = max(0, steps - seen)
        rank = 0.99 * (unseen + seen) - unseen
        worst = (
            calls.percentile(100.0 * rank / seen, slot)
            if seen and rank > 0
            else min(self.samples.pause_s, busy / max(1, steps))
        )
        return SlotTime(slot, steps, busy, busy / max(1, steps), worst, int(self.samples.evidence[slot]))
