"""Parquet shards with a digest of the whole file inside.

Parquet's own page checksums cover neither page headers nor the footer, so a changed bit there can change values
silently. The footer may hold free text; it holds the seal: the SHA-256 of the whole file, of the footer,
and a CRC-32 of every row group, all computed with the seal's own digits as zeros. Any Parquet reader ignores it. It travels
with the file, and one rename puts both in place. A spare copy of the footer is before it, where no reader looks: without a
footer nothing of a Parquet file can be read.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from envfleet.errors import DatasetDamaged
from envfleet.rollout.datasets.episode_codec import arrow
from envfleet.rollout.datasets.tail import Found

_KEY = b"envfleet.seal"
_PREFIX = b"envfleet-seal-1:"
_SHA = 64  # hexadecimal digits
_CRC = 8
_END = b"PAR1"
_SPARE = b"\xf5efspare\xfa"


def sealed_shard(batches: list[Any]) -> bytearray:
    """The bytes of a Parquet file with these record batches, sealed."""
    pa = arrow()
    table = pa.Table.from_batches(batches).combine_chunks()
    # A few megabytes per row group: readers hold one group at a time.
    rows = max(1, min(1024, (8 << 20) * len(table) // max(1, table.nbytes)))
    groups = b"%08x" % -(-len(table) // rows)
    sink = pa.BufferOutputStream()
    with pa.parquet.ParquetWriter(sink, table.schema, compression="zstd", write_page_checksum=True) as writer:
        writer.write_table(table, row_group_size=rows)
        writer.add_key_value_metadata({_KEY: _PREFIX + groups + b"0" * (2 * _SHA + _CRC * int(groups, 16))})
    data = bytearray(sink.getvalue())
    file = io.BytesIO(data)
    metadata = pa.parquet.ParquetFile(pa.BufferReader(data)).metadata
    ends = _ends(file)
    assert ends is not None
    at = ends.begin + ends.place + _CRC
    crcs = [_crc(file, *_span(metadata, group)) for group in range(metadata.num_row_groups)]
    inner = ends.footer_digest() + b"".join(crcs)
    data[at + _SHA : at + _SHA + len(inner)] = inner
    footer = bytes(data[ends.begin :])
    spare = _SPARE + len(footer).to_bytes(8, "little") + hashlib.sha256(footer).digest() + footer
    data[ends.begin : ends.begin] = spare
    at += len(spare)
    data[at : at + _SHA] = _whole_digest(io.BytesIO(data), at)
    return data


class Shard:
    """An opened shard whose bytes are what was written; `sealed` is False for one from before there were seals."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.path = path
        self.sealed = check_seal(file, path)
        file.seek(0)
        self._parquet = _opened(file, path)
        self.schema = self._parquet.schema_arrow

    def batches(self, columns: list[str] | None = None) -> Iterator[Any]:
        """Record batches of some hundred rows."""
        stream = self._parquet.iter_batches(batch_size=256, columns=columns)
        while True:
            try:
                batch = next(stream)
            except StopIteration:
                return
            except Exception as error:  # only without a seal: pyarrow's own checks, in errors of many types
                raise DatasetDamaged(self.path, f"it cannot be read ({error})") from error
            yield batch


def check_seal(file: BinaryIO, path: Path) -> bool:
    """Compare a file with its seal; False when it has none, `DatasetDamaged` when it is not what was written."""
    ends = _ends(file)
    if ends is None:
        raise DatasetDamaged(path, f"its end is not that of a Parquet file ({file.seek(0, os.SEEK_END)} bytes)")
    if ends.place < 0 and not ends.has_key:
        return False
    if ends.place < 0 or ends.part(_CRC, _SHA) != _whole_digest(file, ends.begin + ends.place + _CRC):
        raise DatasetDamaged(path, "its content does not match its digest")
    return True


