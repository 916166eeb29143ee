"""Training over tasks: the previous step, curricula in checkpoints, views of meta-learning scripts, what is refused."""

from __future__ import annotations

import json
import os
import signal
import warnings

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

import envfleet as ef
from envfleet.adapters.meta_envs import make_env, make_parallel_env
from envfleet.errors import BadArgument, SplitsDifferWarning
from envfleet.tasks import LearningProgress
from envfleet.train import PPOConfig, PPOTrainer
from envfleet.train.html_report import _adaptation, write_comparison, write_report
from envfleet.train.settings import settings_from_yaml
from envfleet.train.terminal import View, box

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


@pytest.mark.parametrize("restore", ["replay", "end"])
def test_a_resume_deals_no_task_of_an_episode_that_is_done(tmp_path, monkeypatch, restore):
    """A curriculum that counts its draws would go on from another state, and a ticket that is dealt again never has a result."""
    settings = {"curriculum": "learning_progress", "num_train_tasks": 15, "out": str(tmp_path / "run"), "num_steps": 75}
    with trainer_of(**settings) as trainer:
        for _ in range(2):  # 5 episodes of 30 steps in each slot: a running one, and the next that is assigned
            trainer.train_episode_vectorized()
        trainer.save()
        before = trainer.tasks.state_dict()
    assert [row[0] for row in before["dealt"]] == list(range(20, 28))
    drawn = []
    assign = LearningProgress.assign
    monkeypatch.setattr(LearningProgress, "assign", lambda self, slots, rng: drawn.extend(slots) or assign(self, slots, rng))
    with trainer_of(**settings, resume=True, restore=restore) as trainer:
        after = trainer.tasks.state_dict()
        if restore == "replay":
            assert not drawn and after["dealt"] == before["dealt"]
        else:  # the running ones are ended: the next ones keep their tasks, and those after them are assigned
            assert drawn == list(range(28, 32)) and after["dealt"][:4] == before["dealt"][4:]
            assert [row[0] for row in after["dealt"]] == list(range(24, 32))


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
    learner = ef.Learner(
        {"env": {"env_type": "meta", "env_name": "GridNavi-v0", "episodes_per_task": 1, "num_parallel_workers": 2}}
    )
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


def test_many_tasks_are_shown_by_their_best_and_worst_and_by_quantiles(tmp_path):
    shown = []

    class Kept(View):
        def show(self, status):
            shown.append(status)

    config = PPOConfig(**{**SMALL, "num_envs": 8, "total_steps": 4_800, "out": str(tmp_path / "run")})  # 21 tasks
    with PPOTrainer(config, view=Kept()) as trainer:
        trainer.train()
        means = trainer.board.means()
    last = shown[-1]
    assert len(means) == 21 and not any(name.startswith("return/") for name in last)
    ordered = sorted(means.values())
    assert list(last["best_tasks"].values()) == ordered[::-1][:4] and list(last["worst_tasks"].values()) == ordered[:4]
    assert last["task_return/50 %"] == pytest.approx(np.median(ordered))
    lines = [line for _, line in box(last, [], 79)]
    for label, words in (("tasks", "50 %"), ("best", next(iter(last["best_tasks"]))), ("worst", next(iter(last["worst_tasks"])))):
        (line,) = [line for line in lines if line.startswith(f"│ {label}")]
        assert words in line
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Return over tasks" in page and all(f"<th>{task}</th>" in page for task in means)
    many = write_report(tmp_path / "run", {"tasks": {f"task {i}": float(-i) for i in range(40)}}).read_text()
    assert "the best and the worst of 40" in many and "20 tasks in between" in many
    assert "task 9<" in many and "task 10<" not in many and "task 30<" in many


def test_few_tasks_are_all_shown(tmp_path):
    with trainer_of(env="tmaze", env_type="meta", episodes_per_task=1, num_steps=30, out=str(tmp_path / "run")) as trainer:
        trainer.train()
        assert set(trainer.board.means()) == {"1", "-1"}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Return of task -1" in page and "Return over tasks" not in page and "<h2>Tasks</h2>" in page


