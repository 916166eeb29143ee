"""The family Unlock: three tasks are easy, each later one needs the skills of those before."""

from __future__ import annotations

import numpy as np
import pytest

from envfleet.envs.unlock import Unlock
from envfleet.errors import BadArgument


def play(env, task, keys):
    """The return, the length, and whether it was solved."""
    env.reset(options={"task": task})
    total, length, ended, terminated = 0.0, 0, False, False
    while not ended:
        _, reward, terminated, truncated, _ = env.step(np.int64(keys[length % len(keys)]))
        total, length, ended = total + reward, length + 1, terminated or truncated
    return total, length, terminated


def test_the_right_keys_solve_every_task_and_one_wrong_key_none():
    env = Unlock()
    for task in range(10):
        right = env.keys[task : task + 1] if task < 3 else env.keys[: task + 1]
        assert play(env, task, right) == (1.0, len(right), True)
        wrong = [*right[:-1], (right[-1] + 1) % 8]
        assert play(env, task, wrong + [right[-1]] * 199) == (0.0, 200, False)


def test_random_keys_solve_the_first_three_tasks_only():
    env, rng = Unlock(horizon=10), np.random.default_rng(0)
    solved = [sum(play(env, task, rng.integers(8, size=10))[2] for _ in range(200)) for task in range(10)]
    assert min(solved[:3]) >= 10 and max(solved[3:]) <= 1


def test_the_observation_tells_lock_and_task_and_that_it_is_jammed():
    env = Unlock()
    obs, info = env.reset(seed=3, options={"task": 9})
    assert obs.tolist() == [1.0] + [0.0] * 9 + [1.0] and info["task"] == 9
    assert env.step(env.keys[0])[0].tolist() == [0.0, 1.0] + [0.0] * 8 + [1.0]
    assert env.step((env.keys[1] + 1) % 8)[0].tolist() == [0.0] * 10 + [1.0]


def test_sizes_that_make_no_chain_are_refused():
    with pytest.raises(BadArgument, match="num_tasks from 4"):
        Unlock(num_tasks=3)
