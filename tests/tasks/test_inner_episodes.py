"""VariBadWrapper: what each row says, and that memory, returns and tasks are cut at outer ends only."""

from __future__ import annotations

import numpy as np
import pytest

import envfleet as ef
from envfleet.adapters.meta_envs import family
from envfleet.envs.gridnavi import GridNavi
from envfleet.envs.varibad import VariBadWrapper
from envfleet.errors import BadArgument


def test_an_inner_end_returns_the_fresh_observation_and_keeps_the_last():
    env = VariBadWrapper(GridNavi(horizon=3), episodes_per_task=3)
    env.reset(seed=0, task=(2, 2))
    steps = [env.step(np.int64(2)) for _ in range(9)]  # always right
    x = [int(np.argmax(obs[:5])) for obs, *_ in steps]
    assert x == [1, 2, 0, 1, 2, 0, 1, 2, 3]  # the last step of an outer episode shows where it ended
    assert [bool(info["inner_done"]) for *_, info in steps] == [False, False, True] * 2 + [False] * 3
    assert [info["inner_episode"] for *_, info in steps] == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert [int(np.argmax(info["inner_final_obs"][:5])) for *_, info in steps if info["inner_done"]] == [3, 3]
    assert [obs[-1] for obs, *_ in steps] == [0, 0, 1, 0, 0, 1, 0, 0, 0]
    assert [terminated for _, _, terminated, _, _ in steps] == [False] * 8 + [True]
    assert np.allclose(steps[-1][4]["inner_returns"], -0.3)
    _, info = env.reset(task=(4, 4))
    assert np.allclose(info["inner_returns"], -0.3) and info["inner_episode"] == 0 and info["task"] == (4, 4)


def test_an_oracle_sees_the_task_that_runs():
    env = VariBadWrapper(GridNavi(), episodes_per_task=2, oracle=True)
    obs, _ = env.reset(task=(3, 4))
    assert obs.shape == (21,) and np.argmax(obs[10:15]) == 3 and np.argmax(obs[15:20]) == 4
    assert np.argmax(env.reset(task=(0, 2))[0][15:20]) == 2


@pytest.mark.parametrize("backend", ["serial", "thread", "aio", "pipe", "shm"])
def test_rows_of_a_fleet_have_both_levels_of_ends(backend):
    with ef.make(family("gridnavi", 2), 3, backend=backend, num_workers=None if backend == "serial" else 2) as fleet:
        fleet.reset(seed=0, tasks=[(2, 2), (3, 3), (4, 4)])
        inner, outer, last = [], [], []
        for _ in range(61):
            batch = fleet.step(np.full(3, 2))
            inner.append(batch.inner_done[0].item())
            outer.append(bool(batch.ended[0]))
            last.append(batch.inner_returns[0].copy())
        assert np.flatnonzero(inner).tolist() == [14, 44] and np.flatnonzero(outer).tolist() == [29, 59]
        assert np.allclose(last[29], [-1.5, -1.5])  # of the episode that ended, with the first observation of the next
        assert fleet.get_attr("task") == ((2, 2), (3, 3), (4, 4))  # a task stays until it is replaced


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "2"])
def test_a_wrong_number_of_inner_episodes_is_refused(number):
    with pytest.raises(BadArgument, match="episodes_per_task"):
        VariBadWrapper(GridNavi(), number)


def test_without_tasks_of_the_caller_one_is_drawn_per_outer_episode():
    env = VariBadWrapper(GridNavi(horizon=2), episodes_per_task=3)
    drawn = []
    for seed in (1, None, None, None, 1):
        env.reset(seed=seed)
        during = {env.unwrapped.task for _ in range(6) if env.step(np.int64(0)) is not None}
        assert len(during) == 1  # the same in all inner episodes
        drawn += during
    assert drawn[0] == drawn[-1] and len(set(drawn)) > 2
