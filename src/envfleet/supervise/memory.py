"""Memory without a name: shared between parent and workers by file descriptor, gone when the last holder is.

Nothing appears in /dev/shm, so nothing can be left there, whoever is killed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from typing import Any

import numpy as np

from envfleet.slot import PHASES

_PHASE_NUMBERS = {name: number for number, name in enumerate(PHASES)}


def anonymous_file(name: str) -> int:
    """A file descriptor of a file without a name: memory on Linux, an unlinked temporary file elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


class Segment:
    """A block of shared memory.

    Example:
        >>> segment = Segment.create(4096)
        >>> other = Segment(os.dup(segment.fd), 4096)   # what a worker does with the descriptor it was handed
        >>> segment.map[0] = 7; other.map[0]
        7
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.map = mmap.mmap(fd, size_bytes)

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """New memory, all zeros."""
        fd = anonymous_file("envfleet")
        os.ftruncate(fd, size_bytes)
        return cls(fd, size_bytes)

    def close(self) -> None:
        """Give back the descriptor. The mapping lives until the last array over it is gone, as it must."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        try:
            self.map.close()
        except BufferError:
            pass  # arrays handed out with copy=False still look at it; it is unmapped when they go


class Pulse:
    """What a worker is doing right now: (slot, phase, since when), written by it, read by the supervisor.

    Three int64 per worker. A torn read costs one late or early look at the clock, never a wrong kill: a worker is only
    ended when two looks in a row show the same call past its deadline.
    """

    def __init__(self, words: np.ndarray[Any, Any]) -> None:
        self.words = words

    @classmethod
    def local(cls, num_workers: int) -> list[Pulse]:
        """Pulses for workers of this process."""
        block = np.zeros((num_workers, 8), np.int64)
        block[:, 0] = -1
        return [cls(block[i]) for i in range(num_workers)]

    def enter(self, slot: int, phase: str) -> None:
        """Say what is about to be done (`slot` -1: nothing)."""
        words = self.words
        words[2] = time.monotonic_ns()
        words[1] = _PHASE_NUMBERS[phase]
        words[0] = slot

    def read(self) -> tuple[int, str, float]:
        """(slot or -1, phase, seconds on the monotonic clock when it was entered)."""
        slot, phase, since = (int(word) for word in self.words[:3])
        return slot, PHASES[phase], since / 1e9
