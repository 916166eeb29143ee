"""What more environments bring to training, split into batching (one process) and workers.

    python bench/bench_train.py

A fixed batch of 1,024 steps per update, so that learning costs the same everywhere and only collecting changes.
"""

from __future__ import annotations

import argparse
import time

from envfleet.train import PPOConfig, PPOTrainer

GOALS = {4: 2.2, 8: 4.5, 16: 6.0}


def rate(num_envs: int, num_steps: int, backend: str) -> tuple[float, float]:
    """Steps per second of wall, and per second of this process's CPU time."""
    config = PPOConfig(num_envs=num_envs, num_steps=1024 // num_envs, total_steps=num_steps, backend=backend)
    with PPOTrainer(config) as trainer:
        trainer.train_episode_vectorized()
        wall, cpu, before = time.perf_counter(), time.process_time(), trainer.counters.num_steps
        trainer.train()
        done = trainer.counters.num_steps - before
        return done / (time.perf_counter() - wall), done / (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32_768)
    steps = parser.parse_args().steps
    base = rate(1, steps, "serial")
    print(f"{'envs':>5s} {'backend':>8s} {'steps/s':>9s} {'per cpu-s':>10s} {'wall':>7s} {'cpu':>7s}")
    print(f"{1:5d} {'serial':>8s} {base[0]:9,.0f} {base[1]:10,.0f}")
    for num_envs in (4, 8, 16, 64):
        for backend in ("serial", "shm"):
            wall, cpu = rate(num_envs, steps, backend)
            goal = f"  (goal {GOALS[num_envs]}x)" if num_envs in GOALS and backend == "serial" else ""
            ratio = (
                f"{wall / base[0]:6.1f}x {cpu / base[1]:6.1f}x" if backend == "serial" else f"{wall / base[0]:6.1f}x"
            )
            print(f"{num_envs:5d} {backend:>8s} {wall:9,.0f} {cpu:10,.0f} {ratio}{goal}", flush=True)


if __name__ == "__main__":
    main()
