"""PettingZoo's own tests, on every multi-agent environment that ships and on the views of them.

Not among them: `bombardment_test`, which reads observations from what `AECEnv.step` returns, and that is nothing.
"""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

pytest.importorskip("pettingzoo")

from pettingzoo.test import api_test, max_cycles_test, parallel_api_test, parallel_seed_test, render_test, seed_test
from pettingzoo.test.state_test import state_test
from pettingzoo.utils import parallel_to_aec
from pettingzoo.utils.env import AECEnv, ParallelEnv

import envfleet as ef
from envfleet.envs import connect4_aec, crowd, gridworld
from envfleet.envs.registry import SHORT_NAMES, resolve_env

# PettingZoo advises against Dict observations and says so for its own games too.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def crowd_without_births(**options):
    """PettingZoo forbids that an agent comes back, which is what `Crowd` is for otherwise."""
    return crowd.Crowd(birth=0.0, **options)


AEC = {
    "gridworld-aec": gridworld.GridWorldEnvMultiAgent,
    "connect4-aec": connect4_aec.Connect4AEC,
    "crowd": lambda **options: parallel_to_aec(crowd_without_births(**options)),
    "gridworld converted": lambda **options: parallel_to_aec(gridworld.GridWorldEnvParallel(**options)),
}
PARALLEL = {"gridworld-parallel": gridworld.GridWorldEnvParallel, "crowd": crowd_without_births}


def test_every_multi_agent_environment_of_ours_is_in_these_lists():
    ours = {name: resolve_env(name) for name, target in SHORT_NAMES.items() if target.startswith("envfleet.")}
    many = {name for name, env in ours.items() if isinstance(env, type) and issubclass(env, (AECEnv, ParallelEnv))}
    assert many == {"gridworld-aec", "gridworld-parallel", "connect4-aec"} <= {*AEC, *PARALLEL}


@pytest.mark.parametrize("name", AEC)
def test_api(name):
    api_test(AEC[name](), num_cycles=300)


@pytest.mark.parametrize("name", AEC)
def test_seed(name):
    seed_test(AEC[name], num_cycles=100)


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_api(name):
    parallel_api_test(PARALLEL[name](), num_cycles=300)


@pytest.mark.parametrize("name", PARALLEL)
def test_parallel_seed(name):
    parallel_seed_test(PARALLEL[name], num_cycles=100)


@pytest.mark.parametrize("name", AEC)
def test_render(name):
    render_test(AEC[name])


def test_max_cycles():
    max_cycles_test(gridworld)


@pytest.mark.parametrize("name", PARALLEL)
def test_state(name):
    state_test(parallel_to_aec(PARALLEL[name]()), PARALLEL[name]())


@pytest.mark.parametrize("name", ["gridworld-aec", "gridworld-parallel"])
def test_the_flattened_view_passes_gymnasiums_check(name):
    check_env(ef.FlattenMultiAgentWrapper(resolve_env(name)()), skip_render_check=True)


@pytest.mark.parametrize("name", ["gridworld-parallel", "connect4-aec"])
def test_a_vector_view_with_one_env_gives_what_the_env_gives(name):
    """Spaces, agents and seeded observations of `AsyncPettingZooVecEnv` are PettingZoo's."""
    env = resolve_env(name)()
    with ef.AsyncPettingZooVecEnv([resolve_env(name)], backend="serial") as envs:
        assert envs.possible_agents == env.possible_agents
        seen, _ = envs.reset(seed=5)
        env.reset(seed=5)
        for agent in env.possible_agents:
            assert envs.single_observation_space(agent) == env.observation_space(agent)
            assert envs.single_action_space(agent) == env.action_space(agent)
            assert envs.observation_space(agent).contains(seen[agent])
        agent = env.agents[0]
        np.testing.assert_array_equal(seen[agent]["observation"][0], env.observe(agent)["observation"])
