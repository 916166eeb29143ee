"""What users of other libraries try first: the error says what to write instead."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.errors import BadArgument, EnvFailed


@pytest.fixture
def batch():
    with ef.make("CartPole-v1", 2, backend="serial", columns={"won": gym.spaces.Discrete(2)}) as fleet:
        yield fleet.reset(seed=0)


def test_a_batch_cannot_be_unpacked_and_says_what_can(batch):
    with pytest.raises(TypeError, match=r"batch\.reward.*envfleet\.make_vec"):
        obs, reward, terminated, truncated, info = batch
    with pytest.raises(TypeError, match=r"batch\.obs"):
        batch["obs"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("rewards", "reward"),
        ("observations", "obs"),
        ("observation", "obs"),
        ("dones", "ended"),
        ("done", "ended"),
        ("infos", "info"),
        ("truncations", "truncated"),
        ("terminatd", "terminated"),
        ("wonn", "won"),
    ],
)
def test_a_batch_knows_what_was_meant(batch, wrong, right):
    with pytest.raises(AttributeError, match=rf"no '{wrong}': use batch\.{right}$"):
        getattr(batch, wrong)
    getattr(batch, right)


def test_a_batch_lists_what_it_has_when_nothing_is_near(batch):
    with pytest.raises(AttributeError, match=r"it has obs, reward, .*, won$"):
        batch.zzz
    assert not hasattr(batch, "zzz")


@pytest.mark.parametrize("call", [ef.make, ef.make_vec])
@pytest.mark.parametrize(("wrong", "right"), [("n_envs", "num_envs"), ("num_env", "num_envs"), ("num_worker", "num_workers")])
def test_an_unknown_argument_says_which_was_meant(call, wrong, right):
    with pytest.raises(BadArgument, match=f"no argument '{wrong}': did you mean {right}"):
        call("CartPole-v1", **{wrong: 3})


def test_backends_that_are_offered_exist():
    with pytest.raises(BadArgument, match="'dask'") as caught:
        ef.make("CartPole-v1", backend="dask")
    offered = {word.strip("'") for word in str(caught.value).partition("one of ")[2].split(", ")}
    assert offered == {"auto", "serial", "thread", "aio", "pipe", "shm", "native", "ray", "remote", "jax", "envpool", "vector"}


class OldReset(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32)


class OldStep(OldReset):
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, {}


@pytest.mark.parametrize("backend", ["serial", "shm"])
def test_an_env_of_the_old_gym_api_is_told_what_to_return(backend):
    with ef.make(OldReset, 2, backend=backend) as fleet, pytest.raises(EnvFailed, match=r"old Gym API.*`return obs, \{\}`"):
        fleet.reset()
    with ef.make(OldStep, 2, backend=backend) as fleet:
        fleet.reset()
        with pytest.raises(EnvFailed, match=r"old Gym API\. Return terminated and truncated"):
            fleet.step([0, 0])


class Agents(OldStep):
    """A constructor with a parameter that the fleet has too."""

    def __init__(self, red_agent_type="sleeping", num_workers=3):
        self.red_agent_type, self.their_workers = red_agent_type, num_workers


@pytest.mark.parametrize("view", [ef.VectorizedEnvs, ef.ParallelEnvSharedMemory])
def test_further_arguments_go_to_the_constructor(view):
    with view(Agents, n_envs=2, red_agent_type="eager") as envs:
        assert envs.fleet.get_attr("red_agent_type") == ("eager", "eager")
    with view("tmaze", n_envs=2, length=4, max_restarts=1) as envs:
        assert envs.fleet.get_attr("length") == (4, 4)
    with view("CartPole-v1", n_envs=2, sutton_barto_reward=True, env_kwargs={"max_episode_steps": 5}) as envs:
        assert envs.fleet.get_attr("_max_episode_steps") == (5, 5)
    with view(Agents, n_envs=2, env_kwargs={"num_workers": 7}) as envs:
        assert envs.fleet.get_attr("their_workers") == (7, 7)


def test_arguments_that_could_be_meant_for_both_are_refused():
    with pytest.raises(BadArgument, match=r"\['num_workers'\] are arguments of the fleet and of Agents"):
        ef.ParallelEnvSharedMemory(Agents, n_envs=2, num_workers=1)
    with pytest.raises(BadArgument, match="give each once"):
        ef.ParallelEnvSharedMemory(Agents, n_envs=2, red_agent_type="a", env_kwargs={"red_agent_type": "b"})
    with pytest.raises(BadArgument, match=r"Agents\(\) has no argument 'red_agent': did you mean red_agent_type"):
        ef.ParallelEnvSharedMemory(Agents, n_envs=2, red_agent="a")
    with pytest.raises(BadArgument, match="put them into the callables"):
        ef.VectorizedEnvs([Agents, Agents], num_envs=2, red_agent_type="a")


@pytest.mark.parametrize("seed", [-1, 1.5, "7", True])
def test_seeds_of_runs_are_refused_by_name(seed):
    with pytest.raises(BadArgument, match=r"seed=.*: give a whole number, 0 or more"):
        ef.episode_seed(seed, "train", 0, 0)


@pytest.mark.parametrize(
    ("address", "wrong"),
    [("localhost:8000", "has no http:// in front"), ("ftp://host", "begins with ftp://"), ("", "has no http://")],
)
def test_an_address_without_a_scheme_says_so(address, wrong):
    pytest.importorskip("websockets")
    with pytest.raises(BadArgument, match=f"looks like http://host:8000.*{wrong}"):
        ef.HttpEnvClient(address)


def test_a_trainer_needs_a_config():
    pytest.importorskip("torch")
    from envfleet.train import PPOTrainer

    with pytest.raises(BadArgument, match="give a PPOConfig"):
        PPOTrainer("CartPole-v1")  # type: ignore[arg-type]


def test_the_plan_names_the_old_gym_api():
    class Old(gym.Env):
        observation_space, action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), 0.0, True, {}

    with ef.make(Old, 2) as fleet:
        assert "step() returned 4 values" in str(fleet.plan)
