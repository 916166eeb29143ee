"""Options that several commands share: one flag, one meaning, one way to read its value."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from envfleet.util.text import read_pairs

ENV_HELP = 'a Gymnasium id, a short name (tmaze, catch, …) or "module:attribute"'


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def natural(text: str) -> int:
    """A whole number from 0 up."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 up")
    return int(text)


def positives(text: str) -> list[int]:
    """Whole numbers from 1 up, separated by commas."""
    return [positive(word.strip()) for word in text.split(",")]


def words(text: str) -> list[str]:
    """Words separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def picture(text: str) -> Path:
    """The name of a file that a plot can be written to."""
    path = Path(text)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png, .pdf or .svg")
    return path


def seconds(text: str) -> float:
    """Seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def pairs(text: str) -> dict[str, Any]:
    """A type of argparse: NAME=VALUE, separated by commas."""
    try:
        return read_pairs(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: pairs like name=value,other=2 are needed") from None


#: Option -> its flags (the old spelling last) and how it is declared.
_SHARED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "env": (("env",), {"metavar": "ENV", "help": ENV_HELP}),
    "num_envs": (("--num-envs",), {"type": positive, "metavar": "N", "help": "number of environments"}),
    "num_workers": (
        ("--num-workers", "--workers"),
        {"type": positive, "metavar": "N", "help": "worker processes or threads (default: chosen by the backend)"},
    ),
    "num_episodes": (("--num-episodes", "--episodes"), {"type": positive, "metavar": "N", "help": "episodes"}),
    "seed": (("--seed",), {"type": natural, "metavar": "N", "help": "seed of the run"}),
    "backend": (("--backend",), {"default": "auto", "metavar": "NAME", "help": "serial, thread, aio, pipe, shm, native, ray …"}),
    "ray_address": (("--ray-address",), {"metavar": "ADDRESS", "help": "for --backend ray: the cluster, auto or HOST:PORT"}),
    "ray_resources": (
        ("--ray-resources",),
        {
            "type": pairs,
            "metavar": "NAME=AMOUNT,…",
            "help": "for --backend ray: what each worker needs, e.g. num_cpus=0.5,num_gpus=1 (default: one CPU)",
        },
    ),
    "ray_transport": (
        ("--ray-transport",),
        {"metavar": "NAME", "help": "for --backend ray: stream, or call where only Ray's own ports are open (default: stream)"},
    ),
    "json": (("--json",), {"action": "store_true", "help": "print one JSON object and nothing else"}),
}


def add_shared(parser: argparse.ArgumentParser, name: str, **changes: Any) -> None:
    """Declare a shared option; `changes` are other values for `add_argument` (a default, a help text)."""
    flags, declared = _SHARED[name]
    parser.add_argument(*flags, **{**declared, **changes})


class Help(argparse.HelpFormatter):
    """Shows every default that is a value, so that help texts need not repeat it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default is None or isinstance(default, (bool, list)) or default == argparse.SUPPRESS or "default:" in text:
            return text
        return f"{text} (default: {f'{default:g}' if isinstance(default, float) else default})"
