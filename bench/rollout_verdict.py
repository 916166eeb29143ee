"""What the collector's own timing costs, and what the collector costs beside a bare fleet, as ratios within one run.

    python bench/rollout_verdict.py [--env CartPole-v1] [--num-envs 64] [--backend serial] [--rounds 7]

Rounds with and without timing alternate; medians are compared.
"""

import argparse
import statistics
import time

import numpy as np

import envfleet as ef
from envfleet.rollout import Collector


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--backend", default="serial")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--steps", type=int, default=300, help="steps of every slot in a round")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    workers = {} if args.workers is None else {"num_workers": args.workers}
    times = {"on": [], "off": [], "bare": []}
    with ef.make(args.env, num_envs=args.num_envs, backend=args.backend, **workers) as fleet:
        actions = fleet.action_space.sample()

        def policy(obs):
            return actions[: len(obs)]

        for _ in range(args.rounds):
            for name in ("on", "off", "bare"):
                if name == "bare":
                    fleet.reset(seed=0)
                else:
                    collector = Collector(fleet, policy, seed=0, timing=name == "on")
                    collector.segment(1)  # resets
                begin = time.perf_counter()
                if name == "bare":
                    for _ in range(args.steps):
                        fleet.step(actions)
                else:
                    collector.segment(args.steps)
                times[name].append(time.perf_counter() - begin)
                if name == "on":
                    verdict = collector.verdict()
    middle = {name: statistics.median(values) for name, values in times.items()}
    rate = {name: args.steps * args.num_envs / value for name, value in middle.items()}
    print(f"{args.env}, {args.num_envs} environments on {args.backend}; steps per second:")
    print(f"bare fleet {rate['bare']:,.0f}   segments {rate['off']:,.0f}   segments with timing {rate['on']:,.0f}")
    print(f"timing costs {100 * (middle['on'] / middle['off'] - 1):+.2f} %")
    print(f"segments cost {100 * (middle['off'] / middle['bare'] - 1):+.2f} % over the bare fleet")
    spread = {name: np.std(values) / np.mean(values) for name, values in times.items()}
    print(f"spread between rounds: {100 * max(spread.values()):.1f} % (a cost below that is not told apart)")
    print(verdict)


if __name__ == "__main__":
    main()
