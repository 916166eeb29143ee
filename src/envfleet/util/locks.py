"""One writer at a time in a folder: a lock that is released when its process ends, also by SIGKILL, and names its owner."""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

from envfleet.errors import FolderBusy

_HELD: weakref.WeakSet[FolderLock] = weakref.WeakSet()
_watching_forks = False


class FolderLock:
    """Holds a folder from here to `close`; the kernel lets go of it when the process ends, also by SIGKILL.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> lock = FolderLock(folder / "_writer.lock", "writing to")
        >>> try:
        ...     FolderLock(folder / "_writer.lock", "writing to")
        ... except FolderBusy as busy:
        ...     busy.owner["pid"] == os.getpid()
        True
        >>> lock.close()
        >>> FolderLock(folder / "_writer.lock", "writing to").close()
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self._pid = os.getpid()
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - not "w": that would wipe the owner's name
        try:
            self._take(what)
        except BaseException:
            self._file.close()
            raise

    def _take(self, what: str) -> None:
        try:
            import fcntl
        except ImportError:  # no such locks on this system; two writers at once are then not noticed
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            raise FolderBusy(what, self.path.parent, _owner(self.path)) from held
        except OSError as error:
            warnings.warn(
                f"{self.path.parent} cannot be locked here ({error.strerror}): take care that one process at a time uses it",
                stacklevel=4,
            )
            return
        _HELD.add(self)
        _watch_forks()
        about = {"pid": self._pid, "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        try:
            os.ftruncate(self._file.fileno(), 0)
            self._file.write(json.dumps(about).encode())
        except OSError:
            pass  # a full disk: the lock is held, but without the name of its owner

    def close(self) -> None:
        """Release it; idempotent."""
        _HELD.discard(self)
        self._file.close()


def _owner(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
        return {name: str(found[name]) if name != "pid" else int(found[name]) for name in ("pid", "host", "since")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _watch_forks() -> None:
    """A forked child shares our lock and would hold it after our end: it closes its copy at once."""
    global _watching_forks
    if not _watching_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_let_go_of_copies)
        _watching_forks = True


def _let_go_of_copies() -> None:
    for lock in list(_HELD):
        lock.close()
