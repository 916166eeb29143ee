"""Two halves of a fleet: while one is being stepped, the policy thinks about the other.

python examples/double_buffering.py
"""

import numpy as np

import envfleet as ef


def policy(obs: np.ndarray) -> np.ndarray:
    return (obs[:, 2] > 0).astype(np.int64)  # push towards where the pole leans


with ef.make("CartPole-v1", num_envs=16, backend="shm", num_workers=2) as fleet:
    halves = [np.arange(0, 8), np.arange(8, 16)]
    first = fleet.reset(seed=0)
    for half in halves:
        fleet.send(policy(first.obs[half]), half)
    returns = []
    for _ in range(200):
        for half in halves:
            batch = fleet.recv(half)  # by name: the other half is still being stepped
            returns += batch.ep_return[batch.ended].tolist()
            fleet.send(policy(batch.obs), half)
    fleet.recv()

print(f"{len(returns)} episodes, mean return {np.mean(returns):.1f}")
