"""A cluster with less room than a fleet asks for, and with more later: nothing waits for ever, and slots come back."""

from __future__ import annotations

import contextlib
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
    """Takes CPUs away until it is released, at the end of the block at the latest: other tests need them."""

    def __init__(self, num_cpus: int) -> None:
        from ray.util import placement_group

        self.group = placement_group([{"CPU": num_cpus}])

    def wait(self) -> None:
        assert self.group.wait(60.0)

    def release(self) -> None:
        from ray.util import remove_placement_group

        remove_placement_group(self.group)

    def __enter__(self) -> Hog:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.release()


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


def fleet_without_the_last() -> Any:
    """A fleet that was reset, and whose last worker found no place. Which one finds none is Ray's choice."""
    for _ in range(5):
        fleet = fleet_of(on_fault="restart", init_timeout_s=15.0)
        fleet.send_reset(seed=0)
        status = fleet.recv(timeout_s=20.0).status.tolist()  # at once: it has waited already
        assert sorted(status) == [READY] * 4 + [QUARANTINED] * 2 and status[::2] == status[1::2]
        if status[-1] == QUARANTINED:
            return fleet
        fleet.close()
    raise AssertionError("the last worker always found a place")


def test_a_fleet_that_starts_with_too_little_room_and_is_resized_to_what_fits() -> None:
    with Hog(2) as hog, ef.make("CartPole-v1", 6, backend="serial") as one:
        hog.wait()
        one.reset(seed=0)
        with fleet_without_the_last() as fleet:
            room_comes(hog, one, fleet)


def room_comes(hog: Hog, one: Any, fleet: Any) -> None:
    assert fleet.step([0] * 6).status.tolist() == [READY] * 4 + [QUARANTINED] * 2
    one.step([0] * 6)
    num_faults = len(fleet.faults)
    for slots in (None, [5], [0, 4]):
        with pytest.raises(WorkerLost, match="has no place"):  # and not a wait for it
            fleet.call("get_pid", slots=slots)
    assert fleet.step([0] * 6).status.tolist() == [READY] * 4 + [QUARANTINED] * 2
    one.step([0] * 6)
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
    with fleet_of(resources={"num_cpus": 1.3}) as fleet, contextlib.ExitStack() as closing:
        fleet.reset(seed=0)
        hog = closing.enter_context(Hog(1))
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
    with fleet_of(on_fault="restart", resources={"num_cpus": 1.3}, **limits) as fleet, contextlib.ExitStack() as closing:
        fleet.reset(seed=0)
        hog = closing.enter_context(Hog(1))
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
