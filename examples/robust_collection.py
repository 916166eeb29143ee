"""Robust collection: environments that fail now and then, a server that must not be flooded.

One request in fifty fails. Failed rollouts are begun again after a pause that doubles and is spread at random;
requests are limited per server. What still fails is returned with its error and its partial data.
"""

import random

from envfleet.remote import EchoClient
from envfleet.rollout import ParallelEnvironmentExecutor


class Unreliable(EchoClient):
    base_url = "http://one-server:8000"  # clients with one address share its limits

    def step(self, action):
        if random.random() < 0.02:
            raise ConnectionError("connection reset by peer")
        return super().step(action)


random.seed(0)
executor = ParallelEnvironmentExecutor(
    num_workers=8, on_error="retry", max_retries=10, backoff_s=0.005, jitter=0.5, max_rate=5000.0, max_in_flight=4
)
with executor:
    rollouts = executor.collect_rollouts([Unreliable(horizon=20) for _ in range(40)], lambda obs, done: "hello")
attempts = sum(rollout.attempts for rollout in rollouts)
print(rollouts.stats())
print(f"{len(rollouts.successes)} of 40 complete after {attempts} attempts; {len(rollouts.failures)} failed for good")
assert len(rollouts.successes) == 40 and attempts > 40

careful = ParallelEnvironmentExecutor(num_workers=8, on_error="skip")
with careful:
    rollouts = careful.collect_rollouts([Unreliable(horizon=20) for _ in range(40)], lambda obs, done: "hello")
for rollout in rollouts.failures[:3]:
    print(f"kept {len(rollout)} steps of {rollout.env_name}: {rollout.error}")
