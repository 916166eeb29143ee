"""What can go wrong in a training run.

::

    FleetError
    ├── BadArgument
    │   ├── RunExists            the folder holds a run, and --resume was not given
    │   ├── RunBusy              another trainer is at work in the folder: `.owner`
    │   └── DeviceMissing        cuda or mps was asked for and is not there
    ├── CheckpointError          a checkpoint that cannot be read, or does not fit
    │   ├── CheckpointDamaged    it is not what was written: `.path`, `.problem`
    │   └── CheckpointMissing    it is not there
    ├── WriteFailed (OSError)    the disk is full or fails; says which checkpoint is safe (envfleet.util.files)
    └── TrainingStopped          NaN: where it was seen, and the checkpoint that was written
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from envfleet.errors import BadArgument, FleetError
from envfleet.util.locks import FolderBusy


class RunExists(BadArgument):
    """The run folder already holds a run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} already holds a run: add --resume (resume=True) to go on with it, or choose another folder"
        )


class RunBusy(BadArgument):
    """Another trainer is at work in the run folder; `owner` has its `pid`, `host` and `since`."""

    def __init__(self, busy: FolderBusy) -> None:
        self.owner = busy.owner
        super().__init__(str(busy))


class DeviceMissing(BadArgument):
    """The device that was asked for is not available."""

    def __init__(self, device: str, available: list[str]) -> None:
        super().__init__(f"device={device!r} is not available here; available: {', '.join(available)}")


class CheckpointError(FleetError):
    """A checkpoint cannot be read, or belongs to another kind of run."""


class CheckpointMissing(CheckpointError):
    """There is no such file."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint file is not what was written (changed bytes, cut short).

    Example:
        >>> raise CheckpointDamaged(Path("run/checkpoints/best.pt"), "its digest is another one")
        Traceback (most recent call last):
        ...
        envfleet.train.train_errors.CheckpointDamaged: run/checkpoints/best.pt is damaged: its digest is another one. Use ...
    """

    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(f"{path} is damaged: {problem}. Use another checkpoint of the run, or a copy of this one")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.problem)


class TrainingStopped(FleetError):
    """Training met a value that is not finite. `checkpoint` is what was saved (None without a run folder)."""

    def __init__(self, why: str, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        saved = f" The state before this update is saved in {checkpoint}." if checkpoint else ""
        super().__init__(f"training stopped: {why}.{saved}")
