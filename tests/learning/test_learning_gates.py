"""What must be learned, with how many steps: seeds 1 to 3 each, over 100 evaluation episodes with the modal action."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from envfleet.train import PPOConfig, PPOTrainer

SEEDS = (1, 2, 3)


def learned(**settings) -> float:
    settings.setdefault("backend", "serial")
    with PPOTrainer(PPOConfig(**settings)) as trainer:
        trainer.train()
        return trainer.evaluate(100).mean_return


def test_cartpole_begins_to_learn():
    """The fast one, in every run of the suite: a tenth of the gate's steps, and far from what chance gives (22)."""
    assert learned(env="CartPole-v1", num_envs=8, total_steps=12_000, seed=1) > 60


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_solves_cartpole(seed):
    assert learned(env="CartPole-v1", num_envs=8, total_steps=100_000, seed=seed) >= 475


@pytest.mark.learning
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_solves_acrobot(seed):
    assert learned(env="Acrobot-v1", num_envs=16, total_steps=500_000, seed=seed) >= -90


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_tmaze_needs_memory(seed):
    assert learned(env="tmaze", num_envs=16, total_steps=100_000, arch="memory", seed=seed) >= 0.95
    assert learned(env="tmaze", num_envs=16, total_steps=100_000, arch="markov", seed=seed) <= 0.6


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_cartpole_without_velocities(seed):
    assert learned(env="cartpole-novel", num_envs=8, total_steps=100_000, seed=seed) >= 450


@pytest.mark.learning
@pytest.mark.parametrize("seed", SEEDS)
def test_catch_from_pixels(seed):
    assert learned(env="catch", num_envs=16, total_steps=80_000, seed=seed) >= 0.9
