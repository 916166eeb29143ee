"""The command `envfleet`: one module per command.

A command is a module with `HELP`, `DESCRIPTION`, `add_arguments(parser)` and `run(args) -> int`. Adding one is a line in
`COMMANDS`. Modules of commands import nothing heavy before `add_arguments`, because `envfleet --help` imports them all.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

import envfleet
from envfleet.cli.options import Help
from envfleet.errors import (
    BadArgument,
    DamagedWarning,
    FaultError,
    FleetError,
    LedgerWarning,
    MissingExtra,
    UncheckedWarning,
    WriteFailed,
)
from envfleet.util.extras import extra_of
from envfleet.util.files import NO_ROOM
from envfleet.util.text import Hint, first_line

#: name -> module
COMMANDS = {
    name: f"envfleet.cli.{name}"
    for name in ("demo", "doctor", "collect", "inspect", "serve", "train", "eval", "report", "tune", "native")
}
#: Old names -> the command they stand for now, with its options.
ALIASES = {"sweep": ("tune", "--workers", "1,2,4,8", "--backends", "serial,thread,shm")}

# Exit codes beside 0 (fine) and 1 (a check of the command failed).
EXIT_ERROR, EXIT_NOT_WRITTEN, EXIT_INTERRUPTED = 2, 3, 130

#: After Ctrl-C everything has this long to close; then the process ends, and the keeper ends what it left.
_INTERRUPT_GRACE_S = 2.0


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
    except SystemExit as done:  # --help and --version
        return done.code if isinstance(done.code, int) else 0
    except BrokenPipeError:
        # The reader of our output has closed it (`envfleet … | head`): nothing can be printed any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, FleetError, OSError, ImportError) as error:
        ending = _ending(error)
        if ending is None:
            raise
        code, line = ending
        if show_traceback and code != EXIT_INTERRUPTED:
            traceback.print_exc()
        else:
            _say("\n".join([line, *(note for note in getattr(error, "__notes__", ()) if isinstance(note, Hint))]))
        return code
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _ending(error: BaseException) -> tuple[int, str] | None:
    """The exit code of an error and its line; None for an error that is not expected."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED, "interrupted"
    if isinstance(error, WriteFailed):
        return EXIT_NOT_WRITTEN, first_line(error)
    if isinstance(error, FaultError):
        return EXIT_ERROR, f"{first_line(error)} (--traceback shows the rest)"
    if isinstance(error, FleetError):
        return EXIT_ERROR, first_line(error)
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        place = error.filename or "a file"
        return EXIT_NOT_WRITTEN, f"{place} cannot be written ({error.strerror}): make room, then try again"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return EXIT_ERROR, "too many open files: use fewer workers or environments, or raise the limit (`ulimit -n 65536`)"
    if isinstance(error, OSError) and error.filename:
        return EXIT_ERROR, f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, ModuleNotFoundError) and (extra := extra_of(error.name or "")):
        return EXIT_ERROR, str(MissingExtra(error.name or "", extra=extra))
    return None


class _Parser(argparse.ArgumentParser):
    """Wrong usage is handled like every other error: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise BadArgument(f"{message} (`{self.prog} --help` lists the options)")


def _run(words: list[str]) -> int:
    at = next((i for i, word in enumerate(words) if not word.startswith("-")), None)
    name = words[at] if at is not None else None
    if at is not None and name in ALIASES:
        words[at : at + 1] = ALIASES[name]
        name = words[at]
    if name is not None and name not in COMMANDS:
        raise BadArgument(_unknown(name))
    parser = _Parser(
        prog="envfleet",
        description="Run many reinforcement-learning environments at once.",
        epilog="`envfleet COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"envfleet {envfleet.__version__}")
    # Removed from the words before they are parsed, so that it may stand anywhere; declared here to be in the help.
    parser.add_argument("--traceback", action="store_true", help="show errors in full (or set ENVFLEET_DEBUG=1)")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    run = None
    for command, path in COMMANDS.items():
        if name not in (None, command):
            continue
        module = importlib.import_module(path)
        own = subparsers.add_parser(command, help=module.HELP, description=module.DESCRIPTION, formatter_class=Help)
        if command == name:
            module.add_arguments(own)
            run = module.run
    args, unknown = parser.parse_known_args(words)
    if unknown:
        raise BadArgument(_unrecognised(unknown, own if run else parser))
    if run is None:
        parser.print_help()
        return 0
    if "" not in sys.path:  # "module:name" may be in the current directory, as with `python -m envfleet`
        sys.path.append("")
    code = run(args)
    assert isinstance(code, int)
    return code


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], 1)
    hint = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(COMMANDS)}"
    return f"there is no command {name!r}; {hint}"


def _unrecognised(unknown: list[str], parser: argparse.ArgumentParser) -> str:
    close = difflib.get_close_matches(unknown[0].partition("=")[0], parser._option_string_actions, 1)
    hint = f"; did you mean {close[0]}?" if close and unknown[0].startswith("-") else ""
    return f"unrecognized arguments: {' '.join(unknown)}{hint} (`{parser.prog} --help` lists the options)"


def _say(line: str) -> None:
    print(f"envfleet: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """What we warn about files and lost episodes is one line, without the place in our source."""
    shown = warnings.showwarning

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, (DamagedWarning, LedgerWarning, UncheckedWarning)):
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
        os._exit(EXIT_INTERRUPTED)

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
