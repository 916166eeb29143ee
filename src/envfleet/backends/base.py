"""What a backend is: where workers run and how they are woken. It does not know policies, restarts or batches."""

from __future__ import annotations

import abc
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from envfleet.errors import BadArgument, KeeperLost
from envfleet.faults.failure import Failure, Loss
from envfleet.slots.factories import Recipe
from envfleet.slots.layout import Layout
from envfleet.slots.slab import Slab, Slots
from envfleet.workers.shared_memory import Pulse

Turns = np.ndarray[Any, np.dtype[np.uint32]]


class EnvState(NamedTuple):
    """An environment that is plain memory: what it is, in words, and a copy of its memory."""

    kind: str
    memory: bytes


class Backend(abc.ABC):
    """The contract between a fleet and the backend that runs its slots.

    `start` builds every env and reports each (a description or a failure); `attach` gives the rows; from then on the
    fleet writes actions and commands into rows, `submit`s slots, and `wait`s for them.

    Two numbers say who owns a slot. `submit` gives it a new turn (`given`); when the row of that turn is complete, the
    backend marks it (`done`). A slot with `done != given` is out, and the backend owns its row. Each number changes in
    one step, when the event has happened. So an exception at any point of `submit` or `wait` (Ctrl-C, a signal handler
    that raises) leaves every slot either not submitted or out. Anything of an earlier turn than `given` is dropped and
    counted in `num_stale`.
    """

    name: str
    #: Whether a worker that overruns its deadline can be ended and its slots rebuilt elsewhere.
    can_kill = False
    #: Whether deadlines can be noticed at all while a call is stuck.
    has_deadlines = True
    #: Whether a slot whose call was abandoned may be rebuilt (else it is quarantined).
    can_rebuild_abandoned = False
    #: Whether all slots are one object that fails, and is rebuilt, as a whole.
    is_one_engine = False
    #: Called, in any thread, when something may be there for `wait`: for callers that wait in their own event
    #: loop. Set it before `start`. For workers that are processes, use `sockets` instead.
    on_done: Callable[[], None] | None = None

    def __init__(self) -> None:
        self.recipe: Recipe
        self.slab: Slab
        self.num_workers = 1
        self.start_method: str | None = None
        self.worker_of: np.ndarray[Any, Any]  # [slot] -> worker
        self.pulses: list[Pulse] = []
        self.info: dict[int, Any] = {}  # by slot: a dict, or the bytes of one, unpickled only when it is read
        self.final_info: dict[int, Any] = {}
        self.given: Turns = np.zeros(0, np.uint32)  # [slot]: how often it was handed over
        self.done: Turns = np.zeros(0, np.uint32)  # [slot]: the last turn whose row is complete
        self.failures: dict[int, Failure] = {}  # of slots that are done, until the supervisor has dealt with them
        self.losses: deque[Loss] = deque()  # likewise
        #: Likewise: (worker, why there is no place for it now), or (worker, "") when it has one after all.
        self.placings: deque[tuple[int, str]] = deque()
        self.num_stale = 0  # answers of an earlier turn, which were dropped
        self.is_broken = False  # the keeper is gone: nothing works any more but `close`
        self.is_closing = False  # the fleet was closed: a long wait of a call in another thread ends
        self._call_numbers: dict[int, int] = {}  # slot -> number of its last call
        self._replies: dict[int, Any] = {}  # slot -> the answer to it, until it is asked for
        self.notes: list[str] = []  # what has changed since the plan was made: see `Plan`

    @abc.abstractmethod
    def start(self, recipe: Recipe) -> dict[int, dict[str, Any] | Failure | Loss]:
        """Build all envs; per slot its description (`env_contract.describe`), or why it could not be built."""

    @abc.abstractmethod
    def attach(self, layout: Layout) -> Slab:
        """Lay out the rows, here and in the workers. Calls `_count_turns`."""

    def _count_turns(self) -> None:
        self.given = np.zeros(self.recipe.num_slots, np.uint32)
        self.done = np.zeros(self.recipe.num_slots, np.uint32)

    @abc.abstractmethod
    def submit(self, slots: Slots) -> None:
        """Hand these slots' rows to their workers and let them work."""

    @abc.abstractmethod
    def wait(self, at_least: int, timeout_s: float) -> None:
        """Wait until `at_least` more slots are done, something was lost, or the time is over."""

    def round(self, slots: Slots, timeout_s: float) -> bool:
        """`submit` all slots and `wait` for them; True when every one is done with nothing beside its row.

        Backends override this where one call costs less than two: between two batches the workers wait for the caller.
        """
        self.submit(slots)
        self.wait(len(slots), timeout_s)
        return False

    @property
    def num_out(self) -> int:
        """How many slots are out."""
        return int(np.count_nonzero(self.given != self.done))

    @property
    def has_trouble(self) -> bool:
        """Whether the supervisor has something to deal with."""
        return bool(self.failures or self.losses or self.placings or self.is_broken)

    @abc.abstractmethod
    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """Ask for a call of the env's interface in each slot; results come through `replies`. `each`: args per slot."""

    @abc.abstractmethod
    def replies(self, timeout_s: float) -> dict[int, Any]:
        """Results (or Failures) of calls that have arrived since last asked."""

    @abc.abstractmethod
    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """End everything within the time; what went wrong in envs' close, or had to be killed, by slot."""

    def is_own_thread(self) -> bool:
        """Whether this thread is a worker of this backend, which cannot wait for its own end."""
        return False

    def _next_call(self, slot: int) -> int:
        """A number for a call in a slot. An answer to an earlier call, given up by Ctrl-C or a fault, has another."""
        self._call_numbers[slot] = self._call_numbers.get(slot, 0) + 1
        self._replies.pop(slot, None)
        return self._call_numbers[slot]

    def kill(self, worker: int) -> str:
        """End a stuck worker (or give its call up); returns the Python stacks it was seen in."""
        raise AssertionError(f"{self.name} has no deadlines")  # the supervisor asks has_deadlines first

    def end_worker(self, slot: int, phase: str, words: str, kind: str) -> None:
        """End the worker of a slot that is past its deadline or was given up (where `can_kill`), and add it to the losses."""
        worker = int(self.worker_of[slot])
        self.losses.append(Loss(worker, None, slot, phase, words, self.kill(worker), kind))

    def give_up(self, slot: int) -> str:
        """Give up what a slot is doing, where workers cannot be ended; the Python stack it was in."""
        return self.kill(int(self.worker_of[slot]))

    def broken(self) -> KeeperLost:
        """The error to raise when `is_broken`."""
        return KeeperLost()

    def check(self) -> None:
        """Check whether this backend can still work, and set `is_broken` if not."""

    def settle(self) -> None:
        """Complete a method that an exception interrupted. Otherwise changes nothing."""

    def delivered(self, slot: int) -> Any:
        """The row of a slot as it was last delivered: its head, and the leaves of its observation."""
        return self.slab.delivered(slot, int(self.given[slot]))

    def pulse_of(self, slot: int) -> Pulse:
        """The pulse of this slot."""
        return self.pulses[int(self.worker_of[slot])]

    def has_deadline(self, slot: int) -> bool:
        """Whether silence of this slot is a fault. False where the caller steps it itself."""
        return True

    def part_of(self, slot: int) -> Backend:
        """The backend that really runs this slot: this one, or a part of it where several are joined."""
        return self

    def runnable(self) -> list[int] | None:
        """Slots that can have an env at the same time right now, where that is limited; None: all of them."""
        return None

    def sockets(self) -> Collection[int]:
        """File descriptors that can be read when something is there for `wait`; a restarted worker has a new one."""
        return ()

    def give_tasks(self, tasks: Mapping[int, bytes]) -> None:
        """Make task values known to the workers before slots that use them are submitted."""

    @property
    def seeds_per_slot(self) -> bool:
        """Whether each slot can be given a seed of its own at each of its resets."""
        return True

    def check_seeds(self, slots: Sequence[int], seeds: Sequence[int | None], now: bool) -> None:
        """Refuse seeds that cannot be used. `now`: they belong to a reset that is sent at once, else to the next one."""

    def give_options(self, options: Mapping[int, dict[str, Any] | None]) -> None:
        """Options of the next reset, by slot; None takes back what was given before."""

    def give_mail(self, mail: Mapping[int, Mapping[int, Any]]) -> None:
        """Objects of mailbox action leaves: leaf index -> slot -> object."""

    def states(self, slots: Slots) -> list[EnvState]:
        """The whole state of the environments in these slots, where environments are plain memory."""
        raise BadArgument(f"backend {self.name!r} cannot copy environments: snapshots need backend='native'")

    def set_states(self, slots: Slots, states: Sequence[EnvState]) -> None:
        """Give environments states of their kind; the heads of their rows are written already."""
        raise BadArgument(f"backend {self.name!r} cannot copy environments: snapshots need backend='native'")

    def resize(self, num_workers: int, has_env: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Let so many workers step the slots from now on, where workers can be added and ended."""
        raise BadArgument(f"backend {self.name!r} has the workers it was made with: resize() needs backend 'pipe' or 'ray'")

    def mind(self, free: Callable[[], Slots]) -> None:
        """Periodic work of the backend, e.g. moving slots that are `free`: idle, and not lost.

        Called between two batches, never while a call of the env's interface waits for its answer.
        """

    def now(self) -> float:
        """The clock deadlines are measured with."""
        return time.monotonic()

    def _keep_side(self, slot: int, info: Any, final_info: Any) -> None:
        # Only infos that exist are kept: most steps have none.
        if info:
            self.info[slot] = info
        else:
            self.info.pop(slot, None)
        if final_info:
            self.final_info[slot] = final_info
        else:
            self.final_info.pop(slot, None)


def spread(num_slots: int, num_workers: int) -> np.ndarray[Any, Any]:
    """Slots over workers, in contiguous ranges of nearly equal length.

    Example:
        >>> spread(5, 2).tolist()
        [0, 0, 0, 1, 1]
    """
    return np.sort(np.arange(num_slots) % num_workers)
