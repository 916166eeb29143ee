"""Memory without a name: shared between parent and workers by file descriptor, freed when the last of them ends.

Nothing appears in /dev/shm, so nothing can be left there, whichever process is killed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import mmap
import os
import tempfile
import time
import weakref
from typing import Any

import numpy as np

from envfleet.errors import FleetError
from envfleet.slots.slot_life import PHASES
from envfleet.util.machine import usable_cpus

_PHASE_NUMBERS = {name: number for number, name in enumerate(PHASES)}


def anonymous_file(name: str) -> int:
    """A file descriptor of a file without a name: memory on Linux, an unlinked temporary file elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())


def owned(fd: int) -> io.FileIO:
    """An object that closes a descriptor exactly once, also after interrupts and repeated calls."""
    return io.FileIO(fd, "r+b")


class Segment:
    """A block of shared memory.

    Example:
        >>> segment = Segment.create(4096)
        >>> other = Segment(os.dup(segment.fileno()), 4096)   # what a worker does with the descriptor it was handed
        >>> segment.map[0] = 7; other.map[0]
        7
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._file = owned(fd)
        self.size_bytes = size_bytes
        self.map = _mapped(fd, size_bytes)

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """New memory, all zeros."""
        fd = anonymous_file("envfleet")
        try:
            os.ftruncate(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise FleetError(
                f"cannot get {size_bytes:,} bytes of shared memory ({error.strerror}): raise the limit (`ulimit -f`, the "
                "container's memory), use fewer slots, or backend='pipe'"
            ) from error
        return cls(fd, size_bytes)

    def close(self) -> None:
        """Give back the descriptor. The mapping lives until the last array over it is gone, as it must."""
        self._file.close()
        self.map = None

    def fileno(self) -> int:
        """The descriptor."""
        return self._file.fileno()


def _mapped(fd: int, size_bytes: int) -> Any:
    """The file's bytes as a buffer that is unmapped when the last array over it is gone.

    Not `mmap.mmap`: that keeps a descriptor of its own open as long as the memory is in use.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype, libc.munmap.restype = ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size_bytes} bytes of shared memory: {os.strerror(number)}")
    buffer = (ctypes.c_ubyte * size_bytes).from_address(address)
    # At exit the end of the process unmaps it; earlier, arrays may still use the memory.
    weakref.finalize(buffer, libc.munmap, address, size_bytes).atexit = False
    return buffer


#: Measured on 2 CPUs, steps/s with 4 ms, with this and with 0: 6 AntDirs, each at its own pace: 4,280, 4,740, 4,750; 8 workers with 64 CartPoles, all
#: together: 307k, 316k, 230k.
_CROWDED_SPIN_S = 0.0003


@dataclasses.dataclass(frozen=True)
class SharedMap:
    """Where things are in a fleet's shared memory: rows, then (with the compiled core) doorbell, then infos."""

    slab_bytes: int
    num_workers: int
    num_slots: int
    exchange_bytes: int = 0  # 0: no compiled doorbell, slots travel over sockets
    arena_bytes: int = 0  # per slot
    spin_s: float = 0.004
    spare: int = 0  # 1: the parent has a share of its own, see `ProcessBackend`
    keep_obs: bool = True  # see Slab.keep

    @property
    def size_bytes(self) -> int:
        """The size of the whole memory in bytes."""
        return self.slab_bytes + self.exchange_bytes + self.arena_bytes * self.num_slots

    def open(self, compiled: Any, segment: Segment, me: int, board: Any = None) -> tuple[Any, np.ndarray[Any, Any]]:
        """The doorbell as worker `me` (-1: a parent that does not step) and the infos, one row of bytes per slot.

        `board`: where the parent counts turns, see `Backend`; a worker has none.
        """
        memory = memoryview(segment.map).cast("B")[self.slab_bytes : self.slab_bytes + self.exchange_bytes]
        # Who spins takes a CPU that somebody who steps may need. A parent that only waits does not, where every CPU has a worker: to wake it is cheap,
        # no CPU is idle. Of more workers than CPUs, each spins through gaps only that are about as short as a wake-up.
        waits_only, free_cpus = me < 0 or me == self.num_workers, usable_cpus() - self.num_workers
        longest_s = 0.0 if waits_only else _CROWDED_SPIN_S
        spin_s = self.spin_s if free_cpus > 0 or (free_cpus == 0 and not waits_only) else min(self.spin_s, longest_s)
        exchange = compiled.Exchange(
            memory, self.num_workers + self.spare, self.num_slots, me, spin_s, board is not None, False, board
        )
        at = self.slab_bytes + self.exchange_bytes
        arena = np.ndarray((self.num_slots, self.arena_bytes), np.uint8, buffer=segment.map, offset=at)
        return exchange, arena


class Pulse:
    """What a worker is doing right now: (slot, phase, since when), written by it, read by the supervisor.

    Three int64 per worker. A torn read makes one check late or early, but never kills a worker wrongly: a worker is ended
    only when two checks in a row show the same call past its deadline.
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
        """Write what is done next (`slot` -1: nothing)."""
        words = self.words
        words[2] = time.monotonic_ns()
        words[1] = _PHASE_NUMBERS[phase]
        words[0] = slot

    def read(self) -> tuple[int, str, float]:
        """(slot or -1, phase, seconds on the monotonic clock when it was entered)."""
        slot, phase, since = (int(word) for word in self.words[:3])
        return slot, PHASES[phase], since / 1e9
