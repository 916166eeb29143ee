"""Frames by Ray's calls, where no other port than Ray's is open: two threads between a socket pair and an actor.

A call costs the driver about a third of a millisecond, so the answer of the call that brings frames to the actor brings back what the
worker has to say to them: one call for a step. Calls that only wait for frames are made while nothing is sent.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from typing import Any

from envfleet.workers.channel import Channel, Closed
from envfleet.workers.protocol import num_rows
from envfleet.workers.threaded_worker import LockedChannel

#: How long nothing may be sent, while no row is missing, until a call waits for whatever the worker says by itself.
_IDLE_S = 0.02


class Relay:
    """What comes over `theirs`, the far end of a worker's channel, becomes calls of `swap`; what they return is sent there.

    It ends when the actor or the near end is gone.
    """

    def __init__(self, actor: Any, theirs: Channel) -> None:
        self._swap, self._theirs = actor.swap.options(concurrency_group="swap"), LockedChannel(theirs)
        self._lock = threading.Lock()
        self._number = 0  # of the last call; the actor takes them in this order. With the lock
        self._missing = 0  # rows that were asked for and did not come. With the lock
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()  # in order; None: the near end is gone
        for work in (self._down, self._up):
            threading.Thread(target=work, name="envfleet-ray-relay", daemon=True).start()

    def _call(self, frames: list[bytes]) -> None:
        with self._lock:
            self._number += 1
            self._missing += sum(map(num_rows, frames))
            self._calls.put(self._swap.remote((self._number, frames)))  # one argument: Ray serialises each by itself

    def _down(self) -> None:
        """Frames of the parent."""
        with contextlib.suppress(Closed):  # both threads see it
            while True:
                frames = [self._theirs.recv()]
                while self._theirs.has_frame():
                    frames.append(self._theirs.recv())
                self._call(frames)
        self._calls.put(None)

    def _up(self) -> None:
        """Frames of the worker, in the order of the calls."""
        import ray

        with contextlib.suppress(Closed, ray.exceptions.RayError):  # the actor or the parent is gone
            while (call := self._next()) is not None and (frames := ray.get(call)) is not None:
                for frame in frames:
                    self._theirs.send(frame)
                with self._lock:
                    self._missing -= sum(map(num_rows, frames))
        with contextlib.suppress(OSError):
            self._theirs.sock.shutdown(socket.SHUT_RDWR)  # both ends see it

    def _next(self) -> Any:
        while True:
            try:
                return self._calls.get(timeout=0.0 if self._missing > 0 else _IDLE_S)
            except queue.Empty:
                self._call([])
