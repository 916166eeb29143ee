"""What can go wrong while episodes are collected.

::

    FleetError
    └── RolloutError              has `.rollouts`: everything that was collected, nothing is thrown away
        ├── RolloutFailed         one episode failed: env_name, phase, step, attempts; the cause is chained
        │   ├── AgentFailed       the agent raised, or answered with what is no action (`.value`)
        │   └── ClientFailed      the environment client raised, or answered with what is no result
        ├── RolloutsFailed        some of several episodes failed; `.failed` lists them
        └── DatasetError          a dataset directory that cannot be read or continued as asked
            ├── DatasetDamaged    a file is not what was written: `.path`, `.problem`
            ├── DatasetBusy       another process is writing: `.owner`
            └── DatasetFull       (WriteFailed, OSError) the disk does not take any more; what is safe
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envfleet.errors import FleetError
from envfleet.util.files import WriteFailed
from envfleet.util.locks import FolderBusy

if TYPE_CHECKING:
    from envfleet.rollout.episodes.episode import Rollout


class RolloutError(FleetError):
    """The base; `rollouts` holds what was collected all the same."""

    rollouts: Sequence[Rollout] = ()


def all_gone(fault: Any) -> RolloutError:
    """Every slot has failed too often; `fault` is the last one's."""
    return RolloutError(
        "every slot is quarantined, so nothing can be collected any more (on_fault='raise' stops at the first fault); "
        f"the last one: {fault}"
    )


class RolloutFailed(RolloutError):
    """One episode failed. The address comes first, the chained cause says what happened."""

    def __init__(self, message: str, *, env_name: str = "", phase: str = "", step: int = -1, value: Any = None) -> None:
        self.message = message
        self.env_name = env_name
        self.phase = phase
        self.step = step
        self.value = value
        where = f"environment {env_name!r}, {phase}" + (f" at step {step}" if step >= 0 else "")
        super().__init__(f"{where}: {message}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (
            type(self),
            self.message,
            self.env_name,
            self.phase,
            self.step,
            _portable(self.value),
        )


class AgentFailed(RolloutFailed):
    """The agent raised, returned None, or returned an action outside the action space."""


class ClientFailed(RolloutFailed):
    """The environment client raised, or returned something that is not a step result."""


class RolloutsFailed(RolloutError):
    """Some episodes failed; the others ran to their end first and are in `rollouts`, in submission order."""

    def __init__(self, rollouts: Sequence[Rollout], failed: Sequence[Rollout]) -> None:
        self.rollouts = rollouts
        self.failed = list(failed)
        first = self.failed[0].error if self.failed else None
        super().__init__(
            f"{len(self.failed)} of {len(rollouts)} rollouts failed; the others are in error.rollouts. "
            f"First failure: {first}. To go on without them: on_error='skip' or 'retry'"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rollouts, self.failed)


class DatasetError(RolloutError):
    """A dataset directory cannot be read, or cannot be continued as asked."""


class DatasetDamaged(DatasetError):
    """A file of a dataset is not what was written (changed bytes, cut short). Nothing of it was deleted.

    Example:
        >>> raise DatasetDamaged(Path("data/shard-00000.parquet"), "its digest is another one")
        Traceback (most recent call last):
        ...
        envfleet.rollout.rollout_errors.DatasetDamaged: data/shard-00000.parquet is damaged: its digest is another one. ...
    """

    def __init__(self, path: Path, problem: str) -> None:
        self.path, self.problem = path, problem
        super().__init__(
            f"{path} is damaged: {problem}. Take it from a copy, or continue the dataset (the same `envfleet collect`, "
            "or DatasetWriter(…, resume=True)): the file is then kept under another name, with what can be read saved"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.problem)


class DatasetBusy(DatasetError):
    """Another process is writing to the directory; `owner` has its `pid`, `host` and `since`."""

    def __init__(self, busy: FolderBusy) -> None:
        self.owner = busy.owner
        super().__init__(str(busy))


class DatasetFull(WriteFailed, DatasetError):
    """The disk did not take what was to be written. Episodes whose `add` returned are safe; `add` works again with room."""


class LedgerWarning(UserWarning):
    """What was returned differs from what was started; the message counts it and says why."""


def _rebuild(
    kind: type[RolloutFailed], message: str, env_name: str, phase: str, step: int, value: Any
) -> RolloutFailed:
    return kind(message, env_name=env_name, phase=phase, step=step, value=value)


def _portable(value: Any) -> Any:
    """Keep simple values; anything else crosses a process border as its text, for it may not be picklable."""
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)
