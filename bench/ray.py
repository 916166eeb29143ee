"""Backend `ray` against Ray's own way to call actors and against `pipe`, as ratios within one run.

    python -m bench.ray [--rounds 5] [--seconds 0.6]

Two workers with 64 slots each, a null environment and CartPole. "actor calls" are plain actors that step their environments in a
loop and return seven arrays; "plain fragments" are actors that step 64 times for one call, with a small torch policy in them that keeps the pole up, and "our
fragments" a `FragmentCollector` with the same policy. All exist at once and
take turns. A cluster of this machine is started for the run and ended after it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from typing import Any

import numpy as np

import envfleet as ef
from bench.envs import Null
from bench.stats import Run, ratio, short, take_turns
from envfleet.rollout import FragmentCollector

os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0")  # the first binds Ray to loopback
WORKERS, EACH, FRAGMENT = 2, 64, 64
ENVS: dict[str, Any] = {"null": Null, "CartPole": "CartPole-v1"}


def timed(step: Any, per_call: int) -> Run:
    """A contestant from a function that makes one batch step."""

    def run(seconds: float) -> tuple[int, float]:
        calls, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds:
            step()
            calls += 1
        return calls * per_call, took

    return run


def network() -> Any:
    """Two layers of 64, with weights that keep the pole up: episodes are as long as those of a trained agent."""
    import torch

    nn = torch.nn
    net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        net[0].weight[0] = torch.tensor([0.0, 0.0, 1.0, 1.0])  # push to the side to which it falls
        net[2].weight[0, 0] = net[4].weight[1, 0] = 1.0
    return net


class Stepper:
    """An actor as one writes it without us."""

    def __init__(self, env: Any) -> None:
        import gymnasium as gym
        import torch

        torch.set_num_threads(1)
        self.policy = network()
        self.envs = [gym.make(env) if isinstance(env, str) else env() for _ in range(EACH)]
        self.obs = np.stack([one.reset(seed=i)[0] for i, one in enumerate(self.envs)])

    def step(self, actions: Any) -> tuple[Any, ...]:
        reward, terminated, truncated = np.zeros(EACH), np.zeros(EACH, bool), np.zeros(EACH, bool)
        final = self.obs.copy()
        for i, env in enumerate(self.envs):
            self.obs[i], reward[i], terminated[i], truncated[i], _ = env.step(actions[i])
            if terminated[i] or truncated[i]:
                final[i] = self.obs[i]
                self.obs[i] = env.reset()[0]
        return self.obs.copy(), reward, terminated, truncated, final, np.arange(EACH), np.zeros(EACH, np.int64)

    def fragment(self, steps: int) -> list[Any]:
        import torch

        rows = []
        with torch.inference_mode():
            for _ in range(steps):
                rows.append(self.step(self.policy(torch.from_numpy(self.obs).float()).argmax(-1).numpy()))
        return [np.stack(parts) for parts in zip(*rows)]


class Small:
    """The policy of `Stepper`, for a collector."""

    def __init__(self) -> None:
        self.net = network()

    def __call__(self, obs: Any) -> Any:
        import torch

        with torch.inference_mode():
            return self.net(torch.from_numpy(obs)).argmax(-1).numpy()


def contestants(env: Any, ray: Any) -> dict[str, Run]:
    """Everything that takes turns, built and warm."""
    # Left and right in turn, so that episodes of CartPole are not over at once.
    turns = itertools.cycle([np.zeros(WORKERS * EACH, np.int64), np.ones(WORKERS * EACH, np.int64)])
    runs: dict[str, Run] = {}
    for name, options in {
        "ours, stream": {"backend": "ray", "resources": {"num_cpus": 0.1}},
        "ours, call": {"backend": "ray", "resources": {"num_cpus": 0.1}, "transport": "call"},
        "pipe": {"backend": "pipe"},
    }.items():
        fleet = ef.make(env, WORKERS * EACH, num_workers=WORKERS, **options)
        fleet.reset(seed=0)
        runs[name] = timed(lambda fleet=fleet: fleet.step(next(turns)), WORKERS * EACH)
    actors = [ray.remote(num_cpus=0.1)(Stepper).remote(env) for _ in range(WORKERS)]

    def call_actors() -> None:
        actions = next(turns)[:EACH]
        ray.get([actor.step.remote(actions) for actor in actors])

    call_actors()
    runs["actor calls"] = timed(call_actors, WORKERS * EACH)
    if isinstance(env, str):
        runs["plain fragments"] = timed(
            lambda: ray.get([actor.fragment.remote(FRAGMENT) for actor in actors]), WORKERS * EACH * FRAGMENT
        )
        more = {"num_workers": WORKERS, "resources": {"num_cpus": 0.1}}
        ours = FragmentCollector(env, Small(), WORKERS * EACH, backend="ray", **more)
        ours.segment(1)
        runs["our fragments"] = timed(lambda: ours.segment(FRAGMENT), WORKERS * EACH * FRAGMENT)
    return runs


def main() -> None:
    """Measure and print a table for each environment."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6)
    args = parser.parse_args()
    import ray

    ray.init(address="local", num_cpus=4, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    try:
        for name, env in ENVS.items():
            slices, thrown = take_turns(contestants(env, ray), args.rounds, args.seconds)
            print(f"\n{name}, {WORKERS} workers with {EACH} slots each ({thrown} slices measured again)")
            for contestant, found in slices.items():
                rate = float(np.median([one.rate for one in found.values()]))
                print(
                    f"  {contestant:<15} {short(rate):>7} steps/s   ours (stream) is {ratio(slices['ours, stream'], found)} of it"
                )
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
