"""Random options, seeds and actions: CAGE 2 in C++ is the Python reference, bit for bit, alone and as slots of a fleet."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envfleet as ef
from envfleet.envs.cage2 import STATE, Cage2Env, NativeCage2Env, true_states
from envfleet.envs.cage2.red_agents import RED_NAMES
from envfleet.envs.cage2.scenario import HOST_NAMES, NUM_ACTIONS, action_id

OPTIONS = st.fixed_dictionaries(
    {
        "red_agent": st.sampled_from(RED_NAMES),
        "green": st.sampled_from(("sleep", "active")),
        "observation_rule": st.sampled_from(("strict", "source")),
        "max_steps": st.one_of(st.none(), st.integers(1, 130)),
    }
)
SEEDS = st.integers(0, 2**64 - 1)
#: A number is an action, a word a kind of action on the host that red was just at: it meets more rules than chance alone.
ANSWERS = ("Analyse", "Remove", "Restore", "DecoyVsftpd", "DecoyApache", "DecoyTomcat", "DecoySSHD")
BLUE = st.lists(st.one_of(st.integers(0, NUM_ACTIONS - 1), st.sampled_from(ANSWERS)), min_size=1, max_size=40)
QUICK = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def action_of(choice: int | str, state: Any) -> int:
    """The action of a choice in a state."""
    return choice if isinstance(choice, int) else action_id(choice, HOST_NAMES[int(state["red_target"]) % len(HOST_NAMES)])


@settings(QUICK, max_examples=60)
@given(options=OPTIONS, blue=BLUE, episodes=st.lists(st.tuples(st.none() | SEEDS, st.integers(1, 130)), min_size=1, max_size=3))
def test_any_episodes_are_those_of_the_reference(options, blue, episodes):
    python, native = Cage2Env(**options), NativeCage2Env(**options)
    python.reset(seed=1), native.reset(seed=1)
    taken = 0
    for (
        seed,
        length,
    ) in episodes:  # without a seed the stream of the episode before goes on; an episode may be left before its end
        assert np.array_equal(python.reset(seed=seed)[0], native.reset(seed=seed)[0])
        assert python.state() == native.state()
        for _ in range(length):
            action = action_of(blue[taken % len(blue)], python.state())
            taken += 1
            seen, *outcome = python.step(action)
            seen_native, *outcome_native = native.step(action)
            assert seen.tobytes() == seen_native.tobytes() and outcome == outcome_native
            assert python.state() == native.state() and python.true_state() == native.true_state()
            if outcome[2]:
                break


@settings(QUICK, max_examples=20)
@given(
    options=OPTIONS,
    seed=st.integers(0, 2**31 - 1),
    actions=st.integers(0, 2**32 - 1),
    num_envs=st.integers(1, 5),
    num_steps=st.integers(1, 130),
    num_workers=st.integers(1, 3),
)
def test_any_fleet_has_the_rows_and_true_states_of_the_reference(options, seed, actions, num_envs, num_steps, num_workers):
    rng = np.random.default_rng(actions)
    options = {**options, "state_in_obs": True}
    with (
        ef.make("cage2", num_envs, backend="serial", env_kwargs=options) as python,
        ef.make("cage2", num_envs, backend="native", num_workers=num_workers, env_kwargs=options) as native,
    ):
        assert np.array_equal(python.reset(seed=seed).obs, native.reset(seed=seed).obs)
        for _ in range(num_steps):
            chosen = rng.integers(NUM_ACTIONS, size=num_envs)
            one, other = python.step(chosen), native.step(chosen)
            for name in (
                "obs",
                "final_obs",
                "reward",
                "terminated",
                "truncated",
                "episode",
                "step",
                "seed",
                "ep_return",
                "length",
            ):
                assert np.array_equal(getattr(one, name), getattr(other, name)), name
            states = [true_states(rows.obs[:, 52:].copy().view(STATE)[:, 0]) for rows in (one, other)]
            assert np.array_equal(*states)
