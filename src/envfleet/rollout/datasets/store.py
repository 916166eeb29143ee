"""The files of a dataset directory: which there are, what they hold, what was collected.

::

    shard-00000.parquet     finished shards, one row an episode, sealed; complete or not there at all
    _tail-00001.records     the shard being written: one checked record an episode, on disk when add() returns
    _early-7.records        an episode that failed before its first step, while the columns are not known yet
    _run.json               what was collected, so that only the same command can continue it
    _….damaged-1            a file that could not be read, kept as it was found
    _tail-00001.arrows      a tail as it was written before records had checksums
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envfleet.errors import DamagedWarning, DatasetDamaged, DatasetError, UncheckedWarning
from envfleet.rollout.datasets.episode_codec import Codec, arrow
from envfleet.rollout.datasets.seal import Shard
from envfleet.rollout.datasets.tail import read_tail
from envfleet.rollout.episodes.episode import Rollout
from envfleet.util.files import keep_aside, open_sealed, sealed_json, write_durably

RUN_FILE = "_run.json"
LOCK_FILE = "_writer.lock"
RECORDS, OLD_TAIL = ".records", ".arrows"
_NUMBERED = re.compile(r"(?:_?shard|_tail)-(\d+)\.(?:parquet|records|arrows)")


def number_of(path: Path) -> int:
    """The number in a shard's or tail's name, also when it is kept as damaged; -1 for any other."""
    match = _NUMBERED.match(path.name)
    return int(match.group(1)) if match else -1


def shards(directory: Path) -> list[Path]:
    """Finished shards in the order written."""
    return sorted((path for path in directory.glob("shard-*.parquet") if number_of(path) >= 0), key=number_of)


def tails(directory: Path) -> list[Path]:
    """Tails in the order written."""
    found = [path for path in directory.glob("_tail-*") if path.suffix in (RECORDS, OLD_TAIL)]
    return sorted((path for path in found if number_of(path) >= 0), key=number_of)


def early(directory: Path) -> list[Path]:
    """Episodes that wait for the columns to be known."""
    return sorted(directory.glob(f"_early-*{RECORDS}"))


def next_number(directory: Path) -> int:
    """A number no file has had."""
    return 1 + max((number_of(path) for path in directory.iterdir()), default=-1)


def data_files(directory: Path) -> list[Path]:
    """All files with episodes. What a writer turns into another file meanwhile is in the list as one of the two.

    It makes the new file before it removes the old one: so the old kind is listed first.
    """
    waiting, open_ones = early(directory), tails(directory)
    finished = shards(directory)
    # A tail whose shard exists is what a kill between renaming and deleting left.
    numbers = {number_of(path) for path in finished}
    return [*waiting, *finished, *(path for path in open_ones if number_of(path) not in numbers)]


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """Yield the episodes of any of these files; FileNotFoundError when it has become another meanwhile."""
    codec = None
    for batch in _batches(path):
        codec = codec or Codec.from_schema(batch.schema)
        try:
            rollouts = codec.decode(batch)
        except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:  # only without checksums
            raise DatasetDamaged(path, f"what it holds is no episode ({error})") from error
        yield from rollouts


def _batches(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        with open(path, "rb") as file:
            shard = Shard(file, path)
            if not shard.sealed:
                _warn_unchecked(path.parent)
            yield from shard.batches()
    elif path.suffix == OLD_TAIL:
        _warn_unchecked(path.parent)
        yield from read_old_tail(path)[0]
    else:
        yield from read_tail(path)


def read_old_tail(path: Path) -> tuple[list[Any], bool]:
    """The whole messages of an Arrow stream, and whether it ends with them."""
    pa = arrow()
    data = path.read_bytes()
    batches: list[Any] = []
    reader = pa.BufferReader(data)
    end = 0
    try:
        with pa.ipc.open_stream(reader) as stream:
            while True:
                end = reader.tell()
                batches.append(stream.read_next_batch())
    except StopIteration:
        return batches, len(data) - end <= 8  # an end mark may follow
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowIndexError, OSError):
        return batches, not data
    return batches, True


def _warn_unchecked(directory: Path) -> None:
    warnings.warn(  # the same text for every file: shown once
        f"{directory} has files that were written before datasets had checksums: they are read, but damage to them would "
        "not be noticed (Rollouts.load(…).save(…) writes them with checksums)",
        UncheckedWarning,
        stacklevel=2,
    )


def holds_episodes(directory: Path) -> bool:
    """Whether there is an episode, or anything that may be one."""
    return any(not _is_empty(path) for path in data_files(directory))


def _is_empty(path: Path) -> bool:
    if path.suffix == ".parquet":
        return False
    if path.suffix == OLD_TAIL:
        return path.stat().st_size == 0
    try:
        return next(read_tail(path), None) is None
    except DatasetDamaged:
        return False


def read_run(directory: str | Path) -> dict[str, Any]:
    """What the directory's `_run.json` says was collected; `DatasetDamaged` when it is not what was written."""
    path = Path(directory) / RUN_FILE
    if not path.exists():
        return {}
    try:
        data = path.read_bytes()
        content = json.loads(data.decode())
        if content["version"] != 1:  # the first version had no digest
            content = open_sealed(data)
        if (content["format"], content["version"]) not in (("envfleet-parquet", 1), ("envfleet-parquet", 2)):
            raise ValueError("its format is not one that this version knows")
        run = content["run"]
        if not isinstance(run, dict):
            raise ValueError("it does not describe a collection")
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetDamaged(path, f"it cannot be read ({error})") from error
    return run


def write_run(directory: Path, run: dict[str, Any]) -> None:
    """Write `_run.json`."""
    write_durably(directory / RUN_FILE, sealed_json({"format": "envfleet-parquet", "version": 2, "run": run}))


def check_run(directory: Path, run: dict[str, Any] | None, resume: bool) -> dict[str, Any] | None:
    """What a directory with episodes says was collected, or None for one without episodes: any collection may begin there."""
    if not holds_episodes(directory):
        return None
    if not resume:
        raise DatasetError(f"{directory} already holds a dataset: give another directory, or resume=True")
    before = _run_before(directory)
    if before is None:
        write_run(directory, run or {})
        return run or {}
    if run is not None and before != run:
        differing = sorted(k for k in {*before, *run} if before.get(k) != run.get(k))
        changes = ", ".join(f"{key}: {before.get(key)!r} then, {run.get(key)!r} now" for key in differing)
        raise DatasetError(f"{directory} holds another collection ({changes}): resume needs the same command")
    return before


def _run_before(directory: Path) -> dict[str, Any] | None:
    """What was collected; None, with a warning, when that is not known any more. The file is kept."""
    path = directory / RUN_FILE
    try:
        if path.exists():
            return read_run(directory)
        problem = "is missing"
    except DatasetDamaged as damaged:
        problem = f"is damaged ({damaged.problem}): kept as {keep_aside(path).name}"
    warnings.warn(
        f"{path} {problem}. Whether the episodes there are of the same collection could not be checked",
        DamagedWarning,
        stacklevel=5,
    )
    return None
