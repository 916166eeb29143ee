"""The ways a fleet can run, for tests that go through all of them."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.backends.pipe import PipeBackend
from envfleet.backends.shm import ShmBackend
from envfleet.backends.slot_mover import Mover
from envfleet.slots.layout import FAULT
from envfleet.slots.slab import Slots
from envfleet.testing.conformance import Start
from tests.support.scripted_backend import ScriptedBackend


class SharingPipe(PipeBackend):
    """Worker processes with a thread for every slot, as servers use them."""

    def __init__(self, num_workers: int | None = None, start_method: str | None = "fork") -> None:
        super().__init__(num_workers, start_method or "fork", threads=True)


class MovingShm(ShmBackend):
    """shm whose slots move into the parent and back all the time, at random moments at which they may."""

    def __init__(
        self,
        num_workers: int | None = None,
        start_method: str | None = "fork",
        isolate: bool = True,
        seed: int = 0,
        chance: float = 0.1,
    ) -> None:
        super().__init__(num_workers, start_method or "fork", isolate, mover=Mover(0))
        self.draw, self.chance = random.Random(seed), chance
        self.num_moves = 0
        self.refused: dict[int, str] = {}

    def round(self, slots: Slots, timeout_s: float) -> bool:
        plain = super().round(slots, timeout_s)
        self.shake()
        return plain

    def wait(self, at_least: int, timeout_s: float) -> None:
        super().wait(at_least, timeout_s)
        if timeout_s:  # else a call of the env's interface may be under way
            self.shake()

    def shake(self) -> None:
        """Move some of the slots that nobody works on."""
        if self._exchange is None or self.draw.random() > 3 * self.chance or self.has_trouble:
            return
        free = (self.given == self.done) & (self.slab.head["status"] != FAULT)
        some = [slot for slot in np.flatnonzero(free).tolist() if self.draw.random() < self.chance]
        before = self.worker_of.copy()
        moved, here = self.moved(), self.resident()
        self.refused |= self.move_in([slot for slot in some if not here[slot]])
        self.refused |= self.move_back([slot for slot in some if moved[slot]])
        self.num_moves += int((before != self.worker_of).sum())


#: Name -> (backend, options): every way a fleet can run here. fork is the quickest to start, so it is the usual one.
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "serial": ("serial", {}),
    "thread": ("thread", {}),
    "aio": ("aio", {}),
    "scripted": (ScriptedBackend, {}),
    "pipe": ("pipe", {"start_method": "fork"}),
    "shm": ("shm", {"start_method": "fork"}),
}


def starter(way: str) -> Start:
    """Starts fleets in one of the ways."""
    backend, options = WAYS[way]
    return Start(backend, **options)


def load_backend(where: str) -> Any:
    """The class behind "mine.py:Mine"."""
    path, _, name = where.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, f"--backend {where}: no such file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
