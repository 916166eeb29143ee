"""Threads whose slots come by rings: given up in one slot, its others go on; nothing that comes late is written."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.probe import Counting
from envfleet.slots import compiled_core
from envfleet.testing import wait_until

LIVES = pytest.mark.parametrize("compiled", ["1", "0"], ids=["compiled", "python"])


class Stuck(Counting):
    """Waits in its third step until it is let go."""

    def __init__(self, let_go: threading.Event, returned: list[int]) -> None:
        super().__init__(limit=100)
        self.let_go, self.returned = let_go, returned

    def step(self, action: Any) -> Any:
        if self.count == 2:
            self.let_go.wait(60)
            self.returned.append(1)
        return super().step(action)


@LIVES
def test_a_thread_given_up_leaves_its_other_slots_to_its_successor(compiled: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    let_go, returned = threading.Event(), []
    makes: list[Any] = [lambda: Counting(100)] * 4
    makes[1] = lambda: Stuck(let_go, returned)
    try:
        with ef.make(makes, backend="thread", num_workers=1, on_fault="restart", step_timeout_s=0.3) as fleet:
            fleet.reset(seed=0)
            for step in range(1, 9):
                batch = fleet.step([0] * 4)
                assert batch.obs[[0, 2, 3], 0].tolist() == [float(step)] * 3
            assert fleet.quarantined.tolist() == [1]
            assert fleet.get_attr("count", slots=[0, 2, 3]) == (8, 8, 8)
            row = fleet.slab.head[1].tobytes()
            let_go.set()
            assert wait_until(lambda: bool(returned))
            for _ in range(9, 30):
                batch = fleet.step([0] * 4)
            assert batch.obs[[0, 2, 3], 0].tolist() == [29.0] * 3
            assert fleet.slab.head[1].tobytes() == row
    finally:
        let_go.set()


@LIVES
def test_several_threads_are_given_up_one_after_the_other(compiled: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
    let_go, returned = threading.Event(), []
    makes: list[Any] = [lambda: Stuck(let_go, returned), lambda: Stuck(let_go, returned), lambda: Counting(100)] * 2
    try:
        with ef.make(makes, backend="thread", num_workers=2, on_fault="restart", step_timeout_s=0.2) as fleet:
            fleet.reset(seed=0)
            for _ in range(6):
                batch = fleet.step([0] * 6)
            assert fleet.quarantined.tolist() == [0, 1, 3, 4]
            assert batch.obs[[2, 5], 0].tolist() == [6.0, 6.0]
            let_go.set()
            assert wait_until(lambda: len(returned) == 4)
            assert fleet.step([0] * 6).obs[[2, 5], 0].tolist() == [7.0, 7.0]
    finally:
        let_go.set()


@pytest.mark.skipif(compiled_core.load() is None, reason=compiled_core.status())
def test_many_slots_on_few_threads_and_few_on_many() -> None:
    for slots, workers in ((70, 3), (3, 70), (64, 64)):
        with ef.make(lambda: Counting(5), slots, backend="thread", num_workers=workers) as fleet:
            fleet.reset(seed=0)
            sent = np.ones(slots, int)
            fleet.send([0] * slots)
            for _ in range(200):
                batch = fleet.recv(at_least=min(2, slots))
                fleet.send([0] * len(batch), batch.slots)
                sent[batch.slots] += 1
            fleet.recv()
            # Every send was one step: of whole episodes of five, and of the one that is running.
            head = fleet.slab.head
            assert ((head["started"] - 1) * 5 + head["now_length"] == sent).all()
