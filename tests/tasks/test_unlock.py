"""The family Unlock: three tasks are easy, each later one needs the skills of those before."""

from __future__ import annotations

import numpy as np
import pytest

from envfleet.envs.unlock import Unlock
from envfleet.errors import BadArgument


def play(env, task, choose):
    """The return, the length, and whether it was solved; `choose(env, step)` gives the key."""
    env.reset(options={"task": task})
    total, length, ended, terminated = 0.0, 0, False, False
    while not ended:
        _, reward, terminated, truncated, _ = env.step(np.int64(choose(env, length)))
        total, length, ended = total + reward, length + 1, terminated or truncated
    return total, length, terminated


def test_the_right_keys_solve_every_task_and_one_wrong_key_none():
    env = Unlock()
    env.reset(seed=0)
    for task in range(10):
        locks = 1 if task < 3 else task + 1
        assert play(env, task, lambda env, step: env.right_key) == (1.0, locks, True)
        for wrong in range(locks):  # a jammed lock does not open, whatever is tried afterwards
            chosen = lambda env, step, wrong=wrong: (env.right_key + (step == wrong)) % 8
            assert play(env, task, chosen) == (0.0, 100, False)


def test_random_keys_solve_the_first_three_tasks_only():
    env, rng = Unlock(horizon=10), np.random.default_rng(0)
    env.reset(seed=0)
    solved = [sum(play(env, task, lambda env, step: rng.integers(8))[2] for _ in range(200)) for task in range(10)]
    assert min(solved[:3]) >= 10 and max(solved[3:]) <= 1


def test_the_keys_of_a_lock_are_learned_sign_by_sign():
    """Who knows the key of one sign opens a lock that shows another one no more often than by chance."""
    env = Unlock()
    env.reset(seed=0)
    solved = [play(env, 0, lambda env, step: env.keys[0][0])[2] for _ in range(200)]
    signs = sum(key == env.keys[0][0] for key in env.keys[0])
    assert np.mean(solved) == pytest.approx(signs / 8, abs=0.12)


def test_the_observation_tells_the_sign_of_the_lock_and_the_task_and_that_it_is_jammed():
    env = Unlock(num_signs=2)
    obs, info = env.reset(seed=3, options={"task": 9})
    assert obs.shape == (21,) and obs[:2].sum() == 1 and obs[2:20].sum() == 0 and obs[-1] == 1 and info["task"] == 9
    assert env.keys[0][int(obs[:2].argmax())] == env.right_key
    obs = env.step(env.right_key)[0]
    assert obs[2:4].sum() == 1 and obs[:20].sum() == 1
    assert env.step((env.right_key + 1) % 8)[0].tolist() == [0.0] * 20 + [1.0]


@pytest.mark.parametrize("wrong", [{"num_tasks": 3}, {"num_keys": 1}, {"horizon": 9}, {"num_signs": 0}])
def test_sizes_that_make_no_chain_are_refused(wrong):
    with pytest.raises(BadArgument, match="num_tasks from 4"):
        Unlock(**wrong)
