"""PPO on CAGE 2 with its preset: 30, 50 and 100 steps against B_line and Meander. Writes docs/images/cage2-learning.png.

python -m bench.cage2_learning [--steps 3000000] [--seeds 1]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from envfleet.train import PPOConfig, PPOTrainer

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "cage2-learning.png"
GOAL = -60
Curve = tuple[list[float], list[float]]  # CPU seconds, mean return of the episodes of an update


def learn(red: str, length: int, seed: int, steps: int | None) -> tuple[Curve, str]:
    """One training run, and a row of the table."""
    settings = {"total_steps": steps} if steps else {}
    config = PPOConfig(env="cage2", env_kwargs={"red_agent": red, "max_steps": length}, num_workers=1, seed=seed, **settings)
    seconds: list[float] = []
    returns: list[float] = []
    with PPOTrainer(config) as trainer:
        begin = time.process_time()
        while not trainer.finished:
            result = trainer.train_episode_vectorized()
            if result.returns:
                seconds.append(time.process_time() - begin)
                returns.append(float(np.mean(result.returns)))
        cpu_s = time.process_time() - begin
        found = trainer.evaluate(1000)
    error = found.std_return / found.num_episodes**0.5
    passed = next((f"{at:.1f}" for at, value in zip(seconds, returns) if value > GOAL), "-")
    row = f"| {red} | {length} | {seed} | {found.mean_return:.2f} ± {error:.2f} | {cpu_s:.0f} | {passed} |"
    return (seconds, returns), row


def draw(curves: dict[str, Curve]) -> None:
    """The curves as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=110)
    for name, (seconds, returns) in curves.items():
        axes.plot(seconds, [-value for value in returns], label=name, linewidth=1.3)
    axes.axhline(-GOAL, color="0.5", linestyle="--", linewidth=1, label=f"gate: {GOAL}")
    axes.axhline(744.9, color="0.7", linestyle=":", linewidth=1, label="random blue against B_line: -745")
    axes.set(yscale="log", xlabel="CPU seconds, one thread", ylabel="minus the mean return of an episode")
    axes.set_title("PPO on CAGE 2, episodes of 100 steps, 64 native slots")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(PICTURE)


def main() -> None:
    """Train, print a table, draw the runs of 100 steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 50, 30])
    args = parser.parse_args()
    curves: dict[str, Curve] = {}
    print("| red | steps | seed | mean return of 1,000 episodes | CPU seconds | CPU seconds to -60 |\n|---|---|---|---|---|---|")
    for length in args.lengths:
        for red in ("B_lineAgent", "RedMeanderAgent"):
            for seed in args.seeds:
                curve, row = learn(red, length, seed, args.steps)
                print(row, flush=True)
                if length == 100:
                    curves[f"{red}, seed {seed}"] = curve
    if curves:
        draw(curves)


if __name__ == "__main__":
    main()
