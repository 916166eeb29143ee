"""Ant-v5 at 64 slots: native threads, two Gymnasium processes, EnvPool if it is installed. `python -m bench.native_mujoco`."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import envfleet as ef

NUM_ENVS, NUM_WORKERS, NUM_STEPS, NUM_ROUNDS = 64, 2, 100, 5


def _envpool() -> Any:
    import envpool

    pool = envpool.make("Ant-v5", env_type="gymnasium", num_envs=NUM_ENVS, num_threads=NUM_WORKERS)
    pool.reset()
    return pool


def _rate(step: Callable[[Any], Any], actions: Any) -> float:
    begin = time.perf_counter()
    for row in actions:
        step(row)
    return float(len(actions) * NUM_ENVS / (time.perf_counter() - begin))


def main() -> None:
    """Measure in turns, print the median of each and its ratio to ours."""
    actions = np.random.default_rng(0).uniform(-1, 1, (NUM_STEPS, NUM_ENVS, 8)).astype(np.float32)
    fleets = {name: ef.make("Ant-v5", num_envs=NUM_ENVS, backend=name, num_workers=NUM_WORKERS) for name in ("native", "shm")}
    contestants: dict[str, Any] = {name: fleet.step for name, fleet in fleets.items()}
    for fleet in fleets.values():
        fleet.reset(seed=0)
    if importlib.util.find_spec("envpool"):
        contestants["envpool"] = _envpool().step
    else:
        print("envpool: skipped, it is not installed")
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(NUM_ROUNDS):
        for name, step in contestants.items():
            rates[name].append(_rate(step, actions))
    for fleet in fleets.values():
        fleet.close()
    ours = float(np.median(rates["native"]))
    for name, found in rates.items():
        print(f"{name}: {np.median(found):,.0f} steps/s, native is {ours / np.median(found):.2f} times that")


if __name__ == "__main__":
    main()
