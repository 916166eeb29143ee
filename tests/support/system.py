"""What tests need of the operating system: child processes that find the package and the helpers, limits, waiting."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import envfleet

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = Path(envfleet.__file__).parents[1]  # where the package under test was imported from: src/, a wheel, a sanitized build


def child_env(**changes: str) -> dict[str, str]:
    """Variables for a child process that imports the same `envfleet` and `tests.support`."""
    paths = [str(PACKAGES), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **changes}


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for something outside this process; fails when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        threading.Event().wait(0.01)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: the write that crosses the line is short, the next one fails (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
