"""`envfleet train`: PPO from one command. `train_ppo.py` at the root of the repository is the same program."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

HELP = "train a PPO agent on any number of environments"
DESCRIPTION = "Trains a PPO agent (Markov or with memory) and writes a run folder."

_EXIT_STOPPED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag per setting; names, texts and defaults come from `PPOConfig`."""
    from envfleet.train.config import ALIASES, FIELDS, SECTIONS, default_of
    from envfleet.train.settings import as_text, kinds_of

    parser.add_argument("env_positional", nargs="?", metavar="ENV", help="the environment (same as --env)")
    parser.add_argument("--config", metavar="FILE", help="YAML file with sections env: and train:")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="assignments",
        help="one setting by its YAML name, e.g. env.num_envs=6; may be repeated and wins over everything else",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="show nothing while training")
    parser.add_argument("--print-schema", action="store_true", help="print all settings as YAML and exit")
    groups = {name: parser.add_argument_group(f"{name} settings") for name in SECTIONS}
    for spec in FIELDS.values():
        if not spec.metadata["cli"]:
            continue
        more: dict[str, Any] = {"metavar": spec.name.upper().split("_")[-1]}
        if kinds_of(spec.name)[0] == [bool]:
            more = {"action": argparse.BooleanOptionalAction}  # --wandb and --no-wandb
        groups[spec.metadata["section"]].add_argument(
            "--" + spec.name.replace("_", "-"),
            *("--" + alias.replace("_", "-") for alias, name in ALIASES.items() if name == spec.name),
            dest=f"setting_{spec.name}",
            # Only what the user gave is in the namespace, so that presets and files still apply.
            default=argparse.SUPPRESS,
            help=f"{spec.metadata['help']} (default: {as_text(default_of(spec)) or 'none'})".replace("%", "%%"),
            **more,
        )


def config_from(args: argparse.Namespace) -> Any:
    """Build the config: preset, then file, then flags, then --set."""
    from envfleet.train.config import PPOConfig
    from envfleet.train.settings import parse, parse_assignment, settings_from_yaml

    settings: dict[str, Any] = settings_from_yaml(args.config) if args.config else {}
    if args.env_positional:
        settings["env"] = args.env_positional
    given = {key.removeprefix("setting_"): value for key, value in vars(args).items() if key.startswith("setting_")}
    settings |= {name: parse(name, value) for name, value in given.items()}
    settings |= dict(parse_assignment(text) for text in args.assignments)
    return PPOConfig(**settings)


def run(args: argparse.Namespace) -> int:
    """Train; 130 when the run was stopped by a signal."""
    from envfleet.train.settings import schema
    from envfleet.train.terminal import choose_view
    from envfleet.train.trainer import PPOTrainer

    if args.print_schema:
        sys.stdout.write(schema())
        return 0
    with PPOTrainer(config_from(args), view=choose_view(args.quiet)) as trainer, stop_on_signals(trainer.stop):
        result = trainer.train()
    if not args.quiet:
        _print_result(result)
    return _EXIT_STOPPED if result.stopped else 0


def _print_result(result: Any) -> None:
    print(
        f"{result.num_steps:,} steps in {result.wall_s:.1f} s ({result.steps_per_s:,.0f} steps/s), {result.num_episodes} episodes"
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
