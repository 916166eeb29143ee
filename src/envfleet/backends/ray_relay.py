"""Frames by Ray's calls, where no other port than Ray's is open: two threads between a socket pair and an actor."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from envfleet.workers.channel import Channel, Closed
from envfleet.workers.threaded_worker import LockedChannel

#: How long one call of `take` waits for frames.
_TAKE_S = 5.0


class Relay:
    """What comes over `theirs`, the far end of a worker's channel, becomes calls of `put`; what `take` gives is sent there.

    It ends when the actor or the near end is gone.
    """

    def __init__(self, actor: Any, theirs: Channel) -> None:
        self._actor, self._theirs = actor, LockedChannel(theirs)
        for work in (self._down, self._up):
            threading.Thread(target=work, name="envfleet-ray-relay", daemon=True).start()

    def _down(self) -> None:
        """Frames of the parent, in order: the calls of a concurrency group with one thread are made one after another."""
        with contextlib.suppress(Closed):  # both threads see it
            while True:
                frames = [self._theirs.recv()]
                while self._theirs.has_frame():
                    frames.append(self._theirs.recv())
                self._actor.put.options(concurrency_group="put").remote(frames)

    def _up(self) -> None:
        import ray

        with contextlib.suppress(Closed, ray.exceptions.RayError):  # the actor or the parent is gone
            while (frames := ray.get(self._actor.take.options(concurrency_group="take").remote(_TAKE_S))) is not None:
                for frame in frames:
                    self._theirs.send(frame)
        with contextlib.suppress(OSError):
            self._theirs.sock.shutdown(socket.SHUT_RDWR)  # both ends see it
