"""Segments whose policy acts in Ray actors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import envfleet as ef
from envfleet.rollout import Collector, FragmentCollector
from tests.support.rollout_envs import Frozen, KillsItself, Walk

pytestmark = pytest.mark.usefixtures("ray_here")


@pytest.mark.parametrize("transport", ["stream", pytest.param("call", marks=pytest.mark.full)])
def test_fragments_on_actors_are_the_segments_of_a_collector_and_survive_a_kill(transport: str, tmp_path: Path) -> None:
    envs = [Walk, Walk, Walk, lambda: KillsItself(str(tmp_path / "done"), at=20)]  # in the third segment
    with (
        ef.make(Walk, num_envs=4, backend="serial") as fleet,
        FragmentCollector(
            envs, Frozen(), backend="ray", num_workers=2, seed=3, transport=transport, resources={"num_cpus": 0.5}
        ) as fragments,
    ):
        collector = Collector(fleet, Frozen(), seed=3)
        names = ("obs", "action", "reward", "terminated", "truncated", "scored", "episode", "step")
        for number in range(3):
            ours, theirs = fragments.segment(9), collector.segment(9)
            same = slice(0, 2) if number == 2 else slice(None)
            for name in names:
                assert np.array_equal(getattr(ours, name)[:, same], getattr(theirs, name)[:, same]), name
        assert not ours.scored[:, 2:].any() and fragments.ledger.in_flight == 2
        again = fragments.segment(9)
        assert again.scored.all() and (again.step[0, 2:] == 0).all()
        assert fragments.ledger.in_flight == 4 and fragments.ledger.failed.total() == 2
