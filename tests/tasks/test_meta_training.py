"""Training over tasks: the previous step, curricula in checkpoints, views of meta-learning scripts, what is refused."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import envfleet as ef
from envfleet.adapters.meta_envs import make_env, make_parallel_env
from envfleet.errors import BadArgument
from envfleet.train import PPOConfig, PPOTrainer
from envfleet.train.settings import settings_from_yaml

SMALL = {
    "env": "gridnavi",
    "episodes_per_task": 2,
    "num_envs": 4,
    "num_steps": 30,
    "total_steps": 480,
    "backend": "serial",
    "seed": 2,
}


def trainer_of(**changes) -> PPOTrainer:
    return PPOTrainer(PPOConfig(**{**SMALL, **changes}))


def test_what_a_network_is_told_while_learning_is_what_it_was_told_while_acting():
    with trainer_of(arch="memory", previous_step=True) as trainer:
        segment = trainer.collector.segment(30)
        (trained,) = trainer.learner.trained.values()
        told = segment.extras["previous"]
        expected = trained.net.previous(segment.action[:-1], segment.reward[:-1], segment.step[1:] == 0)
        assert (told[1:] == expected).all() and (told[0] == 0).all() and told[1:, :, -1].any()
        inputs, _ = trained.learner._inputs(segment)
        assert inputs["vector"].shape == (31, 4, 11 + 6)
        # The bootstrap row: nothing after an end, else the last step.
        last = trained.net.previous(segment.action[-1], segment.reward[-1], segment.ended[-1])
        assert (inputs["vector"][-1, :, 11:] == last).all()
        data, _ = trained.learner._prepare(segment, inputs, np.zeros((30, 4), bool))
        with torch.no_grad():
            out = trained.net({"vector": torch.from_numpy(inputs["vector"][:-1])}, trained.net.initial_state(4), data["fresh"])
            log_prob, _ = trained.net.actions.score(out.actions, None, data["raw"], None)
        assert torch.allclose(log_prob, data["log_prob"], atol=1e-6)


@pytest.mark.parametrize("curriculum", ["uniform", "learning_progress", "robust_plr"])
def test_a_resumed_run_deals_the_same_tasks_and_learns_the_same_weights(tmp_path, curriculum):
    def weights(out, stop_after=None, **changes):
        dealt = []
        with trainer_of(
            arch="memory", previous_step=True, curriculum=curriculum, num_train_tasks=15, out=str(out), **changes
        ) as trainer:
            trainer.tasks.curriculum.assign = _noting(trainer.tasks.curriculum.assign, dealt)
            if stop_after is None:
                trainer.train()
            else:
                for _ in range(stop_after):
                    trainer.train_episode_vectorized()
                trainer.save()
            return trainer.learner.flat.clone(), dealt

    whole, all_dealt = weights(tmp_path / "whole")
    _, first = weights(tmp_path / "cut", stop_after=2)
    resumed, rest = weights(tmp_path / "cut", resume=True)
    assert torch.equal(whole, resumed)
    assert first + rest == all_dealt
    other, other_dealt = weights(tmp_path / "workers", backend="shm", num_workers=2)
    assert torch.equal(whole, other) and other_dealt == all_dealt


def _noting(assign, dealt):
    def noting(slots, rng):
        chosen = assign(slots, rng)
        dealt.extend(tuple(task) for task in chosen)
        return chosen

    return noting


def test_robust_level_replay_does_not_learn_from_new_levels():
    with trainer_of(curriculum="robust_plr", num_steps=60, total_steps=4_800) as trainer:
        before = trainer.learner.flat.clone()
        result = trainer.train_episode_vectorized()  # every level is new
        assert torch.equal(before, trainer.learner.flat) and result.num_steps == 240
        assert trainer.tasks.num_results == 8 and trainer.tasks.probabilities()
        for _ in range(6):
            trainer.train_episode_vectorized()
        assert not torch.equal(before, trainer.learner.flat)


def test_evaluation_plays_held_out_tasks_and_counts_inner_episodes():
    with trainer_of(num_train_tasks=15, num_eval_tasks=6) as trainer:
        found = trainer.evaluate(12)
        assert np.shape(found.inner_returns) == (12, 2)
        assert np.allclose(np.sum(found.inner_returns, axis=1), found.returns)
        assert len(trainer.eval_tasks) == 6 and not set(trainer.eval_tasks) & set(trainer.tasks.curriculum.space.values)
        row = trainer.train_episode_vectorized()
        assert row.num_episodes == 4


def test_the_settings_of_meta_learning_files_are_read(tmp_path):
    (tmp_path / "antdir.yaml").write_text(
        "env: {env_type: meta, env_name: AntDir-v0, max_rollouts_per_task: 2, num_train_tasks: 50, num_eval_tasks: 20, "
        "num_parallel_workers: 6}\ntrain: {num_rollouts_per_iter: 12}\n"
    )
    config = PPOConfig(**settings_from_yaml(tmp_path / "antdir.yaml"))
    assert (config.env, config.episodes_per_task, config.num_envs, config.num_rollouts_per_iter) == ("AntDir-v0", 2, 6, 12)
    (tmp_path / "wrong.yaml").write_text("env: {env_tipe: meta}\n")
    with pytest.raises(BadArgument, match=r"env_tipe.*env_type"):
        settings_from_yaml(tmp_path / "wrong.yaml")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_train_tasks": 50}, "the family has 21 tasks"),
        ({"num_eval_tasks": 3}, "without num_train_tasks"),
        ({"episodes_per_task": 0}, "episodes_per_task=0"),
        ({"curriculum": "levles"}, "curriculum"),
        ({"curriculum": "alp_gmm"}, "ALPGMM needs a TaskBox"),
        ({"env": "CartPole-v1", "env_type": "meta"}, "has no tasks"),
    ],
)
def test_wrong_settings_of_tasks_are_refused_before_any_worker_starts(wrong, said):
    with pytest.raises(BadArgument, match=said):
        trainer_of(**wrong)


def test_a_parallel_env_steps_each_worker_at_its_own_pace():
    with make_parallel_env("GridNavi-v0", episodes_per_task=2, num_workers=3, num_train_tasks=15, num_eval_tasks=6) as penv:
        assert penv.reset(tasks=[(2, 2), (3, 3), (4, 4)]).shape == (3, 11)
        penv.step_async([2, 1], ids=[0, 2])
        ids, obs, rewards, dones, infos = penv.step_wait()
        assert ids.tolist() == [0, 2] and obs.shape == (2, 11) and not dones.any() and not infos[0]["done_mdp"]
        assert penv.reset_one(1, task=(0, 4)).shape == (11,) and penv.current_tasks() == [(2, 2), (0, 4), (4, 4)]
        for _ in range(29):
            obs, rewards, dones, infos = penv.step([0, 0, 0])
        assert dones.tolist() == [True, False, True] and infos[0]["done_mdp"]
        with pytest.raises(BadArgument, match="3 environments need a list with one task each"):
            penv.reset(tasks=[(2, 2)])


def test_workers_answer_as_pipes_do():
    from envfleet.envs.gridnavi import GridNavi

    with ef.ParallelEnvManager([GridNavi] * 2) as manager:
        for remote, task in zip(manager.remotes, [(2, 2), (4, 0)]):
            remote.send(("reset", {"task": task}))
        assert [remote.recv()[1]["task"] for remote in manager.remotes] == [(2, 2), (4, 0)]
        manager.remotes[1].send(("step", 2))
        assert manager.remotes[1].recv()[1:4] == (-0.1, False, False)
        manager.remotes[0].send(("get_attr", "task"))
        with pytest.raises(BadArgument, match="was not received"):
            manager.remotes[0].send(("step", 0))
        assert manager.remotes[0].recv() == (2, 2)
        with pytest.raises(BadArgument, match="nothing was sent"):
            manager.remotes[0].recv()
        with pytest.raises(BadArgument, match="no command 'jump'"):
            manager.remotes[0].send(("jump", None))


def test_rollouts_are_tickets_and_sequential_collection_has_the_same(no_leaks):
    config = {
        "env": {
            "env_type": "meta",
            "env_name": "GridNavi-v0",
            "max_rollouts_per_task": 2,
            "num_train_tasks": 15,
            "num_eval_tasks": 6,
        },
        "train": {"num_rollouts_per_iter": 4, "total_steps": 240, "agent_arch": ef.AGENT_ARCHS.Memory},
    }
    alone, together = ef.Learner(config), ef.Learner(config)
    penv = make_parallel_env("GridNavi-v0", episodes_per_task=2, num_workers=3, num_train_tasks=15, num_eval_tasks=6)
    assert alone.collect_rollouts_parallel(7, random_actions=True) == 210
    assert together.collect_rollouts_parallel(7, random_actions=True, parallel_env=penv) == 210
    for one, other in zip(alone.policy_storage._sequences, together.policy_storage._sequences):
        assert all((one[name] == other[name]).all() for name in one)
    before = together.agent().flat.clone()
    rows = together.train(penv)
    assert len(rows) == 2 and not torch.equal(before, together.agent().flat)
    assert np.shape(together.evaluate(6).inner_returns) == (6, 2)
    alone.close()
    together.close()
    del penv  # ends the workers


def test_a_killed_worker_costs_its_rollout_only():
    learner = ef.Learner({"env": {"env_type": "meta", "env_name": "GridNavi-v0", "num_parallel_workers": 2}})
    with make_parallel_env("GridNavi-v0", num_workers=2, on_fault="restart", wrappers=[WithPid]) as penv:
        penv.reset()
        os.kill(penv.call("pid")[0], signal.SIGKILL)
        assert learner.collect_rollouts_parallel(6, random_actions=True, parallel_env=penv) == 90
    learner.close()


class WithPid(ef.envs.varibad.gym.Wrapper):
    def pid(self):
        return os.getpid()


def test_the_single_twin_has_the_tasks_of_the_parallel_one():
    env = make_env("GridNavi-v0", 2, seed=5, num_train_tasks=15, num_eval_tasks=6)
    with make_parallel_env("GridNavi-v0", 2, num_workers=1, seed=5, num_train_tasks=15, num_eval_tasks=6) as penv:
        assert env.train_tasks == penv.train_tasks and env.eval_tasks == penv.eval_tasks
    env.close()
