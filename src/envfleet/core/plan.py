"""The plan: which backend runs a fleet, with how many workers, and why."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a fleet is run. Prints as one line.

    Example:
        >>> print(Plan("serial", 1, 8, reason="asked for"))
        serial, 1 worker, 8 slots: asked for
    """

    backend: str
    num_workers: int
    num_envs: int
    start_method: str | None = None
    reason: str = "asked for"
    #: What has changed since, the latest last: slots that were moved because the machine is busy, or could not be.
    notes: list[str] = dataclasses.field(default_factory=list, repr=False, compare=False)
    pid: int = dataclasses.field(default_factory=os.getpid, repr=False, compare=False)

    def __str__(self) -> str:
        workers = f"{self.num_workers} worker{'s' if self.num_workers != 1 else ''}"
        method = f" ({self.start_method})" if self.start_method else ""
        latest = f"; {self.notes[-1]}" if self.notes else ""
        slots = f"{self.num_envs} slot{'s' if self.num_envs != 1 else ''}"
        return f"{self.backend}{method}, {workers}, {slots}: {self.reason}{latest}"
