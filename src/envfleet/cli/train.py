"""`envfleet train`: PPO from one command. `train_ppo.py` at the root of the repository is the same program."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from envfleet.errors import BadArgument, FleetError
from envfleet.util.files import WriteFailed

_EXIT_STOPPED = 130
EXIT_NOT_WRITTEN = 3


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add `train` to the commands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a PPO agent on any number of environments",
        description="Train a PPO agent (Markov or with memory) and write a run folder.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("env_positional", nargs="?", metavar="ENV", help="the environment (same as --env)")
    add_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag per setting; names, texts and defaults come from `PPOConfig`."""
    # Suppressed defaults: only what the user gave is in the namespace, so that presets and files keep their say.
    parser.add_argument("--config", metavar="FILE", help="YAML file with sections env: and train:")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments",
        help="one setting by its YAML name, e.g. env.num_envs=6; may be repeated and wins over everything else",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="show nothing while training")
    parser.add_argument("--print-schema", action="store_true", help="print all settings as YAML and exit")
    from envfleet.train.settings import FIELDS, kinds_of

    groups = {name: parser.add_argument_group(f"{name} settings") for name in ("env", "train")}
    for spec in FIELDS.values():
        if spec.metadata.get("cli") is False:
            continue
        flag = "--" + spec.name.replace("_", "-")
        names = [flag, *spec.metadata.get("flags", ())]
        default = spec.default if spec.default is not dataclasses.MISSING else "none"
        help_text = f"{spec.metadata['help']} (default: {_shown(default)})".replace("%", "%%")
        kinds, _ = kinds_of(spec.name)
        more: dict[str, Any] = {"metavar": spec.name.upper().split("_")[-1]}
        if kinds == [bool]:
            more = {"action": argparse.BooleanOptionalAction}  # --wandb and --no-wandb
        groups[spec.metadata["section"]].add_argument(
            *names, dest=f"setting_{spec.name}", default=argparse.SUPPRESS, help=help_text, **more
        )


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return ",".join(str(part) for part in default)
    return (
        {None: "none", True: "yes", False: "no"}.get(default, str(default))
        if not isinstance(default, (int, float)) or isinstance(default, bool)
        else str(default)
    )


def config_from(args: argparse.Namespace) -> Any:
    """Build the config: preset, then file, then flags, then --set."""
    from envfleet.train.config import PPOConfig
    from envfleet.train.settings import field_name, parse, settings_from_yaml

    settings: dict[str, Any] = settings_from_yaml(args.config) if args.config else {}
    if getattr(args, "env_positional", None):
        settings["env"] = args.env_positional
    for key, value in vars(args).items():
        if key.startswith("setting_"):
            name = key.removeprefix("setting_")
            settings[name] = parse(name, value)
    for text in args.assignments:
        key, sign, value = text.partition("=")
        if not sign:
            raise BadArgument(f"--set {text}: NAME=VALUE is needed, like --set env.num_envs=6")
        name = field_name(key.strip())
        settings[name] = parse(name, value.strip())
    return PPOConfig(**settings)


def run(args: argparse.Namespace) -> int:
    """Train; return the exit code."""
    from envfleet.train.settings import schema

    if args.print_schema:
        sys.stdout.write(schema())
        return 0
    try:
        config = config_from(args)
        from envfleet.train.terminal import choose_view
        from envfleet.train.trainer import PPOTrainer

        with PPOTrainer(config, view=choose_view(args.quiet)) as trainer, stop_on_signals(trainer.stop):
            result = trainer.train()
    except FleetError as error:
        print("\n".join([f"envfleet train: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        if isinstance(error, WriteFailed):
            return EXIT_NOT_WRITTEN
        return 2 if isinstance(error, BadArgument) else 1
    if not args.quiet:
        _print_result(result)
    return _EXIT_STOPPED if result.stopped else 0


def _print_result(result: Any) -> None:
    print(
        f"{result.num_steps:,} steps in {result.wall_s:.1f} s ({result.sps:,.0f} steps/s), {result.n_completed_episodes} episodes"
    )
    if result.returns:
        print(f"return of the last {len(result.returns)} episodes: {result.mean_return:.2f}")
    if result.out:
        print(f"run folder: {result.out}" + (f"\nreport: {result.report}" if result.report else ""))
    if result.stopped:
        print("stopped early; the state is saved, --resume goes on from here")


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the update in progress, with a checkpoint; a second Ctrl-C at once."""
    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        stop()

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a program of its own (`train_ppo.py`)."""
    parser = argparse.ArgumentParser(prog="train_ppo.py", description="Train a PPO agent on parallel environments.")
    add_arguments(parser)
    parser.set_defaults(env_positional=None)
    return run(parser.parse_args(argv))
