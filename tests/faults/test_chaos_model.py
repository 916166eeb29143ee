"""The model behind `make chaos`: a fault row after one that was dropped may tell the episode that began unseen, and no other."""

from __future__ import annotations

import types
from typing import Any

import pytest

from envfleet.slots.layout import FAULT, READY
from tests.chaos.slots import Op, Row, SlotModel, Wrong, spawned
from tests.chaos.world import State, begin, info_of, view


def row(status: int, episode: int, obs: State, final: State | None = None, **more: Any) -> Row:
    """A row at an episode's first observation."""
    values: dict[str, Any] = {
        "status": status, "scored": False, "reward": 0.0, "terminated": False, "truncated": status == FAULT, "episode": episode,
        "step": -1, "length": 0, "ep_return": 0.0, "seed": obs.given_seed, "task": obs.task, "ended": status == FAULT,
        "obs": view(obs, "plain"), "final_obs": view(final or obs, "plain"), "info": info_of(obs), "final_info": {},
    }  # fmt: skip
    return Row({**values, **more})


def model_after_a_dropped_row() -> SlotModel:
    """Slot 0 was reset with seed 7, sent, its worker died, and the row that came of it was given up."""
    model = SlotModel(0, "plain", "reset", local=False)
    model.assign(7, None)
    model.sent(Op("reset"))
    model.take(row(READY, 0, begin(0, 7, 0, -1)), [])
    model.sent(Op("step", 5))
    model.excuse_for(2, "killed")
    model.swallowed()
    model.seen = []
    model.assign(8, None)
    model.sent(Op("reset"))
    return model


FAULTS = [types.SimpleNamespace(slot=0, episode=0, cause="died"), types.SimpleNamespace(slot=0, episode=1, cause="died")]


def test_it_may_tell_the_episode_that_began_unseen() -> None:
    unseen, now = begin(0, min(spawned(7)), 0, -1), begin(0, 8, 0, -1)
    assert model_after_a_dropped_row().take(row(FAULT, 1, now, unseen, step=0), FAULTS) == "fault"


@pytest.mark.parametrize("seed, task, step", [(99, -1, 0), (7, 3, 0), (7, -1, 1)], ids=["seed", "task", "step"])
def test_it_may_not_tell_another(seed: int, task: int, step: int) -> None:
    other, now = begin(0, seed, 0, task), begin(0, 8, 0, -1)
    with pytest.raises(Wrong, match="does not tell the last delivered"):
        model_after_a_dropped_row().take(row(FAULT, 1, now, other, step=step), FAULTS)
