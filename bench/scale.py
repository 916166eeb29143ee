"""What one driver can drive: its cost per message and per slot measured here, then a simulation with a network between.

python -m bench.scale            # measure, simulate, write docs/images/scale.svg
python -m bench.scale --costs 20 0.3 1.5   # simulate with given costs: us per message, us per slot, us of policy per slot
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import envfleet as ef

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "scale.svg"


class Nothing(gym.Env):
    """An environment that costs nothing: what is left is the driver's own work."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.obs = np.zeros(4, np.float32)

    def reset(self, *, seed=None, options=None):
        return self.obs, {}

    def step(self, action):
        return self.obs, 0.0, False, False, {}


@dataclasses.dataclass(frozen=True)
class Costs:
    """CPU time of the driver, in seconds."""

    message: float  # sending to a worker and receiving from it
    slot: float  # of one slot-step: its action written, its row copied
    policy: float  # of one slot-step: a network of 64 x 64 in NumPy


def driver_seconds(num_workers: int, num_envs: int, steps: int = 400) -> float:
    """CPU time of the driver per step of all slots, on the backend that sends messages (`pipe`)."""
    with ef.make(Nothing, num_envs, backend="pipe", num_workers=num_workers) as fleet:
        fleet.reset(seed=0)
        actions = np.zeros(num_envs, np.int64)
        for _ in range(50):
            fleet.step(actions)
        begun = time.process_time()
        for _ in range(steps):
            fleet.step(actions)
        return (time.process_time() - begun) / steps


def measured_costs() -> tuple[Costs, list[tuple[int, int, float]]]:
    """Least squares over several numbers of workers and slots: seconds = constant + message * workers + slot * slots."""
    cases = [(w, s) for w in (1, 2, 4, 8) for s in (16, 128, 512)]
    seen = [(w, s, min(driver_seconds(w, s) for _ in range(2))) for w, s in cases]
    table = np.array([[1.0, w, s] for w, s, _ in seen])
    _, message, slot = np.linalg.lstsq(table, np.array([seconds for _, _, seconds in seen]), rcond=None)[0]
    rng = np.random.default_rng(0)
    first, second, last = (rng.normal(size=shape).astype(np.float32) for shape in ((4, 64), (64, 64), (64, 2)))
    obs = rng.normal(size=(1024, 4)).astype(np.float32)
    begun = time.process_time()
    for _ in range(200):
        (np.tanh(np.tanh(obs @ first) @ second) @ last).argmax(1)
    policy = (time.process_time() - begun) / 200 / 1024
    return Costs(max(float(message), 1e-7), max(float(slot), 1e-9), policy), seen


@dataclasses.dataclass(frozen=True)
class Network:
    """Between the driver and the nodes. Latency is lognormal; a straggler is a step that takes ten times as long."""

    latency: float = 1e-4  # median, one way
    spread: float = 0.5  # of its logarithm
    bandwidth: float = 10e9 / 8  # bytes per second, of the driver's own link
    stragglers: float = 0.01  # share of messages


def simulate(
    nodes: int, costs: Costs, network: Network, *, at_least: float, slots: int = 64, env_step: float = 2e-5, row: int = 64,
    fragment: int = 1, seconds: float = 2.0, seed: int = 0,
) -> tuple[float, float]:  # fmt: skip
    """(slot-steps per second, share of the time the driver is busy) of one driver over nodes with `slots` slots each.

    The driver waits for `at_least` of the nodes (1.0: lockstep), handles them one after the other, and sends. With
    `fragment` steps the policy is on the nodes, and a message holds so many steps of each slot.
    """
    rng = np.random.default_rng(seed)

    def answers(count: int) -> np.ndarray:
        """How long nodes take from being sent until their answer is here."""
        work = slots * fragment * (env_step + (costs.policy if fragment > 1 else 0.0))
        work = work * np.where(rng.random(count) < network.stragglers, 10.0, 1.0)
        return work + network.latency * np.exp(network.spread * rng.normal(size=(2, count))).sum(axis=0)

    wire = slots * fragment * row / network.bandwidth  # the driver's link carries one answer after the other
    per_node = costs.message + slots * fragment * (costs.slot + (costs.policy if fragment == 1 else 0.0))
    arrivals = [(float(t), node) for node, t in enumerate(answers(nodes))]
    heapq.heapify(arrivals)
    now = busy = 0.0
    steps, need = 0, max(1, round(at_least * nodes))
    while now < seconds:
        ready = [heapq.heappop(arrivals) for _ in range(need)]
        now = max(now, ready[-1][0])
        while arrivals and arrivals[0][0] <= now:
            ready.append(heapq.heappop(arrivals))
        took = len(ready) * max(per_node, wire)
        busy += took
        now += took
        steps += len(ready) * slots * fragment
        for (_, node), t in zip(ready, answers(len(ready))):
            heapq.heappush(arrivals, (now + float(t), node))
    return steps / now, busy / now


