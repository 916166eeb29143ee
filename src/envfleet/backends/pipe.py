"""pipe: worker processes, rows by value. Slower than shm, but nothing is shared except the socket."""

from __future__ import annotations

import cloudpickle

from envfleet.backends.processes import ProcessBackend
from envfleet.slots.layout import Layout
from envfleet.slots.slab import Slab
from envfleet.workers.channel import ParentChannel
from envfleet.workers.protocol import MESSAGE, ToWorker
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

    def _make_slab(self, layout: Layout) -> Slab:
        return Slab(layout, self.recipe.num_slots, keep=False)

    def _post_attach(self, channel: ParentChannel) -> bool:
        if self._layout is None:
            return False
        channel.post(MESSAGE + cloudpickle.dumps((ToWorker.ATTACH, self._layout, self.recipe.num_slots, None)))
        return True
