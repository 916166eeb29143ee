"""A `Learner` and a collector of segments where environments fail: what is left is learned from and counted."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import envfleet as ef
from envfleet.adapters.meta_envs import family, make_parallel_env
from envfleet.envs.gridnavi import GridNavi
from envfleet.envs.varibad import VariBadWrapper
from envfleet.errors import BadArgument, LedgerWarning, RolloutError
from envfleet.tasks import LearningProgress, TaskSource
from envfleet.train import PPOConfig, PPOTrainer
from envfleet.train.task_board import TaskBoard
from envfleet.train.task_training import task_numbers
from tests.support.failing_tasks import FailsOnTasks

TASKS = GridNavi().task_space.values


def learner_of(env, **train):
    settings = {"num_rollouts_per_iter": 4, "total_steps": 240, "arch": "memory", "previous_step": True, **train}
    return ef.Learner(PPOConfig(env=env, env_type="meta", episodes_per_task=2, normalize_reward=True, **settings))


def test_a_learner_goes_on_with_the_rollouts_it_got_and_says_so_once():
    env = partial(FailsOnTasks, bad=TASKS[::3])
    learner = learner_of(env, total_steps=600)
    before = learner.agent().flat.clone()
    with (
        make_parallel_env(env, 2, num_workers=2, backend="serial", on_fault="restart") as penv,
        pytest.warns(LedgerWarning, match="failed in every attempt") as said,
    ):
        rows = learner.train(penv)
    assert len(said) == 1
    lost = rows[-1]["num_lost_rollouts"]
    assert 0 < lost == learner.num_lost_rollouts == 4 * len(rows) - len(learner.policy_storage)
    assert learner.num_env_steps == 30 * len(learner.policy_storage)
    after = learner.agent().flat
    assert torch.isfinite(after).all() and not torch.equal(before, after)
    learner.close()


def test_a_learner_stops_where_no_rollout_came():
    env = partial(FailsOnTasks, bad=TASKS)
    learner = learner_of(env)
    with (
        make_parallel_env(env, 2, num_workers=1, backend="serial", on_fault="restart", max_restarts=1000) as penv,
        pytest.warns(LedgerWarning),
        pytest.raises(RolloutError, match="all 4 rollouts of iteration 0 failed"),
    ):
        learner.train(penv)
    learner.close()


def test_fewer_rollouts_teach_what_the_same_rollouts_alone_would():
    learner = learner_of(GridNavi)
    learner.collect_rollouts_parallel(5)
    with pytest.raises(BadArgument, match="at most num_rollouts_per_iter=4"):
        learner.update()
    learner.collect_rollouts_parallel(2)
    (trained,) = learner.agent().trained.values()
    losses = learner.update()
    assert np.isfinite(list(losses.values())).all()
    assert trained.rewards.count == pytest.approx(60, abs=0.01)  # rewards of the two rollouts, not of empty columns
    with pytest.raises(BadArgument, match="no rollouts of the agent"):
        learner.collect_rollouts_parallel(1, random_actions=True)
        learner.update()
    learner.close()


def test_segments_of_a_collector_move_its_curriculum_as_those_of_a_trainer_do():
    config = PPOConfig(env="gridnavi", num_envs=4, num_steps=30, episodes_per_task=1, seed=2, backend="serial", total_steps=480)
    with PPOTrainer(config, tasks=TaskSource(LearningProgress(TASKS), seed=3)) as trainer:
        trainer.learner.learn = lambda segment, now: {}
        for _ in range(4):
            trainer.train_episode_vectorized()
        theirs = trainer.tasks
    ours = TaskSource(LearningProgress(TASKS), seed=3)
    with ef.make(family("gridnavi"), 4, backend="serial") as fleet:
        collector = ef.Collector(fleet, random_actions=True, seed=2, tasks=ours)
        segments = [collector.segment(30) for _ in range(4)]
    assert ours.num_results == theirs.num_results == sum(len(segment.end_index) for segment in segments) == 32
    assert ours.curriculum.counts.sum() == 32


def test_a_source_says_which_return_is_a_success_for_episodes_and_for_segments():
    results = []
    source = TaskSource(LearningProgress(TASKS), seed=0, success_return=-1e9)
    source.curriculum.update = results.extend
    with ef.make(family("gridnavi"), 2, backend="serial") as fleet:
        collector = ef.Collector(fleet, random_actions=True, seed=2, tasks=source)
        collector.segment(15)
        collector.collect(8)
    assert len(results) >= 4 and {result.success for result in results} == {1.0}


def test_inner_returns_of_an_environment_that_was_made_anew_are_absent_and_not_zero():
    class FailsLater(VariBadWrapper):
        num_resets = 0

        def reset(self, **options):
            FailsLater.num_resets += 1
            if FailsLater.num_resets == 2:  # of the outer episode that follows the first
                raise RuntimeError("cannot begin")
            return super().reset(**options)

    FailsLater.num_resets = 0
    source = TaskSource(TASKS, seed=0)
    with ef.make(lambda: FailsLater(GridNavi(horizon=3), 2), 1, backend="serial", on_fault="restart") as fleet:
        collector = ef.Collector(fleet, random_actions=True, seed=2, tasks=source, max_steps=4)
        segment = collector.segment(9)
    after = segment.columns["inner_returns"]
    assert segment.scored[3, 0] and segment.truncated[3, 0]  # cut off; the reset that follows fails
    assert np.isnan(after[4]).all() and not np.isnan(after[5, 0, 0])

    results = collector.give_results(segment)
    numbers = task_numbers(source, TaskBoard(), segment, results)
    assert len(results) == 2 and numbers["inner_return/1"] == pytest.approx(after[8, 0, 0])


def test_options_other_than_the_task_reach_inner_resets():
    env = VariBadWrapper(FailsOnTasks(horizon=1), 3)
    env.reset(options={"task": (3, 3), "wind": 2})
    env.step(0), env.step(0)
    env.reset()
    env.step(0)
    assert env.unwrapped.resets == [{"task": (3, 3), "wind": 2}, {"wind": 2}, {"wind": 2}, None, None]
    assert env.unwrapped.task == (3, 3)


def test_a_learner_that_was_saved_goes_on_with_the_same_tasks_and_weights(tmp_path):
    def learner():
        config = PPOConfig(
            env="gridnavi",
            episodes_per_task=2,
            num_rollouts_per_iter=4,
            total_steps=240,
            arch="memory",
            curriculum="learning_progress",
            normalize_obs=True,
        )
        return ef.Learner(config)

    def played(one):
        return [sequence["task"][0].tolist() for sequence in one.policy_storage._sequences]

    whole, first, resumed = learner(), learner(), learner()
    whole.train()
    whole.train()
    first.train()
    first.save(tmp_path / "learner.pt")
    resumed.load(tmp_path / "learner.pt")
    resumed.train()
    assert played(first) + played(resumed) == played(whole) and len(played(whole)) == 16
    assert torch.equal(resumed.agent().flat, whole.agent().flat) and resumed.num_env_steps == whole.num_env_steps
    other = learner_of(GridNavi)
    with pytest.raises(BadArgument, match="is of a learner with env='gridnavi'"):
        other.load(tmp_path / "learner.pt")
    for one in (whole, first, resumed, other):
        one.close()
