"""The trainer: the same weights everywhere, exact resume, and what it does when things go wrong."""

from __future__ import annotations

import dataclasses
import io
import json

import gymnasium as gym
import numpy as np
import pytest
import torch

from envfleet.errors import BadArgument, FaultError
from envfleet.train import CheckpointError, DeviceMissing, PPOTrainer, RunExists, TrainingStopped, load_agent
from envfleet.train.terminal import Lines
from tests.support.training import Counting, Fragile, Masked, MaskedByInfo, Poisoned, Restless, config, trained, weights

KINDS = {
    "markov": {"normalize_obs": True, "normalize_reward": True},
    "memory": {"env": "cartpole-novel", "arch": "memory"},
    "memory_markov": {"arch": "memory_markov", "rnn": "lstm"},
    "continuous": {"env": "Pendulum-v1", "std": "state"},
    "squashed": {"env": "Pendulum-v1", "squash": True, "arch": "memory", "sequence_length": 8},
    "picture": {"env": "catch"},
    "one": {"num_envs": 1, "arch": "memory", "total_steps": 16 * 8},
}


@pytest.mark.parametrize("kind", ["markov", "memory"])
def test_same_weights_on_every_backend_and_worker_count(kind):
    wanted = trained(config(**KINDS[kind]))
    for backend, workers in (("thread", 3), ("shm", 1), ("shm", 2)):
        assert torch.equal(trained(config(**KINDS[kind], backend=backend, num_workers=workers)), wanted), backend


def test_native_environments_and_any_number_of_threads_give_the_weights_of_one_thread_in_python():
    # 256 slots: minibatches of several lanes, and a pass over the segment that threads share.
    many = {"num_envs": 256, "total_steps": 256 * 16 * 2, "num_minibatches": 4}
    wanted = trained(config(**many))
    for threads in (1, 2, 3):
        assert torch.equal(trained(config(**many, backend="native", num_workers=threads, num_threads=threads)), wanted), threads


def test_a_native_run_resumes_exactly(tmp_path):
    native = {"backend": "native", "num_workers": 1}
    wanted = trained(config(**native))
    with PPOTrainer(config(**native, out=str(tmp_path))) as trainer:
        trainer.train_episode_vectorized()
        trainer.save()
    with PPOTrainer(config(**native, out=str(tmp_path), resume=True)) as trainer:
        trainer.train()
        assert torch.equal(weights(trainer), wanted)


def test_training_leaves_the_threads_of_pytorch_as_they_were():
    before = torch.get_num_threads()
    with PPOTrainer(config(num_threads=2)):
        assert torch.get_num_threads() == 1  # the compiled update has threads of its own
    with PPOTrainer(config(num_threads=2, activation="relu")):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == before


def test_other_seeds_give_other_weights():
    assert not torch.equal(trained(config()), trained(config(seed=4)))


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact(kind, tmp_path):
    wanted = trained(config(**KINDS[kind]))
    with PPOTrainer(config(**KINDS[kind], out=str(tmp_path))) as trainer:
        for _ in range(3):
            trainer.train_episode_vectorized()
        trainer.save()
        trainer.train_episode_vectorized()  # lost, as after a kill
    with PPOTrainer(config(**KINDS[kind], out=str(tmp_path), resume=True)) as trainer:
        assert trainer.counters.update == 3
        trainer.train()
        assert torch.equal(weights(trainer), wanted)
        ledger = trainer.collector.ledger
        assert ledger.in_flight == trainer.config.num_envs and not ledger.dropped
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == list(range(1, 9))  # the lost update is there once


def test_resume_on_another_backend_is_exact(tmp_path):
    wanted = trained(config())
    with PPOTrainer(config(out=str(tmp_path))) as trainer:
        trainer.train_episode_vectorized()
        trainer.save()
    with PPOTrainer(config(out=str(tmp_path), resume=True, backend="shm", num_workers=2)) as trainer:
        trainer.train()
        assert torch.equal(weights(trainer), wanted)


def test_resume_can_end_running_episodes_instead(tmp_path):
    with PPOTrainer(config(out=str(tmp_path))) as trainer:
        trainer.train_episode_vectorized()
        trainer.save()
    with PPOTrainer(config(out=str(tmp_path), resume=True, restore="end")) as trainer:
        trainer.train()
        assert trainer.collector.ledger.dropped == {"ended when the run was resumed": 4}
        assert trainer.collector.ledger.in_flight == 4


