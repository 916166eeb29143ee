"""What the collector's own timing costs, in processor time, as ratios within one run.

    python bench/rollout_verdict.py [--env CartPole-v1] [--num-envs 64] [--backend serial] [--pairs 400]

One collector makes segments of a few steps with and without timing in turn, in random order; each pair gives one
difference; the median of all and its 95 % interval are printed. Processor time is that of this process. On shm parent and
workers share the stepping out between them as it comes, so there it tells little, and wall time has to do. `--null` shows
what the method finds where there is nothing to find.
"""

import argparse
import random
import statistics
import time

import numpy as np

import envfleet as ef
from envfleet.rollout import Collector


def interval(values):
    """The median's 95 % interval, from the order statistics."""
    ordered, count = sorted(values), len(values)
    low = max(0, int(count / 2 - 0.98 * count**0.5))
    return ordered[low], ordered[count - 1 - low]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--backend", default="serial")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--steps", type=int, default=32, help="steps of every slot in a segment")
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--null", action="store_true", help="no timing in either: what this method shows for nothing")
    args = parser.parse_args()
    workers = {} if args.workers is None else {"num_workers": args.workers}
    costs, walls, base = [], [], []
    with ef.make(args.env, num_envs=args.num_envs, backend=args.backend, **workers) as fleet:
        actions = fleet.action_space.sample()
        collector = Collector(fleet, lambda obs: actions[: len(obs)], seed=0, mode=args.mode)
        collector.segment(4 * args.steps)  # warms up
        chance = random.Random(0)  # a fixed order would fall in step with what comes round by itself
        for _ in range(args.pairs):
            cpu, wall = {}, {}
            for on in (True, False) if chance.random() < 0.5 else (False, True):
                collector._clock.on = on and not args.null
                begin = time.process_time(), time.perf_counter()
                collector.segment(args.steps)
                cpu[on], wall[on] = time.process_time() - begin[0], time.perf_counter() - begin[1]
            costs.append(100 * (cpu[True] / cpu[False] - 1))
            walls.append(100 * (wall[True] / wall[False] - 1))
            base.append(cpu[False] / (args.steps * args.num_envs))
        collector._clock.on = True
        verdict = collector.verdict()
    low, high = interval(costs)
    lowest, highest = interval(walls)
    print(f"{args.env}, {args.num_envs} environments on {args.backend}, mode {args.mode}: ", end="")
    print(f"{1e6 * statistics.median(base):.2f} us of processor time a step without timing")
    print(f"timing costs {statistics.median(costs):+.2f} % processor time (95 %: {low:+.2f} to {high:+.2f}),")
    print(f"             {statistics.median(walls):+.2f} % wall time (95 %: {lowest:+.2f} to {highest:+.2f}), {args.pairs} pairs")
    print(verdict)
    assert np.isfinite(verdict.total_s)


if __name__ == "__main__":
    main()
