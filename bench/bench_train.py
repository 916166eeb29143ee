"""What more environments bring to training, split into batching (one process) and workers.

    python bench/bench_train.py

Two ways to count. "same flags": only --n-envs changes, every environment makes 128 steps per update, so that minibatches grow
with the number of environments: what a user sees. "fixed batch": 1,024 steps per update whatever the number of
environments, so that learning costs the same everywhere and only collecting changes: what batched stepping alone brings.
"""

from __future__ import annotations

import argparse
import time

from envfleet.train import PPOConfig, PPOTrainer

GOALS = {4: 2.2, 8: 4.5, 16: 6.0}


def rate(num_envs: int, num_steps: int, total_steps: int, backend: str) -> tuple[float, float]:
    """Steps per second of wall, and per second of this process's CPU time."""
    total = max(total_steps, 3 * num_envs * num_steps)
    config = PPOConfig(preset="none", num_envs=num_envs, num_steps=num_steps, total_steps=total, backend=backend)
    with PPOTrainer(config) as trainer:
        trainer.train_episode_vectorized()
        wall, cpu, before = time.perf_counter(), time.process_time(), trainer.counters.num_steps
        trainer.train()
        done = trainer.counters.num_steps - before
        return done / (time.perf_counter() - wall), done / (time.process_time() - cpu)


def show(title: str, steps_of: dict[int, int], total: int, goals: dict[int, float]) -> None:
    base = rate(1, steps_of[1], total, "serial")
    print(f"{title}\n{'envs':>5s} {'backend':>8s} {'steps/s':>9s} {'per cpu-s':>10s} {'wall':>7s} {'cpu':>7s}")
    print(f"{1:5d} {'serial':>8s} {base[0]:9,.0f} {base[1]:10,.0f}")
    for num_envs in (4, 8, 16, 64):
        for backend in ("serial", "shm"):
            wall, cpu = rate(num_envs, steps_of[num_envs], total, backend)
            # The workers' CPU time is not this process's, so a ratio of CPU times would flatter them.
            own = f"{cpu / base[1]:6.1f}x" if backend == "serial" else ""
            goal = f"  (goal {goals[num_envs]}x)" if num_envs in goals and backend == "serial" else ""
            print(f"{num_envs:5d} {backend:>8s} {wall:9,.0f} {cpu:10,.0f} {wall / base[0]:6.1f}x {own}{goal}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32_768)
    total = parser.parse_args().steps
    counts = (1, 4, 8, 16, 64)
    show("same flags: 128 steps of each environment per update", dict.fromkeys(counts, 128), total, GOALS)
    show("fixed batch: 1,024 steps per update", {count: 1024 // count for count in counts}, total, {})


if __name__ == "__main__":
    main()
