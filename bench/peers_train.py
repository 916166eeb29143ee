"""PPO, with and without memory, against Stable-Baselines3 in one run: steps per second of wall and of CPU time.

    python bench/peers_train.py                 # all rows (some minutes)
    python bench/peers_train.py --steps 8192    # a smoke run

Same environment, environments in this process, same rollout length, epochs, minibatches and width of the networks, one
thread. Learners take turns so that a busy machine slows all of them. The return is that of the training episodes that
ended last; with few steps it only shows that both learn alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from envfleet.envs.novelocity import cartpole_no_velocity
from envfleet.train import PPOConfig, PPOTrainer

STEPS, EPOCHS, MINIBATCHES, LEARNING_RATE, ENTROPY = 128, 4, 4, 2.5e-4, 0.01


class Run(NamedTuple):
    num_steps: int
    wall_s: float
    cpu_s: float
    mean_return: float


def measured(learn: Callable[[], float], num_steps: int) -> Run:
    wall, cpu = time.perf_counter(), time.process_time()
    mean_return = learn()
    return Run(num_steps, time.perf_counter() - wall, time.process_time() - cpu, mean_return)


def ours(env: Any, num_envs: int, num_steps: int, arch: str, rnn: str) -> Run:
    config = PPOConfig(
        preset="none",
        env=env, num_envs=num_envs, total_steps=num_steps, num_steps=STEPS, num_epochs=EPOCHS, backend="serial",
        num_minibatches=MINIBATCHES, learning_rate=LEARNING_RATE, lr_schedule="constant", entropy=ENTROPY,
        arch=arch, rnn=rnn, state_size=64,
    )  # fmt: skip
    with PPOTrainer(config) as trainer:
        return measured(lambda: trainer.train().mean_return, config.num_updates * config.steps_per_update)


def theirs(env: Any, num_envs: int, num_steps: int, recurrent: bool, width: int | None) -> Run:
    import gymnasium as gym
    from stable_baselines3 import PPO
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    build = env if callable(env) else lambda: gym.make(env)
    envs = DummyVecEnv([lambda: Monitor(build())] * num_envs)
    batch = STEPS * num_envs // MINIBATCHES
    options: dict[str, Any] = {
        "n_steps": STEPS, "batch_size": batch, "n_epochs": EPOCHS, "learning_rate": LEARNING_RATE,
        "ent_coef": ENTROPY, "device": "cpu", "seed": 1,
    }  # fmt: skip
    if recurrent:
        from sb3_contrib import RecurrentPPO

        extra = {"policy_kwargs": {"lstm_hidden_size": width}} if width else {}
        model: Any = RecurrentPPO("MlpLstmPolicy", envs, **options, **extra)
    else:
        model = PPO("MlpPolicy", envs, **options)

    def learn() -> float:
        model.learn(num_steps)
        return float(np.mean([info["r"] for info in model.ep_info_buffer]))

    rounds = -(-num_steps // (STEPS * num_envs))
    return measured(learn, rounds * STEPS * num_envs)


def show(title: str, our: Run, their: Run, goal: float | None) -> None:
    def rate(run: Run) -> str:
        wall, cpu = run.num_steps / run.wall_s, run.num_steps / run.cpu_s
        return f"{wall:9,.0f} {cpu:9,.0f} {run.mean_return:7.1f}"

    wall = (our.num_steps / our.wall_s) / (their.num_steps / their.wall_s)
    cpu = (our.num_steps / our.cpu_s) / (their.num_steps / their.cpu_s)
    target = f"   (goal {goal:g}x)" if goal else ""
    print(f"{title:44s} ours {rate(our)}   sb3 {rate(their)}   {wall:5.1f}x wall {cpu:5.1f}x cpu{target}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=65_536, help="steps of the Markov row; the others do fewer")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(f"{'':44s}      {'steps/s':>9s} {'per cpu-s':>9s} {'return':>7s}")
    ours("CartPole-v1", 8, 2048, "markov", "gru")  # first calls build caches that belong to nobody's time
    theirs("CartPole-v1", 8, 2048, False, None)
    show("CartPole-v1, 8 envs, 4x4", ours("CartPole-v1", 8, steps, "markov", "gru"),
         theirs("CartPole-v1", 8, steps, False, None), 2.5)  # fmt: skip
    for num_envs, count, goal in ((8, steps // 4, 4.0), (64, max(steps // 2, 16_384), 10.0)):
        slow = max(count // 2, 128 * num_envs)
        for rnn in ("gru", "lstm"):
            our = ours(cartpole_no_velocity, num_envs, count, "memory", rnn)
            same = theirs(cartpole_no_velocity, num_envs, slow, True, 64)
            show(f"no velocities, {num_envs} envs, {rnn} 64 / lstm 64", our, same, goal)
        default = theirs(cartpole_no_velocity, num_envs, max(slow // 2, 128 * num_envs), True, None)
        our = ours(cartpole_no_velocity, num_envs, count, "memory", "gru")
        show(f"no velocities, {num_envs} envs, each by default", our, default, goal)


if __name__ == "__main__":
    main()
