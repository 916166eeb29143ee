"""What `envfleet demo` shows, part by part: each runs something real, prints what it finds, and returns it for the page."""

from __future__ import annotations

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import envfleet as ef
from envfleet.testing import Actions, Stream
from envfleet.util.text import number

ENV = "CartPole-v1"
SOLVED = 475.0


@dataclass
class Part:
    """What one part found; `ok` is whether it is as it should be."""

    title: str
    ok: bool
    verdict: str
    rows: Sequence[tuple[str, ...]] = ()
    bars: dict[str, float] = field(default_factory=dict)  # name -> how much of `unit`
    unit: str = ""
    timeline: list[list[str]] = field(default_factory=list)  # per slot and step: "ok" or "fault"
    metrics: list[dict[str, Any]] = field(default_factory=list)  # rows of a training run
    link: Path | None = None


def collect(env: str, num_envs: int, rounds: int, backend: Any, num_workers: int, seed: int) -> tuple[float, str, int]:
    """Random actions for `rounds` steps of every slot: steps per second of stepping, hash of the rows, episodes ended."""
    stream, episodes, stepping_s = Stream(with_info=False), 0, 0.0
    with ef.make(env, num_envs, backend=backend, num_workers=num_workers) as fleet:
        space = fleet.action_space
        space.seed(seed)
        stream.add(fleet.reset(seed=seed))
        for _ in range(rounds):
            actions = space.sample()
            before = time.perf_counter()
            batch = fleet.step(actions)
            stepping_s += time.perf_counter() - before
            stream.add(batch)
            episodes += int(batch.ended.sum())
    return rounds * num_envs / stepping_s, stream.digest(), episodes


def same_bytes(rounds: int = 500) -> Part:
    """The same steps on three backends: the hashes of all rows are equal."""
    found, rows = {}, []
    for backend, num_workers in (("serial", 1), ("thread", 2), ("shm", 2)):
        rate, digest, episodes = collect(ENV, 8, rounds, backend, num_workers, seed=0)
        found[backend] = digest
        where = {"serial": "in this process", "thread": "2 threads", "shm": "2 worker processes"}[backend]
        rows.append((backend, where, f"{rate:,.0f} steps/s", f"{episodes} episodes", f"sha256 {digest[:16]}…"))
        print("  {:<7} {:<19} {:>16} {:>14}   {}".format(*rows[-1]))
    ok = len(set(found.values())) == 1
    verdict = f"the {'same' if ok else 'WRONG'} bytes on all three: observations, rewards, ends, seeds"
    return Part("Same seed, same bytes, on every backend", ok, verdict, rows=rows)


def speed(num_envs: int = 64, seconds: float = 1.0) -> Part:
    """Steps per second of many environments: Gymnasium's two vector environments and ours, with the backend it chooses."""
    actions = np.random.default_rng(0).integers(0, 2, (100, num_envs))
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        makers: dict[str, Callable[[], Any]] = {
            "Gymnasium AsyncVectorEnv": lambda: gym.make_vec(ENV, num_envs, "async"),
            "Gymnasium SyncVectorEnv": lambda: gym.make_vec(ENV, num_envs, "sync"),
            "envfleet make_vec": lambda: ef.make_vec(ENV, num_envs),
        }
        envs = {name: stack.enter_context(closing(make())) for name, make in makers.items()}
        for each in envs.values():
            each.reset(seed=0)
            _rate(each, actions, seconds / 10)  # the first steps are slower
        for _ in range(5):  # in turns, so that other programs slow all of them
            for name, each in envs.items():
                rates.setdefault(name, []).append(_rate(each, actions, seconds / 5))
    found = {name: statistics.median(slices) for name, slices in rates.items()}
    for name, rate in found.items():
        print(f"  {name:<26} {rate:>9,.0f} steps/s")
    times = found["envfleet make_vec"] / found["Gymnasium AsyncVectorEnv"]
    verdict = f"{times:.0f} times the steps of Gymnasium's process workers, with {num_envs} environments"
    return Part(f"{num_envs} environments at once", True, verdict, bars=found, unit="steps/s")


def _rate(envs: Any, actions: np.ndarray[Any, Any], seconds: float) -> float:
    count, took, began = 0, 0.0, time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        envs.step(actions[count % len(actions)])
        count += 1
    return float(count * actions.shape[1] / took)


class WithPid(gym.Wrapper[Any, Any, Any, Any]):
    """Tells in which process an environment runs."""

    def pid(self) -> int:
        """The process."""
        return os.getpid()


