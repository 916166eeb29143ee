"""Ray actors as a part of a joined fleet."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.slots.layout import FAULT, QUARANTINED, READY
from envfleet.testing import record
from tests.support.ray_cluster import one_machine
from tests.support.system import child_env

pytest.importorskip("ray", reason="pip install 'envfleet[ray]'")
pytestmark = pytest.mark.full


def with_pid(env: Any) -> Any:
    """The env with a method that tells its process."""
    env.unwrapped.get_pid = os.getpid
    return env


def mixed_fleet() -> Any:
    """Slots 0 to 3 in two actors, 4 and 5 here, 6 and 7 in a process."""
    options: dict[str, Any] = {"on_fault": "restart", "wrappers": [with_pid]}
    ray_part = ef.make("CartPole-v1", 4, backend="ray", num_workers=2, resources={"num_cpus": 0.5}, **options)
    local = ef.make("CartPole-v1", 2, backend="serial", **options)
    return ef.join([ray_part, local, ef.make("CartPole-v1", 2, backend="shm", num_workers=1, **options)])


@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize("at_least", [None, 2])
def test_actors_and_local_slots_give_the_same_bytes(at_least: int | None) -> None:
    with ef.make("CartPole-v1", 8, backend="serial") as fleet:
        wanted = record(fleet, 60, seed=4).digest()
    with mixed_fleet() as fleet:
        assert record(fleet, 60, seed=4, at_least=at_least).digest() == wanted


def _rows(fleet: Any, hit: Any = None) -> tuple[list[Any], list[Any]]:
    random, rows, statuses = np.random.default_rng(0), [], []
    fleet.reset(seed=0)
    for step in range(40):
        if step == 15 and hit is not None:
            hit(fleet)
        batch = fleet.step(random.integers(2, size=8))
        rows.append(batch.obs.copy())
        statuses.append(batch.status.copy())
    return rows, statuses


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    with ef.make("CartPole-v1", 8, backend="serial") as fleet:
        return _rows(fleet)[0]


@pytest.mark.usefixtures("ray_here")
def test_an_actor_that_is_killed_takes_only_its_own_slots_along(undisturbed: Any) -> None:
    with mixed_fleet() as fleet:
        rows, statuses = _rows(fleet, lambda fleet: os.kill(fleet.call("get_pid", slots=[2])[0], signal.SIGKILL))
    hit = np.flatnonzero((np.array(statuses) == FAULT).any(axis=0)).tolist()
    assert hit == [2, 3] and statuses[-1].tolist() == [READY] * 8
    others = [0, 1, 4, 5, 6, 7]
    assert all(np.array_equal(one[others], other[others]) for one, other in zip(rows, undisturbed))


def shut_down() -> None:
    """A fleet that goes on when its Ray is shut down under it."""
    with ef.make("CartPole-v1", 8, backend="serial") as fleet:
        wanted, _ = _rows(fleet)
    with one_machine() as ray, mixed_fleet() as fleet:
        rows, statuses = _rows(fleet, lambda fleet: ray.shutdown())
        assert statuses[-1].tolist() == [QUARANTINED] * 4 + [READY] * 4 and fleet.quarantined.tolist() == [0, 1, 2, 3]
    assert all(np.array_equal(one[4:], other[4:]) for one, other in zip(rows, wanted))
    print("went on")


def test_a_ray_that_is_shut_down_is_a_part_that_is_gone() -> None:
    """In a process of its own: it ends the Ray that it is connected to."""
    code = "from tests.ray.test_ray_joined import shut_down; shut_down()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=child_env())
    assert done.returncode == 0 and "went on" in done.stdout, done.stderr[-3000:]
