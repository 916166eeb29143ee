"""Six workers against one: AntDir rollouts with random actions, as ratios within one run.

    python -m bench.meta_workers [--rollouts 12] [--rounds 5]

All ways exist at the same time and take turns, so that a change of the machine's speed concerns all of them. Two processes that step an
environment each and send nothing ("apart") show what the machine's cores give at that moment: no way to collect can be much better.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import envfleet as ef

CONFIG = {
    "env": {"env_type": "meta", "env_name": "AntDir-v0", "max_rollouts_per_task": 2, "num_train_tasks": 50, "num_eval_tasks": 20}
}


def step_apart(pipe: Any) -> None:
    """A process of its own: make as many steps as it is told, until it is told 0."""
    env = ef.make_env("AntDir-v0", 2, seed=os.getpid(), num_train_tasks=50, num_eval_tasks=20)
    env.reset()
    pipe.send(None)
    while count := pipe.recv():
        for _ in range(count):
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        pipe.send(None)
    env.close()


class Apart:
    """Processes that step by themselves; `run` makes so many steps, shared out evenly."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(count)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [context.Process(target=step_apart, args=(theirs,), daemon=True) for _, theirs in pairs]
        for process in self.processes:
            process.start()
        for pipe in self.pipes:
            pipe.recv()

    def run(self, steps: int) -> int:
        """Make the steps; returns how many were made."""
        each = steps // len(self.pipes)
        for pipe in self.pipes:
            pipe.send(each)
        for pipe in self.pipes:
            pipe.recv()
        return each * len(self.pipes)

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes):
            pipe.send(0)
            process.join()


def print_rates(rates: dict[str, list[float]]) -> None:
    """Medians over the rounds; the first round warms up. Ratios are to one of the same kind, with their range."""
    for name, found in rates.items():
        base = "1 apart" if name.endswith("apart") else "1 workers"
        ratios = [rate / one for rate, one in zip(found[1:], rates[base][1:])]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:<12} {statistics.median(found[1:]):>8,.0f} steps/s   {statistics.median(ratios):.2f} {spread} of {base}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    fleets = {count: ef.make_parallel_env("AntDir-v0", 2, count, num_train_tasks=50, num_eval_tasks=20) for count in (1, 2, 6)}
    apart = {count: Apart(count) for count in (1, 2)}
    learner = ef.Learner(CONFIG)

    def collect(parallel_env: Any = None) -> int:
        return learner.collect_rollouts_parallel(args.rollouts, random_actions=True, parallel_env=parallel_env)

    ways: dict[str, Callable[[], int]] = {"sequential": collect}
    ways |= {f"{count} workers": lambda penv=penv: collect(penv) for count, penv in fleets.items()}
    ways |= {f"{count} apart": lambda group=group: group.run(args.rollouts * 400) for count, group in apart.items()}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds + 1):
        for name, way in ways.items():
            began = time.perf_counter()
            steps = way()
            rates[name].append(steps / (time.perf_counter() - began))
    print_rates(rates)
    learner.close()
    for each in (*fleets.values(), *apart.values()):
        each.close()


if __name__ == "__main__":
    main()
