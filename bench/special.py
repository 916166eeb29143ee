"""What is not a plain race: a policy in the loop, statistics, the parent's own cost, memory, start-up."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

import envfleet as ef
from bench.contestants import Contestant, Ours, now, ours
from bench.envs import factories
from bench.stats import estimate, tree_pss_bytes
from envfleet.util.machine import usable_cpus

POLICY_CONTESTANTS = ("gymnasium Sync", "serial", "shm", "shm-share", "shm-double", "auto")


# -- a real policy ----------------------------------------------------------------------------------------------


def _policy() -> Callable[[Any], Any]:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = torch.nn
    net = layers.Sequential(layers.Linear(4, 64), layers.Tanh(), layers.Linear(64, 64), layers.Tanh(), layers.Linear(64, 2))

    def act(obs: Any) -> Any:
        with torch.inference_mode():
            return net(torch.from_numpy(obs)).argmax(1).numpy()

    return act


class _PolicyOnSync(Contestant):
    def __init__(self, env: str, slots: int) -> None:
        super().__init__(env, slots)
        self._act = _policy()
        self._vec = gym.vector.SyncVectorEnv(factories(env, slots), copy=False)
        self._obs = self._vec.reset(seed=0)[0]

    def run(self, seconds: float) -> tuple[int, float]:
        steps, start = 0, now()
        while now() - start < seconds:
            self._obs = self._vec.step(self._act(self._obs))[0]
            steps += self.slots
        return steps, now() - start

    def close(self) -> None:
        self._vec.close()


class _PolicyOnOurs(Contestant):
    def __init__(self, env: str, slots: int, kind: str) -> None:
        super().__init__(env, slots)
        self._act = _policy()
        self._ours: Ours = ours(kind)(env, slots)
        self.plan = self._ours.plan
        self._obs = self._ours.fleet.reset(seed=0).obs

    def run(self, seconds: float) -> tuple[int, float]:
        fleet, act, obs = self._ours.fleet, self._act, self._obs
        steps, start = 0, now()
        while now() - start < seconds:
            obs = fleet.step(act(obs), copy=False).obs
            steps += self.slots
        self._obs = obs
        return steps, now() - start

    def close(self) -> None:
        self._ours.close()


class _PolicyDoubleBuffered(_PolicyOnOurs):
    """The policy works on one half while the workers step the other."""

    def run(self, seconds: float) -> tuple[int, float]:
        fleet, act = self._ours.fleet, self._act
        halves = [np.arange(0, self.slots, 2), np.arange(1, self.slots, 2)]
        start, steps = now(), 0
        for half in halves:
            fleet.send(act(self._obs[half]), half)
        while now() - start < seconds:
            for half in halves:
                batch = fleet.recv(half, copy=False)
                fleet.send(act(batch.obs), half)
                steps += len(half)
        took = now() - start
        self._obs = fleet.recv().obs
        return steps, took


def with_policy(who: str) -> Callable[[str, int], Contestant] | str:
    """A contestant whose actions come from an MLP 64×64 in torch, on one thread."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if who == "gymnasium Sync":
        return _PolicyOnSync
    if who == "shm-double":
        return lambda env, slots: _PolicyDoubleBuffered(env, slots, "shm")
    return lambda env, slots: _PolicyOnOurs(env, slots, who)


# -- statistics -------------------------------------------------------------------------------------------------


def statistics(quick: bool) -> dict[str, Any]:
    """CPU nanoseconds per slot-step that the collector's measuring of every step costs: on and off by turns, in one fleet.

    Many short turns in a drawn order, on an env without work: the difference is less than two fleets differ by themselves.
    """
    from envfleet.rollout import Collector

    steps, slots, pairs = 32, 64, 10 if quick else 500
    chance, costs, bare = random.Random(0), [], []
    with ef.make(factories("null", slots), slots, backend="serial") as fleet:
        actions = fleet.action_space.sample()
        collector = Collector(fleet, lambda obs: actions[: len(obs)], seed=0)
        collector.segment(4 * steps)  # warms up
        for _ in range(pairs):
            cpu_ns = {}
            for on in (True, False) if chance.random() < 0.5 else (False, True):
                collector._clock.on = on
                begin_ns = time.process_time_ns()
                collector.segment(steps)
                cpu_ns[on] = (time.process_time_ns() - begin_ns) / (steps * slots)
            costs.append(cpu_ns[True] - cpu_ns[False])
            bare.append(cpu_ns[False])
    return {"cost_ns": costs, "bare_ns": estimate(bare).median}


# -- what the parent itself costs -------------------------------------------------------------------------------


