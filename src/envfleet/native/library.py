"""Libraries of native environments: the C interface of `envfleet_env.h`, read with ctypes."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.machinery
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from envfleet.errors import BadArgument, MissingExtra

ABI = 1
ERROR_BYTES = 256
_MAX_DIMS = 4
_DTYPES = ("uint8", "int32", "int64", "float32", "float64", "int8")
_BOX, _DISCRETE, _MULTI_DISCRETE = 0, 1, 2


class EnvSpace(ctypes.Structure):
    """`EnvSpace` of the header."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("shape", ctypes.c_int64 * _MAX_DIMS),
        ("low", ctypes.c_double),
        ("high", ctypes.c_double),
        ("count", ctypes.c_int64),
        ("start", ctypes.c_int64),
    )


class EnvSpaces(ctypes.Structure):
    """`EnvSpaces` of the header."""

    _fields_ = (("obs", EnvSpace), ("action", EnvSpace), ("task_size", ctypes.c_int64))


class EnvCall(ctypes.Structure):
    """`EnvCall` of the header."""

    _fields_ = (
        ("random", ctypes.c_void_p),
        ("task", ctypes.c_void_p),
        ("action", ctypes.c_void_p),
        ("obs", ctypes.c_void_p),
        ("reward", ctypes.c_double),
        ("terminated", ctypes.c_uint8),
        ("truncated", ctypes.c_uint8),
        ("thread", ctypes.c_int32),
        ("shared", ctypes.c_void_p),
        ("error", ctypes.c_char_p),
    )


_Options = ctypes.POINTER(ctypes.c_double)


class EnvTable(ctypes.Structure):
    """`EnvTable` of the header."""

    _fields_ = (
        ("abi", ctypes.c_uint32),
        ("table_bytes", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("num_options", ctypes.c_int64),
        ("option_names", ctypes.POINTER(ctypes.c_char_p)),
        ("option_defaults", _Options),
        ("state_bytes", ctypes.c_uint64),
        ("spaces", ctypes.CFUNCTYPE(ctypes.c_int, _Options, ctypes.POINTER(EnvSpaces), ctypes.c_char_p)),
        ("init", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, _Options, ctypes.c_void_p, ctypes.c_char_p)),
        ("reset", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(EnvCall))),
        ("step", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(EnvCall))),
        ("render", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64)),
    )


@dataclasses.dataclass(frozen=True)
class Entry:
    """One environment of a library: its table of functions, and what keeps it loaded."""

    path: str
    name: str
    table: EnvTable
    library: ctypes.CDLL
    build: str  # of a library of the user's: its file, and which version of it

    @property
    def address(self) -> int:
        """Where the table is."""
        return ctypes.addressof(self.table)

    def options(self, given: Mapping[str, Any]) -> Any:
        """The options as the functions take them: the defaults, and what was given."""
        table = self.table
        names = [table.option_names[i].decode() for i in range(table.num_options)]
        unknown = sorted(set(given) - set(names))
        if unknown:
            known = f"it has {', '.join(names)}" if names else "it has none"
            raise BadArgument(f"{self.name} has no option {unknown[0]!r}: {known}")
        try:
            values = [float(given.get(name, table.option_defaults[i])) for i, name in enumerate(names)]
        except (TypeError, ValueError):
            raise BadArgument(f"the options of {self.name} are numbers, not {dict(given)}") from None
        return (ctypes.c_double * max(1, len(values)))(*values)

    def spaces(self, options: Any) -> EnvSpaces:
        """The spaces with these options."""
        out, error = EnvSpaces(), ctypes.create_string_buffer(ERROR_BYTES)
        if self.table.spaces(options, ctypes.byref(out), error):
            raise BadArgument(f"{self.name} refuses its options: {text_of(error)}")
        return out


def text_of(error: Any) -> str:
    """What a library wrote as the description of a fault."""
    return bytes(error.value).decode(errors="replace")


