"""PPO, with and without memory, against Stable-Baselines3 in one run: steps per second of wall and of CPU time.

    python bench/peers_train.py                        # all rows (some minutes)
    python bench/peers_train.py --rows markov,64 --share 0.25    # some of them, with a quarter of the steps
    python bench/peers_train.py --share 0.02           # a smoke run

Same environment, environments in this process, same rollout length and epochs, one thread. The two learners take turns, a few
updates each, so that a busy machine slows both. Rows "equal": same learning rate, number of steps per minibatch and width
of the recurrent layer (theirs has one dense layer more behind it). Rows "by default": the minibatch and width
that sb3-contrib takes if nothing is said (128 steps, 256 units). The return is that of the last 100 training episodes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from envfleet.envs.hidden_velocity import cartpole_no_velocity
from envfleet.train import PPOConfig, PPOTrainer

STEPS, EPOCHS, ENTROPY = 128, 4, 0.01


@dataclass
class Learner:
    """Something that makes a number of updates when called, and how long that has taken so far."""

    learn: Callable[[int], None]
    mean_return: Callable[[], float]
    num_steps: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def go(self, updates: int, steps: int) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.learn(updates)
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu
        self.num_steps += steps


def ours(env: Any, num_envs: int, arch: str, rnn: str, minibatches: int, learning_rate: float) -> Learner:
    config = PPOConfig(
        preset="none",
        env=env, num_envs=num_envs, total_steps=10**9, num_steps=STEPS, num_epochs=EPOCHS, backend="serial", seed=1,
        num_minibatches=minibatches, learning_rate=learning_rate, lr_schedule="constant", entropy=ENTROPY,
        arch=arch, rnn=rnn, state_size=64,
    )  # fmt: skip
    trainer = PPOTrainer(config)

    def learn(updates: int) -> None:
        for _ in range(updates):
            trainer.train_episode_vectorized()

    return Learner(learn, lambda: float(np.mean(trainer.counters.returns)) if trainer.counters.returns else float("nan"))


def theirs(env: Any, num_envs: int, recurrent: bool, batch: int, width: int | None, learning_rate: float) -> Learner:
    import gymnasium as gym
    from stable_baselines3 import PPO
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    build = env if callable(env) else lambda: gym.make(env)
    envs = DummyVecEnv([lambda: Monitor(build())] * num_envs)
    options: dict[str, Any] = {
        "n_steps": STEPS, "batch_size": batch, "n_epochs": EPOCHS, "learning_rate": learning_rate,
        "ent_coef": ENTROPY, "device": "cpu", "seed": 1,
    }  # fmt: skip
    if recurrent:
        from sb3_contrib import RecurrentPPO

        extra = {"policy_kwargs": {"lstm_hidden_size": width}} if width else {}
        model: Any = RecurrentPPO("MlpLstmPolicy", envs, **options, **extra)
    else:
        model = PPO("MlpPolicy", envs, **options)

    def learn(updates: int) -> None:
        model.learn(updates * STEPS * num_envs, reset_num_timesteps=False)

    return Learner(learn, lambda: float(np.mean([info["r"] for info in model.ep_info_buffer or [{"r": np.nan}]])))


def compare(title: str, num_envs: int, steps: int, our: Learner, their: Learner, goal: float | None) -> None:
    """Both make `steps` steps, in ten turns."""
    per_update = STEPS * num_envs
    updates = max(steps // per_update, 2)
    for learner in (our, their):
        learner.learn(1)  # first calls build caches that belong to nobody's time
    done = 0
    while done < updates:
        now = min(max(updates // 10, 1), updates - done)
        our.go(now, now * per_update)
        their.go(now, now * per_update)
        done += now

    def rate(run: Learner) -> str:
        wall, cpu = run.num_steps / run.wall_s, run.num_steps / run.cpu_s
        return f"{wall:8,.0f} {cpu:9,.0f} {run.mean_return():7.1f}"

    wall, cpu = their.wall_s / our.wall_s, their.cpu_s / our.cpu_s
    target = f"  (goal {goal:g}x)" if goal else ""
    print(f"{title:66s} ours {rate(our)}   sb3 {rate(their)}   {wall:5.1f}x wall {cpu:5.1f}x cpu{target}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="markov,8,64,default", help="which of markov, 8, 64, default")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps that a whole run makes")
    asked = parser.parse_args()
    rows = asked.rows.split(",")
    torch.set_num_threads(1)
    print(f"{'':66s}      {'steps/s':>8s} {'per cpu-s':>9s} {'return':>7s}")
    if "markov" in rows:
        our, their = (ours("CartPole-v1", 8, "markov", "gru", 4, 2.5e-4), theirs("CartPole-v1", 8, False, 256, None, 2.5e-4))
        compare("CartPole-v1, 8 envs, minibatches 256", 8, int(98_304 * asked.share), our, their, 2.5)
    # (row, envs, steps per minibatch, steps in all, goal): rl-zoo's minibatches of 256 steps, and four per epoch.
    for row, num_envs, batch, steps, goal in (
        ("8", 8, 256, 49_152, 4.0),
        ("64", 64, 256, 65_536, 10.0),
        ("64", 64, 2048, 131_072, 10.0),
    ):
        if row in rows:
            for rnn in ("gru", "lstm"):
                recurrent(f"equal, {rnn} 64 / lstm 64", num_envs, batch, batch, rnn, 64, int(steps * asked.share), goal)
    for num_envs, steps in ((8, 8192), (64, 16_384)):
        if "default" in rows:
            recurrent("theirs by default", num_envs, 256, 128, "gru", None, int(steps * asked.share), None)


def recurrent(
    title: str, num_envs: int, our_batch: int, their_batch: int, rnn: str, width: int | None, steps: int, goal: float | None
) -> None:
    env = cartpole_no_velocity
    our = ours(env, num_envs, "memory", rnn, STEPS * num_envs // our_batch, 1e-3)
    their = theirs(env, num_envs, True, their_batch, width, 1e-3)
    batches = f"{our_batch}" if our_batch == their_batch else f"{our_batch}/{their_batch}"
    compare(f"no velocities, {num_envs} envs, minibatches {batches}, {title}", num_envs, steps, our, their, goal)


if __name__ == "__main__":
    main()