def parent_cost(quick: bool) -> dict[str, Any]:
    """CPU nanoseconds of the parent per `step`, for slots and workers; and a fit a + b·slots + c·workers.

    With a worker for every CPU or more, a parent that waits sleeps: all its CPU time is work, its one wake-up included.
    (With fewer it spins, which is no cost but looks like one, so there are no such rows.) `awake`: the workers still spin
    when rung; `asleep`: each has to be woken by the kernel, because the parent paused before, off the clock.
    """
    full = usable_cpus()
    slot_counts, worker_counts = ((64, 256), (full,)) if quick else ((64, 256, 1024, 4096), (full, 2 * full, 4 * full))
    rows = []
    for slots in slot_counts:
        for workers in worker_counts:
            if workers != full and slots not in (64, 1024):
                continue
            for how, pause_s in (("awake", 0.0), ("asleep", 0.012)):
                samples = _parent_ns(slots, workers, pause_s, 5 if quick else 60)
                one = estimate(samples)
                rows.append({"slots": slots, "workers": workers, "how": how, "step_ns": one.median,
                             "low_ns": one.low, "high_ns": one.high, "ns_per_slot": one.median / slots})  # fmt: skip
    return {"rows": rows, "fit": {how: _fit([row for row in rows if row["how"] == how]) for how in ("awake", "asleep")}}


def _parent_ns(slots: int, workers: int, pause_s: float, count: int) -> list[float]:
    with ef.make(factories("null", slots), slots, backend="shm", num_workers=workers, isolate=True) as fleet:
        fleet.reset(seed=0)
        actions = np.zeros(slots, np.int64)
        found = []
        for _ in range(count + 3):
            if pause_s:
                time.sleep(pause_s)
            before = time.thread_time_ns()
            fleet.step(actions, copy=False)
            found.append(float(time.thread_time_ns() - before))
        return found[3:]


def _fit(rows: list[dict[str, Any]]) -> dict[str, float]:
    matrix = np.array([[1.0, row["slots"], row["workers"]] for row in rows])
    goal = np.array([row["step_ns"] for row in rows])
    # Relative errors count alike, so that 4,096 slots do not decide alone.
    base, per_slot, per_worker = np.linalg.lstsq(matrix / goal[:, None], np.ones(len(goal)), rcond=None)[0]
    return {"base_ns": float(base), "per_slot_ns": float(per_slot), "per_worker_ns": float(per_worker)}


# -- memory and start-up ----------------------------------------------------------------------------------------


def memory(quick: bool) -> dict[str, Any]:
    """Bytes per CartPole slot beyond the env: what the tree grows by from few slots to many, minus plain envs."""
    few, many = (64, 256) if quick else (256, 4096)
    found: dict[str, Any] = {}
    for kind in ("plain", "serial", "shm"):
        sizes = [_pss_in_fresh_process(kind, slots) for slots in (few, many)]
        found[kind] = (sizes[1] - sizes[0]) / (many - few)
    return {
        "bytes_per_slot": found,
        "beyond_env": {kind: found[kind] - found["plain"] for kind in ("serial", "shm")},
        "slots": [few, many],
    }


def _pss_in_fresh_process(kind: str, slots: int) -> int:
    code = f"from bench.special import print_pss; print_pss({kind!r}, {slots})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def print_pss(kind: str, slots: int) -> None:
    """Hold that many CartPoles and print the memory of this process and all below it."""
    if kind == "plain":
        envs = [factory() for factory in factories("CartPole-v1", slots)]
        for _ in range(5):
            for env in envs:
                env.reset()
                env.step(np.int64(0))
        print(tree_pss_bytes(os.getpid()))
        return
    workers = None if kind == "serial" else 2
    with ef.make("CartPole-v1", slots, backend=kind, num_workers=workers) as fleet:
        fleet.reset(seed=0)
        for _ in range(5):
            fleet.step(np.zeros(slots, np.int64))
        print(tree_pss_bytes(os.getpid()))


def startup(quick: bool) -> dict[str, Any]:
    """Seconds from `make` to the first observations."""
    slots, repeats = (16, 2) if quick else (256, 7)
    found: dict[str, list[float]] = {}
    for method in ("forkserver", "fork"):
        found[method] = [_start_s("CartPole-v1", slots, start_method=method) for _ in range(repeats)]
    if not quick:
        found["slow constructor"] = [_start_s(factories("slowstart", 64), 64, num_workers=8)]
    return {"slots": slots, "seconds": found}


def _start_s(env: Any, slots: int, num_workers: int = 2, **options: Any) -> float:
    start = now()
    with ef.make(env, slots, backend="shm", num_workers=num_workers, isolate=True, **options) as fleet:
        fleet.reset(seed=0)
        return now() - start
