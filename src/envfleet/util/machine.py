"""CPUs of this process by affinity and cgroup quota, and how much of them is idle now."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable
from pathlib import Path


def usable_cpus() -> int:
    """CPUs this process may use: affinity, then the cgroup's quota (a container's share), at least 1."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cgroup_quota()
    return max(1, min(count, math.ceil(quota)) if quota else count)


def cgroup_quota(root: str = "/sys/fs/cgroup") -> float | None:
    """CPUs' worth of time the cgroup grants, None when unlimited or unknown."""
    found = []
    for path in _cgroup_dirs(root):
        try:
            quota, period = (path / "cpu.max").read_text().split()[:2]
            if quota != "max":
                found.append(int(quota) / int(period))
        except (OSError, ValueError):
            pass  # no such controller here
        try:
            value = int((path / "cpu.cfs_quota_us").read_text())
            if value > 0:
                found.append(value / int((path / "cpu.cfs_period_us").read_text()))
        except (OSError, ValueError):
            pass  # not cgroup v1
    return min(found) if found else None


def _cgroup_dirs(root: str) -> list[Path]:
    base = Path(root)
    out = [base, base / "cpu"]
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # no /proc: not Linux
        return out
    for line in lines:
        _, controllers, path = line.split(":", 2)
        own = (base / "cpu" if "cpu" in controllers.split(",") else base) / path.lstrip("/")
        while own != base and base in own.parents:  # limits of the groups above hold too
            out.append(own)
            own = own.parent
    return out


# -- how busy it is -----------------------------------------------------------------------------------------------------

#: The least time between two looks: the kernel counts in hundredths of a second.
LOOK_S = 0.04


@dataclasses.dataclass(frozen=True)
class Load:
    """How busy the granted CPUs were between two looks.

    Example:
        >>> Load(cpus=2, free=0.97).whole
        1
    """

    cpus: int
    free: float  # CPUs' worth of time that no other process used

    @property
    def whole(self) -> int:
        """CPUs that are at least half free; at least one."""
        return max(1, min(self.cpus, math.floor(self.free + 0.5)))

    @property
    def is_busy(self) -> bool:
        """Whether others use CPUs that we would."""
        return self.whole < self.cpus


class CpuWatch:
    """Measures how busy the machine was since the last look. Linux only: elsewhere the result is None.

    A look reads one or two small files (about 50 µs). Idle time comes from /proc/stat, of the CPUs this process may use;
    with a quota, what the cgroup has used of it counts as well. The load average would be no help: it is a minute old.
    """

    def __init__(self, proc: str = "/proc", cgroup: str = "/sys/fs/cgroup", clock: Callable[[], float] = time.monotonic):
        self._proc, self._cgroup, self._clock = Path(proc), cgroup, clock
        self._last = self._sample()

    def look(self, own_s: float = 0.0) -> Load | None:
        """The load since the last look that gave one, None if unknown or too early; `own_s` is the CPU time the caller's own processes used meanwhile."""
        before, sample = self._last, self._sample()
        if before is None or sample is None:
            self._last = sample
            return None
        seconds = sample.at - before.at
        if seconds < LOOK_S * 0.9:
            return None
        self._last = sample
        cpus = usable_cpus()
        if sample.total_s - before.total_s < 0.5 * seconds * min(cpus, sample.count):
            return None  # wrong numbers, as in some sandboxes
        free = (sample.idle_s - before.idle_s + own_s) / seconds
        quota = cgroup_quota(self._cgroup)
        if quota is not None and sample.group_s is not None and before.group_s is not None:
            free = min(free, quota - (sample.group_s - before.group_s - own_s) / seconds)
        return Load(cpus, min(max(free, 0.0), float(cpus)))

    def _sample(self) -> _Sample | None:
        try:
            lines = (self._proc / "stat").read_text().splitlines()
            allowed = os.sched_getaffinity(0)
            rows = [[int(word) for word in line.split()[1:9]] for line in lines if _cpu_number(line) in allowed]
            ticks = os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, AttributeError):  # not Linux
            return None
        if not rows or min(len(row) for row in rows) < 4:
            return None
        idle = sum(sum(row[3:5]) for row in rows) / ticks  # idle, and waiting for a disk
        total = sum(sum(row) for row in rows) / ticks
        return _Sample(self._clock(), len(rows), idle, total, _group_s(self._cgroup))


@dataclasses.dataclass(frozen=True)
class _Sample:
    at: float
    count: int  # CPUs
    idle_s: float
    total_s: float
    group_s: float | None  # what the cgroup has used


def cpu_time_of(pid: int) -> float:
    """CPU seconds a process has used, in hundredths; 0 when it is gone or not known."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


def current_load(watch: CpuWatch | None = None, looks: int = 3, sleep: Callable[[float], None] = time.sleep) -> Load | None:
    """How busy the machine is, in 40 ms where it is quiet; a load counts as one only if it lasts for three looks."""
    watch = watch or CpuWatch()
    quietest = None
    for _ in range(looks):
        sleep(LOOK_S)
        load = watch.look()
        if load is None:
            return None
        if quietest is None or load.free > quietest.free:
            quietest = load
        if not load.is_busy:
            break
    return quietest


def _cpu_number(line: str) -> int | None:
    name = line.partition(" ")[0]
    return int(name[3:]) if name.startswith("cpu") and name[3:].isdigit() else None


def _group_s(root: str) -> float | None:
    """CPU seconds the cgroup that has a quota has used so far."""
    for path in _cgroup_dirs(root):
        try:
            if (path / "cpu.max").read_text().split()[0] == "max":
                continue
            words = (path / "cpu.stat").read_text().split()
            return int(words[words.index("usage_usec") + 1]) / 1e6
        except (OSError, ValueError, IndexError):
            continue
    return None
