"""Memory-bounded streaming: thousands of episodes pass through, a few at a time are in memory.

Each episode is used and forgotten; statistics, ledger and dataset need the same room after ten and after a million.
"""

import resource

import envfleet as ef
from envfleet.rollout import Collector, DatasetWriter, iter_rollouts


def resident_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


with ef.make("CartPole-v1", num_envs=16, backend="serial") as fleet, DatasetWriter("data") as writer:
    collector = Collector(fleet, random_actions=True, seed=0)
    for number, rollout in enumerate(collector.episodes(2000)):
        writer.add(rollout)
        if number % 500 == 0:
            print(f"episode {number}: at most {resident_mb():.0f} MB so far")
print(collector.stats())
print(f"ledger: {collector.ledger}")
print(collector.verdict())

longest = max(iter_rollouts("data"), key=len)  # reading streams too
print(f"longest: episode {longest.episode}, {len(longest)} steps, seed {longest.seed}")
assert collector.ledger.used == 2000
