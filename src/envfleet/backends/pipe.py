"""pipe: worker processes, rows by value. Slower than shm, but nothing is shared except the socket."""

from __future__ import annotations

from envfleet.backends.processes import ProcessBackend, WorkerHandle
from envfleet.layout import Layout
from envfleet.slab import Slab


class PipeBackend(ProcessBackend):
    """Rows travel with the messages."""

    name = "pipe"
    by_value = True

    def _make_slab(self, layout: Layout) -> Slab:
        return Slab(layout, self.recipe.num_slots)

    def _attach_worker(self, worker: WorkerHandle) -> None:
        if self._layout is not None:
            self._message(worker, "attach", self._layout, self.recipe.num_slots, None)
            worker.attached = True
