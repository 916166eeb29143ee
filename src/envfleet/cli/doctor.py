"""`envfleet doctor`: what this machine can do, what is installed, and which settings look wrong."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import envfleet
from envfleet.cli.options import add_shared
from envfleet.util.extras import EXTRAS
from envfleet.util.machine import cgroup_quota, usable_cpus
from envfleet.util.text import first_line

HELP = "what this machine can do, and which settings look wrong"
DESCRIPTION = (
    "Looks at the machine, really starts a small fleet with each start method, and names suspicious settings. Exit code 1 "
    "when something does not work."
)

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the system grants this process. None: not known here, or no limit."""

    cpus: int
    usable_cpus: int
    cgroup_cpus: float | None
    memory_bytes: int | None
    cgroup_memory_bytes: int | None
    open_files: int | None
    shm_bytes: int | None
    compiler: str | None
    omp_threads: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_shared(parser, "json")


def run(args: argparse.Namespace) -> int:
    """Look, print, and give 1 when a start method does not work."""
    report = examine()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0 if all(trial["ok"] for trial in report["start_methods"].values()) else 1


def examine() -> dict[str, Any]:
    """Everything the doctor knows, as plain values."""
    machine = look_at_machine()
    compiled = compiled_core()
    trials = {method: try_start_method(method) for method in ("forkserver", "spawn", "fork")}
    return {
        "envfleet": envfleet.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "core": {name: _version(name) for name in ("numpy", "gymnasium", "cloudpickle", "threadpoolctl")},
        "machine": dataclasses.asdict(machine),
        "start_methods": trials,
        "compiled_core": compiled,
        "extras": {extra: {name: _version(name) for name in names} for extra, names in EXTRAS.items()},
        "suspicious": suspicious(machine, compiled["present"]) + [f"{m}: {t['error']}" for m, t in trials.items() if not t["ok"]],
    }  # fmt: skip


