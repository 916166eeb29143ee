"""`envfleet collect ENV --out DIR`: episodes into a dataset that a kill cannot spoil and the same command continues."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

from envfleet.errors import BackendMissing, BadArgument


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the command's arguments."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "collect",
        help="collect episodes into a dataset",
        description="Collects episodes of an environment into a directory. Every finished episode is safe on disk; after "
        "an interruption the same command completes the dataset without duplicates. Which episodes there are depends on "
        "the seed alone, not on --num-envs, --backend, --workers or --mode.",
    )
    parser.add_argument("env", help="a Gymnasium id, or addresses of OpenEnv servers, separated by commas")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the dataset directory (default: only the statistics)")
    parser.add_argument("--episodes", type=int, default=1000, help="episodes in the dataset (default: 1000)")
    parser.add_argument("--num-envs", type=int, default=8, help="environments run at once (default: 8)")
    parser.add_argument(
        "--policy",
        "--agent",
        default="random",
        help="'random' (default), 'echo' (says back the text it sees), a run folder or checkpoint file of `envfleet train`, or MODULE:NAME of a batched policy",
    )
    parser.add_argument(
        "--sample", action="store_true", help="checkpoint: draw actions instead of taking the likeliest"
    )
    parser.add_argument("--format", choices=("parquet", "minari"), default="parquet", help="default: parquet")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: 0)")
    parser.add_argument("--backend", default="auto", help="serial, thread, aio, pipe, shm … (default: auto)")
    parser.add_argument("--workers", type=int, help="worker processes or threads (default: what the backend takes)")
    parser.add_argument("--mode", choices=("sync", "async", "overlap"), default="sync", help="default: sync")
    parser.add_argument("--max-steps", type=int, help="cut episodes off after so many steps")
    parser.add_argument("--max-retries", type=int, default=2, help="begin an episode again after a fault (default: 2)")
    parser.add_argument(
        "--token-file", type=Path, help="file with the servers' token (default: the variable ENVFLEET_TOKEN)"
    )
    parser.add_argument("--infos", action="store_true", help="store the info dicts too")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Collect what is missing; 1 when some episodes failed for good."""
    from envfleet.rollout.datasets.parquet import DatasetWriter
    from envfleet.rollout.rollout_errors import DatasetFull

    if args.episodes < 1 or args.num_envs < 1:
        raise BadArgument("--episodes and --num-envs must be at least 1")
    if args.format == "minari" and args.out is not None and _has_minari(args.out):
        print(f"{args.out} is a complete Minari dataset already")
        return 0
    about = {
        "env": args.env,
        "seed": args.seed,
        "policy": args.policy,
        "sample": args.sample,
        "max_steps": args.max_steps,
        "infos": args.infos,
    }
    # Minari's HDF5 file does not survive a kill: episodes go to Parquet first and are converted when all are there.
    if args.out is None:
        if args.format == "minari":
            raise BadArgument("--format minari needs --out")
        kept = _Counted()
        _collect(args, kept)
        return 1 if kept.count < args.episodes else 0
    place = args.out / "_parts" if args.format == "minari" else args.out
    with DatasetWriter(place, run=about, resume=True) as writer:
        if writer.ids:
            print(f"{len(writer.ids)} of {args.episodes} episodes are there already", flush=True)
        spaces = _collect(args, writer)
        missing = args.episodes - sum(number < args.episodes for number in writer.ids)
    if args.format == "minari" and not missing:
        try:
            _to_minari(args, place, spaces)
        except OSError as error:
            safe = f"all episodes are safe in {place}: the same command converts them"
            raise DatasetFull(args.out, error, safe) from error
    where = f"{args.episodes - missing} episodes in {args.out}"
    print(f"{where}; {missing} failed: the same command tries them again" if missing else where)
    return 1 if missing else 0


class _Counted:
    """Stands in for a dataset when nobody wants one."""

    def __init__(self) -> None:
        self.ids: frozenset[int] = frozenset()
        self.count = 0

    def add(self, rollout: Any) -> None:
        self.count += 1


