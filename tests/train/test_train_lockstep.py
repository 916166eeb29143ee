"""Segments collected the short way equal those collected the long way, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from train_helpers import Fragile, MaskedByInfo, WithLimit, config

from envfleet.networks.network_policy import Policy
from envfleet.rollout.segments import lockstep
from envfleet.train import PPOTrainer
from envfleet.util.trees import tree_leaves


class Doubted(Policy):
    """The same policy, but its answers are checked: it goes the long way."""

    answers_fit = False


def collected(kind: type[Policy], timing: bool = False, **changes):
    import gymnasium as gym

    columns = {"action_mask": gym.spaces.MultiBinary(2)} if changes.get("env") is MaskedByInfo else {}
    with PPOTrainer(config(**changes, columns=columns)) as trainer:
        trainer.policy.__class__ = kind
        trainer.collector._clock.on = timing
        segments = [trainer.collector.segment(16) for _ in range(4)]
        assert lockstep.fits(trainer.collector._segments) == (kind is Policy)
        return segments, trainer.collector.ledger


CASES = {
    "vector": {},
    "memory": {"env": "cartpole-novel", "arch": "memory"},
    "box": {"env": WithLimit},
    "columns": {"env": MaskedByInfo},
    "faults": {"env": Fragile, "on_fault": "restart"},
    "shm": {"backend": "shm", "num_workers": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_short_and_long_way_agree(case):
    short, short_ledger = collected(Policy, timing=True, **CASES[case])
    long, long_ledger = collected(Doubted, **CASES[case])
    if case != "faults":  # how often a slot may be restarted is the fleet's business
        assert str(short_ledger) == str(long_ledger)
        assert sum(len(segment.end_index) for segment in short)
    for one, other in zip(short, long):
        for name, value in vars(one).items():
            theirs = getattr(other, name)
            for (path, leaf), (_, wanted) in zip(tree_leaves(value), tree_leaves(theirs)):
                assert leaf.dtype == wanted.dtype, (name, path)
                np.testing.assert_array_equal(leaf, wanted, err_msg=f"{name} {path}")


def test_segments_do_not_share_memory_with_what_comes_next():
    with PPOTrainer(config()) as trainer:
        first = trainer.collector.segment(8)
        before = first.obs.copy(), first.bootstrap_obs.copy(), first.final_obs.copy()
        second = trainer.collector.segment(8)
        for kept, wanted in zip((first.obs, first.bootstrap_obs, first.final_obs), before):
            np.testing.assert_array_equal(kept, wanted)
        np.testing.assert_array_equal(second.obs[0], first.bootstrap_obs)
    assert torch.get_num_threads() >= 1