def killed_worker(rounds: int = 120, kill_at: int = 40) -> Part:
    """One of four workers gets SIGKILL: its rows are marked, its environments rebuilt, and the others' rows are unchanged."""
    undisturbed, _, _ = _steps(rounds, None, backend="serial")
    stream, timeline, fault = _steps(rounds, kill_at, backend="shm", num_workers=4)
    hit = [slot for slot, steps in enumerate(timeline) if "fault" in steps]
    same = [slot for slot in range(8) if slot not in hit and stream.slot_digest(slot) == undisturbed.slot_digest(slot)]
    print("  " + fault.replace("): ", "):\n    "))
    ok = bool(hit) and len(same) + len(hit) == 8
    verdict = (
        f"slots {' and '.join(map(str, hit))} have one row marked FAULT each and go on; the other {len(same)} have the same bytes as "
        "without it"
    )
    return Part("A worker process is killed", ok, verdict, timeline=timeline)


def _steps(rounds: int, kill_at: int | None, **options: Any) -> tuple[Stream, list[list[str]], str]:
    stream = Stream(with_info=False)
    timeline: list[list[str]] = [[] for _ in range(8)]
    with ef.make(ENV, 8, wrappers=[WithPid], on_fault="restart", **options) as fleet:
        actions = Actions(fleet.single_action_space, 8, seed=0)
        stream.add(fleet.reset(seed=0))
        for step in range(rounds):
            if step == kill_at:
                (pid,) = fleet.call("pid", slots=[2])
                print(f"  step {step}: kill -9 {pid}, the worker of slots 2 and 3")
                os.kill(pid, signal.SIGKILL)
            batch = fleet.step(actions.of(range(8)))
            stream.add(batch)
            for slot, faulted in enumerate(batch.faulted.tolist()):
                timeline[slot].append("fault" if faulted else "ok")
        return stream, timeline, str(fleet.faults[0]).splitlines()[0] if fleet.faults else ""


def eight_sessions(num_episodes: int = 40) -> Part:
    """A server of OpenEnv's protocol on this machine, and a fleet of eight sessions on it."""
    from envfleet.remote import Server
    from envfleet.rollout import RandomPolicy

    with Server(ENV, port=0, max_sessions=8) as server:
        print(f"  envfleet serve {ENV}  →  {server.url}")
        began = time.perf_counter()
        with ef.make(server.url, num_envs=8) as fleet:
            collector = ef.Collector(fleet, RandomPolicy(fleet.single_action_space), seed=0)
            rollouts = ef.Rollouts(collector.episodes(num_episodes))
            steps = sum(len(rollout) for rollout in rollouts)
            took = time.perf_counter() - began
            print(f"  ef.make({server.url!r}, num_envs=8): {len(rollouts)} episodes, {steps} steps in {took:.1f} s")
            print(f"  {collector.ledger}")
    by_session = {f"session {slot}": float(sum(len(r) for r in rollouts if r.slot == slot)) for slot in range(8)}
    ok = len(rollouts) == num_episodes and not rollouts.failures
    verdict = f"{num_episodes} episodes over WebSockets, every one accounted for: {steps / took:,.0f} steps/s"
    return Part("Eight sessions of an OpenEnv server", ok, verdict, bars=by_session, unit="steps")


def training(folder: Path, total_steps: int = 100_000) -> Part:
    """PPO on CartPole with eight environments, then 100 episodes of evaluation in one."""
    from envfleet.train import PPOConfig, PPOTrainer
    from envfleet.train.loggers import read_rows
    from envfleet.train.terminal import Lines, choose_view

    out = folder / "run"
    config = PPOConfig(env=ENV, num_envs=8, total_steps=total_steps, seed=1, backend="serial", out=str(out), tensorboard=False)
    view = choose_view() if sys.stdout.isatty() else Lines(every_s=2.0)
    with PPOTrainer(config, view=view) as trainer:
        result = trainer.train()
        mean_return = trainer.evaluate(100).mean_return
    solved = mean_return >= SOLVED
    verdict = (
        f"{'solved' if solved else 'not solved'}: {number(mean_return, 4)} of 500 in 100 evaluation episodes, "
        f"after {result.num_steps:,} steps in {result.wall_s:.0f} s"
    )
    return Part("PPO learns CartPole", solved, verdict, metrics=read_rows(out), link=result.report)
