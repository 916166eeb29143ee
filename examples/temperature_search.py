"""Hyper-parameter search: four temperatures at once, every one on the same seeds.

The executor's pool takes any work; a rollout is submitted per (temperature, seed).
"""

from collections import defaultdict

import gymnasium as gym
import numpy as np

from envfleet.rollout import ParallelEnvironmentExecutor


def agent_at(temperature, seed):
    rng = np.random.default_rng(seed)

    def agent(obs, done):
        right = 1.0 / (1.0 + np.exp(-(obs[2] * 10 + obs[3]) / temperature))
        return int(rng.random() < right)

    return agent


returns = defaultdict(list)
with ParallelEnvironmentExecutor(num_workers=8) as executor:
    futures = [
        executor.executor.submit(
            executor.collect_rollout, gym.make("CartPole-v1"), agent_at(temperature, seed), 500, f"temp_{temperature}", seed=seed
        )
        for temperature in (0.1, 0.5, 1.0, 5.0)
        for seed in range(8)
    ]
    for future in futures:
        rollout = future.result()
        returns[rollout.env_name].append(rollout.episode_return)
table = {name: float(np.mean(values)) for name, values in returns.items()}
for name, mean in sorted(table.items(), key=lambda item: -item[1]):
    print(f"{name:<9} mean return {mean:6.1f}")
assert table["temp_0.1"] > table["temp_5.0"]
