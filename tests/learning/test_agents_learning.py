"""What many agents must learn, and within which budget. Evaluation on environments and seeds of their own."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pettingzoo")

from envfleet.envs.tictactoe import minimax2
from envfleet.train import PPOConfig, PPOTrainer

TICTACTOE = {
    "env": "tictactoe", "num_envs": 32, "total_steps": 150_000, "preset": "tictactoe", "self_play": True,
    "self_play_pool": 40, "self_play_every": 5,
}  # fmt: skip
GRID = {"env": "gridworld-aec", "num_envs": 16, "total_steps": 120_000, "preset": "gridworld"}
SPREAD = {
    "env": "simple-spread", "num_envs": 16, "total_steps": 64_000, "preset": "spread", "centralised_critic": True,
}  # fmt: skip


def trainer_of(settings, seed, **changes) -> PPOTrainer:
    return PPOTrainer(PPOConfig(**{"backend": "serial", "seed": seed, **settings, **changes}))


def test_grid_world_begins_to_be_learned():
    """The fast one: a tenth of the gate's steps, and far from what chance gives (about 0)."""
    with trainer_of(GRID, 1, total_steps=16_384) as trainer:
        trainer.train()
        assert trainer.evaluate(30, deterministic=False).mean_return > 0.5


@pytest.mark.learning
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", (1, 2))
def test_grid_world_is_solved_by_one_policy_for_all(seed):
    """Every agent reaches its goal in at least 95 of 100 cases. Actions are drawn: two agents in each other's way, who
    see the same and do the most likely thing, would wait for each other for ever."""
    with trainer_of(GRID, seed) as trainer:
        trainer.train()
        found = trainer.evaluate(200, deterministic=False)
    reached = np.array(list(found.agent_returns.values())) > 0.5  # the goal pays 1, all else less than a half
    assert reached.mean() >= 0.95, reached.mean()


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_tictactoe_is_learned_by_self_play():
    with trainer_of(TICTACTOE, 1) as trainer:
        trainer.train()
        by_chance = trainer.evaluate(1000, opponents="random")
        scripted = trainer.evaluate(400, opponents=minimax2)
    assert by_chance.losses < 0.02 * 1000, by_chance.losses
    assert scripted.wins + scripted.draws >= 0.95 * 400, scripted.losses


@pytest.mark.learning
@pytest.mark.timeout(1800)
def test_simple_spread_beats_chance():
    """Every agent's return is at least 3 points above that of random agents (-26.7)."""
    pytest.importorskip("mpe2")
    with trainer_of(SPREAD, 1) as trainer:
        nobody = dict.fromkeys(trainer.learner.agents, "random")
        by_chance = trainer.evaluate(100, opponents=nobody).mean_agent_returns
        trainer.train()
        found = trainer.evaluate(100).mean_agent_returns
    gains = {agent: found[agent] - by_chance[agent] for agent in found}
    assert min(gains.values()) >= 3.0, gains
