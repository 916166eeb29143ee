"""What this machine grants: CPUs by affinity and cgroup quota, limits, suspicious settings."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cpus() -> int:
    """CPUs this process may use: affinity, then the cgroup's quota (a container's share), at least 1.

    Example:
        >>> usable_cpus() >= 1
        True
    """
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
