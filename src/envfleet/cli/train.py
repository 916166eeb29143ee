"""`envfleet train`: PPO from one command. `train_ppo.py` at the root of the repository is the same program."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envfleet.errors import BadArgument

HELP = "train a PPO agent on any number of environments"
DESCRIPTION = "Trains a PPO agent (Markov or with memory) and writes a run folder."

_EXIT_STOPPED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag per setting; names, texts and defaults come from `PPOConfig`."""
    from envfleet.train.config import ALIASES, FIELDS, SECTIONS, default_of, kinds_of
    from envfleet.train.settings import as_text

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
        if spec.name == "resume":
            more = {"nargs": "?", "const": True, "metavar": "DIR"}
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
    """Build the config: preset, then the run that is resumed, then file, then flags, then --set."""
    from envfleet.train.config import PPOConfig
    from envfleet.train.settings import parse, parse_assignment, settings_from_yaml, settings_of_run

    settings: dict[str, Any] = settings_from_yaml(args.config) if args.config else {}
    given = {key.removeprefix("setting_"): value for key, value in vars(args).items() if key.startswith("setting_")}
    folder = _resumed_folder(args, given)
    if args.env_positional:
        if args.env_positional.endswith((".yaml", ".yml")):
            raise BadArgument(
                f"{args.env_positional} is no environment but a file of settings: envfleet train --config {args.env_positional}"
            )
        settings["env"] = args.env_positional
    settings |= {name: parse(name, value, f"--{name.replace('_', '-')} {value}") for name, value in given.items()}
    settings |= dict(parse_assignment(text) for text in args.assignments)
    if folder is not None:
        settings |= {"out": folder, "resume": True}
    if settings.get("resume"):
        if not settings.get("out"):
            raise BadArgument("--resume needs the folder of the run: --resume DIR")
        stored = settings_of_run(settings["out"])
        if not stored and (folder is not None or "env" not in settings):
            raise BadArgument(f"--resume: there is no run in {settings['out']}; `envfleet train ENV --out DIR` starts one")
        settings = {**stored, **settings}
    return PPOConfig(**settings)


def _resumed_folder(args: argparse.Namespace, given: dict[str, Any]) -> str | None:
    """The DIR of `--resume DIR`. In `--resume ENV --out DIR` the word after the flag is the environment."""
    word = given.get("resume")
    if not isinstance(word, str):
        return None
    given["resume"] = True
    if "out" in given and not args.env_positional and not Path(word).is_dir():
        args.env_positional = word
        return None
    if "out" in given and given["out"] != word:
        raise BadArgument(f"--resume {word} and --out {given['out']} name two folders: give one")
    return word


def run(args: argparse.Namespace) -> int:
    """Train; 130 when the run was stopped by a signal."""
    from envfleet.train.settings import schema
    from envfleet.train.terminal import choose_view
    from envfleet.train.trainer import PPOTrainer

    if args.print_schema:
        sys.stdout.write(schema())
        return 0
    with PPOTrainer(config_from(args), view=choose_view(args.quiet)) as trainer, stop_on_signals(trainer):
        result = trainer.train()
    if not args.quiet:
        _print_result(result)
    return _EXIT_STOPPED if result.stopped else 0


def _print_result(result: Any) -> None:
    print(
        f"{result.num_steps:,} steps in {result.wall_s:.1f} s ({result.steps_per_s:,.0f} steps/s), {result.num_episodes:,} episodes"
    )
    if result.returns:
        print(f"return of the last {len(result.returns)} episodes: {result.mean_return:.2f}")
    if result.num_faults:
        lost = f"; slots {', '.join(map(str, result.quarantined))} are quarantined" if result.quarantined else ""
        print(f"faults: {result.num_faults:,}, restarted and not learned from{lost}")
    if result.out:
        print(f"run folder: {result.out}" + (f"\nreport: {result.report}" if result.report else ""))
    if result.stopped:
        again = f"`envfleet train --resume {result.out}` goes on from here" if result.out else "nothing is saved (no --out)"
        print(f"stopped early; {again}")


@contextlib.contextmanager
def stop_on_signals(trainer: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run after the update in progress, with a checkpoint; a second one at once."""
    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)
        trainer.stop()
        trainer.view.interrupt()
        os.write(2, b"\nenvfleet: stopping after this update; a second Ctrl-C stops at once\n")  # safe in a handler; print is not

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
