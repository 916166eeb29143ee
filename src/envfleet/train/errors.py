"""What can go wrong in a training run.

::

    FleetError
    ├── BadArgument
    │   ├── RunExists            the folder holds a run, and --resume was not given
    │   └── DeviceMissing        cuda or mps was asked for and is not there
    ├── CheckpointError          a checkpoint that cannot be read, or does not fit
    └── TrainingStopped          NaN: where it was seen, and the checkpoint that was written
"""

from __future__ import annotations

from pathlib import Path

from envfleet.errors import BadArgument, FleetError


class RunExists(BadArgument):
    """The run folder already holds a run."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} already holds a run: add --resume (resume=True) to go on with it, or choose another folder"
        )


class DeviceMissing(BadArgument):
    """The device that was asked for is not available."""

    def __init__(self, device: str, available: list[str]) -> None:
        super().__init__(f"device={device!r} is not available here; available: {', '.join(available)}")


class CheckpointError(FleetError):
    """A checkpoint cannot be read, or belongs to another kind of run."""


class TrainingStopped(FleetError):
    """Training met a value that is not finite. `checkpoint` is what was saved (None without a run folder)."""

    def __init__(self, why: str, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        saved = f" The state before this update is saved in {checkpoint}." if checkpoint else ""
        super().__init__(f"training stopped: {why}.{saved}")
