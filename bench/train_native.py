"""PPO on CartPole from end to end: ours on native environments, Stable-Baselines3 at its best widths, and a jitted JAX loop.

    python -m bench.train_native                  # under 3 minutes
    python -m bench.train_native --rounds 1 --seconds 0.3     # a smoke run

Everywhere two networks of 64 x 64 tanh units and 4 epochs of 4 minibatches. A contestant is a process of its own, all are alive at once
and take turns: a slice is as many whole updates as fit into its seconds. The first update of each (compilation, caches) is not counted.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.stats import Estimate, Run, Slice, estimate, ratio, short, take_turns

EPOCHS = MINIBATCHES = 4
#: name -> (who, environments, steps per update, threads)
CONTESTANTS: dict[str, tuple[str, int, int, int]] = {
    "SB3, 64 envs x 128, 1 thread": ("sb3", 64, 128, 1),
    "SB3, 256 envs x 128, 1 thread": ("sb3", 256, 128, 1),
    "SB3, 256 envs x 128, 2 threads": ("sb3", 256, 128, 2),
    "JAX, 64 envs x 128, 1 core": ("jax", 64, 128, 1),
    "JAX, 64 envs x 128, 2 cores": ("jax", 64, 128, 2),
    "JAX, 1,024 envs x 32, 2 cores": ("jax", 1024, 32, 2),
    "ours, 256 slots x 32, 1 thread": ("ours", 256, 32, 1),
    "ours, 1,024 slots x 32, 1 thread": ("ours", 1024, 32, 1),
    "ours, 256 slots x 32, 2 threads": ("ours", 256, 32, 2),
    "ours, 1,024 slots x 32, 2 threads": ("ours", 1024, 32, 2),
}


def ours(num_envs: int, num_steps: int, threads: int) -> Callable[[], Any]:
    from envfleet.train import PPOConfig, PPOTrainer

    config = PPOConfig(
        preset="none", env="CartPole-v1", backend="native", num_envs=num_envs, num_steps=num_steps, num_workers=threads,
        num_threads=threads, num_epochs=EPOCHS, num_minibatches=MINIBATCHES, learning_rate=1e-3, lr_schedule="constant",
        entropy=0.01, total_steps=10**12,
    )  # fmt: skip
    return PPOTrainer(config).train_episode_vectorized


def sb3(num_envs: int, num_steps: int, threads: int) -> Callable[[], Any]:
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    torch.set_num_threads(threads)
    envs = DummyVecEnv([lambda: gym.make("CartPole-v1")] * num_envs)  # without Monitor, in its favour
    size = num_envs * num_steps
    options: dict[str, Any] = {"n_epochs": EPOCHS, "learning_rate": 1e-3, "ent_coef": 0.01, "device": "cpu"}
    model = PPO("MlpPolicy", envs, n_steps=num_steps, batch_size=size // MINIBATCHES, **options)
    return lambda: model.learn(size, reset_num_timesteps=False)


def jax_loop(num_envs: int, num_steps: int, threads: int) -> Callable[[], Any]:
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:threads])  # before JAX starts its threads
    from bench.jax_ppo import make_update

    update, state = make_update(num_envs, num_steps)

    def go() -> None:
        nonlocal state
        state, ended = update(state)
        ended.block_until_ready()

    return go


def serve(link: Connection, who: str, num_envs: int, num_steps: int, threads: int) -> None:
    """A contestant's process: whole updates for about as many seconds as it is told, until it is told None."""
    update = {"ours": ours, "sb3": sb3, "jax": jax_loop}[who](num_envs, num_steps, threads)
    update()
    link.send(None)
    while (seconds := link.recv()) is not None:
        updates, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds or not updates:
            update()
            updates += 1
        link.send((updates * num_envs * num_steps, took))


def start(who: str, num_envs: int, num_steps: int, threads: int) -> tuple[Any, Connection]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, who, num_envs, num_steps, threads), daemon=True)
    process.start()
    theirs.close()
    return process, mine


def asking(link: Connection) -> Run:
    def run(seconds: float) -> tuple[int, float]:
        link.send(seconds)
        steps, took = link.recv()
        return steps, took

    return run


def show(slices: dict[str, dict[int, Slice]]) -> None:
    """A row per contestant: rates, and the ratio to the fastest SB3 of the same round."""
    best = max((name for name in slices if name.startswith("SB3")), key=lambda name: median_rate(slices[name]))
    thrifty = min((name for name in slices if name.startswith("SB3")), key=lambda name: cpu_us(slices[name]).median)
    print(f"\n{'':<34} {'samples/s':>9} {'us/sample':>9} {'CPU us':>7}   wall x ({best})   CPU x ({thrifty})")
    for name, found in slices.items():
        rate = median_rate(found)
        per_cpu = estimate([slices[thrifty][i].ns_per_step / found[i].ns_per_step for i in found if i in slices[thrifty]])
        row = f"{name:<34} {short(rate):>9} {1e6 / rate:9.2f} {cpu_us(found).median:7.2f}"
        print(f"{row}   {ratio(found, slices[best])!s:<20} {per_cpu}")


def median_rate(found: dict[int, Slice]) -> float:
    return float(np.median([one.rate for one in found.values()]))


def cpu_us(found: dict[int, Slice]) -> Estimate:
    return estimate([one.ns_per_step / 1e3 for one in found.values()])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--only", default="", help="contestants whose name begins with one of these, separated by ;")
    args = parser.parse_args()
    chosen = {name: what for name, what in CONTESTANTS.items() if name.startswith(tuple(args.only.split(";")))}
    started = {name: start(*what) for name, what in chosen.items()}
    for _, link in started.values():
        link.recv()  # the first update is made
    try:
        slices, thrown = take_turns(
            {name: asking(link) for name, (_, link) in started.items()}, args.rounds, args.seconds, max_repeats=len(chosen)
        )
    finally:
        for process, link in started.values():
            link.send(None)
            process.join(10)
    print(f"{args.rounds} rounds, {thrown} slices measured again because strangers used the machine")
    foreign = max(one.foreign for found in slices.values() for one in found.values())
    print(f"largest share of strangers in a slice: {foreign:.0%}")
    show(slices)


if __name__ == "__main__":
    main()
