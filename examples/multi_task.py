"""Multi-task collection: Echo and Connect4 side by side, one breakdown.

Clients with different observations and actions run in one call; each has its own agent.
"""

import random

from envfleet.envs.connect4 import Connect4Action
from envfleet.envs.echo import EchoAction
from envfleet.remote import Connect4Client, EchoClient
from envfleet.rollout import ParallelRolloutCollector


def talk(obs, done):
    return EchoAction("hello")


def play(obs, done):
    return Connect4Action(random.choice(obs.legal_actions))


clients = [EchoClient(horizon=5) for _ in range(4)] + [Connect4Client(opponent="random") for _ in range(4)]
names = ["Echo"] * 4 + ["Connect4"] * 4
agents = [talk] * 4 + [play] * 4
with ParallelRolloutCollector("thread", num_workers=8) as collector:
    rollouts, stats = collector.collect_with_stats(clients, agents, max_steps=100, env_names=names, seeds=range(8))
print(stats)
for name, mean_return in stats.env_breakdown.items():
    print(f"{name}: mean return {mean_return:.2f} over {stats.per_env[name].count} episodes")
assert stats.env_breakdown["Echo"] == 2.5 and stats.per_env["Connect4"].count == 4
