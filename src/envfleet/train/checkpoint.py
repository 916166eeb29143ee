"""Checkpoints: written whole or not at all, read without executing anything.

A checkpoint is a `torch.save` file of plain values and tensors only, so that `weights_only=True` reads it. It is
written beside its final name, flushed to the disk and renamed: a kill at any moment leaves the earlier files intact.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from envfleet.errors import BadArgument
from envfleet.train.errors import CheckpointError

FORMAT = 1
FOLDER = "checkpoints"
_NAME = re.compile(r"update_(\d+)\.pt$")


class Checkpoints:
    """The checkpoints of a run folder: the last `keep` of them, and the best.

    Example:
        >>> import tempfile
        >>> checkpoints = Checkpoints(tempfile.mkdtemp(), keep=2)
        >>> paths = [checkpoints.save(update, {"weights": np.arange(3)}) for update in (1, 2, 3)]
        >>> [path.name for path in checkpoints.paths()]
        ['update_000000002.pt', 'update_000000003.pt']
        >>> checkpoints.load_latest()["weights"].tolist()
        [0, 1, 2]
    """

    def __init__(self, run_folder: str | Path, keep: int = 3) -> None:
        self.folder = Path(run_folder) / FOLDER
        self.keep = max(keep, 1)

    def paths(self) -> list[Path]:
        """Return the numbered checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.match(path.name)]
        return sorted(found, key=lambda path: int(_NAME.match(path.name).group(1)))  # type: ignore[union-attr]

    @property
    def best(self) -> Path:
        """Where the best checkpoint is, if there is one."""
        return self.folder / "best.pt"

    def save(self, update: int, state: dict[str, Any], best: bool = False) -> Path:
        """Write a checkpoint, mark it as the best if it is, and drop those that are too old."""
        path = self.folder / f"update_{update:09d}.pt"
        write(path, state)
        if best:
            link = self.folder / f".best.{os.getpid()}"
            link.unlink(missing_ok=True)
            try:
                os.link(path, link)  # no second copy of the data, and the rename below is atomic
            except OSError:
                write(link, state)
            os.replace(link, self.best)
        for old in self.paths()[: -self.keep]:
            old.unlink(missing_ok=True)
        for leftover in self.folder.glob(".*.tmp"):  # of a process that was killed while writing
            leftover.unlink(missing_ok=True)
        return path

    def load_latest(self) -> dict[str, Any] | None:
        """Read the newest checkpoint that can be read; None when there is none."""
        problems: list[str] = []
        for path in reversed(self.paths()):
            try:
                return read(path)
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError("no checkpoint can be read: " + "; ".join(problems))
        return None


def write(path: Path, state: dict[str, Any]) -> None:
    """Write a state atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        torch.save({"format": FORMAT, "state": _plain(state)}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must survive a power cut too
    finally:
        os.close(folder)


def read(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint file; nothing in it is executed."""
    path = Path(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path} is not a checkpoint of envfleet")
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"{path} has format {content['format']}, this version reads up to {FORMAT}: upgrade envfleet"
        )
    state: dict[str, Any] = _arrays(content["state"])
    return state


def find(where: str | Path, which: str = "final") -> Path:
    """Return the checkpoint of a run folder (`final` or `best`), or the file itself.

    Example:
        >>> find("nowhere")
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: there is no run in 'nowhere': give a run folder or a checkpoint file
    """
    path = Path(where)
    if path.is_file():
        return path
    checkpoints = Checkpoints(path)
    paths = checkpoints.paths()
    if which == "best" and checkpoints.best.exists():
        return checkpoints.best
    if not paths:
        raise BadArgument(f"there is no run in {str(where)!r}: give a run folder or a checkpoint file")
    return paths[-1]


def _plain(value: Any) -> Any:
    # NumPy arrays travel as tensors under a marker key, so that they come back as arrays of the same dtype.
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise TypeError(f"an array of {value.dtype} cannot go into a checkpoint")
        raw = np.ascontiguousarray(value)
        return {
            "__array__": torch.from_numpy(raw.reshape(-1).view(np.uint8).copy()),
            "dtype": str(value.dtype),
            "shape": list(value.shape),
        }
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value).__name__} cannot go into a checkpoint: only plain values, arrays and tensors can")


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if "__array__" in value:
            return value["__array__"].numpy().view(value["dtype"]).reshape(value["shape"]).copy()
        return {key: _arrays(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_arrays(part) for part in value]
    return value