def test_episodes_that_cannot_be_replayed_are_ended(tmp_path):
    with PPOTrainer(config(env=Restless, out=str(tmp_path))) as trainer:
        trainer.train_episode_vectorized()
        trainer.save()
    with (
        pytest.warns(UserWarning, match=r"slots \[0, 1, 2, 3\] could not be restored"),
        PPOTrainer(config(env=Restless, out=str(tmp_path), resume=True)) as trainer,
    ):
        trainer.train()


def test_state_that_outlives_episodes_comes_back_by_set_state(tmp_path):
    wanted = trained(config(env=Counting))
    with PPOTrainer(config(env=Counting, out=str(tmp_path))) as trainer:
        trainer.train_episode_vectorized()
        trainer.train_episode_vectorized()
        trainer.save()
    with PPOTrainer(config(env=Counting, out=str(tmp_path), resume=True)) as trainer:
        trainer.train()
        assert torch.equal(weights(trainer), wanted)


class Source:
    """Deals tasks and has a state."""

    def __init__(self):
        self.dealt = 0

    def task(self, number):
        self.dealt += 1
        return ("easy", "hard")[number % 2]

    def state_dict(self):
        return {"dealt": self.dealt}

    def load_state_dict(self, state):
        self.dealt = state["dealt"]


class WithTask(Counting):
    def set_task(self, task):
        self.factor = 2.0 if task == "hard" else 1.0

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, reward * getattr(self, "factor", 1.0), *rest


def test_tasks_are_dealt_named_and_kept(tmp_path):
    with PPOTrainer(config(env=WithTask, out=str(tmp_path)), tasks=Source()) as trainer:
        trainer.train()
        dealt = trainer.tasks.dealt
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"return/easy", "return/hard"} <= set().union(*rows)
    with PPOTrainer(config(env=WithTask, out=str(tmp_path), resume=True, total_steps=1024), tasks=Source()) as again:
        assert again.tasks.dealt >= dealt
        again.train()


# -- what may and may not be -----------------------------------------------------------------------------------------------