def look_at_machine() -> Machine:
    """Cores, limits and settings of this process."""
    compilers = (shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name)
    return Machine(
        cpus=os.cpu_count() or 1,
        usable_cpus=usable_cpus(),
        cgroup_cpus=cgroup_quota(),
        memory_bytes=_known(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        cgroup_memory_bytes=_known(lambda: _memory_limit("/sys/fs/cgroup/memory.max"))
        or _known(lambda: _memory_limit("/sys/fs/cgroup/memory/memory.limit_in_bytes")),
        open_files=_known(_open_files),
        shm_bytes=_known(lambda: shutil.disk_usage("/dev/shm").free),
        compiler=next(filter(None, compilers), None),
        omp_threads=_omp_threads(os.environ),
    )


def _known(look: Callable[[], int | None]) -> int | None:
    """What a look finds; None where the system has nothing to look at."""
    try:
        return look()
    except (OSError, ValueError, AttributeError, ImportError):
        return None


def _memory_limit(path: str) -> int | None:
    limit = int(Path(path).read_text())  # "max" is a ValueError: no limit
    return limit if limit < 1 << 60 else None  # v1 writes "no limit" as a huge number


def _open_files() -> int | None:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _omp_threads(environment: Mapping[str, str]) -> int | None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        value = environment.get(name, "").split(",")[0].strip()
        if value.isdigit() and int(value) > 0:
            return int(value)
    return None


def suspicious(machine: Machine, compiled: bool = True) -> list[str]:
    """Settings that usually cost time or end a run, one sentence each.

    Example:
        >>> suspicious(Machine(8, 8, None, None, None, open_files=256, shm_bytes=None, compiler="/usr/bin/cc", omp_threads=1))
        ['ulimit -n is 256: enough for about 112 worker processes; raise it (ulimit -n 4096) for more']
    """
    found = []
    cpus, threads = machine.usable_cpus, machine.omp_threads
    if machine.open_files is not None and machine.open_files < 1024:
        # Each worker costs the parent two descriptors: its socket and the file its stack is dumped to.
        room = max(0, (machine.open_files - 32) // 2)
        found.append(
            f"ulimit -n is {machine.open_files}: enough for about {room} worker processes; raise it (ulimit -n 4096) for more"
        )
    if threads is None and cpus < machine.cpus:
        found.append(
            f"OMP_NUM_THREADS is not set and this process may use {cpus} of {machine.cpus} CPUs: BLAS and torch in this "
            f"process start {machine.cpus} threads; set OMP_NUM_THREADS={cpus}"
        )
    elif threads is not None and threads > 1 and threads * cpus > machine.cpus:
        found.append(
            f"OMP_NUM_THREADS={threads} × {cpus} workers = {threads * cpus} threads on {cpus} usable CPUs if you make fleets "
            "with blas_threads=None; workers are capped at 1 thread otherwise"
        )
    if machine.shm_bytes is not None and machine.shm_bytes < 64 * _MIB:
        found.append(
            f"/dev/shm has {machine.shm_bytes // _MIB} MiB free: fleets do not need it, but torch's own workers do; "
            "in a container start with --shm-size=1g"
        )
    if machine.cgroup_memory_bytes is not None and machine.cgroup_memory_bytes < 512 * _MIB:
        found.append(
            f"the cgroup grants {machine.cgroup_memory_bytes // _MIB} MiB of memory: a worker needs some 60 MiB before its "
            "environments, and the kernel kills what goes over"
        )
    if not compiled and machine.compiler is None:
        found.append("no compiled core and no C compiler: everything works; install a compiler and reinstall for the fast core")
    return found


def try_start_method(method: Any) -> dict[str, Any]:
    """Start a fleet of two slots on two processes, step it, and say how long that took or what went wrong."""
    import envfleet as ef
    from envfleet.envs.probe import Counting

    before = time.perf_counter()
    try:
        with ef.make(Counting, 2, backend="shm", num_workers=2, start_method=method, init_timeout_s=30.0) as fleet:
            fleet.reset(seed=0)
            observed = fleet.step([0, 1]).obs.tolist()
        error = None if observed == [[1.0], [1.0]] else f"two slots stepped once observed {observed}"
    except (ef.FleetError, OSError) as failed:
        error = first_line(failed)
    return {"ok": error is None, "seconds": round(time.perf_counter() - before, 3), "error": error}


def compiled_core() -> dict[str, Any]:
    """Whether the compiled core is here and used, and if not, why."""
    from envfleet.slots import compiled_core

    present = compiled_core.load() is not None
    return {"present": present, "why": None if present else compiled_core.status()}


def print_report(report: Mapping[str, Any]) -> None:
    """The report for people."""
    machine = report["machine"]
    core = ", ".join(f"{name} {version}" for name, version in report["core"].items())
    print(f"envfleet {report['envfleet']}, Python {report['python']}, {core}")
    print(report["platform"])
    quota = "no quota" if machine["cgroup_cpus"] is None else f"quota {machine['cgroup_cpus']:g}"
    print(f"CPUs           {machine['usable_cpus']} usable of {machine['cpus']} (cgroup: {quota})")
    limit = f" (cgroup: {_size(machine['cgroup_memory_bytes'])})" if machine["cgroup_memory_bytes"] else ""
    print(f"memory         {_size(machine['memory_bytes'])}{limit}, /dev/shm {_size(machine['shm_bytes'])} free")
    print(f"open files     {machine['open_files'] if machine['open_files'] is not None else 'no limit'}")
    for method, trial in report["start_methods"].items():
        works = f"works, {trial['seconds']:.2f} s to start, step and close"
        print(f"{method:<14} {works if trial['ok'] else trial['error']}")
    compiled = report["compiled_core"]
    print(f"compiled core  {'present' if compiled['present'] else compiled['why']}")
    for extra, packages in report["extras"].items():
        missing = [name for name, version in packages.items() if version is None]
        have = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        remedy = f'{"; " if have else ""}missing {", ".join(missing)}: pip install "envfleet[{extra}]"' if missing else ""
        print(f"[{extra}]".ljust(15) + have + remedy)
    for line in report["suspicious"] or ["nothing suspicious"]:
        print(f"! {line}" if report["suspicious"] else line)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # not installed, and shown as such
        return None


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / (1 << 30):.1f} GiB"
