"""Act on whichever environments finish first, so that slow ones do not set the pace.

python examples/async_stepping.py
"""

import envfleet as ef
from envfleet.envs.probe import Waiting

TRANSITIONS = 400

with ef.make(lambda: Waiting(step_s=0.001, slow_s=0.05, slow=0.05), num_envs=16, backend="thread") as fleet:
    batch = fleet.reset(seed=0)
    counts = [0] * fleet.num_envs
    while sum(counts) < TRANSITIONS:
        fleet.send([0] * len(batch), batch.slots)
        batch = fleet.recv(at_least=4)  # the stragglers stay out and are received later
        for slot in batch.slots[batch.scored]:
            counts[slot] += 1

print(f"{sum(counts)} transitions; per slot between {min(counts)} and {max(counts)}")
