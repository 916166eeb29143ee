"""Workers and machines of a Ray cluster that die, stop or say nothing: rows of hit slots are faults, all others are as without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.backends.ray_backend import worker_nodes
from envfleet.slots.layout import FAULT, QUARANTINED, READY
from tests.support.ray_cluster import SETTINGS, gone, machines

pytest.importorskip("ray", reason="pip install 'envfleet[ray]'")
SLOTS, WORKERS, STEPS, HIT_AT, DEADLINE_S = 8, 4, 60, 20, 2.0


class Timed:
    """A run of CartPole whose rows, statuses and longest wait are kept."""

    def __init__(self, fleet: Any, hit: Any = None, steps: int = STEPS, until: Any = None) -> None:
        self.status, self.rows, self.longest_s = [], [[] for _ in range(SLOTS)], 0.0
        random = np.random.default_rng(0)
        fleet.reset(seed=0)
        for step in range(steps):
            if step == HIT_AT and hit is not None:
                hit(fleet)
            begun = time.monotonic()
            batch = fleet.step(random.integers(2, size=SLOTS))
            self.longest_s = max(self.longest_s, time.monotonic() - begun)
            assert batch.slots.tolist() == list(range(SLOTS))  # every slot sent comes back
            self.status.append(batch.status.copy())
            for slot in range(SLOTS):
                self.rows[slot].append(
                    (batch.obs[slot].tobytes(), batch.reward[slot], batch.final_obs[slot].tobytes(), bool(batch.ended[slot]))
                )
            if until is not None and step > HIT_AT and until(batch):
                break

    def hit_slots(self) -> list[int]:
        return sorted(set(np.flatnonzero((np.array(self.status) != READY).any(axis=0)).tolist()))


def pids_of(fleet: Any) -> list[int]:
    return [int(pid) for pid in fleet.call("get_pid")]


def with_pid(env: Any) -> Any:
    """The env with a method that tells its process."""
    env.unwrapped.get_pid = os.getpid
    return env


def fleet_of(**options: Any) -> Any:
    more = {"num_workers": WORKERS, "step_timeout_s": DEADLINE_S, "on_fault": "restart", "wrappers": [with_pid]}
    return ef.make("CartPole-v1", SLOTS, **{"backend": "ray", **more, **options})


@pytest.fixture(scope="module")
def undisturbed() -> Timed:
    with ef.make("CartPole-v1", SLOTS, backend="serial") as fleet:
        return Timed(fleet)


def assert_only_hit(run: Timed, undisturbed: Timed, hit: list[int]) -> None:
    """Slots that were not hit have the same bytes; those that were, one fault row each, and good ones again after it."""
    assert run.hit_slots() == hit
    for slot in range(SLOTS):
        if slot not in hit:
            assert run.rows[slot] == undisturbed.rows[slot]
        else:
            statuses = [int(status[slot]) for status in run.status]
            assert statuses.count(FAULT) == 1 and statuses[-1] == READY
            at = statuses.index(FAULT)
            assert run.rows[slot][:at] == undisturbed.rows[slot][:at]
            assert run.rows[slot][at][2] == undisturbed.rows[slot][at - 1][0]  # final_obs: the last good observation


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize("transport", ["stream", pytest.param("call", marks=pytest.mark.full)])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_killed_or_stopped(undisturbed: Timed, blow: int, transport: str) -> None:
    pids: list[int] = []

    def hit(fleet: Any) -> None:
        pids.extend(pids_of(fleet))
        os.kill(pids[2], blow)

    with fleet_of(transport=transport, resources={"num_cpus": 0.5}) as fleet:
        run = Timed(fleet, hit)
        faults = list(fleet.faults)
        pids.extend(pids_of(fleet))
    assert_only_hit(run, undisturbed, [2, 3])
    assert {fault.slot for fault in faults} == {2, 3}
    assert {fault.kind for fault in faults} <= ({"lost"} if blow == signal.SIGKILL else {"timeout", "lost"})
    assert all(fault.worker == 1 for fault in faults)
    if blow == signal.SIGKILL and transport == "stream":
        assert any("ended" in fault.cause or "closed its connection" in fault.cause for fault in faults)
    for pid in set(pids):
        assert gone(pid), f"process {pid} was left"


@pytest.mark.full
@pytest.mark.parametrize("room", [True, False])
def test_a_machine_that_is_gone(room: bool) -> None:
    with machines(2, 2) as cluster:
        if room:
            cluster.add(2)
        with fleet_of(num_workers=4, spawn_timeout_s=20.0 if room else 8.0) as fleet:
            nodes = worker_nodes(fleet._backend)
            second = nodes[-1]
            lost = [slot for slot in range(SLOTS) if nodes[slot // 2] == second]
            assert lost and len(lost) < SLOTS
            joined, hit = [], np.zeros(SLOTS, bool)

            def until(batch: Any) -> bool:
                hit[batch.status != READY] = True
                if not room and not joined and (batch.status == QUARANTINED).any():
                    joined.append(cluster.add(2))
                return bool(hit.sum() == len(lost) and (batch.status == READY).all())

            run = Timed(fleet, lambda _: cluster.kill(second), steps=1_000_000, until=until)
        assert run.hit_slots() == lost and bool(joined) is not room
        with ef.make("CartPole-v1", SLOTS, backend="serial") as fleet:
            as_planned = Timed(fleet, steps=len(run.status))
        if room:
            assert_only_hit(run, as_planned, lost)
        for slot in set(range(SLOTS)) - set(lost):
            assert run.rows[slot] == as_planned.rows[slot]
        assert run.longest_s < (20.0 if room else 8.0) + DEADLINE_S + 6.0  # a bound against hanging, no measurement


@pytest.mark.full
def test_a_machine_that_says_nothing(undisturbed: Timed) -> None:
    with machines(4, 4) as cluster, fleet_of(num_workers=4, spawn_timeout_s=20.0) as fleet:
        pids, nodes = pids_of(fleet), worker_nodes(fleet._backend)
        silent = nodes[-1]
        lost = [slot for slot in range(SLOTS) if nodes[slot // 2] == silent]
        assert len(lost) < SLOTS
        run = Timed(fleet, lambda _: cluster.silence(silent, [pids[slot] for slot in lost[::2]]))
        assert_only_hit(run, undisturbed, lost)
        assert silent not in worker_nodes(fleet._backend)  # what replaces them is elsewhere


DRIVER = """
import os, ray, envfleet as ef
ray.init(address=os.environ["ADDRESS"], log_to_driver=False)
fleet = ef.make("CartPole-v1", 4, backend="ray", num_workers=2, wrappers=[__import__("tests.ray.test_ray_faults", fromlist=["x"]).with_pid])
fleet.reset(seed=0)
print(*fleet.call("get_pid"), flush=True)
while True:
    fleet.step([0, 1, 0, 1])
