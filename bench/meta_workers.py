"""Six workers against one: AntDir rollouts with random actions, as ratios within one run.

    python -m bench.meta_workers [--rollouts 12] [--rounds 5]

All ways exist at the same time and take turns, so that a change of the machine's speed concerns all of them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import envfleet as ef

CONFIG = {
    "env": {"env_type": "meta", "env_name": "AntDir-v0", "max_rollouts_per_task": 2, "num_train_tasks": 50, "num_eval_tasks": 20}
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    ways = {
        f"{count} workers": ef.make_parallel_env("AntDir-v0", 2, count, num_train_tasks=50, num_eval_tasks=20)
        for count in (1, 2, 6)
    }
    learner = ef.Learner(CONFIG)
    rates: dict[str, list[float]] = {name: [] for name in ("sequential", *ways)}
    for _ in range(args.rounds + 1):
        for name in rates:
            began = time.perf_counter()
            steps = learner.collect_rollouts_parallel(args.rollouts, random_actions=True, parallel_env=ways.get(name))
            rates[name].append(steps / (time.perf_counter() - began))
    for name, found in rates.items():
        ratios = [rate / base for rate, base in zip(found[1:], rates["1 workers"][1:])]  # the first round warms up
        print(f"{name:<12} {statistics.median(found[1:]):>8,.0f} steps/s   {statistics.median(ratios):.2f} of one worker")
    learner.close()
    for penv in ways.values():
        penv.close()


if __name__ == "__main__":
    main()