def test_an_existing_run_is_not_overwritten(tmp_path):
    with PPOTrainer(config(out=str(tmp_path))) as trainer:
        trainer.train()
    with pytest.raises(RunExists, match="--resume"):
        PPOTrainer(config(out=str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"gamma was 0.99 and is 0.5"):
        PPOTrainer(config(out=str(tmp_path), resume=True, gamma=0.5))


def test_unwritable_folder_and_missing_device(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BadArgument, match="cannot be written"):
        PPOTrainer(config(out=str(blocked / "run")))
    if not torch.cuda.is_available():
        with pytest.raises(DeviceMissing, match="available: cpu"):
            PPOTrainer(config(device="cuda"))


@pytest.mark.parametrize("env", [Masked, MaskedByInfo])
@pytest.mark.parametrize("arch", ["markov", "memory"])
def test_masked_actions_are_never_sent(env, arch):
    columns = {"action_mask": gym.spaces.MultiBinary(2)} if env is MaskedByInfo else {}
    with PPOTrainer(config(env=env, arch=arch, columns=columns)) as trainer:
        result = trainer.train()
        assert result.mean_return > 0
        assert trainer.evaluate(2).mean_return >= 0


def test_nan_stops_with_address_and_checkpoint(tmp_path):
    with PPOTrainer(config(env=Poisoned, out=str(tmp_path))) as trainer:
        with pytest.raises(TrainingStopped, match="slot 0, episode 0, step 30") as caught:
            trainer.train()
        assert caught.value.checkpoint is not None and caught.value.checkpoint.exists()
    with PPOTrainer(config(env=Poisoned, out=str(tmp_path), resume=True, on_nan="skip")) as trainer:
        assert (trainer.collector._segments.episode == 1).all()  # the episodes that met it are not begun again
        trainer.train()
        assert trainer.collector.ledger.in_flight == 4
    with PPOTrainer(config(env=Poisoned, on_nan="skip")) as trainer:
        trainer.train()
        assert torch.isfinite(weights(trainer)).all()


def test_faults_raise_or_are_restarted_and_left_out():
    with PPOTrainer(config(env=Fragile, on_fault="raise")) as trainer, pytest.raises(FaultError):
        trainer.train()
    with PPOTrainer(config(env=Fragile, on_fault="restart", total_steps=256)) as trainer:
        result = trainer.train()
        assert trainer.fleet.faults
        assert result.num_steps >= 256 and result.num_faults == len(trainer.fleet.faults)
        ledger = trainer.collector.ledger
        assert ledger.in_flight == 4 - len(trainer.fleet.quarantined)
        assert ledger.failed.total() == len(trainer.fleet.faults)


class Broken(Fragile):
    """Never ends an episode before its 13th step, in which it raises."""

    def reset(self, **options):
        out = super().reset(**options)
        self.limit = 100
        return out


class Sound(Fragile):
    """Ends every episode in its fifth step."""

    def reset(self, **options):
        out = super().reset(**options)
        self.limit = 5
        return out


def test_a_run_goes_on_without_its_quarantined_slots_and_is_resumed(tmp_path):
    """The steps of a slot that is given up are made by the others, and a checkpoint can be written without it."""
    wanted = config(env=[Broken, Sound], total_steps=512, num_steps=32, out=str(tmp_path), tensorboard=False)
    seen = Lines(io.StringIO())
    with PPOTrainer(wanted, view=seen) as trainer:
        result = trainer.train()
        assert result.quarantined == [0, 2] and result.num_steps >= 512 and result.num_faults >= 6
    told = seen._out.getvalue()
    assert (
        "quarantined after repeated faults, slots: 0, 2. The run goes on with 2 of 4" in told and "slot 0 failed in step" in told
    )
    with PPOTrainer(dataclasses.replace(wanted, resume=True, total_steps=700)) as again:
        assert again.train().num_steps >= 700


def test_an_evaluation_whose_environment_fails_does_not_end_the_run():
    seen = Lines(io.StringIO())
    with PPOTrainer(config(env=[Sound, Broken], total_steps=128, eval_every=1, eval_episodes=1), view=seen) as trainer:
        assert trainer.train().num_steps >= 128
    assert "this evaluation is left out, because its environment failed: slot 0 failed in step" in seen._out.getvalue()


def test_one_update_tells_what_happened():
    with PPOTrainer(config(num_steps=64)) as trainer:
        result = trainer.train_episode_vectorized()
    assert result.num_steps == 256 and result.n_completed_episodes == len(result.returns) > 0
    assert result.returns == [float(length) for length in result.lengths]  # CartPole pays 1 a step
    assert result.sps > 0 and "policy_loss" in result.losses


def test_stops_by_episodes_and_on_request():
    with PPOTrainer(config(num_episodes=10, total_steps=10**6)) as trainer:
        assert 10 <= trainer.train().n_completed_episodes < 30
    with PPOTrainer(config(total_steps=10**9)) as trainer:
        trainer.stop()
        assert trainer.train().stopped


def test_evaluation_changes_nothing_and_repeats_itself(tmp_path):
    wanted = trained(config())
    with PPOTrainer(config(eval_every=1, eval_episodes=3, out=str(tmp_path))) as trainer:
        trainer.train()
        assert torch.equal(weights(trainer), wanted)
        first, second = trainer.evaluate(5), trainer.evaluate(5)
        assert first.returns == second.returns
    agent = load_agent(tmp_path)
    assert agent.evaluate(5).returns == first.returns
    assert load_agent(tmp_path, which="best").update <= agent.update
    assert agent.policy().choose(np.zeros((1, 4), np.float32))[0].shape == (1,)


class Sized(Counting):
    """A class with settings, which reach the evaluation's environment as they reach those of training."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def step(self, action):
        observation, reward, _, cut, info = super().step(action)
        return observation, reward, self.time == self.limit, cut, info


def test_an_environment_given_as_a_class_is_evaluated_with_its_settings(tmp_path):
    settings = config(env=Sized, env_kwargs={"limit": 5}, total_steps=64, out=str(tmp_path))
    with PPOTrainer(settings) as trainer:
        trainer.train()
        assert trainer.evaluate(2).lengths == [5, 5]
        with pytest.raises(BadArgument, match="has one agent and no opponents"):
            trainer.evaluate(1, opponents="random")
    assert load_agent(tmp_path, env=Sized).evaluate(2).lengths == [5, 5]


def test_several_environments_by_name(tmp_path):
    with PPOTrainer(config(env="CartPole-v1,CartPole-v0", num_steps=64, out=str(tmp_path))) as trainer:
        trainer.train()
        assert trainer.evaluate(2).num_episodes == 4
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {"return/CartPole-v1", "return/CartPole-v0"} <= set().union(*rows)


def test_nothing_is_left_behind(no_leaks):
    threads = torch.get_num_threads()
    trained(config(backend="shm", num_workers=2))
    assert torch.get_num_threads() == threads