"""


@pytest.mark.full
def test_a_driver_that_is_killed_leaves_no_worker() -> None:
    with machines(4) as cluster:
        environ = {**os.environ, **SETTINGS, "ADDRESS": cluster.cluster.address}
        driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, env=environ, text=True)
        assert driver.stdout is not None
        pids = {int(pid) for pid in driver.stdout.readline().split()}
        driver.kill()
        driver.wait()
        assert len(pids) == 2 and all(gone(pid) for pid in pids)


@pytest.mark.usefixtures("ray_here")
def test_half_a_message_is_a_silent_worker(undisturbed: Timed) -> None:
    """The connection carries the beginning of a message, and then nothing."""

    def hit(fleet: Any) -> None:
        channel = fleet._backend._workers[3].channel
        channel._chunks.append((5_000).to_bytes(4, "big") + b"half")

    with fleet_of(resources={"num_cpus": 0.5}) as fleet:
        run = Timed(fleet, hit)
    assert_only_hit(run, undisturbed, [6, 7])


@pytest.mark.usefixtures("ray_here")
@pytest.mark.full
def test_bytes_of_somebody_else_end_the_connection_and_change_no_row(undisturbed: Timed) -> None:
    def hit(fleet: Any) -> None:
        channel = fleet._backend._workers[0].channel
        channel._chunks.append((100).to_bytes(4, "big") + bytes(100))  # the right form, without the key

    with fleet_of(resources={"num_cpus": 0.5}) as fleet:
        run = Timed(fleet, hit)
    assert_only_hit(run, undisturbed, [0, 1])
