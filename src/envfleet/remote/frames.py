"""WebSocket framing for the common case, by hand: a small unfragmented frame that comes in one piece.

The library's parser takes every case, a byte at a time if it must, and that generality is a fifth of what a step
costs a client. Whatever is not the common case goes to it.
"""

from __future__ import annotations

import os
import struct

from envfleet.errors import BackendMissing

try:
    from websockets.frames import apply_mask
except ImportError as missing:  # pragma: no cover - depends on the installation
    raise BackendMissing("websockets", extra="remote") from missing

TEXT, BINARY = 0x81, 0x82  # the first byte of an unfragmented, uncompressed text or binary frame

_random = [b"", 0]  # unpredictable bytes and how far they are used; a call to the system for each mask is dear


def _mask() -> bytes:
    pool, at = _random
    assert isinstance(pool, bytes) and isinstance(at, int)
    if at + 4 > len(pool):
        pool, at = os.urandom(4096), 0
        _random[0] = pool
    _random[1] = at + 4
    return pool[at : at + 4]


def client_frame(first: int, payload: bytes) -> bytes:
    """A masked frame, as clients must send them.

    Example:
        >>> frame = client_frame(TEXT, b"hi")
        >>> len(frame), frame[:2]
        (8, b'\\x81\\x82')
    """
    size = len(payload)
    if size < 126:
        head = bytes((first, 0x80 | size))
    elif size < 65536:
        head = struct.pack("!BBH", first, 0xFE, size)
    else:
        head = struct.pack("!BBQ", first, 0xFF, size)
    mask = _mask()
    return head + mask + bytes(apply_mask(payload, mask))


def whole_payload(data: bytes) -> bytes | None:
    """The payload when the data is exactly one unfragmented server frame of less than 64 KiB, else None."""
    if len(data) < 2 or (data[0] != TEXT and data[0] != BINARY):
        return None
    size = data[1]
    if size < 126:
        return data[2:] if len(data) == 2 + size else None
    if size == 126 and len(data) >= 4 and len(data) == 4 + int.from_bytes(data[2:4], "big"):
        return data[4:]
    return None


def missing_after(data: bytes, missing: int) -> int:
    """How many bytes the last frame still lacks after this data; -1 when that cannot be told.

    `missing` is what the frame before lacked. 0 means that the data ended where a frame ends.
    """
    at = missing
    while at < len(data):
        if at + 2 > len(data):
            return -1  # a header was cut
        size, head = data[at + 1] & 0x7F, 2
        if size >= 126:
            head = 4 if size == 126 else 10
            if at + head > len(data):
                return -1
            size = int.from_bytes(data[at + 2 : at + head], "big")
        at += head + size
    return at - len(data)
