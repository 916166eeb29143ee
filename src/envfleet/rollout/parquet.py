"""A dataset directory of Parquet shards that a kill cannot spoil.

::

    shard-00000.parquet   finished shards, one row an episode; complete or not there at all
    _tail-00001.arrows the shard being written: an Arrow stream, one message an episode, on disk when add()
    returns _run.json             what was collected, so that only the same command can continue it

Parquet files are readable only once closed, so finished episodes first go to the tail, which is readable up
to its last whole message. A full tail is rewritten as a shard under a temporary name and renamed. Readers
such as pandas skip names that begin with an underscore and see the shards; ours read both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from envfleet.errors import FleetClosed
from envfleet.rollout.codec import Codec, arrow
from envfleet.rollout.episode import Rollout
from envfleet.rollout.errors import DatasetError

RUN_FILE = "_run.json"
LOCK_FILE = "_writer.lock"


class DatasetWriter:
    """Write episodes as they come; each is safe when `add` returns.

    Args:
        directory: made when missing.
        run: what is being collected (environment, seed, policy …); continuing with another is refused.
        resume: continue a directory that holds episodes; `ids` lists them.
        shard_bytes, shard_episodes: a shard is closed when it has either.
        fsync: also wait for the disk, so that a power cut loses nothing either; a kill never does.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with DatasetWriter(directory) as writer:
        ...         writer.add(Rollout(observations=[0, 1], actions=[1], rewards=[1.0], terminated=[True],
        ...                            truncated=[False], episode=0))
        ...     [rollout.episode_return for rollout in read_parquet(directory)]
        [1.0]
    """

    def __init__(
        self,
        directory: str | Path,
        run: dict[str, Any] | None = None,
        resume: bool = False,
        shard_bytes: int = 64 << 20,
        shard_episodes: int = 10_000,
        fsync: bool = False,
    ) -> None:
        arrow()
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DatasetError(
                f"{self.directory} cannot be made ({error}): give a directory one can write to"
            ) from error
        self._lock = _lock_directory(self.directory)
        try:
            self.run = _check_run(self.directory, run, resume)
        except BaseException:
            self._lock.close()
            raise
        self._shard_bytes, self._shard_episodes, self._fsync = shard_bytes, shard_episodes, fsync
        self._sink: Any = None
        self._stream: Any = None
        self._codec: Codec | None = None
        self._count = 0
        self._waiting: list[Rollout] = []
        self._closed = False
        self._clean_up()
        self.ids: set[int] = set(_read_ids(self.directory))

    def _clean_up(self) -> None:
        """Finish what a killed writer left: half-made shards go, its tail becomes a shard."""
        for path in self.directory.glob(".making-*"):
            path.unlink()
        for tail in sorted(self.directory.glob("_tail-*.arrows")):
            _tail_to_shard(tail)
        shards = sorted(self.directory.glob("shard-*.parquet"))
        self._number = int(shards[-1].stem.split("-")[1]) + 1 if shards else 0

    def add(self, rollout: Rollout) -> None:
        """Write one episode; its `episode` is its id and must be new."""
        if self._closed:
            raise FleetClosed("the dataset writer")
        if rollout.episode in self.ids:
            raise DatasetError(f"episode {rollout.episode} is already in {self.directory}")
        if self._codec is None:
            self._codec = _existing_codec(self.directory)
        if self._codec is None:
            if not len(rollout):  # it failed before its first step and cannot tell what the columns are
                self._waiting.append(rollout)
                self.ids.add(rollout.episode)
                return
            self._codec = Codec.of(rollout)
        for early in self._take_waiting():
            self._write(early)
        self._write(rollout)

    def _take_waiting(self) -> list[Rollout]:
        taken, self._waiting = self._waiting, []
        return taken

    def _write(self, rollout: Rollout) -> None:
        assert self._codec is not None
        batch = self._codec.encode(rollout)
        if self._stream is None:
            self._open_tail()
        self._stream.write_batch(batch)
        if self._fsync:
            os.fsync(self._sink.fileno())
        self.ids.add(rollout.episode)
        self._count += 1
        if self._count >= self._shard_episodes or self._sink.tell() >= self._shard_bytes:
            self._close_tail()

    def _open_tail(self) -> None:
        assert self._codec is not None
        # Unbuffered: what the kernel has survives our death.
        self._sink = open(self._tail_path, "wb", buffering=0)  # noqa: SIM115
        self._stream = arrow().ipc.new_stream(self._sink, self._codec.schema)

    @property
    def _tail_path(self) -> Path:
        return self.directory / f"_tail-{self._number:05d}.arrows"

    def _close_tail(self) -> None:
        self._stream.close()
        self._sink.close()
        self._stream = self._sink = None
        _tail_to_shard(self._tail_path, self._fsync)
        self._number += 1
        self._count = 0

    def close(self) -> None:
        """Turn the tail into a shard; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._waiting:
                self._codec = Codec.of(self._waiting[0])
                for early in self._take_waiting():
                    self._write(early)
            if self._stream is not None:
                self._close_tail()
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_parquet(directory: str | Path) -> Iterator[Rollout]:
    """Yield the episodes of a directory in the order written, shard by shard; also of one being written."""
    pa = arrow()
    directory = Path(directory)
    seen: set[int] = set()
    for path in _data_files(directory):
        if path.suffix == ".parquet":
            file = pa.parquet.ParquetFile(path)
            codec = Codec.from_schema(file.schema_arrow)
            batches: Any = file.iter_batches(batch_size=256)
        else:
            batches, codec = _read_tail(path), None
        for batch in batches:
            for rollout in (codec or Codec.from_schema(batch.schema)).decode(batch):
                if rollout.episode not in seen:
                    seen.add(rollout.episode)
                    yield rollout


