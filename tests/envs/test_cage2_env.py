"""The Gymnasium side of CAGE 2: names, options, spaces, ends, errors, text."""

from __future__ import annotations

import pickle

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import envfleet as ef
from envfleet.envs.cage2 import ACTION_MEANINGS, HOST_NAMES, STATE, TRUE_STATE, B_lineAgent, Cage2Env, RedMeanderAgent
from envfleet.envs.cage2.native_cage2 import NATIVE, NativeCage2Env
from tests.support.cage2 import VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_gymnasium_finds_nothing_wrong(version):
    check_env(VERSIONS[version](render_mode="ansi"), skip_render_check=False)


def test_it_has_two_names():
    assert isinstance(gym.make("envfleet/Cage2-v0", red_agent="RedMeanderAgent").unwrapped, Cage2Env)
    for name in ("cage2", "envfleet/Cage2-v0"):
        with ef.make(name, 2, backend="native") as fleet:
            assert fleet.single_observation_space == gym.spaces.Box(0, 1, (52,), np.uint8)
            assert fleet.single_action_space == gym.spaces.Discrete(145)


def test_actions_have_names():
    assert len(ACTION_MEANINGS) == 145 and Cage2Env.action_meanings is ACTION_MEANINGS
    assert [ACTION_MEANINGS[i] for i in (0, 1, 2, 27, 28, 131, 132, 144)] == [
        "Sleep", "Monitor", "Analyse Defender", "Remove User4", "DecoyApache Defender", "DecoyVsftpd User4",
        "Restore Defender", "Restore User4",
    ]  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("limit", [30, 50, 100, 7])
def test_an_episode_is_cut_after_max_steps(version, limit):
    env = VERSIONS[version](max_steps=limit)
    env.reset(seed=0)
    ends = [env.step(0)[2:4] for _ in range(limit)]
    assert ends == [(False, False)] * (limit - 1) + [(False, True)]


@pytest.mark.parametrize("version", VERSIONS)
def test_without_a_limit_it_goes_on(version):
    env = VERSIONS[version](max_steps=None)
    env.reset(seed=0)
    assert not any(env.step(0)[3] for _ in range(500))
    assert env.true_state()["steps"] == 500


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"red_agent": "beeline"}, "red_agent='beeline': choose B_lineAgent, RedMeanderAgent or SleepAgent"),
        ({"red_agent": 3}, "red_agent=3: choose"),
        ({"red_agent": dict}, "choose B_lineAgent"),
        ({"green": True}, "green=True: choose 'sleep' or 'active'"),
        ({"max_steps": 0}, "max_steps=0: give a whole number from 1 up"),
        ({"max_steps": 1.5}, "max_steps=1.5: give a whole number"),
        ({"max_steps": 2**32}, "give a whole number"),
        ({"observation_rule": "loose"}, "observation_rule='loose': choose 'strict' or 'source'"),
        ({"render_mode": "rgb_array"}, "render_mode='rgb_array': choose 'ansi' or None"),
    ],
)
def test_bad_options_are_refused(version, options, said):
    with pytest.raises(ef.BadArgument) as error:
        VERSIONS[version](**options)
    assert said in str(error.value)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("action", [-1, 145, 10**9])
def test_actions_that_do_not_exist_are_refused_by_name(version, action):
    env = VERSIONS[version]()
    env.reset(seed=0)
    with pytest.raises((ef.BadArgument, RuntimeError), match=str(action)):
        env.step(action)


def test_an_action_that_is_no_number_is_refused():
    env = Cage2Env()
    with pytest.raises(ef.BadArgument, match="reset"):
        env.step(0)
    env.reset(seed=0)
    with pytest.raises(ef.BadArgument, match="is not a whole number from 0 to 144"):
        env.step("Sleep")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_map_shows_hosts_sessions_and_decoys(version):
    env = VERSIONS[version](render_mode="ansi")
    env.reset(seed=0)
    env.step(ACTION_MEANINGS.index("DecoyTomcat User1"))
    lines = env.render().splitlines()
    assert lines[0] == "step 1, red: Sweep User succeeded, OT service runs"
    assert [line.split()[0] for line in lines if line.startswith("  ")][1:] == list(HOST_NAMES)
    assert lines[-5].split()[:2] == ["User0", "PRIVILEGED"] and lines[-4].endswith("Tomcat")
    assert VERSIONS[version]().render() is None


@pytest.mark.parametrize("version", VERSIONS)
def test_true_state_is_a_record_of_the_documented_type(version):
    env = VERSIONS[version]()
    env.reset(seed=0)
    state = env.true_state()
    assert state.dtype == TRUE_STATE and state.shape == ()
    assert state["access"].tolist() == [0] * 8 + [2] + [0] * 4 and state["known_subnets"].tolist() == [False, False, True]
    before = state.copy()
    env.step(0)
    assert state == before  # a copy, not a view


def test_a_native_environment_is_small():
    assert STATE.itemsize == 84 and NATIVE.itemsize == 100
    assert NativeCage2Env()._entry.table.state_bytes == NATIVE.itemsize


@pytest.mark.parametrize("version", VERSIONS)
def test_a_pickled_environment_goes_on_as_the_original(version):
    env = VERSIONS[version](RedMeanderAgent)
    env.reset(seed=2)
    for _ in range(20):
        env.step(0)
    twin = pickle.loads(pickle.dumps(env))
    for _ in range(30):
        first, second = env.step(0), twin.step(0)
        assert np.array_equal(first[0], second[0]) and first[1:] == second[1:] and env.state() == twin.state()


def test_native_rows_are_those_of_the_python_rules():
    rng = np.random.default_rng(0)
    with (
        ef.make("cage2", 8, backend="serial", env_kwargs={"red_agent": RedMeanderAgent, "green": "active"}) as python,
        ef.make("cage2", 8, backend="native", env_kwargs={"red_agent": RedMeanderAgent, "green": "active"}) as native,
    ):
        assert np.array_equal(python.reset(seed=4).obs, native.reset(seed=4).obs)
        for _ in range(250):
            actions = rng.integers(145, size=8)
            one, other = python.step(actions), native.step(actions)
            assert np.array_equal(one.obs, other.obs) and np.array_equal(one.reward, other.reward)
            assert np.array_equal(one.truncated, other.truncated)


def test_users_find_the_agents_where_they_look():
    assert ef.envs.cage2.B_lineAgent is B_lineAgent
