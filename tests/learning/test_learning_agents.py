"""Many agents as one: Stable-Baselines3 solves the grid world through the flatten wrapper."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("pettingzoo")
pytest.importorskip("stable_baselines3")

import stable_baselines3 as sb3
import torch

import envfleet as ef
from envfleet.envs.gridworld import GridWorldEnvMultiAgent

PPO = {"n_steps": 64, "batch_size": 256, "n_epochs": 6, "gamma": 0.9, "gae_lambda": 0.9, "ent_coef": 0.002}


def make_env():
    return ef.FlattenMultiAgentWrapper(GridWorldEnvMultiAgent())


def success_rate(model, episodes_each=5, num_envs=40):
    """Over grids of seeds never trained on, five of each of 40 environments, with sampled actions.

    Sampled, because two agents that want through the same door wait for each other forever if both always do the same.
    """
    envs = ef.adapters.sb3.DummyVecEnv([make_env] * num_envs)
    envs.seed(10_000)
    observation, won = envs.reset(), [[] for _ in range(num_envs)]
    while min(map(len, won)) < episodes_each:
        observation, _, done, infos = envs.step(model.predict(observation)[0])
        for i in np.flatnonzero(done):
            won[i].append(infos[i]["is_success"])
    envs.close()
    return np.mean([one[:episodes_each] for one in won])


@pytest.mark.learning
@pytest.mark.parametrize("seed", (1, 2))
def test_flattened_gridworld(seed):
    """20,480 steps of 16 environments; an untrained policy solves 5 to 9 of 100 grids."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        envs = ef.adapters.sb3.DummyVecEnv([make_env] * 16)
        envs.seed(seed)
        model = sb3.PPO("MlpPolicy", envs, learning_rate=lambda left: 2e-3 * left, seed=seed, device="cpu", **PPO)
        untrained = success_rate(model)
        model.learn(20_480)
        envs.close()
        assert untrained < 0.3 and success_rate(model) >= 0.95
    finally:
        torch.set_num_threads(threads)
