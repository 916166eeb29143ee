"""How a fleet ends: bounded, idempotent, complete."""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any, Self

from envfleet.backends.base import Backend
from envfleet.core.plan import Plan
from envfleet.core.supervisor import Supervisor


class Ending:
    """The end of a fleet, by `close`, by leaving a `with` block, or by dropping the last reference."""

    plan: Plan
    _backend: Backend
    _supervisor: Supervisor
    _closed: bool
    _finalizer: weakref.finalize[Any, Any]

    def close(self, timeout_s: float = 4.0) -> None:
        """End everything: envs are asked to close, and whatever does not within `timeout_s` is killed. Idempotent.

        What went wrong in closing is in `faults` and in one warning; it is never raised.
        """
        self._closed = True
        if not self._finalizer.alive or os.getpid() != self.plan.pid:
            return
        problems = self._backend.close(timeout_s)
        self._finalizer.detach()  # not before: a close that was interrupted can be called again
        faults = [self._supervisor.note_close(slot, problem) for slot, problem in problems]
        late = [fault for fault in faults if fault.phase == "close" or fault.kind == "timeout"]
        if late:
            warnings.warn("while closing: " + "; ".join(str(fault) for fault in late), RuntimeWarning, stacklevel=2)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def close_quietly(backend: Backend, pid: int) -> None:
    """Close a backend whose fleet was dropped."""
    # A forked child of the user's process inherits this finalizer but not the right to end the parent's workers.
    if os.getpid() == pid:
        backend.close(2.0)
