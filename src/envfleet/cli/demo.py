"""`envfleet demo`: CartPole solved with eight envs, and what the speed came from; or the same steps on two backends."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

#: Tells how many more environment steps are done.
Advance = Callable[[int], None]


def add_parser(subparsers: Any) -> None:
    """Declare the command's arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="train CartPole until solved, or compare two backends (--backends)",
        description="Trains PPO on CartPole-v1 with 8 environments until it is solved, evaluates it, and says how much of the "
        "speed came from batching and how much from workers. With --backends: collects the same steps on two backends, "
        "prints the throughput of each and compares SHA-256 hashes of everything the environments gave.",
    )
    parser.add_argument("--out", help="where the run and its report go (default: a temporary folder)")
    parser.add_argument("--backends", action="store_true", help="compare two backends instead of training")
    parser.add_argument("--env", default="CartPole-v1", help="a Gymnasium id (default: CartPole-v1)")
    parser.add_argument(
        "--steps", type=_positive, default=20_000, help="environment steps per backend (default: 20000)"
    )
    parser.add_argument("--num-envs", type=_positive, default=8, help="slots (default: 8)")
    parser.add_argument("--num-workers", type=_positive, default=2, help="worker processes of shm (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first slot and of the actions (default: 0)")


def run(args: argparse.Namespace) -> int:
    """Train and evaluate, or compare backends; 0 when it is solved, or the hashes are equal, 1 when not."""
    if args.backends:
        return compare(args)
    from envfleet.errors import BackendMissing

    if importlib.util.find_spec("torch") is None:
        raise BackendMissing("PyTorch", extra="train")
    from envfleet.cli.demo_run import run_demo

    return 0 if run_demo(args.out)["solved"] else 1


def compare(args: argparse.Namespace) -> int:
    """Collect on serial and shm; 0 when the hashes are equal, 1 when not."""
    rounds = -(-args.steps // args.num_envs)
    print(f"{args.env}: {args.num_envs} slots, {rounds * args.num_envs:,} steps on each backend, seed {args.seed}")
    found = []
    for backend, num_workers in (("serial", 1), ("shm", args.num_workers)):
        with _progress(backend, rounds * args.num_envs) as advance:
            rate, digest, episodes = collect(args.env, args.num_envs, rounds, backend, num_workers, args.seed, advance)
        found.append(digest)
        workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
        print(f"{backend:<7} {workers:<10} {rate:>10,.0f} steps/s  {episodes:>5,} episodes  sha256 {digest[:16]}…")
    if found[0] != found[1]:
        print("the two backends differ: this environment does not depend on its seed and actions alone")
        return 1
    print("the two backends gave the same bytes")
    return 0


def collect(
    env: str, num_envs: int, rounds: int, backend: str, num_workers: int, seed: int, advance: Advance
) -> tuple[float, str, int]:
    """Random actions for `rounds` steps of every slot: steps per second of stepping, hash of the stream, episodes ended."""
    import envfleet as ef

    digest, episodes, stepping_s = hashlib.sha256(), 0, 0.0
    with ef.make(env, num_envs, backend=backend, num_workers=num_workers) as fleet:
        space = fleet.action_space
        space.seed(seed)
        _add_tree(digest, fleet.reset(seed=seed).obs)
        for _ in range(rounds):
            actions = space.sample()
            before = time.perf_counter()
            batch = fleet.step(actions)
            stepping_s += time.perf_counter() - before
            for part in (batch.obs, batch.final_obs, batch.reward, batch.terminated, batch.truncated):
                _add_tree(digest, part)
            episodes += int(batch.ended.sum())
            advance(num_envs)
    return rounds * num_envs / stepping_s, digest.hexdigest(), episodes


def _add_tree(digest: Any, tree: Any) -> None:
    if isinstance(tree, dict):
        tree = [item for _, item in sorted(tree.items())]
    if isinstance(tree, (list, tuple)):
        for item in tree:
            _add_tree(digest, item)
    elif hasattr(tree, "tobytes"):
        digest.update(tree.tobytes())
    else:  # an object of a mailbox space
        digest.update(repr(tree).encode())


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Advance]:
    """A bar on a terminal; elsewhere a line at each half, so that logs stay readable."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn(f"{name:<7}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.advance(task, count)
        return
    done = 0

    def plain(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        if before * 2 // total != done * 2 // total:
            print(f"{name:<7} {done:,} of {total:,} steps", flush=True)

    yield plain


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)
