"""What a backend is: where workers live and how they are woken. It knows nothing of policies, restarts or batches."""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from envfleet.layout import Layout
from envfleet.recipe import Recipe
from envfleet.slab import Slab, Slots
from envfleet.supervise.faults import Failure
from envfleet.supervise.memory import Pulse


@dataclasses.dataclass(frozen=True)
class Loss:
    """A worker whose process ended: which slot it was in, and how it ended."""

    worker: int
    exit_code: int | None
    slot: int  # -1: it was idle
    phase: str


@dataclasses.dataclass
class Finished:
    """What a `wait` brought: slots whose rows are written, failures among them, workers that were lost."""

    done: list[int] = dataclasses.field(default_factory=list)
    failures: dict[int, Failure] = dataclasses.field(default_factory=dict)
    losses: list[Loss] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.done or self.losses)


class Backend(abc.ABC):
    """The contract between a fleet and whatever runs its slots.

    `start` builds every env and reports each (a description or a failure); `attach` gives the rows; from then on the
    fleet writes actions and commands into rows, `submit`s slots, and `wait`s for them. Rows of submitted slots are the
    backend's until it has named them in `Finished.done`.
    """

    name: str
    #: Whether a worker that overruns its deadline can be ended and its slots rebuilt elsewhere.
    can_kill = False
    #: Whether deadlines can be noticed at all while a call is stuck.
    has_deadlines = True
    #: Whether a slot whose call was abandoned may be rebuilt (else it is quarantined).
    can_rebuild_abandoned = False
    #: Called, in whatever thread, when something may be there for `wait`: for callers who wait in an event loop of
    #: their own. Set it before `start`. Workers that are processes are heard by `sockets` instead.
    on_done: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.recipe: Recipe
        self.slab: Slab
        self.num_workers = 1
        self.start_method: str | None = None
        self.worker_of: np.ndarray[Any, Any]  # [slot] -> worker
        self.pulses: list[Pulse] = []
        self.info: dict[int, Any] = {}  # by slot: a dict, or the bytes of one, unpickled only when someone looks
        self.final_info: dict[int, Any] = {}
        self.handed_over = False  # see `round`
        self._tickets: dict[int, int] = {}  # slot -> number of its last call

    @abc.abstractmethod
    def start(self, recipe: Recipe) -> dict[int, dict[str, Any] | Failure | Loss]:
        """Build all envs; per slot what `slot.describe` tells, or why it could not be built."""

    @abc.abstractmethod
    def attach(self, layout: Layout) -> Slab:
        """Lay out the rows, here and in the workers."""

    @abc.abstractmethod
    def submit(self, slots: Slots) -> None:
        """Hand these slots' rows to their workers and let them work."""

    @abc.abstractmethod
    def wait(self, at_least: int, timeout_s: float) -> Finished:
        """Wait until `at_least` more slots are done, something was lost, or the time is over."""

    def round(self, slots: Slots, timeout_s: float) -> Finished | None:
        """`submit` all slots and `wait` for them; None when every one came back with nothing beside its row.

        Backends override this where one call costs less than two: between two batches the workers wait for the caller.
        When it raises, `handed_over` says whether the slots are out, as after `submit`, or were never taken.
        """
        self.handed_over = False
        self.submit(slots)
        self.handed_over = True
        return self.wait(len(slots), timeout_s)

    @abc.abstractmethod
    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """Ask for a call of the env's interface in each slot; results come through `replies`. `each`: args per slot."""

    @abc.abstractmethod
    def replies(self, timeout_s: float) -> dict[int, Any]:
        """Results (or Failures) of calls that have arrived since last asked."""

    @abc.abstractmethod
    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """End everything within the time; what went wrong in envs' close, or had to be killed, by slot."""

    def _ticket(self, slot: int) -> int:
        """A number for a call in a slot. An answer to an earlier call, given up by Ctrl-C or a fault, has another."""
        self._tickets[slot] = self._tickets.get(slot, 0) + 1
        return self._tickets[slot]

    def kill(self, worker: int) -> str:
        """End a stuck worker (or give its call up); returns the Python stacks it was seen in."""
        raise AssertionError(f"{self.name} has no deadlines")  # the supervisor asks has_deadlines first

    def runnable(self) -> list[int] | None:
        """Slots that can have an env at the same time right now, where that is limited; None: all of them."""
        return None

    def sockets(self) -> Collection[int]:
        """File descriptors that can be read when something is there for `wait`; a restarted worker has a new one."""
        return ()

    def give_tasks(self, tasks: Mapping[int, bytes]) -> None:
        """Make task values known to the workers before slots that use them are submitted."""

    def give_options(self, options: Mapping[int, dict[str, Any]]) -> None:
        """Options of the next explicit reset, by slot."""

    def give_mail(self, mail: Mapping[int, Mapping[int, Any]]) -> None:
        """Objects of mailbox action leaves: leaf index -> slot -> object."""

    def now(self) -> float:
        """The clock deadlines are measured with."""
        return time.monotonic()

    def _keep_side(self, slot: int, info: Any, final_info: Any) -> None:
        # Only what is there is kept: most envs have nothing to say on most steps.
        if info:
            self.info[slot] = info
        else:
            self.info.pop(slot, None)
        if final_info:
            self.final_info[slot] = final_info
        else:
            self.final_info.pop(slot, None)


def spread(num_slots: int, num_workers: int) -> np.ndarray[Any, Any]:
    """Slots over workers, in contiguous runs as even as can be.

    Example:
        >>> spread(5, 2).tolist()
        [0, 0, 0, 1, 1]
    """
    return np.sort(np.arange(num_slots) % num_workers)
