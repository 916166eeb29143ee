"""Resident memory while episodes stream through a collector: start, course and end.

python bench/rollout_memory.py [--episodes 100000] [--backend serial] [--mode sync]
"""

import argparse
import gc

import psutil

import envfleet as ef
from envfleet.envs.probe import Counting
from envfleet.rollout import Collector


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--backend", default="serial")
    parser.add_argument("--mode", default="sync")
    args = parser.parse_args()
    process = psutil.Process()

    def resident():
        gc.collect()
        return process.memory_info().rss / 2**20

    warm = max(1, args.episodes // 20)
    with ef.make(lambda: Counting(limit=10), num_envs=args.num_envs, backend=args.backend) as fleet:
        collector = Collector(fleet, random_actions=True, seed=0, mode=args.mode)
        start = None
        for number, _ in enumerate(collector.episodes(args.episodes), 1):
            if number % warm == 0:
                now = resident()
                start = now if start is None else start
                print(f"{number:>9} episodes  {now:8.1f} MB", flush=True)
        end = resident()
    print(f"start {start:.1f} MB, end {end:.1f} MB: {end - start:+.1f} MB over {args.episodes - warm} episodes")
    kept = 16 * (args.episodes - warm) / 2**20
    print(f"(of which {kept:.1f} MB are the return and length of each episode, for quantiles)")
    print(f"ledger: {collector.ledger}")


if __name__ == "__main__":
    main()
