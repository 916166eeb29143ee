"""`envfleet collect ENV --out DIR`: collect episodes into a crash-safe dataset; the same command continues it."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envfleet.cli.options import ENV_HELP, add_shared, natural, positive
from envfleet.cli.serve import add_token_file, read_token
from envfleet.errors import BadArgument
from envfleet.util.loading import load_attribute

HELP = "collect episodes into a dataset"
DESCRIPTION = (
    "Collects episodes of an environment into a directory. Every finished episode is safe on disk; after an interruption "
    "the same command completes the dataset without duplicates. The set of episodes depends on the seed alone, not on "
    "--num-envs, --backend, --num-workers or --mode."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_shared(parser, "env", help=f"{ENV_HELP}, or addresses of OpenEnv servers, separated by commas")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the dataset directory (default: only the statistics)")
    add_shared(parser, "num_episodes", default=1000, help="episodes in the dataset")
    add_shared(parser, "num_envs", default=8)
    parser.add_argument(
        "--policy",
        "--agent",
        default="random",
        help="'random', a run folder or checkpoint file of `envfleet train`, or MODULE:NAME of a batched policy",
    )
    parser.add_argument("--sample", action="store_true", help="checkpoint: sample actions instead of the most likely ones")
    parser.add_argument("--format", choices=("parquet", "minari"), default="parquet", help="file format")
    add_shared(parser, "seed", default=0)
    add_shared(parser, "backend")
    for name in ("ray_address", "ray_resources", "ray_transport"):
        add_shared(parser, name)
    add_shared(parser, "num_workers")
    parser.add_argument("--mode", choices=("sync", "async", "overlap"), default="sync", help="how slots are stepped")
    parser.add_argument("--max-steps", type=positive, help="truncate episodes after this many steps")
    parser.add_argument("--max-retries", type=natural, default=2, help="start an episode again after a fault, this many times")
    add_token_file(parser, "file with the servers' token")
    parser.add_argument("--infos", action="store_true", help="store the info dicts too")


def run(args: argparse.Namespace) -> int:
    """Collect what is missing; 1 when some episodes failed in all attempts."""
    from envfleet.errors import WriteFailed
    from envfleet.rollout.datasets.parquet import DatasetWriter

    count, out = args.num_episodes, args.out
    if out is None:
        if args.format == "minari":
            raise BadArgument("--format minari needs --out")
        kept = _Counted()
        _collect(args, kept)
        return 1 if kept.count < count else 0
    if args.format == "minari" and _has_minari(out):
        print(f"{out} is a complete Minari dataset already")
        return 0
    about = {name: getattr(args, name) for name in ("env", "seed", "policy", "sample", "max_steps", "infos")}
    # Minari's HDF5 file does not survive a kill: episodes go to Parquet first and are converted when all are there.
    place = out / "_parts" if args.format == "minari" else out
    with DatasetWriter(place, run=about, resume=True) as writer:
        if writer.ids:
            print(f"{len(writer.ids):,} of {count:,} episodes are there already", flush=True)
        spaces = _collect(args, writer)
        missing = count - sum(number < count for number in writer.ids)
    if args.format == "minari" and not missing:
        try:
            _to_minari(args, place, spaces)
        except OSError as error:
            safe = f"all episodes are safe in {place}: the same command converts them"
            raise WriteFailed(out, error, safe) from error
    where = f"{count - missing:,} episodes in {out}"
    more = f"{missing:,} failed: the same command tries them again" if missing else f"`envfleet inspect {out}` shows them"
    print(f"{where}; {more}")
    return 1 if missing else 0


class _Counted:
    """Takes the place of a dataset when there is no --out."""

    def __init__(self) -> None:
        self.ids: frozenset[int] = frozenset()
        self.count = 0

    def add(self, rollout: Any) -> None:
        self.count += 1


def _ray_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was given for backend ray, as arguments of `make`."""
    given = {"ray_address": args.ray_address, "resources": args.ray_resources, "transport": args.ray_transport}
    return {name: value for name, value in given.items() if value is not None}