def salvage_shard(path: Path) -> Found:
    """The row groups of a damaged shard that are what was written; none when its footer and the copy of it are not."""
    found = Found()
    data = path.read_bytes()
    ends = _ends(io.BytesIO(data))
    if ends is None or ends.place < 0 or ends.part(_CRC + _SHA, _SHA) != ends.footer_digest():
        ends = _spare_ends(data)
        if ends is None:
            found.problems.append("its footer is damaged, so no episode can be read")
            return found
        found.problems.append("its footer is damaged")
        data = data[: ends.begin] + ends.data
    parquet = _opened(io.BytesIO(data), path)
    for group in range(parquet.metadata.num_row_groups):
        crc = ends.part(_CRC + 2 * _SHA + _CRC * group, _CRC)
        if crc == _crc(io.BytesIO(data), *_span(parquet.metadata, group)):
            found.batches += parquet.read_row_group(group).to_batches()
        else:
            rows = parquet.metadata.row_group(group).num_rows
            found.problems.append(f"{rows} episodes (row group {group}) are damaged")
    if not found.problems:  # all groups are whole: the change is where nothing is stored
        found.problems.append("bytes that hold no episode are damaged")
    return found


def _spare_ends(data: bytes) -> _Ends | None:
    """The spare copy of the footer, if that is whole."""
    at = data.rfind(_SPARE)
    begin = at + len(_SPARE) + 40
    size = int.from_bytes(data[begin - 40 : begin - 32], "little")
    copy = data[begin : begin + size]
    if at < 0 or hashlib.sha256(copy).digest() != data[begin - 32 : begin]:
        return None
    place = copy.rfind(_PREFIX)
    return _Ends(at, copy, place + len(_PREFIX), True) if place >= 0 else None


def _opened(file: BinaryIO, path: Path) -> Any:
    try:
        return arrow().parquet.ParquetFile(file, page_checksum_verification=True)
    except Exception as error:  # only without a seal: whatever pyarrow makes of foreign or damaged bytes
        raise DatasetDamaged(path, f"it cannot be read ({error})") from error


@dataclass
class _Ends:
    """The end of a file and where the seal is in it: prefix, number of groups, digest, digest of the footer, CRCs."""

    begin: int  # where the footer begins in the file
    data: bytes  # footer, its length and the closing mark
    place: int  # where the digits begin in `data`; -1 without a seal
    has_key: bool

    @property
    def size(self) -> int:
        """Length of all digits."""
        count = self.data[self.place : self.place + _CRC]
        groups = int(count, 16) if re.fullmatch(rb"[0-9a-f]{8}", count) else 0
        return _CRC + 2 * _SHA + _CRC * min(groups, len(self.data))

    def part(self, begin: int, size: int) -> bytes:
        """Some of the digits."""
        return self.data[self.place + begin :][:size]

    def footer_digest(self) -> bytes:
        """The digest of the footer, its seal's digits as zeros but for the count."""
        first, last = self.place + _CRC, self.place + self.size
        blank = self.data[:first] + b"0" * (last - first) + self.data[last:]
        return hashlib.sha256(blank).hexdigest().encode()


def _ends(file: BinaryIO) -> _Ends | None:
    """The end of a Parquet file; None when it is not that of one."""
    size = file.seek(0, os.SEEK_END)
    last = _read_at(file, max(size - 8, 0), 8)
    length = int.from_bytes(last[:4], "little") + 8
    if size < 12 or last[4:] != _END or length > size - 4:
        return None
    data = _read_at(file, size - length, length)
    place = data.rfind(_PREFIX)
    return _Ends(size - length, data, place + len(_PREFIX) if place >= 0 else -1, _KEY in data)


def _whole_digest(file: BinaryIO, blank: int) -> bytes:
    """The digest of the file with the 64 digits at `blank` as zeros."""
    digest = hashlib.sha256()
    file.seek(0)
    for size, instead in ((blank, b"0" * _SHA), (sys.maxsize, b"")):
        while size > 0 and (data := file.read(min(size, 1 << 20))):
            digest.update(data)
            size -= len(data)
        digest.update(instead)
        file.seek(blank + _SHA)
    return digest.hexdigest().encode()


def _span(metadata: Any, group: int) -> tuple[int, int]:
    """First byte and length of a row group."""
    spans = []
    for column in range(metadata.num_columns):
        chunk = metadata.row_group(group).column(column)
        first = chunk.data_page_offset
        if chunk.has_dictionary_page:
            first = min(first, chunk.dictionary_page_offset)
        spans.append((first, first + chunk.total_compressed_size))
    begin = min(first for first, _ in spans)
    return begin, max(last for _, last in spans) - begin


def _crc(file: BinaryIO, begin: int, length: int) -> bytes:
    return b"%08x" % zlib.crc32(_read_at(file, begin, length))


def _read_at(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)
