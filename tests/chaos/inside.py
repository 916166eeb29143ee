"""The only place that looks behind the fleet's public interface: process numbers, and who holds a slot."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np


def worker_pids(fleet: Any) -> dict[int, int]:
    """Worker -> process number, of the workers that are processes and alive."""
    parts = [(part.backend, part.first_worker) for part in getattr(fleet._backend, "parts", ())] or [(fleet._backend, 0)]
    return {
        w.index + first: w.pid for backend, first in parts for w in getattr(backend, "_workers", ()) if getattr(w, "alive", False)
    }


def keeper_pid(fleet: Any) -> int:
    """The process that starts the workers."""
    keeper = fleet._backend._keeper
    for name in ("pid", "_pid"):
        if isinstance(getattr(keeper, name, None), int):
            return int(getattr(keeper, name))
    return int(keeper._process.pid)


def worker_of(fleet: Any) -> list[int]:
    """The worker of every slot."""
    return [int(worker) for worker in fleet._backend.worker_of]


def out_slots(fleet: Any) -> list[int]:
    """Slots that are sent and not yet received. What an interrupt left half done is settled first, as every call does."""
    fleet._backend.settle()
    return [int(slot) for slot in np.flatnonzero(fleet._table.state != 0)]


def is_lost(fleet: Any, slot: int) -> bool:
    """Whether the slot's env is known to be gone: the next row of a step will be a fault row."""
    return bool(fleet._supervisor.lost[slot])


def send_signal(pid: int, number: int) -> bool:
    """Signal one process of ours; whether it was there."""
    if pid <= 1 or pid == os.getpid():
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def cont(pid: int) -> None:
    """Let a stopped process go on."""
    send_signal(pid, signal.SIGCONT)


def worker_pids_alive(fleet: Any) -> list[int]:
    """Worker processes that really run."""
    from envfleet.testing import alive

    return [pid for pid in worker_pids(fleet).values() if alive(pid)]


def interrupt_once(fleet: Any, name: str, error: type[BaseException]) -> None:
    """The backend's next call of this name raises, as a signal handler would."""
    backend = fleet._backend
    real = getattr(backend, name)

    def once(*args: Any) -> Any:
        setattr(backend, name, real)
        raise error

    setattr(backend, name, once)
