"""Frames over a socket pair, between the parent and one worker (or the keeper).

The worker's end blocks. The parent's end never does: when a worker does not take what is sent because it is itself
waiting to be read, the parent reads first. Two full buffers therefore cannot lock each other.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections import deque
from typing import Any

_LENGTH = struct.Struct("=Q")


class Closed(Exception):
    """The other end is gone."""


class Channel:
    """The blocking end: `send` and `recv` whole frames, in order.

    Example:
        >>> ours, theirs = pair()
        >>> ours.send(b"hello"); theirs.recv()
        b'hello'
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self.sock.fileno()

    def send(self, data: bytes) -> None:
        """Send one frame."""
        try:
            self.sock.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as gone:
            raise Closed from gone

    def recv(self) -> bytes:
        """Wait for the next frame."""
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view, got = memoryview(data), 0
        while got < count:
            try:
                part = self.sock.recv_into(view[got:])
            except OSError as gone:
                raise Closed from gone
            if not part:
                raise Closed
            got += part
        return bytes(data)

    def send_fds(self, fds: list[int]) -> None:
        """Hand over file descriptors; the other end takes them with `recv_fds` at the same place in the stream."""
        try:
            socket.send_fds(self.sock, [b"F"], fds)
        except OSError as gone:
            raise Closed from gone

    def recv_fds(self, count: int) -> list[int]:
        """Take file descriptors handed over by `send_fds`."""
        _, fds, _, _ = socket.recv_fds(self.sock, 1, count)
        if len(fds) != count:
            raise Closed
        for fd in fds:
            os.set_inheritable(fd, False)  # what an env starts must not keep our sockets and memory open
        return list(fds)

    def close(self) -> None:
        """Close this end."""
        self.sock.close()


class ParentChannel(Channel):
    """The parent's end: never blocks for good; incoming frames queue up in `inbox`."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.setblocking(False)
        self.inbox: deque[bytes] = deque()
        self.eof = False
        self._partial = bytearray()

    def send(self, data: bytes) -> None:
        """Send one frame, reading whatever arrives meanwhile. A Ctrl-C waits until the frame is whole."""
        view = memoryview(_LENGTH.pack(len(data)) + data)
        interrupt: KeyboardInterrupt | None = None
        while view:
            try:
                view = view[self.sock.send(view) :]
            except KeyboardInterrupt as pressed:
                interrupt = pressed  # half a frame would make nonsense of every later one
            except BlockingIOError:
                if _poll(self.sock, select.POLLIN | select.POLLOUT, 1.0) & select.POLLIN:
                    self.pump()
                if self.eof:
                    raise Closed from None
            except OSError as gone:
                raise Closed from gone
        if interrupt is not None:
            raise interrupt

    def pump(self) -> None:
        """Read what is there into `inbox`; sets `eof` when the other end is gone."""
        while True:
            try:
                part = self.sock.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                self.eof = True
                break
            self._partial += part
            if len(part) < 1 << 16:
                break
        self._split()

    def _split(self) -> None:
        data, at = self._partial, 0
        while len(data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            if len(data) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            self.inbox.append(bytes(memoryview(data)[at : at + length]))
            at += length
        if at:
            del data[:at]

    def wait(self, timeout_s: float) -> bool:
        """Wait until something can be read, or the time is over."""
        if self.inbox:
            return True
        if not _poll(self.sock, select.POLLIN, timeout_s):
            return False
        self.pump()
        return True


def _poll(sock: socket.socket, events: int, timeout_s: float) -> int:
    """Which events are there, 0 when the time is over. poll, not select: descriptors above 1023 are fine."""
    poller = select.poll()
    poller.register(sock, events)
    found = poller.poll(max(0.0, timeout_s) * 1000)
    return (
        found[0][1] | select.POLLIN
        if found and found[0][1] & (select.POLLHUP | select.POLLERR)
        else (found[0][1] if found else 0)
    )


def pair() -> tuple[ParentChannel, Channel]:
    """A parent's end and the other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for sock in (ours, theirs):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
    return ParentChannel(ours), Channel(theirs)


def unpickled(data: bytes) -> Any:
    """A message of our own worker or parent. Only ever used on our own socket pairs."""
    import pickle

    return pickle.loads(data)
