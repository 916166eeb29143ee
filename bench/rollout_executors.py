"""How near the executors come to the ideal rate over clients that wait, as ratios within one run.

    python bench/rollout_executors.py [--clients 64] [--steps 20] [--step-ms 50]

The ideal: all clients wait at the same time, so a collection takes steps x step time.
"""

import argparse
import asyncio
import time

import numpy as np

from envfleet.rollout import AsyncParallelExecutor, BatchedPolicy, ParallelEnvironmentExecutor


class Waiting:
    def __init__(self, steps, step_s):
        self.steps, self.step_s, self.t = steps, step_s, 0

    def reset(self):
        self.t = 0
        return np.zeros(4)

    def step(self, action):
        time.sleep(self.step_s)
        return self._result()

    def _result(self):
        self.t += 1
        return np.full(4, self.t), 1.0, self.t >= self.steps, False, {}


class AsyncWaiting(Waiting):
    async def step(self, action):
        await asyncio.sleep(self.step_s)
        return self._result()


def stay(obs, done):
    return 0


def seconds(run):
    begin = time.perf_counter()
    rollouts = run()
    took = time.perf_counter() - begin
    return took, rollouts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--step-ms", type=float, default=50.0)
    args = parser.parse_args()
    step_s = args.step_ms / 1e3
    ideal = args.steps * step_s

    def clients(kind, count=args.clients):
        return [kind(args.steps, step_s) for _ in range(count)]

    print(f"{args.clients} clients, {args.steps} steps of {args.step_ms:g} ms: ideal {ideal:.3f} s")
    with ParallelEnvironmentExecutor(max_workers=args.clients) as executor:
        took, rollouts = seconds(lambda: executor.collect_rollouts(clients(Waiting), stay))
        assert rollouts.total_steps == args.clients * args.steps
        print(f"thread, {args.clients} workers       {took:.3f} s  {100 * ideal / took:.1f} % of ideal")
        policy = BatchedPolicy(lambda obs: np.zeros(len(obs), np.int64), max_batch=args.clients, max_wait_s=step_s)
        took, rollouts = seconds(lambda: executor.collect_rollouts(clients(Waiting), policy))
        share = rollouts.total_steps / policy.num_calls
        print(f"thread, batched policy   {took:.3f} s  {100 * ideal / took:.1f} % of ideal, {share:.1f} steps a policy call")
    with AsyncParallelExecutor(max_concurrency=args.clients) as executor:
        for name, kind in (("async clients", AsyncWaiting), ("sync clients", Waiting)):
            took, rollouts = seconds(lambda kind=kind: executor.run(clients(kind), stay))
            assert rollouts.total_steps == args.clients * args.steps
            print(f"async, {name:<13}     {took:.3f} s  {100 * ideal / took:.1f} % of ideal")
    times = {}
    for workers in (1, 8):
        with ParallelEnvironmentExecutor(max_workers=workers) as executor:
            times[workers], _ = seconds(lambda executor=executor: executor.collect_rollouts(clients(Waiting, 8), stay))
    print(f"8 clients: 8 workers {times[1] / times[8]:.2f}x as fast as 1 worker (ideal 8)")


if __name__ == "__main__":
    main()
