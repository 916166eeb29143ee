"""`envfleet demo`: solve CartPole with eight envs and show where the speed comes from; or compare two backends."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from envfleet.cli.options import add_shared, positive

HELP = "train CartPole until solved, or compare two backends (--backends)"
DESCRIPTION = (
    "Trains PPO on CartPole-v1 with 8 environments until it is solved, evaluates it, and says how much of the speed came "
    "from batching and how much from workers. With --backends: collects the same steps on two backends, prints the "
    "throughput of each and compares SHA-256 hashes of everything the environments gave."
)
SOLVED = 475.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--out", help="where the run and its report go (default: a temporary folder)")
    parser.add_argument("--backends", action="store_true", help="compare two backends instead of training")
    parser.add_argument("--env", default="CartPole-v1", help="the environment of --backends")
    parser.add_argument("--steps", type=positive, default=20_000, help="environment steps per backend")
    add_shared(parser, "num_envs", default=8)
    add_shared(parser, "num_workers", default=2, help="worker processes of shm")
    add_shared(parser, "seed", default=0, help="seed of the first slot and of the actions")


def run(args: argparse.Namespace) -> int:
    """Train and evaluate, or compare backends; 0 when it is solved, or the hashes are equal, 1 when not."""
    if args.backends:
        return compare(args)
    return 0 if run_demo(args.out)["solved"] else 1


def compare(args: argparse.Namespace) -> int:
    """Collect on serial and shm; 0 when the hashes are equal, 1 when not."""
    rounds = -(-args.steps // args.num_envs)
    print(f"{args.env}: {args.num_envs} slots, {rounds * args.num_envs:,} steps on each backend, seed {args.seed}")
    found = []
    for backend, num_workers in (("serial", 1), ("shm", args.num_workers)):
        rate, digest, episodes = collect(args.env, args.num_envs, rounds, backend, num_workers, args.seed)
        found.append(digest)
        workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
        print(f"{backend:<7} {workers:<10} {rate:>10,.0f} steps/s  {episodes:>5,} episodes  sha256 {digest[:16]}…")
    if found[0] != found[1]:
        print("the two backends differ: this environment does not depend on its seed and actions alone")
        return 1
    print("the two backends gave the same bytes")
    return 0


def collect(env: str, num_envs: int, rounds: int, backend: Any, num_workers: int, seed: int) -> tuple[float, str, int]:
    """Random actions for `rounds` steps of every slot: steps per second of stepping, hash of the rows, episodes ended."""
    import envfleet as ef
    from envfleet.testing import Stream

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


def run_demo(out: str | None = None, total_steps: int = 100_000) -> dict[str, Any]:
    """Train, evaluate, measure, write the report; prints and returns what was found."""
    from envfleet.train.config import PPOConfig
    from envfleet.train.terminal import choose_view
    from envfleet.train.trainer import PPOTrainer

    folder = Path(out) if out else Path(tempfile.mkdtemp(prefix="envfleet-demo-"))
    config = PPOConfig(
        env="CartPole-v1",
        num_envs=8,
        total_steps=total_steps,
        seed=1,
        backend="serial",
        out=str(folder / "run"),
        tensorboard=False,
    )
    with PPOTrainer(config, view=choose_view(quiet=False)) as trainer:
        result = trainer.train()
        mean_return = trainer.evaluate(100).mean_return
    one, batched, workers = (training_speed(*setting) for setting in ((1, "serial"), (8, "serial"), (8, "shm")))
    solved = mean_return >= SOLVED
    print(
        f"CartPole-v1 after {result.num_steps:,} steps in {result.wall_s:.0f} s: {mean_return:.1f} "
        f"({'solved' if solved else 'not solved'})\n"
        f"one environment {one:,.0f} steps/s; eight in one process {batched:,.0f}: batching gives {batched / one:.1f}x\n"
        f"eight over worker processes {workers:,.0f}: workers give {workers / batched:.2f}x on top "
        f"(CartPole's step is too cheap to share out)\n"
        f"report: {result.report}"
    )
    return {"solved": solved, "speedup_batching": batched / one, "speedup_workers": workers / batched}


def training_speed(num_envs: int, backend: Any) -> float:
    """Steps per second of training with the same settings but for the number of environments."""
    from envfleet.train.config import PPOConfig
    from envfleet.train.trainer import PPOTrainer

    total = max(6_144, 3 * 128 * num_envs)  # at least three updates of 128 steps of each
    config = PPOConfig(env="CartPole-v1", preset="none", num_envs=num_envs, total_steps=total, backend=backend)
    with PPOTrainer(config) as trainer:
        trainer.train_episode_vectorized()
        begin, before = time.perf_counter(), trainer.counters.num_steps
        trainer.train()
        return (trainer.counters.num_steps - before) / (time.perf_counter() - begin)
