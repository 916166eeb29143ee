"""Dataset directories of either format behind two functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from envfleet.errors import BadArgument, DatasetError
from envfleet.rollout.datasets.minari_format import find_minari, read_minari, save_minari
from envfleet.rollout.datasets.parquet import DatasetWriter, is_dataset, read_parquet
from envfleet.rollout.episodes.episode import Rollout, Rollouts


def save_rollouts(rollouts: Iterable[Rollout], directory: str | Path, format: str = "parquet", **options: Any) -> Path:
    """Write rollouts to a new directory.

    Parquet options are those of `DatasetWriter`, Minari options those of `save_minari`. Rollouts without an
    id, or with ids that repeat (several collections in one list), are numbered by their position.
    """
    listed = Rollouts(rollouts)
    if format == "minari":
        return save_minari(listed, directory, **options)
    if format != "parquet":
        raise BadArgument(f"format must be 'parquet' or 'minari', got {format!r}")
    ids = [rollout.episode for rollout in listed]
    unique = len(set(ids)) == len(ids) and all(number >= 0 for number in ids)
    with DatasetWriter(directory, **options) as writer:
        for position, rollout in enumerate(listed):
            writer.add(rollout if unique else replace(rollout, episode=position))
    return Path(directory)


def iter_rollouts(directory: str | Path) -> Iterator[Rollout]:
    """Yield the episodes of a dataset directory, one at a time.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = save_rollouts([Rollout(observations=[0, 1], actions=[1], rewards=[1.0], terminated=[True],
        ...                                truncated=[False])], directory)
        ...     [len(rollout) for rollout in iter_rollouts(directory)]
        [1]
    """
    path = Path(directory)
    if not path.is_dir():
        raise DatasetError(f"{path} is not a directory")
    if is_dataset(path):
        return read_parquet(path)
    if find_minari(path) is not None:
        return read_minari(path)
    raise DatasetError(f"{path} holds neither an envfleet dataset (shard-*.parquet) nor a Minari one")
