"""Frames over a socket pair, between the parent and one worker (or the keeper).

A frame is sent as numbered messages, which the kernel delivers whole. The worker's end blocks. The parent's end never
blocks: messages that a worker does not read yet are kept in an outbox, and what it sends is read meanwhile, so two full
buffers cannot deadlock.

The parent's end survives an exception between any two of its lines (Ctrl-C, a signal handler that raises). A frame is
sent from the moment one `deque.extend` has put it into the outbox. A message is removed only after it was handled;
if that is interrupted, it is sent or read a second time, and its number shows this.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

_HEAD = struct.Struct("=QB")  # number of the message, flags
_FIRST, _LAST = 1, 2
#: Bytes of a frame in one message: well below what the smallest usual socket buffer (208 KiB) takes.
_PART = 1 << 16
# Linux has sockets that keep message boundaries and report the end of the other side; elsewhere datagrams come closest.
_KIND = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
#: How long `flush` waits for a worker that takes nothing.
_PATIENCE_S = 0.2


class Closed(Exception):
    """The other end is gone."""


class HasFileno(Protocol):
    """Something with a file descriptor of its own."""

    def fileno(self) -> int:
        """The descriptor."""
        ...


def _messages(data: bytes, number: int) -> list[bytes]:
    """A frame as messages, the first with this number."""
    if len(data) <= _PART:
        return [_HEAD.pack(number, _FIRST | _LAST) + data]
    view, last = memoryview(data), (len(data) - 1) // _PART
    return [
        _HEAD.pack(number + i, (_FIRST if i == 0 else 0) | (_LAST if i == last else 0)) + view[i * _PART : (i + 1) * _PART]
        for i in range(last + 1)
    ]


class Channel:
    """The blocking end: `send` and `recv` whole frames, in order.

    Example:
        >>> ours, theirs = pair()
        >>> ours.send(b"hello"); theirs.recv()
        b'hello'
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._sent = 0  # number of the last message sent
        self._got = 0  # and of the last one received
        self.owner: int | None = None  # the only process that may use it, where it matters

    def _end_if_forked(self) -> None:
        # An env has forked and the child returned from the call: it must neither send nor receive.
        if self.owner is not None and os.getpid() != self.owner:
            os._exit(1)

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self.sock.fileno()

    def send(self, data: bytes) -> None:
        """Send one frame."""
        self._end_if_forked()
        try:
            for message in _messages(data, self._sent + 1):
                self.sock.send(message)
                self._sent += 1
        except OSError as gone:
            raise Closed from gone

    def recv(self) -> bytes:
        """Wait for the next frame."""
        self._end_if_forked()
        parts = []
        while True:
            try:
                message = self.sock.recv(_PART + _HEAD.size)
            except OSError as gone:
                raise Closed from gone
            flags = self._number(message)
            if flags is None:
                continue
            parts.append(message[_HEAD.size :])
            if flags & _LAST:
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def _number(self, message: bytes) -> int | None:
        """The flags of the next message, None for one that was sent twice."""
        if not message:
            raise Closed
        number, flags = _HEAD.unpack_from(message)
        if number <= self._got:
            return None
        if number != self._got + 1:
            raise Closed  # one is missing: nothing that follows can be trusted
        self._got = number
        return int(flags)

    def has_frame(self) -> bool:
        """Whether `recv` would return at once: a frame, or the end of the other side. Not for a message that was sent twice."""
        while True:
            try:
                head = self.sock.recv(_HEAD.size, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not head or _HEAD.unpack_from(head)[0] > self._got:
                return True
            self.sock.recv(1)

    def recv_fds(self, count: int) -> list[int]:
        """Take the file descriptors that follow the frame just received."""
        while True:
            message, fds, _, _ = socket.recv_fds(self.sock, _HEAD.size, count)
            if self._number(message) is None:
                for fd in fds:
                    os.close(fd)
                continue
            if len(fds) != count:
                raise Closed
            for fd in fds:
                os.set_inheritable(fd, False)  # processes that an env starts must not keep our sockets and memory open
            return list(fds)

    @property
    def hung_up(self) -> bool:
        """Whether the other end is closed, also while frames it sent before are still to be read."""
        poller = select.poll()
        poller.register(self.sock, getattr(select, "POLLRDHUP", 0))  # POLLHUP is always reported
        return bool(poller.poll(0))

    def close(self) -> None:
        """Close this end."""
        self.sock.close()


class ParentChannel:
    """The parent's end: never blocks forever. See the module docstring for interrupts."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.eof = False
        self._outbox: deque[tuple[int, bytes, Sequence[HasFileno]]] = deque()  # (number, message, files)
        self._sent = 0
        self._inbox: deque[bytes] = deque()  # messages, with their heads
        self._got = 0  # number of the last message that left the inbox

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self.sock.fileno()

    # -- sending ------------------------------------------------------------------------------------------------

    def send(self, data: bytes, files: Sequence[HasFileno] = ()) -> None:
        """Send one frame; what the other end does not take now is sent by a later `flush` or `wait`.

        The descriptors of `files` follow it: the other end takes them with `recv_fds` right behind the frame. A `Channel` among
        them is handed over and closed here once it is sent; the outbox holds the objects, so no interrupt can lose a descriptor.
        """
        self.post(data, files)
        self.flush()

    @property
    def next_number(self) -> int:
        """The number of the next message; all below it will be delivered."""
        return self._outbox[-1][0] + 1 if self._outbox else self._sent + 1

    def post(self, data: bytes, files: Sequence[HasFileno] = ()) -> None:
        """Put a frame into the outbox: one step, done or not done."""
        first = self.next_number
        entries: list[tuple[int, bytes, Sequence[HasFileno]]]
        entries = [(first + i, message, ()) for i, message in enumerate(_messages(data, first))]
        if files:
            number = first + len(entries)
            entries.append((number, _HEAD.pack(number, _FIRST | _LAST), files))
        self._outbox.extend(entries)

    @property
    def pending(self) -> bool:
        """Whether something waits in the outbox."""
        return bool(self._outbox)

    def flush(self, patience_s: float = _PATIENCE_S) -> None:
        """Send what is in the outbox, reading meanwhile; stops when the other end takes nothing for a while."""
        give_up = 0.0
        while self._outbox:
            number, message, files = self._outbox[0]
            try:
                self._send_one(number, message, files)
            except BlockingIOError:
                self.pump()
                now = time.monotonic()
                give_up = give_up or now + patience_s
                if self.eof:
                    raise Closed from None
                if now >= give_up:
                    return
                _poll(self.sock, select.POLLIN | select.POLLOUT, give_up - now)
                continue
            except OSError as gone:
                raise Closed from gone
            give_up = 0.0
            self._sent = number
            self._outbox.popleft()
            _close_channels(files)

    def _send_one(self, number: int, message: bytes, files: Sequence[HasFileno]) -> None:
        """Send one message; a BlockingIOError when the other end does not take it now."""
        if files:
            socket.send_fds(self.sock, [message], [file.fileno() for file in files])
        else:
            self.sock.send(message)

    # -- receiving ----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Read what is there into the inbox; sets `eof` when the other end is gone."""
        while True:
            try:
                message = self.sock.recv(_PART + _HEAD.size, socket.MSG_PEEK)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self.eof = True
                return
            (number, _), last = _HEAD.unpack_from(message), self._last_read()
            if number == last + 1:
                self._inbox.append(message)
            elif number > last:
                self.eof = True  # one is missing: nothing that follows can be trusted
                return
            self.sock.recv(1)  # now that it is kept: the kernel drops the whole message

    @property
    def has_message(self) -> bool:
        """Whether messages are in the inbox: after an interrupt, the socket does not show them any more."""
        return bool(self._inbox)

    def _last_read(self) -> int:
        return int(_HEAD.unpack_from(self._inbox[-1])[0]) if self._inbox else self._got

    def peek(self) -> memoryview | None:
        """The oldest frame that has arrived, None when there is none. It stays until `drop`."""
        inbox = self._inbox
        while inbox and not inbox[0][8] & _FIRST:  # the rest of a frame whose removal was interrupted
            self._remove()
        if not inbox:
            return None
        if inbox[0][8] & _LAST:
            return memoryview(inbox[0])[_HEAD.size :]
        parts = []
        for message in inbox:
            parts.append(memoryview(message)[_HEAD.size :])
            if message[8] & _LAST:
                return memoryview(b"".join(parts))
        return None

    def drop(self) -> None:
        """Remove the frame that `peek` returned: it was handled."""
        while self._inbox and not self._remove() & _LAST:
            pass

    def _remove(self) -> int:
        number, flags = _HEAD.unpack_from(self._inbox[0])
        self._got = number
        self._inbox.popleft()
        return int(flags)

    def take(self) -> bytes | None:
        """`peek` and `drop`, for callers that cannot be interrupted: a thread other than the main one."""
        frame = self.peek()
        if frame is None:
            return None
        self.drop()
        return bytes(frame)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a frame is there or the other end is gone, or the time is over; flushes the outbox meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            if self.pending and not self.eof:
                with contextlib.suppress(Closed):
                    self.flush(0.0)
            self.pump()
            left = deadline - time.monotonic()
            if self.peek() is not None or self.eof:
                return True
            if left <= 0:
                return False
            _poll(self.sock, select.POLLIN | (select.POLLOUT if self.pending else 0), left)

    def close(self) -> None:
        """Close this end."""
        while self._outbox:
            _close_channels(self._outbox.popleft()[2])
        self.sock.close()


def _close_channels(files: Sequence[HasFileno]) -> None:
    for file in files:
        if isinstance(file, Channel):
            file.close()


def _poll(sock: socket.socket, events: int, timeout_s: float) -> None:
    """Wait for events on one socket. poll, not select: descriptors above 1023 are fine."""
    poller = select.poll()
    poller.register(sock, events)
    poller.poll(max(0.0, timeout_s) * 1000)


def pair() -> tuple[ParentChannel, Channel]:
    """A parent's end and the other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, _KIND)
    for sock in (ours, theirs):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
    return ParentChannel(ours), Channel(theirs)
