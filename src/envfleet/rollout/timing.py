"""Where a collector's time goes: policy, environments, waiting for the slowest, moving data. And what to do about it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from envfleet.core.batch import Batch
from envfleet.rollout.stats import LatencyHistogram

#: Share of the time that sampling rows may cost. A sample takes some tens of microseconds, and is measured too.
SHARE = 0.003
_FREE_LOOKS = 8  # the first are made whatever they cost, so that short collections have a verdict, too


_OF_CLIENTS = {
    "agent": ("agent-bound", "goes to the agent: use a BatchedPolicy, or a faster agent"),
    "env": ("env-bound", "the environments work: more workers and more clients, or a faster environment"),
    "network": ("network-bound", "goes to the way to the server and back: more workers, or run nearer to the server"),
    "waiting": ("waiting", "rollouts wait for a session or for a request limit: more sessions or servers, or higher limits"),
    "idle": ("uneven", "workers have no rollout to run: more rollouts a call, or fewer workers"),
}


@dataclass(frozen=True)
class SlotTime:
    """One slot's share: how long its environment worked, per step and at worst."""

    slot: int
    steps: int
    busy_s: float
    mean_s: float
    p99_s: float


@dataclass(frozen=True)
class Verdict:
    """Where the time went, and one sentence on what to do.

    Example:
        >>> verdict = Verdict({"policy": 7.0, "env": 2.0, "slowest": 0.5, "transfer": 0.5}, [], num_workers=2)
        >>> verdict.sentence
        'policy-bound: 70 % of the time goes to the policy: batch it, make it smaller, or use mode="overlap"'
    """

    seconds: dict[str, float]  # policy, env, slowest, transfer; of an executor: agent, env, network, waiting, idle
    slots: list[SlotTime]
    num_workers: int = 1
    mode: str = "sync"  # or "clients": an executor's
    is_serial: bool = False  # the environments are in this process already

    @property
    def total_s(self) -> float:
        """All of the collector's time, or that of all workers of an executor."""
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        """Fraction of the time that went to a part."""
        return self.seconds[part] / self.total_s if self.total_s > 0 else 0.0

    @property
    def straggler(self) -> SlotTime | None:
        """A slot that takes three times as long a step as the middle one, and a quarter of the time for itself.

        The second condition leaves out a slot that was only interrupted by other processes more often than the rest.
        """
        timed = [slot for slot in self.slots if slot.steps >= 5]
        if not timed or len(self.slots) < 3:
            return None
        slowest = max(timed, key=lambda slot: slot.mean_s)
        middle = float(np.median([slot.mean_s for slot in self.slots if slot.steps]))
        weighs = slowest.busy_s > 0.25 * self.total_s
        return slowest if weighs and slowest.mean_s > 3.0 * middle else None

    @property
    def sentence(self) -> str:
        """What limits the collection, and what to do."""
        if self.total_s == 0:
            return "nothing was collected yet"
        largest = max(self.seconds, key=lambda part: self.seconds[part])
        share = f"{100 * self.share(largest):.0f} % of the time"
        straggler = self.straggler
        if straggler is not None and largest != "policy" and self.share("slowest") + self.share("env") > 0.3:
            return (
                f"one straggler: slot {straggler.slot} p99 {1e3 * straggler.p99_s:.3g} ms, mean "
                f'{1e3 * straggler.mean_s:.3g} ms a step: use mode="async", or look at what its environment does'
            )
        if self.mode == "clients":
            return f"{_OF_CLIENTS[largest][0]}: {share} {_OF_CLIENTS[largest][1]}"
        moving = (
            "more slots, so that each call does more" if self.is_serial else 'more environments a worker, or backend="serial"'
        )
        remedy = "lower at_least, or more slots than workers" if self.mode == "async" else 'use mode="async"'
        return {
            "policy": f'policy-bound: {share} goes to the policy: batch it, make it smaller, or use mode="overlap"',
            "slowest": f"uneven: {share} workers wait for the slowest: {remedy}",
            "env": f"env-bound: {share} the environments work: more workers, or a faster environment",
            "transfer": f"overhead-bound: {share} goes to moving data: {moving}",
        }[largest]

    def __str__(self) -> str:
        parts = "  ".join(f"{part} {100 * self.share(part):.0f} %" for part in self.seconds)
        lines = [self.sentence, f"{parts}  ({self.total_s:.3g} s)"]
        if self.slots:
            lines.append(f"{'slot':>5} {'steps':>9} {'busy s':>9} {'mean ms':>9} {'p99 ms':>9}")
            for slot in sorted(self.slots, key=lambda slot: -slot.busy_s)[:8]:
                mean, worst = f"{1e3 * slot.mean_s:9.3g}", f"{1e3 * slot.p99_s:9.3g}"
                lines.append(f"{slot.slot:>5} {slot.steps:>9} {slot.busy_s:>9.3g} {mean} {worst}")
        return "\n".join(lines)