def test_the_probabilities_of_many_tasks_are_shown_by_their_range(tmp_path):
    with trainer_of(curriculum="learning_progress", out=str(tmp_path / "run")) as trainer:  # 21 tasks
        trainer.train()
        chances = trainer.tasks.probabilities().values()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["probability/likeliest"] == pytest.approx(max(chances))
    assert "What the curriculum assigns" in (tmp_path / "run" / "report.html").read_text()


def test_the_random_pool_of_a_learner_is_read_from_its_config_and_an_argument_wins(tmp_path):
    train = {"num_rollouts_per_iter": 2, "total_steps": 60, "num_init_rollouts_pool": 3}
    config = {"env": {"env_type": "meta", "env_name": "gridnavi", "max_rollouts_per_task": 2}, "train": train}
    (tmp_path / "grid.json.yaml").write_text(json.dumps(config))  # JSON is YAML too
    for given, options, pool in (
        (config, {}, 3),
        (tmp_path / "grid.json.yaml", {}, 3),
        (config, {"num_init_rollouts_pool": 1}, 1),
    ):
        learner = ef.Learner(given, **options)
        learner.train()
        assert len(learner.policy_storage) == pool + 2
        learner.close()
    with pytest.raises(BadArgument, match="num_init_rollouts_pool=-1"):
        ef.Learner({**config, "train": {**train, "num_init_rollouts_pool": -1}})


def test_runs_are_compared_by_the_same_kind_of_episodes_and_task_by_task(tmp_path):
    """One run with evaluation and one without: their adaptation is drawn from training, where both have it."""
    for name, changes in {"memory": {"arch": "memory", "eval_every": 2, "eval_episodes": 4}, "oracle": {"oracle": True}}.items():
        with trainer_of(curriculum="learning_progress", out=str(tmp_path / name), **changes) as trainer:
            trainer.train()
    both = write_comparison([tmp_path / "memory", tmp_path / "oracle"], tmp_path / "both.html").read_text()
    assert "Adaptation to a task, in training" in both and "Adaptation to a task, in evaluation" not in both
    assert "Return of the median task" in both and "likeliest task" in both
    tasks = json.loads((tmp_path / "memory" / "report.json").read_text())["tasks"]
    assert tasks and all(f"<th>{task}</th>" in both for task in tasks)
    assert "Adaptation to a task, in evaluation" in (tmp_path / "memory" / "report.html").read_text()


def test_a_learner_takes_another_environment_and_begins_anew_or_keeps_what_it_has():
    config = {"env": {"env_type": "meta", "env_name": "GridNavi-v0"}, "train": {"num_rollouts_per_iter": 2}}
    learner = ef.Learner(config)
    learner.collect_rollouts_parallel(2, random_actions=True)
    for wrong in ({"env_nam": "x"}, {"num_train_tasks": 500}, {"env_type": "plain"}, {"env_name": "Nope-v0"}):
        with pytest.raises(BadArgument, match=r"env_nam|num_train_tasks=500|env_type='meta'|Nope-v0"):
            learner.init_env(**wrong)
    assert learner.num_env_steps == 120 and learner.config.env_name == "GridNavi-v0"
    learner.init_env(env_name="TMaze-v0", max_rollouts_per_task=1)
    assert learner.num_env_steps == 0 and len(learner.policy_storage) == 0
    assert learner.collect_rollouts_parallel(2, random_actions=True) > 0
    learner.close()


@pytest.mark.parametrize("kind", [dict, ef.train.PPOConfig])
def test_a_learner_that_took_another_environment_is_as_a_new_one_of_it(kind, tmp_path):
    """Also in the settings that a preset has for the environment."""
    env, train = {"env_type": "meta", "max_rollouts_per_task": 1}, {"num_rollouts_per_iter": 2, "total_steps": 200}

    def learner(name):
        return ef.Learner(
            kind(env={**env, "env_name": name}, train=train) if kind is dict else kind(**env, env_name=name, **train)
        )

    ours, new = learner("GridNavi-v0"), learner("TMaze-v0")
    ours.train()
    ours.init_env(env_name="TMaze-v0")
    assert ours.config == new.config != learner("GridNavi-v0").config
    rows = ours.train()
    assert rows == new.train()
    again = learner("TMaze-v0")
    again.load(ours.save(tmp_path / "agent.pt"))
    assert again.train() == ours.train()
    for one in (ours, new, again):
        one.close()


