"""Segments written as whole rows equal those written slot by slot, and checked answers equal trusted ones, to the byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from envfleet.networks.network_policy import Policy
from envfleet.train import PPOTrainer
from envfleet.util.trees import tree_leaves
from tests.support.training import Fragile, MaskedByInfo, WithLimit, config


class Checked(Policy):
    """The same policy, but its answers are checked."""

    answers_fit = False


def collected(kind: type[Policy], whole: bool, timing: bool = False, **changes):
    import gymnasium as gym

    columns = {"action_mask": gym.spaces.MultiBinary(2)} if changes.get("env") is MaskedByInfo else {}
    with PPOTrainer(config(**changes, columns=columns)) as trainer:
        trainer.policy.__class__ = kind
        trainer.collector._clock.on = timing
        run = trainer.collector._open_segments()
        run.whole = whole
        run.at = run._first()
        return [trainer.collector.segment(16) for _ in range(4)], trainer.collector.ledger


CASES = {
    "vector": {},
    "memory": {"env": "cartpole-novel", "arch": "memory"},
    "box": {"env": WithLimit},
    "columns": {"env": MaskedByInfo},
    "faults": {"env": Fragile, "on_fault": "restart"},
    "shm": {"backend": "shm", "num_workers": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind, whole", [(Checked, True), (Policy, False)], ids=["checked", "by slot"])
def test_whole_rows_of_trusted_answers_are_right(case, kind, whole):
    usual, usual_ledger = collected(Policy, True, timing=True, **CASES[case])
    others, other_ledger = collected(kind, whole, **CASES[case])
    if case != "faults":  # how often a slot may be restarted is the fleet's business
        assert str(usual_ledger) == str(other_ledger)
        assert sum(len(segment.end_index) for segment in usual)
    for one, other in zip(usual, others):
        for name, value in vars(one).items():
            if value is None:  # `learned`: all rows are
                assert getattr(other, name) is None
                continue
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
