"""Files that are complete or absent: the only code that writes files of datasets and runs, and keeps damaged ones.

Every error of the disk becomes a `WriteFailed` that says what could not be written and what is safe. A file that cannot
be read is never deleted: it is kept under another name (`keep_aside`) and named in a `DamagedWarning`.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

#: What the system says when there is no room: the disk, the user's share of it, or a limit on the file.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def write_all(descriptor: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write everything at an offset; `os.pwrite` may write less than asked (full disk, limits, more than 2 GiB)."""
    left = memoryview(data).cast("B")
    while left:
        if hasattr(os, "pwrite"):
            done = os.pwrite(descriptor, left, offset)
        else:  # Windows
            os.lseek(descriptor, offset, os.SEEK_SET)
            done = os.write(descriptor, left)
        if done == 0:
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        left, offset = left[done:], offset + done


def write_durably(path: Path, data: bytes | bytearray | memoryview, fsync: bool = True) -> None:
    """Write a file atomically: under a temporary name, flushed to the disk, renamed.

    Whatever happens, the file before is untouched until the rename, and nothing half-made is left.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.json"
        >>> write_durably(path, b"{}")
        >>> path.read_text(), [found.name for found in path.parent.iterdir()]
        ('{}', ['a.json'])
    """
    making = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(making, _NEW_FILE, 0o666)
        try:
            write_all(descriptor, data, 0)
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(making, path)
    except BaseException:
        with suppress(OSError):
            making.unlink(missing_ok=True)
        raise
    if fsync:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    if os.name == "nt":  # folders cannot be opened there
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove half-made files of processes that were killed; those of a process that lives are not touched."""
    for path in folder.glob(".*.tmp"):
        number = path.name.split(".")[-2]
        if number.isdigit() and not _alive(int(number)):
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def keep_aside(path: Path) -> Path:
    """Keep a damaged file under a second name, so that the first may be replaced; returns the second.

    The name begins with an underscore: pandas and other readers of a directory skip it.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.bin"
        >>> _ = path.write_bytes(b"damaged")
        >>> keep_aside(path).name
        '_a.bin.damaged-1'
    """
    stem = path.name if path.name.startswith("_") else f"_{path.name}"
    for number in itertools.count(1):
        aside = path.with_name(f"{stem}.damaged-{number}")
        try:
            os.link(path, aside)  # no second copy of the data
        except FileExistsError:
            if os.path.samefile(path, aside):  # kept already, by a process that ended after this step
                return aside
            continue
        except OSError:  # a file system without hard links
            if aside.exists():
                continue
            shutil.copy2(path, aside)
        return aside
    raise AssertionError


def sealed_json(content: dict[str, Any]) -> bytes:
    """JSON with the digest of its own content under `sha256`; `open_sealed` reads it."""
    plain = json.loads(json.dumps(content))  # as it will be read: keys are text then
    return json.dumps({**plain, "sha256": _digest_of(plain)}, indent=1).encode()


def open_sealed(data: bytes) -> dict[str, Any]:
    """Read what `sealed_json` wrote; ValueError says what is wrong with it.

    Example:
        >>> open_sealed(sealed_json({"seed": 1}))
        {'seed': 1}
        >>> open_sealed(sealed_json({"seed": 1}).replace(b"1", b"3", 1))
        Traceback (most recent call last):
        ...
        ValueError: its content does not have the digest it names
    """
    content = json.loads(data.decode())
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    if content.pop("sha256", None) != _digest_of(content):
        raise ValueError("its content does not have the digest it names")
    return content


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class AppendFile:
    """A text file of lines. A line is there whole, or (disk full, an interrupt) not at all, and the next one works.

    Example:
        >>> import tempfile
        >>> file = AppendFile(Path(tempfile.mkdtemp()) / "a.txt")
        >>> file.append("one\\n")
        >>> file.append("two\\n")
        >>> file.close()
        >>> file.path.read_text().split()
        ['one', 'two']
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "r+b" if path.exists() else "w+b", buffering=0)  # noqa: SIM115 - open for long
        self._good = os.fstat(self._file.fileno()).st_size
        self._unsettled = False

    def append(self, line: str) -> None:
        """Write at the last good byte; an error leaves the file as it was."""
        data = line.encode()
        descriptor = self._file.fileno()
        if self._unsettled:
            os.ftruncate(descriptor, self._good)
        self._unsettled = True
        try:
            write_all(descriptor, data, self._good)
            self._good += len(data)
        except BaseException:
            with suppress(OSError):  # then the next call does it, or fails
                os.ftruncate(descriptor, self._good)
            raise
        self._unsettled = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()