def _collect(args: argparse.Namespace, writer: Any) -> tuple[Any, Any]:
    from envfleet.cli.serve import read_token
    from envfleet.core.construct import is_remote, make
    from envfleet.remote.remote_backend import count_sessions
    from envfleet.rollout.collector import Collector

    workers: dict[str, Any] = {} if args.workers is None else {"num_workers": args.workers}
    env, num_envs = _env(args.env), args.num_envs
    if is_remote(env):
        token = read_token(args.token_file)
        workers["env_kwargs"] = {"token": token}
        num_envs = count_sessions(env, num_envs, token=token)
        if num_envs < args.num_envs:
            print(f"the servers have {num_envs} sessions free, so {num_envs} run at once", flush=True)
    with make(env, num_envs, backend=args.backend, on_fault="restart", **workers) as fleet:
        spaces = (fleet.single_observation_space, fleet.single_action_space)
        if all(number in writer.ids for number in range(args.episodes)):
            return spaces
        print(f"{args.env}: {fleet.plan}", flush=True)
        policy = _policy(args, fleet)
        collector = Collector(
            fleet,
            policy,
            seed=args.seed,
            mode=args.mode,
            random_actions=policy is None,
            max_steps=args.max_steps,
            max_retries=args.max_retries,
            keep_infos=args.infos,
            env_name=args.env,
        )
        try:
            for rollout in collector.episodes(args.episodes, skip=writer.ids, progress=True):
                writer.add(rollout)
        except KeyboardInterrupt:
            if args.out is not None:
                print(
                    f"{len(writer.ids)} of {args.episodes} episodes are in {args.out}; the same command makes the others"
                )
            raise
        print(collector.stats())
        print(f"ledger: {collector.ledger}")
        print(f"verdict: {collector.verdict().sentence}")
    return spaces


def _env(name: str) -> Any:
    """Addresses of servers, an environment of ours by its short name, or a Gymnasium id."""
    from envfleet.core.construct import is_remote

    urls = name.split(",")
    if is_remote(urls):
        return urls
    if importlib.util.find_spec("envfleet.envs.registry") is None:
        return name
    return importlib.import_module("envfleet.envs.registry").resolve_env(name)


def _policy(args: argparse.Namespace, fleet: Any) -> Any:
    if args.policy == "random":
        return None
    if args.policy == "echo":
        return _echo(fleet)
    if Path(args.policy).exists():
        try:
            agent = importlib.import_module("envfleet.train.agent").load_agent(args.policy)
        except ImportError as missing:
            raise BackendMissing("checkpoints", extra="train") from missing
        policy = agent.policy(fleet.num_envs, deterministic=not args.sample, seed=args.seed)
        policy.version = agent.update  # every step of the dataset tells which update chose its action
        return policy
    module, colon, name = args.policy.partition(":")
    if not colon:
        raise BadArgument(f"--policy {args.policy!r}: give 'random', an existing checkpoint, or MODULE:NAME")
    sys.path.insert(0, "")  # as `python -m` would: modules of the current directory
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadArgument(f"--policy {args.policy!r}: {error}") from error


def _echo(fleet: Any) -> Any:
    """A policy that says back the text it sees."""
    from gymnasium.spaces import Dict, Text

    seen, said = fleet.single_observation_space, fleet.single_action_space
    names = [name for name, space in seen.items() if isinstance(space, Text)] if isinstance(seen, Dict) else []
    if not isinstance(said, Text) or not (isinstance(seen, Text) or names):
        raise BadArgument(f"the echo agent wants text to see and to say; this environment has {seen} and {said}")
    return lambda obs: list(obs if isinstance(seen, Text) else obs[names[0]])


def _has_minari(directory: Path) -> bool:
    from envfleet.rollout.datasets.minari_format import find_minari

    return directory.is_dir() and find_minari(directory) is not None


def _to_minari(args: argparse.Namespace, parts: Path, spaces: tuple[Any, Any]) -> None:
    from envfleet.rollout.datasets.minari_format import save_minari
    from envfleet.rollout.episodes.episode import Rollouts

    name = "".join(char if char.isalnum() or char in "_-" else "-" for char in args.env.split(":")[-1])
    making = args.out / "_minari"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    save_minari(
        Rollouts.load(parts)[: args.episodes],
        making,
        dataset_id=f"{name.rsplit('-v', 1)[0]}/{Path(args.policy).stem.replace(':', '-')}-v0",
        observation_space=spaces[0],
        action_space=spaces[1],
        algorithm_name=args.policy,
        description=f"{args.episodes} episodes of {args.env}, collected by envfleet with seed {args.seed}",
    )
    for made in making.iterdir():
        made.rename(args.out / made.name)
    making.rmdir()
    shutil.rmtree(parts)
