"""A dataset directory of Parquet shards that stays readable after a kill or a full disk.

Parquet files are readable only once closed, so finished episodes first go to the tail (`tail.py`), where each is checked
and committed by itself. A full tail is rewritten as a sealed shard (`seal.py`) and then removed. Readers such as pandas skip
names that begin with an underscore and see the shards; ours read both. `store.py` lists the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from envfleet.errors import DatasetDamaged, DatasetError, FleetClosed, WriteFailed
from envfleet.rollout.datasets.episode_codec import Codec, arrow
from envfleet.rollout.datasets.repair import finish_tail, mend
from envfleet.rollout.datasets.store import (
    LOCK_FILE,
    RECORDS,
    RUN_FILE,
    check_run,
    data_files,
    next_number,
    number_of,
    read_rollouts,
    tails,
    write_run,
)
from envfleet.rollout.datasets.store import read_run as read_run
from envfleet.rollout.datasets.tail import Tail
from envfleet.rollout.episodes.episode import Rollout
from envfleet.util.files import NO_ROOM
from envfleet.util.locks import FolderLock


class DatasetWriter:
    """Write episodes as they come; each is safe when `add` returns.

    Args:
        directory: made when missing.
        run: what is being collected (environment, seed, policy …); continuing with another is refused.
        resume: continue a directory that holds episodes; `ids` lists them. Every file is read and checked first. One that
            is damaged is kept under another name, what can be read of it is saved, and a `DamagedWarning` names it.
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
        self._shard_bytes, self._shard_episodes, self._fsync = shard_bytes, shard_episodes, fsync
        self._sink: Tail | None = None
        self._count = 0
        self._closed = False
        self._pid = os.getpid()
        self._lock = _locked(self.directory)
        try:
            self._begin(run, resume)
        except OSError as error:
            self._lock.close()
            raise self._full(error) from error
        except BaseException:
            self._lock.close()
            raise

    def _begin(self, run: dict[str, Any] | None, resume: bool) -> None:
        before = check_run(self.directory, run, resume)
        # Written with the first episode only: a collection that fails before it leaves nothing that binds the next.
        self._run_written = before is not None
        self.run: dict[str, Any] = (run or {}) if before is None else before
        contents = mend(self.directory)
        self.ids: set[int] = contents.ids
        self._codec = contents.codec
        self._early = contents.early  # episodes without a step, which do not show what the columns are

    def add(self, rollout: Rollout) -> None:
        """Write one episode; its `episode` is its id and must be new.

        When this raises (disk full, Ctrl-C), the dataset is as before and further calls work. After an interrupt `ids` shows
        whether it came before the episode was written or after.
        """
        if self._closed:
            raise FleetClosed("the dataset writer")
        if os.getpid() != self._pid:
            raise DatasetError(f"this writer belongs to process {self._pid}: a forked process needs its own directory")
        if rollout.episode in self.ids:
            raise DatasetError(f"episode {rollout.episode} is already in {self.directory}")
        try:
            if self._codec is None and not len(rollout):
                self._keep_early(rollout)
            else:
                codec = self._codec or Codec.of(rollout)
                self._take_early(codec)
                self._write(rollout, codec)
        except WriteFailed:
            raise
        except OSError as error:
            raise self._full(error) from error

    def _write(self, rollout: Rollout, codec: Codec) -> None:
        batch = codec.encode(rollout)
        sink = self._sink or self._open_sink(codec)
        before = sink.good
        try:
            sink.append(batch)
            self.ids.add(rollout.episode)
        except BaseException:
            with suppress(OSError):
                sink.settle()
            if sink.good > before:  # the interrupt came after it was committed
                self.ids.add(rollout.episode)
            raise
        self._count += 1
        if self._count >= self._shard_episodes or sink.good >= self._shard_bytes:
            self._sink = None
            sink.close()
            # The episode is safe in the tail: without room for the shard it is tried again at the next one, and by close().
            with suppress(OSError):
                self._finish_tails()

    def _open_sink(self, codec: Codec) -> Tail:
        self._write_run()
        path = self.directory / f"_tail-{next_number(self.directory):05d}{RECORDS}"
        sink = Tail(path, codec.schema, self._fsync)
        self._codec, self._count = codec, 0
        self._sink = sink
        return sink

    def _write_run(self) -> None:
        if not self._run_written:
            write_run(self.directory, self.run)
            self._run_written = True

    def _keep_early(self, rollout: Rollout) -> None:
        codec = Codec.of(rollout)
        batch = codec.encode(rollout)
        self._write_run()
        path = self.directory / f"_early-{rollout.episode}{RECORDS}"
        try:
            tail = Tail(path, codec.schema, self._fsync)
            tail.append(batch)
            tail.close()
            self._early[path] = rollout
            self.ids.add(rollout.episode)
        except BaseException:
            self._early.pop(path, None)
            path.unlink(missing_ok=True)
            raise

    def _take_early(self, codec: Codec) -> None:
        """The columns are known now: write what waited for them."""
        for path, rollout in list(self._early.items()):
            self._write(rollout, codec)
            path.unlink(missing_ok=True)
            del self._early[path]

    def _finish_tails(self) -> None:
        for tail in tails(self.directory):
            if self._sink is None or tail != self._sink.path:
                finish_tail(tail)

    def _full(self, error: OSError) -> WriteFailed:
        safe = "every episode whose add() returned is safe; once there is room, add() or the same command goes on"
        return WriteFailed(self.directory, error, safe)

    def close(self) -> None:
        """Turn the tail into a shard; idempotent. Without room for it the episodes stay safe in the tail."""
        self._close(begun_well=True)

    def _close(self, begun_well: bool) -> None:
        if os.getpid() != self._pid:
            return
        try:
            if self._closed:
                return
            self._closed = True
            if self._codec is not None:
                self._take_early(self._codec)
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.close()
            self._finish_tails()
            if begun_well:
                self._write_run()  # an empty dataset is one too
        except OSError as error:
            raise self._full(error) from error
        finally:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(WriteFailed):  # the caller gets the first error
                self._close(begun_well=False)


def read_parquet(directory: str | Path) -> Iterator[Rollout]:
    """Yield the episodes of a directory in the order written, shard by shard; also of one being written.

    All that was committed when the first is asked for are among them. `DatasetDamaged` names a file that is not what was
    written.
    """
    arrow()
    directory = Path(directory)
    seen: set[int] = set()
    done: set[str] = set()
    missed: set[Path] = set()
    while True:
        for path in data_files(directory):
            # A tail and the shard it becomes have the same number: whichever was read, both are.
            key = path.name if number_of(path) < 0 else str(number_of(path))
            if key in done:
                continue
            try:
                for rollout in read_rollouts(path):
                    if rollout.episode not in seen:
                        seen.add(rollout.episode)
                        yield rollout
            except FileNotFoundError as gone:
                if path in missed:
                    raise DatasetDamaged(path, "it is listed, but cannot be opened") from gone
                missed.add(path)
                break  # the writer turned it into another one: look again
            done.add(key)
        else:
            return


def is_dataset(directory: Path) -> bool:
    """Whether a directory holds such a dataset, perhaps an empty one."""
    return (directory / RUN_FILE).exists() or bool(data_files(directory))


def _locked(directory: Path) -> FolderLock:
    """Make the directory and hold it: one writer at a time."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return FolderLock(directory / LOCK_FILE, "writing to")
    except OSError as error:
        if error.errno in NO_ROOM:
            raise WriteFailed(directory, error, "nothing was changed") from error
        raise DatasetError(f"{directory} cannot be made ({error}): give a writable directory") from error