def test_a_resumed_run_knows_the_returns_of_its_tasks(tmp_path):
    """Else the quantiles in its logs differ from those of a run that was not stopped."""
    with trainer_of(out=str(tmp_path)) as trainer:
        trainer.train_episode_vectorized()
        trainer.train_episode_vectorized()
        trainer.save()
        before = trainer.board.means()
    with trainer_of(out=str(tmp_path), resume=True) as trainer:
        assert before and trainer.board.means() == before


def test_adaptation_in_training_is_the_mean_of_the_last_updates(tmp_path):
    """One update has few episodes: the slope of its curve says nothing."""
    with trainer_of(out=str(tmp_path)) as trainer:
        trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert "Adaptation to a task, in training, last updates" in (tmp_path / "report.html").read_text()

    made = [{"inner_return/1": float(i), "inner_return/2": float(-i)} for i in range(60)]
    mean = sum(range(50, 60)) / 10
    assert _adaptation({"": made}) == _adaptation({"": [{"inner_return/1": mean, "inner_return/2": -mean}]})
    assert _adaptation({"": made[:8]}) == _adaptation({"": made[7:8]})  # a short run: not its beginning


def test_a_learner_warns_of_a_parallel_env_that_holds_out_what_is_trained_on():
    env = {"env_type": "meta", "env_name": "gridnavi", "episodes_per_task": 2, "num_train_tasks": 15, "num_eval_tasks": 6}
    learner = ef.Learner({"env": env, "train": {"num_rollouts_per_iter": 2, "seed": 5}})
    for seed in (5, 6):
        with ef.make_parallel_env("gridnavi", 2, 1, seed, num_train_tasks=15, num_eval_tasks=6, backend="serial") as penv:
            assert (penv.eval_tasks == learner.eval_tasks) == (seed == 5)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                learner.collect_rollouts_parallel(2, random_actions=True, parallel_env=penv)
            said = [str(one.message) for one in found if one.category is SplitsDifferWarning]
            assert len(said) == (seed == 6) and all("of the 6 tasks" in text and "learner's is 5" in text for text in said)
            with pytest.raises(BadArgument, match="worker_id=1: give a whole number from 0 to 0"):
                penv.reset_one(1)
    learner.close()


def test_a_learner_refuses_a_parallel_env_of_other_episodes_and_wrong_numbers():
    """Three inner episodes instead of two were collected and learned from without a word."""
    learner = ef.Learner(PPOConfig(**{**SMALL, "env_type": "meta", "num_steps": 60, "num_rollouts_per_iter": 2}))
    for env, count, words in (("gridnavi", 3, "inner_returns: parallel_env has"), ("tmaze", 2, "observation: parallel_env has")):
        with make_parallel_env(env, count, num_workers=2, backend="serial") as penv, pytest.raises(BadArgument, match=words):
            learner.collect_rollouts_parallel(2, random_actions=True, parallel_env=penv)
    with pytest.raises(BadArgument, match=r"parallel_env=<MetaEnv.*: give what make_parallel_env"):
        learner.collect_rollouts_parallel(2, random_actions=True, parallel_env=make_env("gridnavi", 2))
    with pytest.raises(BadArgument, match="num_rollouts='4'"):
        learner.collect_rollouts_parallel("4")
    with pytest.raises(BadArgument, match="num_episodes=0"):
        learner.evaluate(0)
    with pytest.raises(BadArgument, match=r"step\(\) before reset\(\)"):
        make_env("gridnavi", 2).step(1)
    learner.close()


@pytest.mark.parametrize("setting", [{"curriculum": "sfl"}, {"oracle": True}, {"num_train_tasks": 3}])
def test_settings_of_tasks_are_refused_where_there_are_none(setting):
    """They were ignored: a run without its curriculum looks like one with it."""
    with pytest.raises(BadArgument, match="need env_type=meta"):
        PPOTrainer(PPOConfig(env="CartPole-v1", total_steps=256, **setting))


def test_a_family_that_does_not_have_an_argument_is_named():
    with pytest.raises(
        BadArgument, match=r"gridnavi cannot be made \(env_kwargs=\{'siz': 3\}\): .*unexpected keyword argument 'siz'"
    ):
        trainer_of(env_kwargs={"siz": 3})
