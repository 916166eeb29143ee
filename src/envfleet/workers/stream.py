"""Frames over a TCP connection, between the parent and a worker on another machine.

The same numbered messages as over a socket pair (`envfleet.workers.channel`), each with its length and a code that only the two
ends can make: BLAKE2b with a key that both got in another way. Nothing of a message is looked at before its code is checked. So
whoever can write to the connection, but does not have the key, can end it and do nothing else. Nothing is encrypted.

The parent's end survives an exception between any two of its lines, as that of a socket pair does. A stream has no
message boundaries, so it must never be unknown how many bytes were sent or read. `deque.extend(map(sock.send, …))` calls the
system and keeps the answer without running Python code in between, and signal handlers run only between Python code.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence

from envfleet.workers.channel import _HEAD, _LAST, _PART, Channel, Closed, HasFileno, ParentChannel, _messages

_LENGTH = struct.Struct("!I")
_CODE_BYTES = 16
_NONCE_BYTES = 32
#: Bytes of the longest message; a longer one is not from us.
_MOST = _CODE_BYTES + _HEAD.size + _PART
#: How many messages of one frame the parent keeps: 1 GiB.
_MOST_MESSAGES = 1 << 14
_READ = 1 << 18
TO_WORKER, TO_PARENT = b"to worker", b"to parent"


class _Codes:
    """Codes of messages in one direction. The number in a message makes equal ones differ."""

    def __init__(self, key: bytes, direction: bytes) -> None:
        self._begun = hashlib.blake2b(key=key, digest_size=_CODE_BYTES, person=direction)

    def of(self, message: bytes | memoryview) -> bytes:
        code = self._begun.copy()
        code.update(message)
        return code.digest()

    def packed(self, message: bytes) -> bytes:
        return b"".join((_LENGTH.pack(_CODE_BYTES + len(message)), self.of(message), message))

    def checked(self, body: bytes | memoryview) -> bytes | None:
        """The message of a body, None if its code is wrong."""
        message = bytes(body[_CODE_BYTES:])
        return message if hmac.compare_digest(bytes(body[:_CODE_BYTES]), self.of(message)) else None


def prove(sock: socket.socket, key: bytes, is_parent: bool, timeout_s: float) -> bool:
    """Show the other end that this one has the key, and check that it has it too. Both ends call it once, before any message.

    Example:
        >>> one, other = socket.socketpair()
        >>> thread = threading.Thread(target=prove, args=(other, b"k" * 32, False, 5.0))
        >>> thread.start()
        >>> prove(one, b"k" * 32, True, 5.0)
        True
        >>> thread.join()
    """
    deadline = time.monotonic() + timeout_s
    mine = os.urandom(_NONCE_BYTES)
    try:
        sock.settimeout(timeout_s)
        sock.sendall(mine)
        theirs = _read_exactly(sock, _NONCE_BYTES, deadline)
        sock.sendall(_proof(key, is_parent, mine, theirs))
        said = _read_exactly(sock, _NONCE_BYTES, deadline)
        sock.settimeout(None)
    except (OSError, Closed):
        return False
    return hmac.compare_digest(said, _proof(key, not is_parent, theirs, mine))


def _proof(key: bytes, is_parent: bool, own: bytes, other: bytes) -> bytes:
    who = b"parent" if is_parent else b"worker"
    return hashlib.blake2b(own + other, key=key, digest_size=_NONCE_BYTES, person=who).digest()


def _read_exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    got = b""
    while len(got) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        some = sock.recv(count - len(got))
        if not some:
            raise Closed
        got += some
    return got


class StreamChannel(Channel):
    """The worker's end: blocks. Several threads may send."""

    def __init__(self, sock: socket.socket, key: bytes) -> None:
        super().__init__(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = sock.makefile("rb", buffering=_READ)
        self._outgoing, self._incoming = _Codes(key, TO_PARENT), _Codes(key, TO_WORKER)
        self._sending = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send one frame, whole."""
        self._end_if_forked()
        with self._sending:
            try:
                for message in _messages(data, self._sent + 1):
                    self.sock.sendall(self._outgoing.packed(message))
                    self._sent += 1
            except OSError as gone:
                raise Closed from gone

    def recv(self) -> bytes:
        """Wait for the next frame."""
        self._end_if_forked()
        parts: list[bytes] = []
        while len(parts) < _MOST_MESSAGES:
            message = self._next_message()
            flags = self._number(message)
            if flags is None:
                continue
            parts.append(message[_HEAD.size :])
            if flags & _LAST:
                return parts[0] if len(parts) == 1 else b"".join(parts)
        raise Closed

    def _next_message(self) -> bytes:
        try:
            head = self._reader.read(_LENGTH.size)
            size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
            body = self._reader.read(size) if _CODE_BYTES + _HEAD.size <= size <= _MOST else b""
        except (OSError, ValueError) as gone:
            raise Closed from gone
        message = self._incoming.checked(body) if body and len(body) == size else None
        if message is None:
            raise Closed  # the end, half a message, or one that is not from the parent
        return message

    def close(self) -> None:
        """Close this end."""
        self._reader.close()
        super().close()


class StreamParentChannel(ParentChannel):
    """The parent's end: never blocks. It can be made, and given frames, before there is a connection."""

    def __init__(self, key: bytes) -> None:
        self._unconnected, other = socket.socketpair()
        other.close()
        super().__init__(self._unconnected)
        self._outgoing, self._incoming = _Codes(key, TO_WORKER), _Codes(key, TO_PARENT)
        self.connected = False
        self._current: tuple[int, bytes, deque[int]] = (0, b"", deque())  # number, bytes and progress of what is being sent
        self._chunks: deque[bytes] = deque()  # what was read and is not yet in the inbox
        self._unparsed = False  # whether there may be whole messages in it, because `pump` was interrupted

    def connect(self, sock: socket.socket) -> None:
        """Use a connection whose other end has proved that it has the key."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.connected = True
        self._unconnected.close()

    def flush(self, patience_s: float = 0.0) -> None:
        """Send what is in the outbox, once there is a connection. It does not wait: another machine may be silent."""
        if self.connected:
            super().flush(0.0)

    def _send_one(self, number: int, message: bytes, files: Sequence[HasFileno]) -> None:
        assert not files
        if self._current[0] != number:
            self._current = (number, self._outgoing.packed(message), deque())
        _, data, progress = self._current
        while (at := sum(progress)) < len(data):
            progress.extend(map(self.sock.send, (memoryview(data)[at:],)))

    def pump(self) -> None:
        """Read what is there into the inbox; sets `eof` when the other end is gone, or cannot be trusted."""
        if not self.connected:
            return
        self._unparsed = True
        chunks, ended = self._chunks, False
        while not ended:
            try:
                chunks.extend(map(self.sock.recv, (_READ,)))
            except BlockingIOError:
                break
            except OSError:
                ended = True
                break
            ended = not chunks[-1]
            if len(chunks[-1]) < _READ:
                break
        self._parse()
        self.eof |= ended

    def _parse(self) -> None:
        """Whole messages into the inbox. If it is interrupted, they are found again, and their numbers show it."""
        data = memoryview(b"".join(self._chunks))
        at = 0
        while len(data) - at >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(data, at)
            if not _CODE_BYTES + _HEAD.size <= size <= _MOST or self._is_one_huge_frame():
                self.eof = True
                return
            body = data[at + _LENGTH.size : at + _LENGTH.size + size]
            if len(body) < size:
                break
            message = self._incoming.checked(body)
            if message is None:
                self.eof = True
                return
            (number, _), last = _HEAD.unpack_from(message), self._last_read()
            if number > last + 1:
                self.eof = True
                return
            if number == last + 1:
                self._inbox.append(message)
            at += _LENGTH.size + size
        self._chunks = deque([bytes(data[at:])] if at < len(data) else [])
        self._unparsed = False

    def _is_one_huge_frame(self) -> bool:
        # Many whole frames are fine: a worker with many slots reports each of them.
        return len(self._inbox) > _MOST_MESSAGES and not any(message[8] & _LAST for message in self._inbox)

    @property
    def has_message(self) -> bool:
        """As for a socket pair; what an interrupted `pump` has read is found here, because the socket does not show it any more."""
        if self._unparsed:
            self._parse()
        return bool(self._inbox)
