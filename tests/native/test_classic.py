"""Gymnasium's classic environments in C++ against Gymnasium's own classes: equal to the last bit."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.registry import NATIVE, native_version
from envfleet.testing import canonical, record

CLASSIC = [name for name, target in NATIVE.items() if "native_classic" in target]
pytestmark = pytest.mark.parametrize("name", CLASSIC)


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Gymnasium's environment and ours, without wrappers."""
    return gym.make(name, **options).unwrapped, native_version(name)[0].make(**options).unwrapped


def actions(env: Any, count: int, seed: int) -> list[Any]:
    """Random actions; of a box also beyond its bounds, and held for some steps, so that every part of the state space is reached."""
    rng = np.random.default_rng(seed)
    out: list[Any] = []
    while len(out) < count:
        if isinstance(env.action_space, gym.spaces.Discrete):
            action = np.int64(rng.integers(env.action_space.n))
        else:
            action = (1.3 * rng.uniform(env.action_space.low, env.action_space.high)).astype(np.float32)
        out += [action] * int(rng.integers(1, 30 if rng.random() < 0.2 else 3))
    return out[:count]


def assert_equal_steps(theirs: Any, ours: Any, count: int, seed: int) -> int:
    """Steps both, and resets both at ends and after 300 steps; returns the number of episodes."""
    episodes, length = 0, 0
    for action in actions(theirs, count, seed):
        wanted, got = theirs.step(action), ours.step(action)
        assert canonical(np.asarray(theirs.state)) == canonical(ours.state), (theirs.state, ours.state)
        assert canonical(wanted[0]) == canonical(got[0])
        assert canonical(float(wanted[1])) == canonical(float(got[1])), (wanted, got)
        assert wanted[2:] == got[2:]
        length += 1
        if wanted[2] or length == 300:
            episodes, length = episodes + 1, 0
            assert canonical(theirs.reset()) == canonical(ours.reset())
    return episodes


def test_its_states_are_gymnasiums(name: str) -> None:
    theirs, ours = pair(name)
    assert theirs.observation_space == ours.observation_space and theirs.action_space == ours.action_space
    for seed in (0, 1, 2**40):
        assert canonical(theirs.reset(seed=seed)) == canonical(ours.reset(seed=seed))
        assert assert_equal_steps(theirs, ours, 5000, seed) > 3


def test_it_begins_as_gymnasiums(name: str) -> None:
    theirs, ours = pair(name)
    for seed in range(300):
        assert canonical(theirs.reset(seed=seed)) == canonical(ours.reset(seed=seed)), seed
        assert canonical(theirs.reset()) == canonical(ours.reset()), seed
    assert theirs.np_random.bit_generator.state == ours.np_random.bit_generator.state


def test_it_goes_on_from_a_recorded_state(name: str) -> None:
    theirs, ours = pair(name)
    theirs.reset(seed=0)
    ours.reset(seed=1)
    rng, states = np.random.default_rng(3), []
    for action in actions(theirs, 400, 5):
        if theirs.step(action)[2]:
            theirs.reset()
        states.append(np.array(theirs.state))
    for _ in range(300):
        state = states[int(rng.integers(len(states)))]
        theirs.reset()
        ours.reset()
        theirs.state, ours.state = state.copy(), state.copy()
        action = actions(theirs, 1, int(rng.integers(1000)))[0]
        assert canonical(theirs.step(action)[0]) == canonical(ours.step(action)[0])
        assert canonical(np.asarray(theirs.state)) == canonical(ours.state)


OPTIONS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"sutton_barto_reward": True},
    "MountainCar-v0": {"goal_velocity": 0.02},
    "MountainCarContinuous-v0": {"goal_velocity": 0.01},
    "Acrobot-v1": {},
    "Pendulum-v1": {"g": 9.81},
}


def test_its_options_are_gymnasiums(name: str) -> None:
    theirs, ours = pair(name, **OPTIONS[name])
    assert canonical(theirs.reset(seed=4)) == canonical(ours.reset(seed=4))
    assert_equal_steps(theirs, ours, 1500, 4)


def test_another_start_is_refused(name: str) -> None:
    option = "x_init" if name == "Pendulum-v1" else "low"
    with pytest.raises(ef.BadArgument, match=option):
        pair(name)[1].reset(options={option: 0.01})


@pytest.mark.parametrize("on_end", ["reset", "wait"])
def test_a_fleet_gives_the_bytes_of_serial(name: str, on_end: Any) -> None:
    spec = copy.deepcopy(gym.spec(name))
    spec.max_episode_steps = 37
    with ef.make(spec, 7, backend="serial", on_end=on_end) as fleet:
        wanted = record(fleet, 150, seed=7, with_info=False).digest()
    for workers, at_least in ((1, None), (2, None), (2, 3), (3, 1)):
        with ef.make(spec, 7, backend="native", num_workers=workers, on_end=on_end) as fleet:
            got = record(fleet, 150, seed=7, at_least=at_least, with_info=False).digest()
            assert got == wanted, (workers, at_least)


@pytest.mark.parametrize("on_end", ["reset", "wait"])
@pytest.mark.parametrize("workers", [1, 3])
def test_seeds_of_episodes_are_as_in_serial(name: str, on_end: Any, workers: int) -> None:
    spec = copy.deepcopy(gym.spec(name))
    spec.max_episode_steps = 20
    seeds = np.random.default_rng(0).integers(0, 2**62, (8, 5))
    rows = []
    for options in ({"backend": "serial"}, {"backend": "native", "num_workers": workers}):
        with ef.make(spec, 5, on_end=on_end, **options) as fleet:
            fleet.reset(seed=1)
            space = fleet.action_space
            space.seed(0)
            mine = []
            for step in range(160):
                if step % 20 == 10:
                    fleet.assign(range(5), seeds=seeds[step // 20].tolist())
                batch = fleet.step(space.sample())
                mine.append(canonical((batch.obs, batch.final_obs, batch.reward, batch.seed, batch.ended, batch.episode)))
            rows.append(mine)
            assert batch.episode.min() > 4
    assert rows[0] == rows[1]
