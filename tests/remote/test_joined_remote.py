"""Sessions with a server as a part of a joined fleet."""

from __future__ import annotations

import numpy as np
import pytest

import envfleet as ef
from envfleet.remote import Server
from envfleet.rollout import Collector
from envfleet.slots.layout import FAULT, QUARANTINED, READY
from envfleet.testing import record
from tests.support.our_server import OurServer


@pytest.mark.parametrize(("on_end", "at_least"), [pytest.param("reset", None, marks=pytest.mark.full), ("wait", 2)])
def test_sessions_and_local_slots_give_the_same_bytes(on_end, at_least):
    with ef.make("CartPole-v1", 6, backend="serial", on_end=on_end) as fleet:
        wanted = record(fleet, 60, seed=3, with_info=False).digest()
    with Server("CartPole-v1", port=0, max_sessions=16, num_workers=1) as server:
        remote = ef.make(server.url, 3, on_end=on_end)
        local = ef.make("CartPole-v1", 3, backend="serial", on_end=on_end, on_fault="restart")
        with ef.join([remote, local]) as fleet:
            assert record(fleet, 60, seed=3, with_info=False, at_least=at_least).digest() == wanted


def test_capacity_of_the_servers_and_of_the_other_parts_together():
    with Server("CartPole-v1", port=0, max_sessions=2, num_workers=1) as server:
        remote = ef.make(server.url, 4, reset_timeout_s=5.0)
        with ef.join([remote, ef.make("CartPole-v1", 2, backend="serial", on_fault="restart")]) as fleet:
            collector = Collector(fleet, random_actions=True, seed=0, mode="async", at_least=1)
            with pytest.warns(RuntimeWarning, match="sessions for 4 of 6 slots"):
                assert {rollout.slot for rollout in collector.collect(20)} == {0, 1, 4, 5}


def test_a_server_that_is_gone_takes_only_its_own_slots_along():
    steps, random = 40, np.random.default_rng(0)
    actions = random.integers(2, size=(steps, 4))
    with ef.make("CartPole-v1", 4, backend="serial") as fleet:
        fleet.reset(seed=0)
        wanted = [fleet.step(action).obs[2:].tobytes() for action in actions]
    with OurServer("CartPole-v1") as server:
        remote = ef.make(server.url, 2, reset_timeout_s=1.0, step_timeout_s=2.0, max_restarts=1)
        local = ef.make("CartPole-v1", 2, backend="thread", on_fault="restart", max_restarts=1)
        with ef.join([remote, local]) as fleet:
            fleet.reset(seed=0)
            for step, action in enumerate(actions):
                if step == 10:
                    server.kill()
                batch = fleet.step(action)
                assert batch.obs[2:].tobytes() == wanted[step] and (batch.status[2:] == READY).all()
            assert (batch.status[:2] == QUARANTINED).all() and set(batch.status.tolist()) <= {READY, FAULT, QUARANTINED}
            assert {fault.slot for fault in fleet.faults} == {0, 1}
