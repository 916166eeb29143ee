"""Our SB3 classes against SB3's own: the same calls, the same answers."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import numpy as np
import pytest

from tests.support.light_envs import Custom

sb3 = pytest.importorskip("stable_baselines3")

from stable_baselines3.common import vec_env as theirs  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402

from envfleet.adapters import sb3 as ours  # noqa: E402
from envfleet.errors import EnvFailed  # noqa: E402

CLASSES = [ours.DummyVecEnv, ours.SubprocVecEnv]


def factories(count=3, monitor=True, **kwargs):
    # TimeLimit instead of Monitor where workers are to start quickly: Monitor makes them import SB3, and PyTorch with it.
    wrap = Monitor if monitor else partial(gym.wrappers.TimeLimit, max_episode_steps=1000)
    return [lambda: wrap(Custom(**kwargs)) for _ in range(count)]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("case", [{}, {"truncates": True, "monitor": False}, {"nested": True, "monitor": False}])
def test_steps_equal_sb3s(kind, case):
    our, their = kind(factories(**case)), theirs.DummyVecEnv(factories(**case))
    assert isinstance(our, theirs.VecEnv)
    assert our.observation_space == their.observation_space and our.action_space == their.action_space
    our.seed(7), their.seed(7)
    same(our.reset(), their.reset())
    assert [info["seed"] for info in our.reset_infos] == [7, 8, 9]
    for step in range(12):
        got, wanted = our.step(np.array([0, 1, 0])), their.step(np.array([0, 1, 0]))
        same(got[0], wanted[0])
        assert got[1].dtype == wanted[1].dtype == np.float32 and (got[1] == wanted[1]).all()
        assert got[2].dtype == bool and (got[2] == wanted[2]).all()
        for one, other in zip(got[3], wanted[3]):
            assert one.keys() == other.keys()
            assert one["TimeLimit.truncated"] == other["TimeLimit.truncated"] and one["time"] == other["time"]
            if "terminal_observation" in one:
                same(one["terminal_observation"], other["terminal_observation"])
                assert "episode" not in other or one["episode"]["r"] == other["episode"]["r"]
        assert [info["seed"] for info in our.reset_infos] == [info["seed"] for info in their.reset_infos], step
    our.close()


def same(one, other):
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            same(one[key], other[key])
    else:
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", CLASSES)
def test_attributes_methods_wrappers_options(kind):
    options = {"num_workers": 2} if kind is ours.SubprocVecEnv else {}
    envs = kind(factories(monitor=False), **options)
    try:
        assert envs.get_attr("limit") == [5, 5, 5] and envs.get_attr("limit", 1) == [5]
        envs.set_attr("mark", [1, 2], indices=[0, 2])
        assert envs.get_attr("mark", [0, 2]) == [[1, 2], [1, 2]]
        assert envs.env_method("double", 4, plus=1, indices=[1, 2]) == [14, 14]
        assert envs.env_is_wrapped(gym.wrappers.TimeLimit) == [True] * 3
        assert envs.env_is_wrapped(gym.wrappers.ClipAction, indices=0) == [False]
        assert envs.has_attr("limit") and not envs.has_attr("nonsense")
        with pytest.raises(AttributeError):
            envs.env_method("nonsense")
        envs.set_options([{"offset": 100}, {}, {"offset": 300}])
        envs.seed(0)
        first = envs.reset()[:, 1]
        envs.seed(0)
        assert (first - envs.reset()[:, 1]).tolist() == [100, 0, 300]  # options are used once
        assert envs.render_mode == "rgb_array" and envs.render("rgb_array").ndim == 3
        assert [image.shape for image in envs.get_images()] == [(4, 6, 3)] * 3
    finally:
        envs.close()
        envs.close()


@pytest.mark.parametrize("kind", CLASSES)
def test_a_failing_env_says_where(kind):
    envs = kind(factories(monitor=False))
    envs.reset()
    with pytest.raises(EnvFailed, match=r"slot 1 .*no such door"):
        envs.step(np.array([0, 2, 0]))
    envs.close()


@pytest.mark.parametrize("kind", CLASSES)
def test_sb3_trains_on_it_with_its_wrappers(kind, tmp_path):
    envs = theirs.VecNormalize(theirs.VecMonitor(kind([lambda: gym.make("CartPole-v1")] * 4)))
    model = sb3.PPO("MlpPolicy", envs, n_steps=32, batch_size=64, n_epochs=2, device="cpu", seed=0)
    model.learn(256)
    assert len(model.ep_info_buffer) > 0
    mean, _ = evaluate_policy(model, envs, n_eval_episodes=4)
    assert mean > 0
    envs.save(str(tmp_path / "norm.pkl"))
    envs.close()


def test_same_training_as_on_sb3s_own():
    def learned(kind):
        envs = kind([lambda: gym.make("CartPole-v1")] * 4)
        model = sb3.PPO("MlpPolicy", envs, n_steps=32, batch_size=64, n_epochs=2, device="cpu", seed=3)
        model.learn(256)
        envs.close()
        return [value.clone() for value in model.policy.state_dict().values()]

    wanted = learned(theirs.DummyVecEnv)
    for kind in CLASSES:
        assert all((one == other).all() for one, other in zip(learned(kind), wanted))


def test_video_recorder(tmp_path):
    pytest.importorskip("moviepy")
    envs = theirs.VecVideoRecorder(
        ours.DummyVecEnv(factories(1)), str(tmp_path), record_video_trigger=lambda step: step == 0, video_length=3
    )
    envs.reset()
    for _ in range(5):
        envs.step(np.array([0]))
    envs.close()
    assert list(tmp_path.glob("*.mp4"))