class Clock:
    """The stopwatch of one collector: adds up its own phases, and reads in the rows how long environments worked.

    The slot life writes that into every row. The sums (`busy_ns`) are read when collecting begins and ends. Single rows
    (`step_ns`) are looked at in the first batches and then in as many as `SHARE` of the time allows: they show how
    steps are spread, and what the waiting was for.
    """

    def __init__(self, fleet: Any, on: bool = True, mode: str = "sync") -> None:
        self.on, self.mode = on, mode
        self.policy_s = self.send_s = self.wait_s = self.book_s = 0.0
        self.steps = np.zeros(fleet.num_envs, dtype=np.int64)  # [slot]
        self.num_workers = max(1, fleet.plan.num_workers)
        self._serial = fleet.plan.backend == "serial"
        self._worker_of = fleet._backend.worker_of
        self._busy_ns = fleet.slab.scalars["busy_ns"]  # [slot] the rows', since the fleet began
        self._worked_ns = np.zeros(fleet.num_envs, dtype=np.int64)  # [slot] of that: in collections that are over
        self._began_ns: npt.NDArray[np.int64] | None = None  # [slot] where the running collection began
        self._calls = LatencyHistogram(fleet.num_envs)  # of rows looked at
        self._batches = self._looks = self._next_look = 0
        self._cost_s = 0.0  # of all looks
        self._lap = time.perf_counter()
        self._seen_s = self._env_s = self._slowest_s = 0.0  # waiting for the batches looked at, and two parts of it

    def start(self) -> None:
        """The work of environments counts from now on."""
        self._began_ns = self._busy_ns.copy()
        self.lap()

    def pause(self) -> None:
        """The work of environments no longer counts for this collector."""
        self._worked_ns, self._began_ns = self._worked(), None

    @property
    def longest_s(self) -> float:
        """The longest work for one row that was looked at."""
        return float(self._calls.max_s.max())

    def lap(self) -> float:
        """Seconds since the last lap. They are added to the phase that has just ended, or left out."""
        before, self._lap = self._lap, time.perf_counter()
        return self._lap - before

    def _worked(self) -> npt.NDArray[np.int64]:
        return self._worked_ns if self._began_ns is None else self._worked_ns + self._busy_ns - self._began_ns

    def received(self, batch: Batch, waited_s: float) -> None:
        """Count a batch, and look at it if it is its turn. A lap was taken just before."""
        self._batches += 1
        if self.on and self._batches > self._next_look:
            self._look(batch, waited_s)
            self._looks += 1
            self._cost_s += self.lap()
            if self._looks >= _FREE_LOOKS:
                a_batch_s = (self.policy_s + self.send_s + self.wait_s + self.book_s) / self._batches
                self._next_look = self._batches + int(self._cost_s / self._looks / (SHARE * max(a_batch_s, 1e-9)))

    def _look(self, batch: Batch, waited_s: float) -> None:
        """Workers stepped side by side: their mean is the environments' part, up to the last of them the slowest's."""
        seconds = 1e-9 * batch._field("step_ns")
        self._calls.add(seconds, batch.slots)
        workers = np.bincount(self._worker_of[batch.slots], seconds)  # [worker]
        total_s, present = float(workers.sum()), int(np.count_nonzero(workers))
        # Slots of one thread pool count as workers of their own, but no more than `num_workers` work at once.
        mean_s = max(total_s / max(1, present), min(waited_s, total_s / self.num_workers))
        most_s = max(float(workers.max()), mean_s, 1e-9)
        at_work_s = min(waited_s, most_s)  # less than `most_s` where they began before we waited
        self._seen_s += waited_s
        self._env_s += at_work_s * mean_s / most_s
        self._slowest_s += at_work_s * (1.0 - mean_s / most_s)

    def verdict(self) -> Verdict:
        """What was measured so far."""
        busy_s = 1e-9 * self._worked()  # [slot]
        called_s = self.send_s + self.wait_s
        env, slowest = called_s, 0.0  # nothing was measured: all of it
        if self._serial and self._looks:
            env = min(called_s, float(busy_s.sum()))
        elif self._looks:
            at_work = self.wait_s * (self._env_s + self._slowest_s) / max(self._seen_s, 1e-9)
            env = self.wait_s * self._env_s / max(self._seen_s, 1e-9)
            if self.mode == "async":  # workers go on with slots that are not in the batch
                env = min(at_work, float(busy_s.sum()) / self.num_workers)
            slowest = at_work - env
        transfer = called_s - env - slowest + self.book_s
        seconds = {"policy": self.policy_s, "env": env, "slowest": slowest, "transfer": transfer}
        slots = [self._slot(slot, busy) for slot, busy in enumerate(busy_s.tolist())] if self.on else []
        return Verdict(seconds, slots, self.num_workers, self.mode, self._serial)

    def _slot(self, slot: int, busy_s: float) -> SlotTime:
        steps = int(self.steps[slot])
        mean_s = busy_s / max(1, steps)
        worst_s = self._calls.percentile(99, slot) if self._calls.count(slot) else mean_s
        return SlotTime(slot, steps, busy_s, mean_s, worst_s)
