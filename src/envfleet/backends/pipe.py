"""pipe: worker processes, rows by value. Slower than shm, but nothing is shared except the socket."""

from __future__ import annotations

import time
from typing import Any

import cloudpickle
import numpy as np

from envfleet.backends.processes import ProcessBackend
from envfleet.backends.resizing import resize
from envfleet.backends.worker_handle import WorkerHandle
from envfleet.errors import BadArgument
from envfleet.slots.layout import Layout
from envfleet.slots.slab import Slab, Slots
from envfleet.workers.channel import ParentChannel
from envfleet.workers.launcher import Keeper
from envfleet.workers.protocol import MESSAGE, UP, ToWorker
from envfleet.workers.shared_memory import Pulse


class PipeBackend(ProcessBackend):
    """Rows travel with the messages.

    With `threads` every slot has a thread of its own in its worker, so that a slow one delays none of those it shares the
    process with. That costs a wake-up a step; a server's sessions, which do not wait for each other, need it.
    """

    name = "pipe"
    by_value = True

    def __init__(self, num_workers: int | None = None, start_method: str | None = None, threads: bool = False) -> None:
        super().__init__(num_workers, start_method)
        self.threads = threads

    def pulse_of(self, slot: int) -> Pulse:
        """The pulse of the slot, if slots have their own threads."""
        return self.pulses[slot] if self.threads else super().pulse_of(slot)

    # -- another number of workers: see `envfleet.backends.resizing` ------------------------------------------------

    def resize(self, num_workers: int, has_env: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """Let so many workers step the slots."""
        if self.threads:
            raise BadArgument("resize(): slots with threads of their own stay with their worker")
        self.settle()
        resize(self, num_workers, has_env)

    @property
    def workers(self) -> list[WorkerHandle]:
        """The handles of all workers."""
        return self._workers

    @property
    def keeper(self) -> Keeper:
        """Who starts workers."""
        assert self._keeper is not None
        return self._keeper

    def new_pulse(self, index: int) -> Pulse:
        """The pulse of one more worker."""
        self.pulses = self._all_pulses[: index + 1]
        return self.pulses[index]

    def launch(self, worker: WorkerHandle) -> None:
        """Start a worker whose slots come from others."""
        self._launch(worker, build=False)

    def has_place(self, worker: WorkerHandle) -> bool:
        """Whether a worker that was asked for runs, or will: here always."""
        return True

    def poll(self, timeout_s: float) -> None:
        """Take in messages."""
        self._poll(timeout_s)

    def message(self, worker: WorkerHandle, *message: Any) -> None:
        """Send a worker a message."""
        self._message(worker, *message)

    def wait_for_ends(self, workers: list[WorkerHandle], timeout_s: float) -> None:
        """Wait for workers that were told to close; end those that do not."""
        deadline = time.monotonic() + timeout_s
        while any(worker.alive for worker in workers) and time.monotonic() < deadline:
            self._poll(0.05)
        self._hear_keeper()
        for worker in workers:
            if worker.alive:
                self.kill(worker.index)
            if not self.keeper.channel.pending:  # else its start, which was interrupted, still has to send this descriptor
                worker.close()

    def _make_slab(self, layout: Layout) -> Slab:
        slab = Slab(layout, self.recipe.num_slots, keep=False)
        # Heads of rows as workers have them, and the start of the worker that has it so: a plain step sends no heads.
        self._heads, self._heads_of = np.zeros_like(slab.raw), np.full(self.recipe.num_slots, -1)
        return slab

    def _pack_rows(self, worker: WorkerHandle, slots: Slots) -> tuple[bytes, bool]:
        known = bool((self._heads_of[slots] == worker.start_number).all())
        heads = not known or self._heads[slots].tobytes() != self.slab.raw[slots].tobytes()
        return self.slab.pack_actions(slots, heads), heads

    def _take_rows(self, worker: WorkerHandle, slots: Slots, current: Any, frame: memoryview, at: int) -> None:
        self._heads_of[slots] = -1  # until all of this is done, and where the row is not taken
        if current.all():
            self.slab.unpack(slots, self.slab.names(*UP), frame, at)
        else:
            self.slab.unpack(slots, self.slab.names(*UP), frame, at, current)
            slots = slots[current]
        self._heads[slots] = self.slab.raw[slots]
        self._heads_of[slots] = worker.start_number

    def _post_attach(self, channel: ParentChannel) -> bool:
        if self._layout is None:
            return False
        channel.post(MESSAGE + cloudpickle.dumps((ToWorker.ATTACH, self._layout, self.recipe.num_slots, None)))
        return True