def driver_limit(costs: Costs, slots: int = 64) -> float:
    """Slot-steps per second that one driver with the policy can handle, whatever the nodes do."""
    return slots / (costs.message + slots * (costs.slot + costs.policy))


WAYS: dict[str, dict[str, Any]] = {
    "lockstep": {"at_least": 1.0},
    "at_least = a quarter": {"at_least": 0.25},
    "fragments of 64, a quarter": {"at_least": 0.25, "fragment": 64},
}


def main() -> None:
    """Measure, simulate, print tables and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", type=float, nargs=3, metavar="US", help="us per message, per slot, of policy per slot")
    args = parser.parse_args()
    if args.costs:
        costs = Costs(*(1e-6 * value for value in args.costs))
    else:
        costs, seen = measured_costs()
        print("| workers | slots | driver, us per step of all |\n|---:|---:|---:|")
        print("\n".join(f"| {w} | {s} | {1e6 * seconds:.0f} |" for w, s, seconds in seen))
    words = (
        f"message {1e6 * costs.message:.1f} us, slot-step {1e6 * costs.slot:.3f} us, policy {1e6 * costs.policy:.3f} us per slot"
    )
    print(f"\ncosts: {words}")
    numbers = (1, 3, 10, 30, 100, 300, 1000)
    curves: dict[str, list[float]] = {}
    for environment, env_step in (("cheap (20 us)", 2e-5), ("slow (2 ms)", 2e-3)):
        print(
            f"\n{environment}, 64 slots a node\n| nodes | "
            + " | ".join(WAYS)
            + " | drivers |\n|---:|"
            + "---:|" * (len(WAYS) + 1)
        )
        for nodes in numbers:
            cells = []
            for name, how in WAYS.items():
                seconds = max(2.0, 40 * 64 * how.get("fragment", 1) * env_step)
                rate, busy = simulate(nodes, costs, Network(), env_step=env_step, seconds=seconds, **how)
                curves.setdefault(f"{environment}, {name}", []).append(rate)
                cells.append(f"{rate / 1e3:,.0f}k ({busy:.0%})")
            # A driver of its own for every so many nodes, each with a copy of the policy, keeps all nodes busy.
            alone, _ = simulate(
                1, costs, Network(stragglers=0.0), at_least=1.0, env_step=env_step, seconds=max(2.0, 2560 * env_step)
            )
            drivers = nodes * alone / (0.8 * driver_limit(costs))
            print(f"| {nodes} | {' | '.join(cells)} | {max(1, int(np.ceil(drivers)))} |")
    draw(numbers, curves, costs)


def draw(numbers: tuple[int, ...], curves: dict[str, list[float]], costs: Costs) -> None:
    """Steps per second over nodes, with the most that one driver can handle."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for axis, environment in zip(axes, ("cheap (20 us)", "slow (2 ms)")):
        for name in WAYS:
            axis.loglog(numbers, curves[f"{environment}, {name}"], marker="o", label=name)
        axis.axhline(driver_limit(costs), color="grey", linestyle="--", label="one driver with the policy")
        axis.set(title=f"environment: {environment} a step", xlabel="nodes of 64 slots")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("slot-steps per second (simulated)")
    axes[1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(IMAGE, metadata={"Date": None})
    print(f"written: {IMAGE}")


if __name__ == "__main__":
    main()
