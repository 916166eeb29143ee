"""A cluster with less room than a fleet asks for, and with more later: nothing waits for ever, and slots come back."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.errors import FleetError, WorkerLost
from envfleet.slots.layout import QUARANTINED, READY

pytest.importorskip("ray", reason="pip install 'envfleet[ray]'")
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("ray_here")]
START_S, LATER_S = 20.0, 4.0


class Hog:
    """Takes CPUs away until it is released."""

    def __init__(self, num_cpus: int) -> None:
        from ray.util import placement_group

        self.group = placement_group([{"CPU": num_cpus}])

    def wait(self) -> None:
        assert self.group.wait(60.0)

    def release(self) -> None:
        from ray.util import remove_placement_group

        remove_placement_group(self.group)


def with_pid(env: Any) -> Any:
    """The env with a method that tells its process."""
    env.unwrapped.get_pid = os.getpid
    return env


def fleet_of(**options: Any) -> Any:
    """Six slots in three workers of one CPU each, on a machine with four."""
    more = {"num_workers": 3, "spawn_timeout_s": START_S, "wrappers": [with_pid], **options}
    return ef.make("CartPole-v1", 6, backend="ray", **more)


def hurry(fleet: Any) -> None:
    """From now on nothing waits long for a place: what is asked for next gets none."""
    fleet._backend._launcher.options = dataclasses.replace(fleet._backend.options, spawn_timeout_s=LATER_S)


def test_a_fleet_that_starts_with_too_little_room_and_is_resized_to_what_fits() -> None:
    hog = Hog(2)
    hog.wait()
    with ef.make("CartPole-v1", 6, backend="serial") as one, fleet_of(on_fault="restart", init_timeout_s=15.0) as fleet:
        one.reset(seed=0)
        fleet.send_reset(seed=0)
        assert fleet.recv(timeout_s=20.0).status.tolist() == [READY] * 4 + [QUARANTINED] * 2  # at once: it has waited already
        assert fleet.step([0] * 6).status.tolist() == [READY] * 4 + [QUARANTINED] * 2
        one.step([0] * 6)
        num_faults = len(fleet.faults)
        fleet.resize(2)
        batch = fleet.step([0] * 6)
        assert batch.status.tolist() == [READY] * 6 and batch.step.tolist()[4:] == [-1, -1]
        assert np.array_equal(batch.obs[:4], one.step([0] * 6).obs[:4])
        hurry(fleet)
        with pytest.raises(FleetError, match="worker 2 has no place"):
            fleet.resize(3)
        hog.release()
        fleet._backend._launcher.options = fleet._backend.options
        fleet.resize(3)  # the request that found no place is not waited for again
        assert fleet.step([0] * 6).status.tolist() == [READY] * 6 and len(set(fleet.call("get_pid"))) == 3
        assert len(fleet.faults) == num_faults and not len(fleet.quarantined)


def test_with_on_fault_raise_a_second_reset_without_room_raises_at_once() -> None:
    with fleet_of(resources={"num_cpus": 1.3}) as fleet:
        fleet.reset(seed=0)
        hog = Hog(1)
        os.kill(fleet.call("get_pid")[4], signal.SIGKILL)
        hog.wait()
        hurry(fleet)
        with pytest.raises(WorkerLost):
            fleet.step([0] * 6)
        for _ in range(2):
            fleet.send_reset(seed=0)
            with pytest.raises(WorkerLost, match="has no place"):
                fleet.recv(timeout_s=5 * LATER_S)
        hog.release()
        deadline = time.monotonic() + 60.0
        while True:
            fleet.send_reset(seed=0)
            try:
                assert fleet.recv(timeout_s=5 * LATER_S).status.tolist() == [READY] * 6
                break
            except WorkerLost:
                assert time.monotonic() < deadline


def test_a_place_that_comes_later_than_the_deadline_of_a_constructor() -> None:
    limits = {"step_timeout_s": 1.0, "init_timeout_s": 2.0, "reset_timeout_s": 2.0, "spawn_timeout_s": 60.0}
    with fleet_of(on_fault="restart", resources={"num_cpus": 1.3}, **limits) as fleet:
        fleet.reset(seed=0)
        hog = Hog(1)
        os.kill(fleet.call("get_pid")[4], signal.SIGKILL)
        hog.wait()
        fleet.send([0] * 6)
        begun = time.monotonic()
        while time.monotonic() < begun + 5.0:
            fleet._backend.wait(6, 0.1)
            fleet._supervisor.take()
            fleet._supervisor.rebuild_due()
            fleet._supervisor.look()
        hog.release()
        assert fleet.recv().status.tolist() == [READY] * 4 + [2, 2]
        assert {fault.slot for fault in fleet.faults} == {4, 5} and len(fleet.faults) == 2
