"""backend="auto": the arithmetic of the choice, the probe in a worker, and what is remembered."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import envfleet as ef
from envfleet.autotune.auto import Choice, Probe, cache_path, choose, measure_env
from envfleet.cli.tune import grid, measure, tune
from envfleet.envs.probe import Counting, Faulty, Waiting
from envfleet.util.machine import Load, cgroup_quota


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_CACHE_DIR", str(tmp_path / "cache"))


def pick(step_s: float, num_slots: int, cpus: int = 2, cpu_s: float | None = None, **more: Any) -> Choice:
    more = {"isolate": None, "num_workers": None, **more}
    return choose(Probe(step_s, step_s if cpu_s is None else cpu_s, 16), num_slots, cpus, **more)


def test_a_handful_of_cheap_envs_never_goes_through_processes() -> None:
    for num_slots in (1, 2, 4):
        assert pick(7e-6, num_slots, cpus=64).backend == "serial"
    assert pick(0.1e-6, 256).backend == "serial"


def test_work_that_is_worth_sharing_is_shared() -> None:
    assert pick(7e-6, 64).backend == "shm"
    ant = pick(250e-6, 8, cpus=8)
    assert (ant.backend, ant.num_workers, ant.isolate) == ("shm", 8, True)
    assert pick(250e-6, 64, cpus=1).backend == "serial"


def test_the_parent_takes_a_share_on_few_cores_unless_forbidden() -> None:
    assert pick(250e-6, 8, cpus=2).isolate is False
    assert pick(250e-6, 8, cpus=2, isolate=True).isolate is True
    assert pick(250e-6, 8, cpus=16).isolate is True


def test_envs_that_wait_get_a_thread_each() -> None:
    choice = pick(50e-3, 64, cpu_s=1e-4)
    assert (choice.backend, choice.num_workers) == ("thread", 64)
    assert choose(Probe(0, 0, 0, is_async=True), 8, 2, None, None).backend == "aio"


def test_a_given_number_of_workers_is_kept() -> None:
    assert pick(250e-6, 64, cpus=8, num_workers=3).num_workers == 3


def test_the_probe_runs_in_a_worker_and_is_remembered_by_id() -> None:
    with ef.make("CartPole-v1", num_envs=32) as fleet:
        assert fleet.plan.reason.startswith("auto: ") and fleet.reset(seed=0).obs.shape == (32, 4)
    known = json.loads(cache_path().read_text())
    (key,) = known
    assert key.startswith("CartPole-v1 ") and 0 < known[key]["probe"]["step_s"] < 1
    known[key]["probe"].update(step_s=1.0, cpu_s=0.0, pauses=1.0)
    cache_path().write_text(json.dumps(known))
    with ef.make("CartPole-v1", num_envs=2) as fleet:
        assert fleet.plan.backend == "thread"  # what is remembered decides: no second probe
    for broken in ("not json", "[]", json.dumps({key: 1}), json.dumps({key: {"at": "x"}})):
        cache_path().write_text(broken)
        with ef.make("CartPole-v1", num_envs=2) as fleet:
            assert fleet.plan.backend in ("serial", "shm")


def test_nothing_of_the_env_runs_in_the_parent_while_probing() -> None:
    class Here(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.pid = os.getpid()

    with ef.make(Here, num_envs=64, isolate=True, num_workers=2) as fleet:
        pids = set(fleet.get_attr("pid"))
    assert (fleet.plan.backend == "serial") == (pids == {os.getpid()})


def test_waiting_envs_are_noticed_for_real() -> None:
    with ef.make(lambda: Waiting(0.005), num_envs=4, isolate=False) as fleet:
        assert fleet.plan.backend == "thread" and "waits" in fleet.plan.reason
    with ef.make(lambda: Waiting(0.005), num_envs=4) as fleet:  # unknown code waits in workers, a thread for each
        assert fleet.plan.backend == "pipe" and "waits" in fleet.plan.reason
        fleet.reset(seed=0)
        assert fleet.step([0] * 4).obs.tolist() == [[1.0]] * 4


def test_what_cannot_be_probed_shows_its_own_error_or_runs_here() -> None:
    lock = threading.Lock()
    with ef.make(lambda: (lock, Counting())[1], num_envs=3) as fleet:
        assert fleet.plan.backend == "serial" and "cannot be sent" in fleet.plan.reason
        assert "which a crash ends" in fleet.plan.reason
    with pytest.raises(ef.EnvFailed, match="planted fault in init"):
        ef.make(lambda: Faulty("init", "raise"), num_envs=4)


def test_measuring_an_env_counts_its_steps() -> None:
    found = measure_env(Counting(5), seconds=0.01)
    assert found["obs_bytes"] == 8 and 0 < found["cpu_s"] < 0.01 and not found["is_async"]


def test_quota_of_the_cgroup_is_read(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cgroup_quota(str(tmp_path)) == 1.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cgroup_quota(str(tmp_path)) is None


def test_the_grid_is_measured_point_by_point() -> None:
    assert ("serial", None, True) in grid(8, 2) and ("shm", 2, False) in grid(8, 2)
    heard: list[Any] = []
    points = tune(lambda: Counting(5), [1], 0.02, heard.append)
    assert heard == points and all(point.steps_per_s > 0 for point in points), points
    failed = measure(lambda: Faulty("init", "raise"), 1, ("serial", None, True), 0.02)
    assert failed.steps_per_s == 0 and "planted fault" in failed.problem


def test_an_env_that_was_kept_waiting_is_not_one_that_waits():
    """On a busy machine a step takes long by the clock; only one that gives its core away by itself wants a thread."""
    busy = Probe(1.3e-3, 0.4e-3, 16, pauses=0.0)
    assert choose(busy, 64, 2, None, None).backend == "shm"
    assert choose(dataclasses.replace(busy, pauses=1.0), 64, 2, None, None).backend == "thread"


def test_large_observations_are_worth_sharing_out():
    assert choose(Probe(4e-7, 4e-7, 16), 64, 2, None, None).backend == "serial"
    assert choose(Probe(4e-7, 4e-7, 28_224), 64, 2, None, None).backend == "shm"


def test_what_may_not_run_here_never_does() -> None:
    for step_s in (1e-7, 1e-5, 1e-3):
        for num_slots in (1, 2, 8, 256):
            for load in (None, Load(2, 0.0), Load(2, 1.0)):
                choice = pick(step_s, num_slots, here=False, load=load)
                assert (choice.backend, choice.isolate) == ("shm", True), choice
    assert pick(50e-3, 64, cpu_s=1e-4, here=False).backend == "pipe"
    assert pick(1e-6, 8, here=False).num_workers == 1  # ringing two costs more than eight such steps
    assert pick(100e-6, 8, here=False).num_workers == 2


@pytest.mark.parametrize("num_slots", [8, 64])
@pytest.mark.parametrize("free", [0.0, 0.4, 1.0, 1.3])
def test_cheap_envs_stay_in_one_process_where_the_cores_are_taken(num_slots: int, free: float) -> None:
    choice = pick(10e-6, num_slots, load=Load(2, free))
    assert choice.backend == "serial" and f"{free:.1f} of 2 CPUs are free" in choice.reason
    assert pick(10e-6, num_slots, load=Load(2, free), here=False).num_workers == 1
    assert pick(10e-6, num_slots, load=Load(2, 1.8)) == pick(10e-6, num_slots)  # quiet: nothing changes


def test_long_shares_outlast_others_and_spare_cores_are_used() -> None:
    ant = pick(350e-6, 64, load=Load(2, 0.0))
    assert (ant.backend, ant.num_workers, ant.isolate) == ("shm", 2, True) and "others use the machine" in ant.reason
    assert pick(10e-6, 64, cpus=8, load=Load(8, 5.2)).num_workers == 5
    assert pick(10e-6, 64, cpus=8, num_workers=3, load=Load(8, 5.2)).num_workers == 3
