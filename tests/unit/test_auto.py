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
from envfleet.auto import Choice, Probe, cache_path, choose, measure_env
from envfleet.envs.probe import Counting, Faulty, Waiting
from envfleet.supervise.machine import cgroup_quota
from envfleet.tuning import grid, measure, tune


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
    assert key.startswith("CartPole-v1 ") and 0 < known[key]["step_s"] < 1
    known[key].update(step_s=1.0, cpu_s=0.0, pauses=1.0)
    cache_path().write_text(json.dumps(known))
    with ef.make("CartPole-v1", num_envs=2) as fleet:
        assert fleet.plan.backend == "thread"  # what is remembered decides: no second probe
    cache_path().write_text("not json")
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
    with ef.make(lambda: Waiting(0.005), num_envs=4) as fleet:
        assert fleet.plan.backend == "thread" and "waits" in fleet.plan.reason


def test_what_cannot_be_probed_shows_its_own_error_or_runs_here() -> None:
    lock = threading.Lock()
    with ef.make(lambda: (lock, Counting())[1], num_envs=3) as fleet:
        assert fleet.plan.backend == "serial" and "cannot travel" in fleet.plan.reason
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
