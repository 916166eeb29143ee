"""A worker as a Ray actor: Ray starts, places and ends it; commands and rows come over a connection of its own.

Ray's way to call an actor costs about a millisecond of the parent's time for each message, a connection some ten microseconds.
Where only Ray's own ports are open, `RelayedRayWorker` takes the same messages by calls.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

import numpy as np

from envfleet.errors import BadArgument
from envfleet.workers.beats import Beats
from envfleet.workers.channel import Channel, Closed, pair
from envfleet.workers.stream import StreamChannel, prove
from envfleet.workers.threaded_worker import LockedChannel
from envfleet.workers.worker import Worker

#: How long a peer may take to prove that it has the key.
_PROOF_S = 10.0
#: How long a call of `swap` waits for frames.
_SWAP_S = 5.0
#: How long one wait for a connection lasts: then it is seen whether somebody has proved it.
_LOOK_S = 0.02


class RayWorker:
    """The class behind the actors of backend "ray". One call of `listen`, then one of `serve`, which lasts as long as the worker."""

    def listen(self, key: bytes, ports: tuple[int, int] | None) -> dict[str, Any]:
        """Open a port for the parent, and say where."""
        self._key, here = key, about_here()
        self._door = _bound(here["host"], ports)
        return {**here, "port": self._door.getsockname()[1]}

    def serve(self) -> None:
        """Let the parent in, and nobody else; then work until it closes the connection."""
        with self._door:
            sock = self._let_in()
        work(StreamChannel(sock, self._key))

    def _let_in(self) -> socket.socket:
        """The first one who has the key. Each is asked in a thread of its own: those who say nothing keep nobody out."""
        found: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._door.settimeout(_LOOK_S)
        while found.empty():
            with contextlib.suppress(TimeoutError, ConnectionError):
                sock, _ = self._door.accept()
                threading.Thread(target=self._ask, args=(sock, found), daemon=True).start()
        return found.get()

    def _ask(self, sock: socket.socket, found: queue.SimpleQueue[socket.socket]) -> None:
        if prove(sock, self._key, is_parent=False, timeout_s=_PROOF_S):
            found.put(sock)
        else:
            sock.close()


class RelayedRayWorker:
    """The same where messages come by Ray's calls: `swap` beside `serve`, in two threads of its own."""

    def listen(self, key: bytes, ports: tuple[int, int] | None) -> dict[str, Any]:
        """Make the two ends that this process relays between. Both block; each direction has a thread of its own."""
        near, self._inside = pair()
        near.sock.setblocking(True)
        self._outside = Channel(near.sock)
        self._poller = select.poll()
        self._poller.register(near.sock, select.POLLIN)
        self._order = threading.Condition()
        self._given, self._taken = 0, 0  # the last call whose frames were given to the worker, and that took frames of it
        return {**about_here(), "port": 0}

    def serve(self) -> None:
        """Work until the parent closes."""
        work(LockedChannel(self._inside))

    def swap(self, numbered: tuple[int, list[bytes]]) -> list[bytes] | None:
        """Give the worker frames; what it says, as soon as it says something. None: it has ended.

        Calls act in the order of their numbers, though threads run them. One that waits ends, with nothing, when the next one comes.
        """
        number, frames = numbered
        with self._order:
            self._order.wait_for(lambda: self._given == number - 1)
            for frame in frames:
                with contextlib.suppress(Closed):  # what it said before its end is still to be taken
                    self._outside.send(frame)
            self._given = number
            self._order.notify_all()
            self._order.wait_for(lambda: self._taken == number - 1)
        found = self._take(number, time.monotonic() + _SWAP_S)
        with self._order:
            self._taken = number
            self._order.notify_all()
        return found

    def _take(self, number: int, until: float) -> list[bytes] | None:
        found: list[bytes] = []
        try:
            while not found and self._given == number and (left := until - time.monotonic()) > 0:
                self._poller.poll(min(left, _LOOK_S) * 1000)
                while self._poller.poll(0):
                    found.append(self._outside.recv())
        except Closed:
            return found or None
        return found


def about_here() -> dict[str, Any]:
    """What the parent wants to know of an actor's process."""
    import ray

    from envfleet import __version__

    context = ray.get_runtime_context()
    return {
        "version": __version__,
        "python": sys.version_info[:2],
        "pid": os.getpid(),
        "node": context.get_node_id(),
        "host": ray.util.get_node_ip_address(),
    }


def work(channel: Channel) -> None:
    """Be a worker on this channel until the parent closes it."""
    channel.owner = os.getpid()
    with contextlib.suppress(ValueError):  # not the main thread, which alone gets signals
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    words = np.zeros((1, 8), np.int64)
    words[0, 0] = -1
    with contextlib.suppress(Closed):  # the parent is gone
        start = pickle.loads(channel.recv())  # its code was checked: it is the parent's
        # The parent's folders may not exist here, or hold something else: what is installed here comes first.
        start["path"] = [*sys.path, *(folder for folder in start["path"] if folder not in sys.path)]
        os.environ.update(start["environ"])  # settings of ours, as a local worker inherits them
        beats = Beats(channel, words[0], *start["beats"])
        try:
            Worker(channel, words, {**start, "worker": 0}).serve()
        finally:
            beats.stop()
    with contextlib.suppress(OSError):
        channel.sock.shutdown(socket.SHUT_RDWR)
    channel.close()


def _bound(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """A listening socket on one of the ports, or on any free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(ports[0], ports[1] + 1) if ports is not None else (0,):
        door = socket.socket(family, socket.SOCK_STREAM)
        try:
            door.bind((host, port))
            door.listen(8)
            return door
        except OSError:
            door.close()
    raise BadArgument(f"no free port on {host} in ports={ports}: give a range with a port for every worker of a machine")
