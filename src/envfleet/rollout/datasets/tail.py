"""The tail of a dataset: records that are on disk when they are committed, each with its own checksum.

::

    magic (8 bytes) | commit A (20) | commit B (20) | schema frame | schema frame again | frame | frame | …
    commit = number of the commit, length of the file that is good, CRC-32 of both
    frame  = mark (8), payload length (8), CRC-32 of the payload (4), CRC-32 of all that and of the frame's place (4), payload

A record is written behind the last good byte and then committed by writing its end to the older of the two commits.
So at any moment one of the two is whole, and it says how much of the file must be readable: a file that was cut
short, or whose bytes were changed, does not pass for one whose writer was killed. What is behind the
committed length was never promised: the next record is written over it.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from envfleet.errors import DatasetDamaged
from envfleet.rollout.datasets.episode_codec import arrow
from envfleet.util.files import write_all, write_durably

_MAGIC = b"EFTAIL2\n"
_COMMIT = struct.Struct("<QQI")
_FRAME = struct.Struct("<8sQII")
_SCHEMA_MARK, _RECORD_MARK = b"\xf5efscm\xfa\n", b"\xf5efrec\xfa\n"
_CRC = struct.Struct("<I")
_ANY_MARK = re.escape(_SCHEMA_MARK) + b"|" + re.escape(_RECORD_MARK)
_BEGIN = len(_MAGIC) + 2 * _COMMIT.size


class Tail:
    """The file while it is written. `good` is its length up to the last committed record.

    Example:
        >>> import tempfile
        >>> pa = arrow()
        >>> batch = pa.record_batch({"id": [7]})
        >>> tail = Tail(Path(tempfile.mkdtemp()) / "_tail-00000.records", batch.schema)
        >>> tail.append(batch)
        >>> tail.close()
        >>> [read.to_pydict() for read in read_tail(tail.path)]
        [{'id': [7]}]
    """

    def __init__(self, path: Path, schema: Any, fsync: bool = False) -> None:
        self.path = path
        self._fsync = fsync
        payload = schema.serialize().to_pybytes()
        first = _frame_head(_SCHEMA_MARK, payload, _BEGIN) + payload
        frames = first + _frame_head(_SCHEMA_MARK, payload, _BEGIN + len(first)) + payload
        self.good = _BEGIN + len(frames)
        self._commits = 1
        commits = _commit(0, self.good) + _commit(1, self.good)
        write_durably(path, _MAGIC + commits + frames, fsync)
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 - open while the tail is written
        self._unsettled = False

    def append(self, batch: Any) -> None:
        """Write and commit one record. After an error of any kind the file is as it was before."""
        self.settle()
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise DatasetDamaged(self.path, "it was removed while it was written")
        payload = memoryview(batch.serialize())
        head = _frame_head(_RECORD_MARK, payload, self.good)
        begin, end = self.good + len(head), self.good + len(head) + len(payload)
        self._unsettled = True
        try:
            write_all(self._file.fileno(), head, self.good)
            write_all(self._file.fileno(), payload, begin)
            if self._fsync:
                os.fsync(self._file.fileno())
            self._commit(end)
        except BaseException:
            with suppress(OSError):  # then the next call settles it, or says that it cannot
                self.settle()
            raise
        self.good = end
        self._unsettled = False

    def _commit(self, good: int) -> None:
        number = self._commits + 1
        write_all(self._file.fileno(), _commit(number, good), len(_MAGIC) + number % 2 * _COMMIT.size)
        self._commits = number

    def settle(self) -> None:
        """After an interrupted `append`: what the file says is committed counts, the rest is cut off."""
        if not self._unsettled:
            return
        descriptor = self._file.fileno()
        self._file.seek(0)
        found = _last_commit(self._file.read(_BEGIN))
        if found is None:  # only if another process wrote to the file
            raise DatasetDamaged(self.path, "what it says is committed cannot be read any more")
        self._commits, self.good = found
        os.ftruncate(descriptor, self.good)
        self._unsettled = False

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


@dataclass
class Found:
    """What can be read of a damaged file, and what cannot."""

    batches: list[Any] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_tail(path: Path, problems: list[str] | None = None) -> Iterator[Any]:
    """Yield the record batches; `DatasetDamaged` as soon as something committed cannot be read.

    With a list of `problems` damage is noted there instead, and the records behind it are read, too.
    """

    def note(problem: str) -> None:
        if problems is None:
            raise DatasetDamaged(path, problem)
        problems.append(problem)

    with open(path, "rb") as file:
        head = file.read(_BEGIN)
        commit = _last_commit(head)
        if not head.startswith(_MAGIC) or commit is None:
            note(f"its first {_BEGIN} bytes are not what was written")
        committed = commit[1] if commit else os.fstat(file.fileno()).st_size
        schema, at = None, _BEGIN
        while True:
            mark, payload = _read_frame(file, at)
            if payload is None:
                if at >= committed:  # a record that was being written
                    return
                following = None if problems is None else _next_frame(file, at)
                note(f"bytes {at} to {following or committed} are damaged or missing")
                if following is None:
                    return
                at = following
                continue
            if mark == _SCHEMA_MARK:
                schema = arrow().ipc.read_schema(payload)
            elif schema is not None:
                yield arrow().ipc.read_record_batch(payload, schema)
            at += _FRAME.size + payload.size


def _next_frame(file: BinaryIO, after: int) -> int | None:
    """Where the next whole frame begins. A frame knows its place, so a copy of one inside data is none."""
    file.seek(after + 1)
    places = (after + 1 + match.start() for match in re.finditer(_ANY_MARK, file.read()))
    return next((place for place in places if _read_frame(file, place)[1] is not None), None)


def _frame_head(mark: bytes, payload: bytes | memoryview, offset: int) -> bytes:
    head = _FRAME.pack(mark, len(payload), zlib.crc32(payload), 0)[:-4]
    return head + _CRC.pack(zlib.crc32(head, offset & 0xFFFFFFFF))


def _read_frame(file: BinaryIO, offset: int) -> tuple[bytes, Any]:
    """Mark and payload (an Arrow buffer) of the frame at an offset; the payload is None when there is no whole one."""
    file.seek(offset)
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        return b"", None
    mark, size, crc, head_crc = _FRAME.unpack(head)
    if mark not in (_SCHEMA_MARK, _RECORD_MARK) or head_crc != zlib.crc32(head[:-4], offset & 0xFFFFFFFF):
        return mark, None
    payload = file.read(size)
    whole = len(payload) == size and zlib.crc32(payload) == crc
    return mark, arrow().py_buffer(payload) if whole else None


def _commit(number: int, good: int) -> bytes:
    return _COMMIT.pack(number, good, zlib.crc32(struct.pack("<QQ", number, good)))


def _last_commit(head: bytes) -> tuple[int, int] | None:
    """Number and length of the newest whole commit."""
    if len(head) < _BEGIN:
        return None
    found = [_COMMIT.unpack_from(head, len(_MAGIC) + slot * _COMMIT.size) for slot in (0, 1)]
    return max(((n, good) for n, good, crc in found if crc == zlib.crc32(struct.pack("<QQ", n, good))), default=None)
