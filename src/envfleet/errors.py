"""Every error envfleet raises, under one base.

::

    FleetError
    ├── BadArgument (ValueError)      refused before anything started
    │   ├── NotPicklable              an environment or a task that cannot travel to a worker
    │   └── SpacesDiffer              environments of one fleet whose spaces are not equal
    ├── BackendMissing (ImportError)  an optional part is not installed, or not possible on this system
    ├── SlotBusy                      sent again before it was received
    ├── ResetNeeded                   stepped before the first reset, or after an end nobody reset
    ├── FleetClosed                   used after close()
    ├── KeeperLost                    the process that starts and ends the workers is gone: make a new fleet
    ├── RecvTimeout (TimeoutError)    recv(timeout_s=…) ran out; nothing is lost, receive again
    └── FaultError                    an environment or its worker failed; `.fault` is the record
        ├── EnvFailed                 the environment raised, or returned what it must not
        ├── EnvTimeout (TimeoutError) the environment overran its deadline
        └── WorkerLost                the worker's process ended
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from envfleet.faults.failure import Fault


class FleetError(Exception):
    """The base of every error envfleet raises."""


class BadArgument(FleetError, ValueError):
    """An argument that cannot work, refused before any process started."""


class NotPicklable(BadArgument):
    """Something that has to travel to a worker cannot be pickled; the message names it."""


class SpacesDiffer(BadArgument):
    """Two environments of one fleet have different spaces."""


class BackendMissing(FleetError, ImportError):
    """A backend or an optional part is not installed or not possible here.

    Example:
        >>> raise BackendMissing("ray", extra="ray")
        Traceback (most recent call last):
        ...
        envfleet.errors.BackendMissing: 'ray' is not available here. Install it: pip install "envfleet[ray]"
    """

    def __init__(self, what: str, extra: str | None = None, why: str | None = None) -> None:
        remedy = f'Install it: pip install "envfleet[{extra}]"' if extra else (why or "")
        super().__init__(f"'{what}' is not available here. {remedy}".strip())


class SlotBusy(FleetError):
    """Slots were sent (or reset, or called) while an earlier send had not been received."""

    def __init__(self, slots: Sequence[int], hint: str = "recv() them before sending again") -> None:
        self.slots = [int(slot) for slot in slots]
        super().__init__(f"slots {_short(self.slots)} are busy: {hint}")


class ResetNeeded(FleetError, AssertionError):
    """Slots were stepped that have no running episode."""

    def __init__(self, slots: Sequence[int], hint: str = "call reset() first") -> None:
        self.slots = [int(slot) for slot in slots]
        super().__init__(f"slots {_short(self.slots)} have no running episode: {hint}")


class FleetClosed(FleetError):
    """The fleet was used after close()."""

    def __init__(self, what: str = "the fleet") -> None:
        super().__init__(f"{what} is closed: make a new one")


class KeeperLost(FleetError):
    """The process that starts and ends a fleet's workers is gone, and the workers with it."""

    def __init__(self) -> None:
        super().__init__(
            "the process that starts workers ended (killed from outside, or out of memory), and all workers with it: "
            "close() this fleet and make a new one"
        )


class RecvTimeout(FleetError, TimeoutError):
    """recv() ran out of its own time. Nothing is lost: the slots are still out and can be received later."""

    def __init__(self, busy: Sequence[int], timeout_s: float) -> None:
        self.slots = [int(slot) for slot in busy]
        super().__init__(
            f"after {timeout_s:g} s slots {_short(self.slots)} had not finished; "
            "what is ready is kept: ready() lists it, recv() again returns it"
        )


class FaultError(FleetError):
    """A fault of one slot. `fault` holds slot, episode, step, seed, task, phase, cause and the last actions."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        super().__init__(str(fault))

    def __getattr__(self, name: str) -> Any:
        # error.slot, error.phase, error.step …: the address is what people look for first.
        if name.startswith("__") or name == "fault":
            raise AttributeError(name)
        return getattr(self.fault, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.fault,)


class EnvFailed(FaultError):
    """The environment raised, or returned something that is not a valid result."""


class EnvTimeout(FaultError, TimeoutError):
    """The environment overran init_timeout_s, reset_timeout_s or step_timeout_s."""


class WorkerLost(FaultError):
    """The worker process that held the slot ended: exit code, signal, or killed from outside."""


def _short(slots: Sequence[int], most: int = 12) -> str:
    shown = ", ".join(str(slot) for slot in slots[:most])
    return f"[{shown}, … {len(slots)} in all]" if len(slots) > most else f"[{shown}]"