def is_dataset(directory: Path) -> bool:
    """Whether a directory holds such a dataset, perhaps an empty one."""
    return (directory / RUN_FILE).exists() or bool(_data_files(directory))


def read_run(directory: str | Path) -> dict[str, Any]:
    """What the directory's `_run.json` says was collected."""
    path = Path(directory) / RUN_FILE
    run: dict[str, Any] = json.loads(path.read_text())["run"] if path.exists() else {}
    return run


def _data_files(directory: Path) -> list[Path]:
    shards = sorted(directory.glob("shard-*.parquet"))
    finished = {path.stem.split("-")[1] for path in shards}
    # A tail whose shard exists is what a kill between renaming and deleting left.
    tails = [p for p in sorted(directory.glob("_tail-*.arrows")) if p.stem.split("-")[1] not in finished]
    return shards + tails


def _read_tail(path: Path) -> list[Any]:
    """All whole messages of an Arrow stream; a torn last one is the episode that was being written."""
    pa = arrow()
    batches: list[Any] = []
    try:
        with pa.ipc.open_stream(pa.memory_map(str(path)) if path.stat().st_size else path.read_bytes()) as stream:
            while True:
                batches.append(stream.read_next_batch())
    except (StopIteration, pa.ArrowInvalid, OSError):
        pass  # the end of the stream, or of what was written of it
    return batches


def _tail_to_shard(tail: Path, fsync: bool = False) -> None:
    pa = arrow()
    number = tail.stem.split("-")[1]
    shard = tail.with_name(f"shard-{number}.parquet")
    batches = [] if shard.exists() else _read_tail(tail)
    if batches:
        making = tail.with_name(f".making-{number}.parquet")
        table = pa.Table.from_batches(batches).combine_chunks()
        # A few megabytes a row group: readers hold one group at a time.
        rows = max(1, min(1024, (8 << 20) * len(table) // max(1, table.nbytes)))
        pa.parquet.write_table(table, making, compression="zstd", row_group_size=rows)
        if fsync:
            with open(making, "rb") as file:
                os.fsync(file.fileno())
        making.rename(shard)
    tail.unlink()


def _read_ids(directory: Path) -> Iterator[int]:
    pa = arrow()
    for path in _data_files(directory):
        if path.suffix == ".parquet":
            yield from pa.parquet.read_table(path, columns=["id"]).column("id").to_pylist()
        else:
            for batch in _read_tail(path):
                yield from batch.column("id").to_pylist()


def _existing_codec(directory: Path) -> Codec | None:
    for path in directory.glob("shard-*.parquet"):
        return Codec.from_schema(arrow().parquet.read_schema(path))
    return None


def _check_run(directory: Path, run: dict[str, Any] | None, resume: bool) -> dict[str, Any]:
    path = directory / RUN_FILE
    if path.exists() or _data_files(directory):
        if not resume:
            raise DatasetError(f"{directory} already holds a dataset: give another directory, or resume=True")
        before = read_run(directory)
        if run is not None and before != run:
            differing = sorted(k for k in {*before, *run} if before.get(k) != run.get(k))
            told = ", ".join(f"{key}: {before.get(key)!r} then, {run.get(key)!r} now" for key in differing)
            raise DatasetError(f"{directory} holds another collection ({told}): resume needs the same command")
        return before
    making = directory / ".making-run.json"
    making.write_text(json.dumps({"format": "envfleet-parquet", "version": 1, "run": run or {}}, indent=1))
    making.rename(path)
    return run or {}


def _lock_directory(directory: Path) -> Any:
    """One writer at a time; the lock goes with the process that holds it."""
    file = open(directory / LOCK_FILE, "w")  # noqa: SIM115
    try:
        import fcntl
    except ImportError:  # no such locks on this system; writing twice at once is then the user's care
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as held:
        file.close()
        raise DatasetError(f"another process is writing to {directory}") from held
    return file