def _collect(args: argparse.Namespace, writer: Any) -> tuple[Any, Any]:
    from envfleet.core.construct import is_remote, make
    from envfleet.remote.remote_backend import count_sessions
    from envfleet.rollout.collector import Collector

    workers: dict[str, Any] = {} if args.num_workers is None else {"num_workers": args.num_workers}
    env, num_envs = args.env, args.num_envs
    if is_remote(urls := args.env.split(",")):
        env, token = urls, read_token(args.token_file)
        workers["env_kwargs"] = {"token": token}
        num_envs = count_sessions(env, num_envs, token=token)
        if num_envs < args.num_envs:
            print(f"the servers have {num_envs} sessions free, so {num_envs} run at once", flush=True)
    elif args.token_file is not None:
        raise BadArgument(f"--token-file is for OpenEnv servers, and {env!r} is no address: leave it out, or give an address")
    complete = all(number in writer.ids for number in range(args.num_episodes))
    policy_for = None if complete else _load_policy(args)  # a wrong --policy is refused before a fleet is made
    workers |= _ray_options(args)
    with make(env, num_envs, backend=args.backend, on_fault="restart", **workers) as fleet:
        spaces = (fleet.single_observation_space, fleet.single_action_space)
        if complete:
            return spaces
        print(f"{args.env}: {fleet.plan}", flush=True)
        policy = policy_for and policy_for(fleet.num_envs)
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
            for rollout in collector.episodes(args.num_episodes, skip=writer.ids, progress=True):
                writer.add(rollout)
        except KeyboardInterrupt:
            if args.out is not None:
                print(
                    f"{len(writer.ids):,} of {args.num_episodes:,} episodes are in {args.out}; the same command collects the others"
                )
            raise
        stats = collector.stats()
        print(stats if args.out is None else stats.line)  # `envfleet inspect` shows the whole table
        print(f"ledger: {collector.ledger}")
        print(f"verdict: {collector.verdict().sentence}")
    return spaces


def _load_policy(args: argparse.Namespace) -> Callable[[int], Any] | None:
    """What makes the policy for a number of environments; None: random actions."""
    if args.policy == "random":
        return None
    if Path(args.policy).exists():
        from envfleet.train.agent import load_agent

        agent: Any = load_agent(args.policy)

        def trained(num_envs: int) -> Any:
            policy = agent.policy(num_envs, deterministic=not args.sample, seed=args.seed)
            policy.version = agent.update  # every step of the dataset names the update that chose its action
            return policy

        return trained
    if ":" not in args.policy:
        raise BadArgument(f"--policy {args.policy!r}: give 'random', an existing checkpoint, or MODULE:NAME")
    policy = load_attribute(args.policy, "--policy")
    return lambda num_envs: policy


def _has_minari(directory: Path) -> bool:
    from envfleet.rollout.datasets.minari_format import find_minari

    return directory.is_dir() and find_minari(directory) is not None


def _to_minari(args: argparse.Namespace, parts: Path, spaces: tuple[Any, Any]) -> None:
    from envfleet.core.construct import is_remote
    from envfleet.rollout.datasets.minari_format import save_minari
    from envfleet.rollout.episodes.episode import Rollouts

    name = "".join(char if char.isalnum() or char in "_-" else "-" for char in args.env.split(":")[-1])
    making = args.out / "_minari"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    save_minari(
        Rollouts.load(parts)[: args.num_episodes],
        making,
        env=None if is_remote(args.env.split(",")) else args.env,
        dataset_id=f"{name.rsplit('-v', 1)[0]}/{Path(args.policy).stem.replace(':', '-')}-v0",
        observation_space=spaces[0],
        action_space=spaces[1],
        algorithm_name=args.policy,
        description=f"{args.num_episodes} episodes of {args.env}, collected by envfleet with seed {args.seed}",
    )
    for made in making.iterdir():
        made.rename(args.out / made.name)
    making.rmdir()
    shutil.rmtree(parts)
