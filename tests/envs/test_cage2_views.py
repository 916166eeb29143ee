"""The views that older scripts use, over CAGE 2: shapes, true states in one call, refusals, ends."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.adapters.true_states import TrueStates
from envfleet.envs.cage2 import STATE, TRUE_STATE, B_lineAgent, Cage2Env, NativeCage2Env, RedMeanderAgent, true_states
from envfleet.errors import EnvFailed

VIEWS = {
    "shared memory": lambda **more: ef.ParallelEnvSharedMemory(**{"num_workers": 1, **more}),
    "native": lambda **more: ef.VectorizedCAGE2Envs(**{"num_workers": 1, **more}),
    "threads": lambda **more: ef.VectorizedCAGE2Envs(**{"num_workers": 2, **more}),
    "serial": lambda **more: ef.VectorizedEnvs("cage2", **more),
    "pipes": lambda **more: ef.VectorizedEnvs("envfleet/Cage2-v0", **{"backend": "pipe", "num_workers": 1, **more}),
    "python in processes": lambda **more: ef.VectorizedEnvs(
        Cage2Env, backend="shm", num_workers=1, **{"red_agent" if key == "red_agent_type" else key: more[key] for key in more}
    ),
}
each_view = pytest.mark.parametrize("view", VIEWS)


@each_view
def test_every_view_gives_the_same_rows_and_true_states(view, no_leaks):
    rng, options = np.random.default_rng(3), {"red_agent": RedMeanderAgent, "green": "active", "max_steps": 7}
    alone = [Cage2Env(**options) for _ in range(4)]
    with VIEWS[view](n_envs=4, red_agent_type=RedMeanderAgent, green="active", max_steps=7) as envs:
        assert envs.n_envs == 4 and envs.observation_space.shape == (4, 52)
        obs = envs.reset(seed=5)
        assert np.array_equal(obs, [env.reset(seed=5 + i)[0] for i, env in enumerate(alone)])
        for _ in range(16):
            actions = rng.integers(145, size=4)
            obs, rewards, dones, infos = envs.step(actions)
            wanted = [env.step(action) for env, action in zip(alone, actions)]
            assert rewards.tolist() == [row[1] for row in wanted] and dones.tolist() == [row[3] for row in wanted]
            for i, (env, row) in enumerate(zip(alone, wanted)):
                assert ("terminal_observation" in infos[i]) == row[3]
                if row[3]:
                    assert np.array_equal(infos[i]["terminal_observation"], row[0]) and infos[i]["TimeLimit.truncated"]
                assert np.array_equal(obs[i], env.reset()[0] if row[3] else row[0])
            states = envs.get_true_states()
            assert states.dtype == TRUE_STATE and states.shape == (4,)
            assert np.array_equal(states, np.stack([env.true_state() for env in alone]))


def test_the_names_and_defaults_that_users_know():
    with ef.ParallelEnvSharedMemory(n_envs=3, red_agent_type=ef.envs.cage2.B_lineAgent, num_workers=1) as envs:
        assert envs.fleet.plan.backend == "shm" and envs.reset(seed=0).shape == (3, 52)
    with ef.VectorizedCAGE2Envs(num_envs=2) as envs:
        assert envs.fleet.plan.backend == "native" and envs.reset().dtype == np.uint8
    with ef.VectorizedEnvs("cage2", 2, backend="native", env_kwargs={"red_agent_type": "meander"}) as envs:
        assert envs.fleet.get_attr("record")[0]["red"] == 1


def test_true_states_are_copies_and_come_without_messages(monkeypatch):
    for view in ("shared memory", "native", "pipes"):
        with VIEWS[view](n_envs=3) as envs:
            envs.reset(seed=0)
            before = envs.get_true_states()
            kept = before.copy()
            monkeypatch.setattr(envs.fleet, "_call", None)  # nothing may be asked any more
            envs.step([0, 0, 0])
            assert np.array_equal(before, kept) and envs.get_true_states()["steps"].tolist() == [1, 1, 1]
            monkeypatch.undo()


def test_true_states_follow_a_restored_snapshot():
    with ef.VectorizedCAGE2Envs(3) as envs:
        envs.reset(seed=0)
        start, true = envs.fleet.snapshot([1]), envs.get_true_states()
        for _ in range(9):
            envs.step([0, 0, 0])
        envs.fleet.restore(start)
        assert np.array_equal(envs.get_true_states(), true[[1, 1, 1]])


def test_true_states_are_those_of_an_environment_that_was_built_again():
    with ef.make("cage2", 3, backend="native") as fleet:
        true = TrueStates(fleet)
        fleet.reset(seed=0)
        with pytest.raises(EnvFailed):
            fleet.step([0, 999, 0])
        fleet.drop()
        true.read()  # while slot 1 is lost
        fleet.reset(seed=0)
        fleet.step([0, 0, 0])
        fleet.step([0, 0, 0])
        assert true.read()["steps"].tolist() == [2, 2, 2]


def test_the_state_can_travel_in_the_observation():
    for kind in (Cage2Env, NativeCage2Env):
        env = kind(state_in_obs=True)
        assert env.observation_space.shape == (52 + STATE.itemsize,)
        obs, _ = env.reset(seed=0)
        for _ in range(5):
            obs = env.step(0)[0]
        assert true_states(obs[52:].copy().view(STATE))[0] == env.true_state() and env.observation_space.contains(obs)


class Counting(gym.Env):
    """Another environment with a true state, and one without."""

    observation_space = action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {}

    def true_state(self):
        return np.arange(4)


def test_other_environments_may_have_true_states_too():
    with ef.VectorizedEnvs(Counting, 2) as envs:
        envs.reset()
        assert envs.get_true_states().tolist() == [[0, 1, 2, 3]] * 2
    with ef.VectorizedEnvs("CartPole-v1", 2) as envs:
        envs.reset()
        with pytest.raises(ef.BadArgument, match=r"needs environments with a method true_state\(\)"):
            envs.get_true_states()


@pytest.mark.parametrize("view", ["shared memory", "native", "serial", "pipes"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"red_agent_type": "beeline"}, "red_agent='beeline': choose B_lineAgent, RedMeanderAgent or SleepAgent"),
        ({"red_agent_type": B_lineAgent, "red_agent": "sleep"}, "red_agent and red_agent_type are the same: give one"),
        ({"red_agent_type": "bline", "env_kwargs": {"red_agent": "sleep"}}, "are the same: give one"),
        ({"red_agents": "sleep"}, "has no argument 'red_agents': did you mean red_agent"),
        ({"max_steps": -1}, "max_steps=-1: give a whole number from 1 up"),
        ({"env_kwargs": {"green": "yes"}}, "green='yes': choose"),
        ({"n_envs": 0}, "num_envs=0: give a whole number from 1 up"),
        ({"n_envs": -3}, "num_envs=-3"),
        ({"n_envs": 2.5}, "num_envs=2.5"),
        ({"n_envs": True}, "num_envs=True"),
        ({"n_envs": "200"}, "num_envs='200'"),
    ],
)
def test_wrong_arguments_are_refused(view, options, said, no_leaks):
    with pytest.raises(ef.BadArgument) as error:
        VIEWS[view](**{"n_envs": 2, **options})
    assert said in str(error.value)


@pytest.mark.parametrize("view", ["shared memory", "native", "threads", "serial", "pipes"])
def test_wrong_actions_are_refused_and_harm_nothing(view):
    with VIEWS[view](n_envs=3) as envs:
        envs.reset(seed=0)
        for wrong, said in (
            ([0, 145, 0], "slot 1"),
            ([0, 0, -1], "slot 2"),
            ([0, 0], "2"),
            ([0.5, 0, 0], ""),
            ("abc", ""),
            (None, ""),
        ):
            with pytest.raises((ef.FleetError, TypeError, ValueError)) as error:
                envs.step(wrong)
            assert said in str(error.value)
        envs.step([0, 1, 144])
        assert envs.get_true_states()["steps"].tolist() == [1, 1, 1]


@each_view
def test_calls_in_the_wrong_order_are_refused(view, no_leaks):
    envs = VIEWS[view](n_envs=2)
    with pytest.raises(ef.errors.ResetNeeded):
        envs.get_true_states()
    envs.reset(seed=0)
    envs.step_async([0, 0])
    with pytest.raises(ef.errors.SlotBusy):
        envs.get_true_states()
    envs.step_wait()
    assert envs.get_true_states()["steps"].tolist() == [1, 1]
    envs.close()
    envs.close()
    for call in (envs.get_true_states, envs.reset, lambda: envs.step([0, 0])):
        with pytest.raises(ef.errors.FleetClosed):
            call()


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 2}])
def test_where_nothing_native_was_built_it_runs_in_python_and_says_what_that_costs(monkeypatch, options):
    monkeypatch.setattr("envfleet.adapters.classic.is_built", lambda: False)
    with (
        pytest.warns(RuntimeWarning, match=r"runs it in Python, some 200 times slower: install a C\+\+ compiler"),
        ef.VectorizedCAGE2Envs(n_envs=2, **options) as envs,
    ):
        assert envs.fleet.plan.backend == "serial" and envs.reset(seed=0).shape == (2, 52)
