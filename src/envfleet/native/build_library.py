"""Builds a library of native environments from a C++ file."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from envfleet.errors import BadArgument, FleetError, MissingExtra

#: No fused operations and no powers by multiplication, so that bits do not depend on the compiler.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-builtin-pow",
    "-fno-builtin-powf",
    "-Wall",
    "-Wextra",
)
_MORE = {
    "fast": (),
    "debug": ("-O1", "-g", "-fno-omit-frame-pointer"),
    "sanitize": ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined"),
}


class BuildFailed(FleetError):
    """The compiler refused a file; its own messages are the text."""


def compiler() -> list[str]:
    """The C++ compiler as the words of a command: $CXX, else the first of c++, g++, clang++ that is there.

    Example:
        >>> bool(compiler())
        True
    """
    try:
        chosen = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BadArgument(f"the variable CXX cannot be read as a command: {error}") from None
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise MissingExtra(chosen[0], why="The variable CXX names this C++ compiler: install it, or unset CXX.")
        return chosen
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise MissingExtra("a C++ compiler", why="Install one (Debian: apt install g++; macOS: xcode-select --install), or set CXX.")


def build_library(source: str | Path, out: str | Path | None = None, kind: str = "fast") -> tuple[Path, str]:
    """Compile a file; returns the library and what the compiler warned about.

    The library appears under its name when it is complete, as a new file: one that is loaded already stays as it is.

    Args:
        source: the C++ file.
        out: the library; None: beside the file, with the ending ".so".
        kind: "fast", "debug" (for a debugger) or "sanitize" (stops at errors of memory and undefined behaviour).

    Example:
        >>> build_library("missing.cpp")
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: there is no file 'missing.cpp': `envfleet native new missing.cpp` writes one to begin with
    """
    source = Path(source)
    if not source.is_file():
        raise BadArgument(f"there is no file {str(source)!r}: `envfleet native new {source}` writes one to begin with")
    out = source.with_suffix(".so") if out is None else Path(out)
    if out.resolve() == source.resolve():
        raise BadArgument(f"{str(out)!r} is the source: give another name for the library")
    if out.is_dir():
        raise BadArgument(f"{str(out)!r} is a folder: give the name of the library too")
    if not out.parent.is_dir():
        raise BadArgument(f"there is no folder {str(out.parent)!r} for the library: make it first")
    made = out.with_name(f".{out.name}.{os.getpid()}.part")
    words = [*compiler(), *FLAGS, *_MORE[kind], f"-I{Path(__file__).parent}", str(source), "-o", str(made)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        if done.returncode:
            said = (done.stderr + done.stdout).strip()
            raise BuildFailed(f"{source} does not compile (`{shlex.join(words)}` ended with {done.returncode}):\n{said}")
        os.replace(made, out)
    finally:
        made.unlink(missing_ok=True)
    return out, done.stderr.strip()
