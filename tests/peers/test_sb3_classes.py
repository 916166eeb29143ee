"""What users of Stable-Baselines3's DummyVecEnv and SubprocVecEnv rely on, on our classes of the same names.

Equal results, methods and wrappers are in tests/train/test_adapters_sb3.py.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from tests.support.light_envs import Custom

pytest.importorskip("stable_baselines3")

from stable_baselines3.common import vec_env as theirs
from stable_baselines3.common.env_util import make_vec_env

from envfleet import EnvFailed
from envfleet.adapters import sb3 as ours
from envfleet.errors import FleetError

KINDS = {"dummy": ours.DummyVecEnv, "subproc": partial(ours.SubprocVecEnv, start_method="fork")}
# Of SB3's own workings, which are other ones here.
INNER = {"buf_dones", "buf_infos", "buf_obs", "buf_rews", "keys", "processes", "remotes", "work_remotes"}


@pytest.fixture(params=KINDS)
def kind(request: Any) -> Any:
    return KINDS[request.param]


@pytest.mark.parametrize("name", ["DummyVecEnv", "SubprocVecEnv"])
def test_constructors_and_names_are_sb3s(name: str) -> None:
    mine, wanted = getattr(ours, name), getattr(theirs, name)
    parameters = list(inspect.signature(wanted).parameters)
    assert list(inspect.signature(mine).parameters)[: len(parameters)] == parameters
    options = {} if name == "DummyVecEnv" else {"start_method": "fork"}
    envs, other = mine([Custom] * 2, **options), wanted([Custom] * 2, **options)
    assert {name for name in dir(other) if not name.startswith("_")} - set(dir(envs)) <= INNER
    assert envs.metadata["render_modes"] == ["human", "rgb_array"] and envs.render_mode == other.render_mode
    envs.close(), other.close()


def test_one_environment_for_all_is_refused() -> None:
    env = Custom()
    with pytest.raises(ValueError, match="the same environment object"):
        ours.DummyVecEnv([lambda: env] * 3)
    with ours.SubprocVecEnv([lambda: env] * 2, start_method="fork") as envs:  # every worker has its copy, as in SB3
        envs.reset()
        assert envs.step([0, 1])[0][:, 0].tolist() == [1, 1]


def test_environments_themselves_and_waiting(kind: Any) -> None:
    with kind([Custom] * 2) as envs:
        envs.reset()
        assert not envs.waiting
        envs.step_async([0, 1])
        assert envs.waiting
        envs.step_wait()
        assert not envs.waiting
        if kind is ours.DummyVecEnv:
            assert [env.time for env in envs.envs] == [1, 1]
            envs.set_attr("mark", 12)
            assert envs.envs[1].mark == 12
        else:
            assert not hasattr(envs, "envs")
            assert envs.fleet.plan.num_workers == 2  # a process for each: environments that wait do so at the same time


def test_errors_are_what_sb3s_users_catch(kind: Any) -> None:
    with kind([Custom] * 2) as envs:
        envs.reset()
        with pytest.raises(RuntimeError, match="no such door") as raised:
            envs.step([0, 2])
        assert isinstance(raised.value, EnvFailed)
        for ask in (envs.get_attr, envs.env_method):
            with pytest.raises(AttributeError, match="nonsense") as missing:
                ask("nonsense")
            assert isinstance(missing.value, FleetError)
        assert envs.has_attr("limit") and not envs.has_attr("nonsense")
    with pytest.raises(ValueError, match="cannot find context for 'nothing'"):
        ours.SubprocVecEnv([Custom], "nothing")


def test_options_of_each_environment_are_given_in_one_reset(kind: Any) -> None:
    with kind([Custom] * 3) as envs:
        envs.set_options([{"offset": 100}, {}, {"offset": 300}])
        envs.seed(4)
        envs.reset()
        assert [info["options"] for info in envs.reset_infos] == [{"offset": 100}, None, {"offset": 300}]
        assert [info["seed"] for info in envs.reset_infos] == [4, 5, 6]
        envs.reset()
        assert [info["options"] for info in envs.reset_infos] == [None] * 3


def test_pictures_without_a_render_mode_warn(kind: Any) -> None:
    with kind([lambda: gym.make("CartPole-v1")] * 2) as envs:
        with pytest.warns(UserWarning, match="rgb_array"):
            assert envs.get_images() == [None, None]


def test_sb3s_make_vec_env(kind: Any) -> None:
    envs = make_vec_env("CartPole-v1", n_envs=2, seed=0, vec_env_cls=kind)
    other = make_vec_env("CartPole-v1", n_envs=2, seed=0)
    assert (envs.reset() == other.reset()).all()
    for _ in range(30):
        got, wanted = envs.step(np.array([0, 1])), other.step(np.array([0, 1]))
        assert (got[0] == wanted[0]).all() and (got[2] == wanted[2]).all()
        assert [info.get("episode", {}).get("r") for info in got[3]] == [info.get("episode", {}).get("r") for info in wanted[3]]
    envs.close(), other.close()
