"""The learning runs that take too long for a test: LunarLander-v3 and HalfCheetah-v5, a million steps each, reported.

python bench/long_learning.py lunarlander halfcheetah --seeds 1
"""

from __future__ import annotations

import argparse
import time

from envfleet.train import PPOConfig, PPOTrainer

RUNS = {
    "lunarlander": ({"env": "LunarLander-v3", "num_envs": 16}, 200.0),
    "halfcheetah": ({"env": "HalfCheetah-v5", "num_envs": 8}, 1400.0),
    "acrobot": ({"env": "Acrobot-v1", "num_envs": 16, "total_steps": 500_000}, -90.0),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    for name in args.names or list(RUNS):
        settings, goal = RUNS[name]
        for seed in args.seeds:
            chosen = {"total_steps": 1_000_000, "backend": "serial", **settings, "seed": seed}
            if args.steps:
                chosen["total_steps"] = args.steps
            begin = time.perf_counter()
            with PPOTrainer(PPOConfig(**chosen)) as trainer:
                result = trainer.train()
                found = trainer.evaluate(100)
            told = f"{found.mean_return:9.1f} ± {found.std_return:.1f} (goal {goal:g})"
            print(
                f"{name:12s} seed {seed}  {told}  {result.steps_per_s:,.0f} steps/s, {time.perf_counter() - begin:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
