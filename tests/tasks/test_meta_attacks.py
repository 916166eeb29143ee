"""Tasks that are held out stay so, and what is wrong in files, states and calls is refused by name."""

import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.gridnavi import GridNavi
from envfleet.envs.varibad import VariBadWrapper
from envfleet.errors import BadArgument
from envfleet.tasks import PLR, LearningProgress, TaskSource
from envfleet.tasks.curriculum import TaskResult
from envfleet.train.config import PPOConfig
from envfleet.train.settings import settings_from_mapping
from envfleet.train.trainer import PPOTrainer

META = {"env_type": "meta", "env_name": "GridNavi-v0"}


def test_a_reset_without_a_task_draws_none_that_is_held_out():
    env = ef.make_env("GridNavi-v0", 2, seed=1, num_train_tasks=2, num_eval_tasks=19)
    assert all(env.reset(seed=seed)[1]["task"] in env.train_tasks for seed in range(30))
    with ef.make_parallel_env("GridNavi-v0", 1, num_workers=2, num_train_tasks=1, num_eval_tasks=20, backend="serial") as penv:
        penv.reset(tasks=[None, penv.eval_tasks[0]])
        assert penv.current_tasks() == [penv.train_tasks[0], penv.eval_tasks[0]]


def test_a_task_counts_beside_options_that_have_none():
    env = VariBadWrapper(GridNavi(), 2)
    assert env.reset(seed=0, options={"task": None}, task=(4, 4))[1]["task"] == (4, 4)


def test_a_task_among_the_options_of_a_worker_is_its_task():
    with ef.ParallelEnvManager([GridNavi], backend="serial") as manager:
        (remote,) = manager.remotes
        for message in ({"task": (2, 2)}, {"options": {"task": (4, 2)}}, None):
            remote.send(("reset", message))
            told = remote.recv()[1]["task"]
        assert told == (4, 2)
        with pytest.raises(BadArgument, match=r"two tasks, \(2, 2\) and, in options, \(4, 2\)"):
            remote.send(("reset", {"task": (2, 2), "options": {"task": (4, 2)}}))


@pytest.mark.parametrize("worker", [True, False])
def test_a_worker_that_is_no_number_is_refused_by_name(worker):
    with (
        ef.make_parallel_env("GridNavi-v0", num_workers=2, backend="serial") as penv,
        pytest.raises(BadArgument, match="worker_id="),
    ):
        penv.reset_one(worker)


@pytest.mark.parametrize("arch", ["markov", "memory"])
def test_robust_level_replay_may_have_a_limit_for_the_kl_divergence(arch):
    config = PPOConfig(
        env="gridnavi",
        env_type="meta",
        curriculum="robust_plr",
        target_kl=0.02,
        arch=arch,
        num_envs=4,
        num_steps=15,
        backend="serial",
    )
    with PPOTrainer(config) as trainer:
        before = trainer.learner.flat
        trainer.train_episode_vectorized()  # levels that were never seen: nothing is learned from
        assert (trainer.learner.flat == before).all()


def test_an_update_of_ones_own_may_return_nothing():
    class Mine(ef.Learner):
        def update(self):
            pass

    learner = Mine({"env": META | {"max_rollouts_per_task": 1}, "train": {"num_rollouts_per_iter": 2, "total_steps": 60}})
    assert [row["step"] for row in learner.train()] == [30, 60]
    learner.close()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"env": META | {"env_name": "gridnavi,tmaze"}}, "a Learner needs one family, not 2"),
        ({"env": 5}, "env: 5: settings are needed"),
        (5, "config=5: give a PPOConfig"),
        (None, "config=None: give a PPOConfig"),
    ],
)
def test_what_is_no_config_of_a_learner_is_refused(config, said):
    with pytest.raises(BadArgument, match=said):
        ef.Learner(config)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"env": ["a"]}, r"env: \['a'\]: settings are needed below it"),
        ({"train": "fast"}, "train: 'fast': settings are needed below it"),
        ({"env": {"num_envs": float("inf")}}, "num_envs=inf: a whole number is needed"),
        ({"env": {"num_envs": 2, "num_parallel_workers": 3}}, "env.num_parallel_workers: num_envs was given before"),
        ({"env": {"env_name": "gridnavi", "env": "tmaze"}}, "env.env: env was given before"),
    ],
)
def test_wrong_settings_of_files_are_refused_and_none_wins_quietly(content, said):
    with pytest.raises(BadArgument, match=said):
        settings_from_mapping(content)


def test_a_setting_that_is_given_under_two_names_is_refused():
    with pytest.raises(BadArgument, match="n_envs"):
        PPOConfig(num_envs=2, n_envs=3)


@pytest.mark.parametrize("curriculum", [LearningProgress, PLR])
@pytest.mark.parametrize("wrong", [{"curriculum": None}, {"curriculum": [1]}, {"next": -1}, {"num_results": -1}])
def test_a_stored_source_that_was_changed_is_refused_and_nothing_of_it_is_taken(curriculum, wrong):
    source = TaskSource(curriculum(range(4)), seed=0)
    source.in_order(0, 2)
    for ticket in range(6):
        source.add(TaskResult(ticket, source.task(ticket), 1.0, 3, value_error=1.0))
    other = TaskSource(curriculum(range(4)), seed=0)
    before = repr(other.state_dict())
    with pytest.raises(BadArgument, match="damaged"):
        other.load_state_dict(source.state_dict() | wrong)
    assert repr(other.state_dict()) == before
    other.load_state_dict(source.state_dict())
    assert repr(other.state_dict()) == repr(source.state_dict())
    assert np.isfinite(list(other.probabilities().values())).all()
