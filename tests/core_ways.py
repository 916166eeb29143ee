"""The ways a fleet can run, for tests that go through all of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from envfleet.backends.pipe import PipeBackend


class SharingPipe(PipeBackend):
    """Worker processes with a thread for every slot, as servers use them."""

    def __init__(self, num_workers: int | None = None, start_method: str | None = "fork") -> None:
        super().__init__(num_workers, start_method or "fork", threads=True)


#: Name -> (backend, options): every way a fleet can run here. fork is the quickest to start, so it is the usual one.
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "serial": ("serial", {}),
    "thread": ("thread", {}),
    "aio": ("aio", {}),
    "scripted": ("scripted", {}),
    "pipe": ("pipe", {"start_method": "fork"}),
    "shm": ("shm", {"start_method": "fork"}),
}


def load_backend(where: str) -> Any:
    """The class behind "mine.py:Mine"."""
    path, _, name = where.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, f"--backend {where}: no such file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
