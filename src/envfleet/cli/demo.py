"""`envfleet demo`: in under a minute what is special here, with a page of pictures at the end; or compare two backends."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from envfleet.cli.options import add_shared, positive
from envfleet.errors import BadArgument, MissingExtra

if TYPE_CHECKING:
    from envfleet.cli.demo_parts import Part

HELP = "a tour in under a minute: equal bytes, speed, a killed worker, OpenEnv sessions, PPO; or compare two backends"
DESCRIPTION = (
    "Runs five short parts and writes what they found to demo.html: the same bytes on three backends, the speed beside Gymnasium's "
    "vector environments, a worker process that is killed, eight sessions of an OpenEnv server, and PPO that solves CartPole. With "
    "--backends: collects the same steps on two backends, prints the throughput of each and compares SHA-256 hashes of "
    "everything the environments gave."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--out", help="where the page and the training run go (default: a temporary folder)")
    parser.add_argument("--backends", action="store_true", help="compare two backends instead")
    parser.add_argument("--env", help="the environment of --backends (default: CartPole-v1)")
    parser.add_argument("--steps", type=positive, default=20_000, help="environment steps per backend, with --backends")
    add_shared(parser, "num_envs", default=8, help="environments, with --backends")
    add_shared(parser, "num_workers", default=2, help="worker processes of shm, with --backends")
    add_shared(parser, "seed", default=0, help="seed of the first slot and of the actions, with --backends")


def run(args: argparse.Namespace) -> int:
    """Show all parts, or compare backends; 0 when all is as it should be, 1 when not."""
    if args.backends:
        return compare(args)
    if args.env is not None:
        raise BadArgument("--env is for --backends; `envfleet train ENV` trains on another environment")
    return 0 if run_demo(args.out) else 1


def compare(args: argparse.Namespace) -> int:
    """Collect on serial and shm; 0 when the hashes are equal, 1 when not."""
    from envfleet.cli.demo_parts import ENV, collect

    env = args.env or ENV
    rounds = -(-args.steps // args.num_envs)
    print(f"{env}: {args.num_envs} slots, {rounds * args.num_envs:,} steps on each backend, seed {args.seed}")
    found = []
    for backend, num_workers in (("serial", 1), ("shm", args.num_workers)):
        rate, digest, episodes = collect(env, args.num_envs, rounds, backend, num_workers, args.seed)
        found.append(digest)
        workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
        print(f"{backend:<7} {workers:<10} {rate:>10,.0f} steps/s  {episodes:>5,} episodes  sha256 {digest[:16]}…")
    if found[0] != found[1]:
        print("the two backends differ: this environment does not depend on its seed and actions alone")
        return 1
    print("the two backends gave the same bytes")
    return 0


def run_demo(out: str | None = None, total_steps: int = 100_000) -> bool:
    """Run all parts and write the page; whether all is as it should be."""
    from envfleet.cli import demo_parts
    from envfleet.cli.demo_page import write_demo
    from envfleet.util.machine import usable_cpus

    for module, extra in (("starlette", "remote"), ("torch", "train")):
        if importlib.util.find_spec(module) is None:  # said now, not after three of the parts
            raise MissingExtra(module, extra=extra)
    began = time.perf_counter()
    folder = free_folder(Path(out)) if out else Path(tempfile.mkdtemp(prefix="envfleet-demo-"))
    shows: list[tuple[str, Callable[[], Part]]] = [
        ("Same seed, same bytes", demo_parts.same_bytes),
        ("Speed", demo_parts.speed),
        ("A worker is killed", demo_parts.killed_worker),
        ("OpenEnv", demo_parts.eight_sessions),
        ("Training", partial(demo_parts.training, folder, total_steps)),
    ]
    parts = []
    for i, (title, show) in enumerate(shows, 1):
        print(f"\n{i}/{len(shows)}  {title}", flush=True)
        parts.append(show())
        print(f"  {'✓' if parts[-1].ok else '✗'} {parts[-1].verdict}", flush=True)
    page = write_demo(folder, parts, f"{usable_cpus()} CPUs, Python {platform.python_version()}")
    print(f"\n{time.perf_counter() - began:.0f} s in all. Pictures: {page}")
    return all(part.ok for part in parts)


def free_folder(wanted: Path) -> Path:
    """The folder itself, or, where a demo was written already, the next number."""
    number, folder = 1, wanted
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    folder.mkdir(parents=True)
    return folder
