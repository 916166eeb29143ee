"""RLlib's own vectorisation, fleets by vector_entry_point, and `FleetEnvRunner`, in turns of one run. Needs the venv of `make test-ray`.

PYTHONPATH=src:. .envs/rllib/bin/python -m bench.rllib
PYTHONPATH=src:. .envs/rllib/bin/python -m bench.rllib --solve    # train until greedy episodes are long
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0")

import numpy as np
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from envfleet.adapters import rllib

CONTESTANTS = ("default", "vector_entry_point", "FleetEnvRunner")
TARGETS = {"vector_entry_point": (0.85, None), "FleetEnvRunner": (1.6, 1.2)}


def config_of(contestant: str, num_envs: int = 64, fragment: int = 32, seed: int = 1) -> Any:
    """PPO on CartPole with a local runner."""
    config = (
        PPOConfig()
        .env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs, rollout_fragment_length=fragment)
        .training(train_batch_size=num_envs * fragment, minibatch_size=512, num_epochs=4, lr=1e-3, gamma=0.98)
        .debugging(seed=seed)
    )
    if contestant == "default":
        return config.environment("CartPole-v1")
    runner: Any = "fleet" if contestant == "FleetEnvRunner" else "rllib"
    return rllib.environment(config, "CartPole-v1", runner=runner, seeds="gymnasium", backend="serial")


def sampling(rounds: int, seconds: float) -> dict[str, list[float]]:
    """Steps per second of sampling, one figure per turn."""
    runners = {}
    for name in CONTESTANTS:
        config = config_of(name)
        runners[name] = (config.env_runner_cls or SingleAgentEnvRunner)(config=config, worker_index=0)
        runners[name].sample(num_timesteps=2048)
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for turn in range(rounds):
        for name in CONTESTANTS[turn % 3 :] + CONTESTANTS[: turn % 3]:
            begun, steps = time.perf_counter(), 0
            while time.perf_counter() - begun < seconds:
                steps += sum(len(episode) for episode in runners[name].sample(num_timesteps=2048))
                runners[name].get_metrics()
            rates[name].append(steps / (time.perf_counter() - begun))
    for runner in runners.values():
        runner.stop()
    return rates


def training(rounds: int, iterations: int) -> dict[str, list[float]]:
    """Steps per second of PPO as a whole, one figure per turn."""
    algorithms = {name: config_of(name).build_algo() for name in CONTESTANTS}
    rates: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for algorithm in algorithms.values():
        algorithm.train()
    for turn in range(rounds):
        for name in CONTESTANTS[turn % 3 :] + CONTESTANTS[: turn % 3]:
            begun = time.perf_counter()
            steps = sum(algorithms[name].train()["env_runners"]["num_env_steps_sampled"] for _ in range(iterations))
            rates[name].append(steps / (time.perf_counter() - begun))
    for algorithm in algorithms.values():
        algorithm.stop()
    return rates


def print_table(title: str, rates: dict[str, list[float]], column: int) -> None:
    """Medians, and ratios to the default within each turn."""
    print(f"\n{title}\n| | steps/s (median) | / default, per turn | median | target |\n|---|---:|---|---:|---:|")
    for name, values in rates.items():
        ratios = [one / other for one, other in zip(values, rates["default"])]
        target = TARGETS.get(name, (None, None))[column]
        row = f"| {name} | {statistics.median(values):,.0f} | {' '.join(f'{ratio:.2f}' for ratio in ratios)} | "
        print(row + f"{statistics.median(ratios):.2f} | {target or ''} |", flush=True)


def greedy(algorithm: Any, num_episodes: int = 64) -> float:
    """The mean length of greedy episodes, all begun together and played to their ends."""
    import gymnasium as gym

    envs = gym.make_vec("CartPole-v1", num_envs=num_episodes)
    obs, _ = envs.reset(seed=10_000)
    module, running, lengths = algorithm.get_module(), np.ones(num_episodes, bool), np.zeros(num_episodes)
    while running.any():
        with torch.no_grad():
            logits = module.forward_inference({"obs": torch.as_tensor(obs)})["action_dist_inputs"]
        obs, _, terminated, truncated, _ = envs.step(logits.argmax(-1).numpy())
        lengths += running
        running &= ~(terminated | truncated)
    envs.close()
    return float(lengths.mean())


def solve(iterations: int) -> None:
    """Train each contestant for so many iterations at most."""
    print("\n| | greedy mean length before | after | steps | seconds |\n|---|---:|---:|---:|---:|")
    for name in CONTESTANTS:
        algorithm = config_of(name, fragment=64).build_algo()
        before, begun, best, steps = greedy(algorithm), time.perf_counter(), 0.0, 0
        for iteration in range(1, iterations + 1):
            steps = algorithm.train()["num_env_steps_sampled_lifetime"]
            if iteration % 5 == 0 and (best := greedy(algorithm)) >= 475:
                break
        print(f"| {name} | {before:.1f} | {best:.1f} | {steps:,.0f} | {time.perf_counter() - begun:.0f} |", flush=True)
        algorithm.stop()


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--solve", type=int, nargs="?", const=60, default=0, metavar="ITERATIONS")
    args = parser.parse_args()
    ray.init(address="local", num_cpus=2, object_store_memory=200 * 2**20, include_dashboard=False, logging_level="ERROR")
    try:
        if args.solve:
            solve(args.solve)
        else:
            print_table("sampling, 64 slots, local runner", sampling(args.rounds, args.seconds), 0)
            print_table("PPO as a whole", training(args.rounds, args.iterations), 1)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
