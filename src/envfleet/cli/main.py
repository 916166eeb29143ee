"""The command `envfleet`: one module a command, imported only when that command is asked for.

A command is a module with `add_parser(subparsers)` and `run(args) -> int`. Adding one is a line in `COMMANDS`; a command
whose module is not installed is not listed.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

import envfleet
from envfleet.errors import FaultError, FleetError
from envfleet.util.files import NO_ROOM, DamagedWarning, UncheckedWarning, WriteFailed

#: name -> (module, help line)
COMMANDS = {
    "demo": ("envfleet.cli.demo", "train CartPole until solved, or compare two backends"),
    "doctor": ("envfleet.cli.doctor", "what this machine can do, and which settings look wrong"),
    "collect": ("envfleet.cli.collect", "collect episodes into a dataset"),
    "inspect": ("envfleet.cli.inspect", "show what is in a dataset"),
    "sweep": ("envfleet.cli.sweep", "run a grid of settings"),
    "serve": ("envfleet.cli.serve", "serve an environment to remote clients"),
    "train": ("envfleet.cli.train", "train an agent"),
    "eval": ("envfleet.cli.eval", "evaluate a trained agent"),
    "tune": ("envfleet.cli.tune", "find the best backend and worker count for an environment"),
    "bench": ("envfleet.cli.bench", "measure throughput here"),
}

#: After Ctrl-C everything has this long to close; then the process ends, and the keeper ends what it left.
_INTERRUPT_GRACE_S = 2.0


def available() -> dict[str, tuple[str, str]]:
    """The commands whose modules are here.

    Example:
        >>> "doctor" in available()
        True
    """
    return {name: entry for name, entry in COMMANDS.items() if importlib.util.find_spec(entry[0]) is not None}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0 fine, 1 a check failed, 2 misuse or a failed environment, 3 a file could not be written (disk full), 130 Ctrl-C.

    Example:
        >>> main(["--version"])
        envfleet 0.1.0
        0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    show_traceback = "--traceback" in words or os.environ.get("ENVFLEET_DEBUG", "0") not in ("", "0")
    words = [word for word in words if word != "--traceback"]
    before = _handle_ctrl_c()
    try:
        with _warnings_in_a_line():
            return _run(words)
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except FleetError as error:
        if show_traceback:
            traceback.print_exc()
        else:
            _say(_one_line(error))
        return 3 if isinstance(error, WriteFailed) else 2
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            return _reader_gone()
        if show_traceback or error.errno not in NO_ROOM:
            raise
        _say(f"{error.filename or 'a file'} cannot be written ({error.strerror}): make room, then try again")
        return 3
    except SystemExit as done:  # argparse has printed its message
        return done.code if isinstance(done.code, int) else 0
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _reader_gone() -> int:
    # The reader of our output went away (`envfleet … | head`): nothing is left to tell it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _run(words: list[str]) -> int:
    commands = available()
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in commands:
        _say(_unknown(name, list(commands)))
        return 2
    parser, subparsers = _parser()
    module: ModuleType | None = None
    for command, (path, line) in commands.items():
        if command == name:
            module = importlib.import_module(path)
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(command, help=line)
    args = parser.parse_args(words)
    if module is None:
        parser.print_help()
        return 0
    code = module.run(args)
    assert isinstance(code, int)
    return code


def _parser() -> tuple[argparse.ArgumentParser, Any]:
    parser = argparse.ArgumentParser(
        prog="envfleet",
        description="Run many reinforcement-learning environments at once.",
        epilog="`envfleet COMMAND --help` tells about a command.",
    )
    parser.add_argument("--version", action="version", version=f"envfleet {envfleet.__version__}")
    # Taken out of the words before they are parsed, so that it may stand anywhere; declared here to be in the help.
    parser.add_argument("--traceback", action="store_true", help="show errors in full (or set ENVFLEET_DEBUG=1)")
    return parser, parser.add_subparsers(title="commands", metavar="COMMAND")


def _unknown(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    if not close and name in COMMANDS:
        return f"the command {name!r} is not part of this installation"
    hint = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(known)}"
    return f"there is no command {name!r}; {hint}"


def _one_line(error: FleetError) -> str:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return first + (" (--traceback shows the rest)" if isinstance(error, FaultError) else "")


def _say(line: str) -> None:
    print(f"envfleet: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """What we warn about files is one line, without the place in our source."""
    shown = warnings.showwarning

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, (DamagedWarning, UncheckedWarning)):
            _say(f"warning: {message}")
        else:
            shown(message, category, *where, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always", DamagedWarning)
        warnings.showwarning = show
        yield


def _handle_ctrl_c() -> Any:
    """Ctrl-C raises KeyboardInterrupt once, and ends the process for good when closing takes too long or at a second one.

    Ending it hard is safe: workers and all they started end with this process.
    """
    if threading.current_thread() is not threading.main_thread():
        return None
    pressed = False

    def end_now() -> None:
        _say("interrupted; what did not close in time was killed")
        os._exit(130)

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            end_now()
        pressed = True
        timer = threading.Timer(_INTERRUPT_GRACE_S, end_now)
        timer.daemon = True
        timer.start()
        raise KeyboardInterrupt

    return signal.signal(signal.SIGINT, handler)


if __name__ == "__main__":
    sys.exit(main())
