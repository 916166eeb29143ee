"""PPO on CAGE 2 with its preset, on native slots: far better than chance (-745 against B_line) in a fraction of ten CPU-minutes."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch")

from envfleet.train import PPOConfig, PPOTrainer

GATE = -60


def test_a_name_is_enough_for_the_preset_and_the_native_backend():
    for name in ("cage2", "envfleet/Cage2-v0"):
        config = PPOConfig(env=name)
        assert (config.backend, config.num_envs, config.num_steps) == ("native", 64, 100)
    assert PPOConfig(env="cage2", backend="serial").backend == "serial"
    assert PPOConfig(env="cage2", start_method="spawn").backend == "auto"
    assert PPOConfig(env="my.package:MyCage2Env").backend == "auto"
    with PPOTrainer(PPOConfig(env="cage2", total_steps=6400)) as trainer:
        trainer.train()
        assert trainer.fleet.plan.backend == "native"


@pytest.mark.learning
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ppo_defends_against_b_line(seed):
    begin = time.process_time()
    with PPOTrainer(
        PPOConfig(env="cage2", env_kwargs={"red_agent": "bline"}, num_workers=1, total_steps=1_000_000, seed=seed)
    ) as trainer:
        trainer.train()
        assert time.process_time() - begin < 600  # the gate is stated in CPU time
        assert trainer.evaluate(100).mean_return > GATE