def space_of(space: EnvSpace) -> gym.Space[Any]:
    """A space of the header as Gymnasium's."""
    try:
        return _space_of(space)
    except (AssertionError, ValueError, OverflowError) as problem:
        raise BadArgument(f"a native environment declares a space that cannot be: {problem}") from problem


def _space_of(space: EnvSpace) -> gym.Space[Any]:
    shape = tuple(space.shape[: space.ndim])
    if space.kind == _DISCRETE:
        return gym.spaces.Discrete(space.count, start=space.start)
    if space.kind == _MULTI_DISCRETE:
        return gym.spaces.MultiDiscrete(np.full(shape, space.count, np.int64))
    if space.kind != _BOX or not 0 <= space.dtype < len(_DTYPES):
        raise BadArgument(
            f"a native environment has a space of kind {space.kind} and dtype {space.dtype}: built for another version?"
        )
    dtype = np.dtype(_DTYPES[space.dtype])
    low: float
    high: float
    low, high = space.low, space.high
    if (
        dtype.kind in "iu"
    ):  # infinite bounds mean: all values of the type; as whole numbers, because no float is the last of 64 bits
        least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        low, high = least if low <= least else int(low), most if high >= most else int(high)
    return gym.spaces.Box(low, high, shape, dtype.type)


def load_library(path: str) -> dict[str, Entry]:
    """The environments of a library, by name. One that was built again since it was loaded is loaded again."""
    try:
        found = os.stat(path)
    except OSError:
        raise BadArgument(f"there is no library {path!r}: build one with `envfleet native build my_env.cpp`") from None
    return _loaded(os.path.abspath(path), found.st_dev, found.st_ino, found.st_mtime_ns)


def _opened(path: str) -> ctypes.CDLL:
    """The library as it is now: a copy, because the loader knows libraries by name, and a file that is written over while it is in use
    crashes the process."""
    if path == _own_path():
        return ctypes.CDLL(path)
    with tempfile.TemporaryDirectory(prefix="envfleet-native-") as folder:
        return ctypes.CDLL(shutil.copy(path, folder))


@functools.cache
def _loaded(path: str, *version: int) -> dict[str, Entry]:
    try:
        library = _opened(path)
        lookup = library.envfleet_env
    except (OSError, AttributeError) as error:
        why = error if isinstance(error, OSError) else "ENVFLEET_ENV(YourStruct) is missing at the end of its source"
        raise BadArgument(f"{path!r} is not a library of native environments: {why}") from error
    lookup.restype, lookup.argtypes = ctypes.POINTER(EnvTable), (ctypes.c_int64,)
    build = "" if path == _own_path() else f" of {os.path.basename(path)}, version {_digest(path)}"
    found: dict[str, Entry] = {}
    while pointer := lookup(len(found)):
        table = pointer.contents
        if table.abi != ABI or table.table_bytes < ctypes.sizeof(EnvTable):
            raise BadArgument(
                f"{path!r} was built with version {table.abi} of envfleet_env.h, and this envfleet has {ABI}: build it again "
                "with `envfleet native build`"
            )
        name = table.name.decode(errors="replace")
        if name in found:
            raise BadArgument(f"{path!r} has two environments with the name {name!r}: give one of them another `name`")
        found[name] = Entry(path, name, table, library, build)
    if not found:
        raise BadArgument(f"{path!r} has no environment: ENVFLEET_ENV(YourStruct) is missing at its end")
    return found


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def is_built() -> bool:
    """Whether the library was built with the package."""
    try:
        own_library()
    except MissingExtra:
        return False
    return True


def _own_path() -> str | None:
    found = [Path(__file__).parent.parent / f"_native_envs{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((str(path) for path in found if path.is_file()), None)


def own_library() -> str:
    """The path of the library that is built with the package; an error says what is missing if it was not."""
    if path := _own_path():
        return path
    raise MissingExtra(
        "native", why="Its environments were not built: install a C++ compiler and envfleet again. All else works without them."
    )
