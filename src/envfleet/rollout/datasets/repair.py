"""What a writer does first: finish what a killed one left, and keep what cannot be read under another name.

Nothing is deleted before all it held is somewhere else. A damaged file is linked to a second name first, then what can
be saved of it takes its place.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envfleet.errors import DamagedWarning, DatasetDamaged
from envfleet.rollout.datasets.episode_codec import Codec
from envfleet.rollout.datasets.seal import Shard, salvage_shard, sealed_shard
from envfleet.rollout.datasets.store import OLD_TAIL, early, number_of, read_old_tail, read_rollouts, shards, tails
from envfleet.rollout.datasets.tail import Found, read_tail
from envfleet.rollout.episodes.episode import Rollout
from envfleet.util.files import keep_aside, remove_leftovers, write_durably


@dataclass
class Contents:
    """What is in a directory."""

    ids: set[int] = field(default_factory=set)
    codec: Codec | None = None
    early: dict[Path, Rollout] = field(default_factory=dict)


def mend(directory: Path) -> Contents:
    """Make every file of a directory a whole shard; return what is in them. The caller holds the lock."""
    remove_leftovers(directory)
    for path in directory.glob(".making-*"):  # of a killed writer of an earlier version
        path.unlink()
    contents = Contents()
    for path in shards(directory):
        _look_at_shard(path, contents)
    for path in tails(directory):
        shard = finish_tail(path)
        if shard is not None:
            _look_at_shard(shard, contents)
    for path in early(directory):
        _look_at_early(path, contents)
    return contents


def _look_at_shard(path: Path, contents: Contents) -> None:
    try:
        _note(path, contents)
    except DatasetDamaged:
        again = next((tail for tail in tails(path.parent) if number_of(tail) == number_of(path)), None)
        if again is not None:  # the tail it was made from is still there
            aside = keep_aside(path)
            path.unlink()
            _warn(path, aside, ["it is made again from its tail"], None)
            return
        if _replaced(path, path, salvage_shard(path)):
            _note(path, contents)


def _note(path: Path, contents: Contents) -> None:
    with open(path, "rb") as file:
        shard = Shard(file, path)
        codec = Codec.from_schema(shard.schema)
        ids = [number for batch in shard.batches(["id"]) for number in batch.column("id").to_pylist()]
    contents.codec = contents.codec or codec
    contents.ids |= set(ids)


def _look_at_early(path: Path, contents: Contents) -> None:
    try:
        found = list(read_rollouts(path))
    except DatasetDamaged as damaged:
        aside = keep_aside(path)
        path.unlink()
        _warn(path, aside, [damaged.problem], None)
        return
    for rollout in found:
        contents.early[path] = rollout
        contents.ids.add(rollout.episode)


def finish_tail(tail: Path) -> Path | None:
    """Turn a tail into a shard and remove it; returns the shard if there was anything to write."""
    shard = tail.with_name(f"shard-{number_of(tail):05d}.parquet")
    if shard.exists():  # a kill between writing it and removing the tail; `mend` has looked at it
        tail.unlink()
        return None
    found = _read(tail)
    if found.problems:
        made = _replaced(tail, shard, found)
        return shard if made else None
    if found.batches:
        write_durably(shard, sealed_shard(_without_repeats(found.batches)))
    tail.unlink()
    return shard if found.batches else None


def _read(tail: Path) -> Found:
    if tail.suffix == OLD_TAIL:
        batches, whole = read_old_tail(tail)
        return Found(batches, [] if whole else ["something behind its last whole record cannot be read"])
    problems: list[str] = []
    return Found(list(read_tail(tail, problems)), problems)


def _replaced(damaged: Path, place: Path, found: Found) -> bool:
    """Keep a damaged file aside and put what was saved of it in its place; False if that is nothing."""
    aside = keep_aside(damaged)
    if found.batches:
        write_durably(place, sealed_shard(_without_repeats(found.batches)))
    if damaged != place or not found.batches:
        damaged.unlink()
    _warn(damaged, aside, found.problems, sum(batch.num_rows for batch in found.batches))
    return bool(found.batches)


def _warn(path: Path, aside: Path, problems: list[str], saved: int | None) -> None:
    rest = "" if saved is None else f"; {saved} episodes of it were saved"
    warnings.warn(f"{path} is damaged ({'; '.join(problems)}): kept as {aside.name}{rest}", DamagedWarning, stacklevel=6)


def _without_repeats(batches: list[Any]) -> list[Any]:
    """Leave out records of an episode that is there already: an interrupted `add` may have been called again."""
    seen: set[int] = set()
    kept = []
    for batch in batches:
        numbers = batch.column("id").to_pylist()
        if len(numbers) > 1 or numbers[0] not in seen:
            kept.append(batch)
        seen |= set(numbers)
    return kept
