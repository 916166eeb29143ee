"""How busy the machine is, as the kernel tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import envfleet as ef
from envfleet.envs.probe import Counting
from envfleet.slots import compiled_core
from envfleet.util.machine import CpuWatch, current_load


class FakeMachine:
    """A /proc whose CPUs are used as told; `sleep` moves its clock."""

    def __init__(self, root: Path, used: list[float]) -> None:
        self.root, self.used, self.now = root, used, 100.0
        self.busy_s, self.idle_s = [50.0] * len(used), [50.0] * len(used)
        self.write()

    def write(self) -> None:
        ticks = os.sysconf("SC_CLK_TCK")
        rows = [
            f"cpu{i} {busy * ticks:.0f} 0 0 {idle * ticks:.0f} 0 0 0 0 0 0"
            for i, (busy, idle) in zip(sorted(os.sched_getaffinity(0)), zip(self.busy_s, self.idle_s))
        ]
        (self.root / "stat").write_text("cpu 0 0 0 0 0 0 0 0 0 0\n" + "\n".join(rows) + "\nintr 1 2 3\n")

    def sleep(self, seconds: float) -> None:
        seconds = max(seconds, 1.0)  # longer than asked for: the kernel's hundredths do not blur it
        self.now += seconds
        for i, share in enumerate(self.used):
            self.busy_s[i] += share * seconds
            self.idle_s[i] += (1 - share) * seconds
        self.write()

    def watch(self, cgroup: Path | None = None) -> CpuWatch:
        return CpuWatch(str(self.root), str(cgroup or self.root / "none"), lambda: self.now)


@pytest.fixture
def two_cpus(monkeypatch: Any) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr("envfleet.util.machine.usable_cpus", lambda: 2)


def test_how_busy_the_machine_is_is_read_from_the_kernel(tmp_path: Path, two_cpus: None) -> None:
    machine = FakeMachine(tmp_path, [1.0, 0.25])
    watch = machine.watch()
    assert watch.look() is None  # no time has passed
    machine.sleep(1.0)
    load = watch.look()
    assert load is not None and load.free == pytest.approx(0.75, abs=0.03)
    assert load.whole == 1 and load.is_busy
    machine.used = [0.05, 0.05]
    machine.sleep(1.0)
    quiet = watch.look()  # since the last look, not since the first
    assert quiet is not None and quiet.free == pytest.approx(1.9, abs=0.03) and not quiet.is_busy
    machine.used = [1.0, 1.0]
    machine.sleep(1.0)
    ours = watch.look(own_s=2.0)  # what the caller's own processes use is free to it
    assert ours is not None and ours.free == pytest.approx(2.0, abs=0.03)


def test_a_quota_that_is_used_up_leaves_nothing(tmp_path: Path, two_cpus: None) -> None:
    machine, group = FakeMachine(tmp_path, [0.0, 0.0]), tmp_path / "cgroup"
    group.mkdir()
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "cpu.stat").write_text("usage_usec 1000000\nuser_usec 5\n")
    watch = machine.watch(group)
    machine.sleep(1.0)
    (group / "cpu.stat").write_text("usage_usec 2300000\nuser_usec 5\n")
    load = watch.look()
    assert load is not None and load.free == pytest.approx(0.2, abs=0.01)


def test_a_load_counts_only_if_it_lasts(tmp_path: Path, two_cpus: None) -> None:
    machine = FakeMachine(tmp_path, [1.0, 1.0])
    lasting = current_load(machine.watch(), sleep=machine.sleep)
    assert lasting is not None and lasting.free == pytest.approx(0.0, abs=0.03)

    def ends_soon(seconds: float) -> None:
        machine.sleep(seconds)
        machine.used = [0.0, 0.0]

    passing = current_load(machine.watch(), sleep=ends_soon)
    assert passing is not None and not passing.is_busy


def test_where_nobody_tells_the_load_is_unknown(tmp_path: Path, two_cpus: None) -> None:
    assert CpuWatch(str(tmp_path / "none")).look() is None
    machine = FakeMachine(tmp_path, [0.0, 0.0])
    watch = machine.watch()
    machine.now += 1.0  # a sandbox whose counters stand still
    assert watch.look() is None
    (tmp_path / "stat").write_text("cpu0 1 2\n")
    assert machine.watch().look() is None


LOOP = "import os\nparent = os.getppid()\nprint(1, flush=True)\nwhile os.getppid() == parent:\n    for _ in range(100_000): pass"


@pytest.mark.skipif(compiled_core.load() is None or not hasattr(compiled_core.load(), "Exchange"), reason="no compiled doorbell")
def test_who_loses_its_core_while_spinning_stops_spinning() -> None:
    """Parent, worker and a stranger on one CPU: every yield is a lost time slice. Rows stay right."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE) as loop:
            try:
                assert loop.stdout is not None and loop.stdout.readline()
                with ef.make(lambda: Counting(10**9), 2, backend="shm", num_workers=2, isolate=False) as fleet:
                    fleet.reset(seed=0)
                    count = 0
                    while not fleet._backend._exchange.rests and count < 20_000:
                        count += 1
                        assert fleet.step([0, 0]).obs.tolist() == [[count], [count]]
                    assert fleet._backend._exchange.rests
            finally:
                loop.kill()
    finally:
        os.sched_setaffinity(0, allowed)
