"""Invariant 7: close is bounded, idempotent and complete, and what the caller still holds stays readable."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.ways import WAYS, starter

EVERY = pytest.mark.parametrize("way", WAYS)


@EVERY
def test_what_was_handed_out_outlives_the_fleet(way: str) -> None:
    """A closed fleet's rows and zero-copy views can still be looked at: the memory goes when the last view does."""
    fleet = starter(way)("CartPole-v1", 3, 2)
    fleet.reset(seed=0)
    batch = fleet.step([0, 1, 0], copy=False)
    obs, before = batch.obs, batch.obs.copy()
    slab = fleet.slab
    fleet.close()
    assert np.array_equal(obs, before) and np.array_equal(slab.obs, before) and batch.reward.tolist() == [1.0] * 3
    assert len(fleet.faults) == 0
