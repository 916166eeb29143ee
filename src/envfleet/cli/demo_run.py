"""The demonstration: CartPole solved with eight environments, and where the speed-up comes from."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from envfleet.train.config import PPOConfig
from envfleet.train.terminal import choose_view
from envfleet.train.trainer import PPOTrainer

SOLVED = 475.0


def steps_per_second(num_envs: int, backend: str, num_steps: int = 6_144) -> float:
    """Training speed with the same flags but for the number of environments (128 steps of each per update)."""
    total = max(num_steps, 3 * 128 * num_envs)
    config = PPOConfig(env="CartPole-v1", preset="none", num_envs=num_envs, total_steps=total, backend=backend)
    with PPOTrainer(config) as trainer:
        trainer.train_episode_vectorized()
        begin, before = time.perf_counter(), trainer.counters.num_steps
        trainer.train()
        return (trainer.counters.num_steps - before) / (time.perf_counter() - begin)


def run_demo(out: str | None = None, quiet: bool = False, total_steps: int = 100_000) -> dict[str, Any]:
    """Train, evaluate, measure and write the report; returns what was found (and prints it, unless `quiet`)."""
    folder = Path(out) if out else Path(tempfile.mkdtemp(prefix="envfleet-demo-"))
    config = PPOConfig(
        env="CartPole-v1",
        num_envs=8,
        total_steps=total_steps,
        seed=1,
        backend="serial",
        out=str(folder / "run"),
        tensorboard=False,
    )
    with PPOTrainer(config, view=choose_view(quiet)) as trainer:
        result = trainer.train()
        evaluation = trainer.evaluate(100)
    one, batched, workers = steps_per_second(1, "serial"), steps_per_second(8, "serial"), steps_per_second(8, "shm")
    found = {
        "mean_return": evaluation.mean_return,
        "solved": evaluation.mean_return >= SOLVED,
        "wall_s": result.wall_s,
        "sps": result.sps,
        "speedup_batching": batched / one,
        "speedup_workers": workers / batched,
        "report": str(result.report),
    }
    if not quiet:
        verdict = "solved" if found["solved"] else "not solved"
        print(
            f"CartPole-v1 after {result.num_steps:,} steps in {result.wall_s:.0f} s: {evaluation.mean_return:.1f} ({verdict})"
        )
        print(
            f"one environment {one:,.0f} steps/s; eight in one process {batched:,.0f}: batching gives {batched / one:.1f}x"
        )
        print(
            f"eight over worker processes {workers:,.0f}: workers give {workers / batched:.2f}x on top (CartPole's step is too cheap to share out)"
        )
        print(f"report: {result.report}")
    return found
