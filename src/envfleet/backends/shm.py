"""shm: worker processes over shared rows; only slot numbers travel, through rings in the same memory.

With the compiled core, parent and workers wake each other by a doorbell that spins while gaps are short and sleeps when
they are long. With `isolate=False` the parent steps one share of the slots itself: on few cores that is faster, because
no third process competes for them, but an env that crashes the process then takes the trainer down, and deadlines cannot
be enforced in that share. Without the compiled core, slot numbers travel over the workers' sockets.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet import native
from envfleet.backends.base import Finished, Loss
from envfleet.backends.handle import WorkerHandle
from envfleet.backends.local import Described, LocalBackend
from envfleet.backends.processes import ProcessBackend
from envfleet.layout import ALIGN, Layout
from envfleet.slab import Slab, Slots
from envfleet.slot import SlotLife, drive
from envfleet.supervise.channel import Closed
from envfleet.supervise.faults import Failure
from envfleet.supervise.memory import Segment, SharedMap
from envfleet.supervise.worker import call_life


class ShmBackend(ProcessBackend):
    """Rows in shared memory."""

    name = "shm"
    by_value = False

    def __init__(
        self,
        num_workers: int | None = None,
        start_method: str | None = None,
        isolate: bool = True,
        spin_s: float = 0.004,
    ) -> None:
        super().__init__(num_workers, start_method)
        self._compiled = native.load()
        if self._compiled is not None and not hasattr(self._compiled, "Exchange"):
            self._compiled = None  # built on a system without futexes
        self._isolate = isolate or self._compiled is None
        self._spin_s = spin_s
        self._exchange: Any = None
        self._segment: Segment | None = None
        self._lives: dict[int, SlotLife] = {}  # of the parent's own share
        self._runner: Any = None
        self._all_alive = True

    # -- the parent's own share ---------------------------------------------------------------------------------

    def _is_own(self, worker: int) -> bool:
        # The last share, so that the other workers are rung before the parent starts on its own slots.
        return not self._isolate and worker == self.num_workers - 1

    def _build_own(self) -> None:
        for slot in self._own_slots():
            life = self._lives[slot] = SlotLife(slot, self.recipe.factories[slot], self.recipe.on_end, self._tasks)
            drive(life, life.build(), _unwatched)
            described: Described = LocalBackend._described(life)
            self._built[slot] = described

    def _own_slots(self) -> list[int]:
        return self._workers[-1].slots if not self._isolate else []

    # -- memory -------------------------------------------------------------------------------------------------

    def _make_slab(self, layout: Layout) -> Slab:
        count = self.recipe.num_slots
        slab_bytes = layout.offsets(count)[1]
        self._map = SharedMap(slab_bytes, self.num_workers, count)
        if self._compiled is not None:
            exchange_bytes = -(-self._compiled.Exchange.size(self.num_workers, count) // ALIGN) * ALIGN
            self._map = SharedMap(slab_bytes, self.num_workers, count, exchange_bytes, native.ARENA_BYTES, self._spin_s)
        self._segment = Segment.create(self._map.size_bytes)
        slab = Slab(layout, count, self._segment.map)
        if self._compiled is not None:
            me = -1 if self._isolate else self.num_workers - 1
            self._exchange, self._arena = self._map.open(self._compiled, self._segment, me, is_parent=True)
            self._out = np.zeros(count, np.int64)
        for life in self._lives.values():
            life.attach(slab)
        if self._lives:
            self._runner = native.make_runner(self._compiled, slab, self._lives, _unwatched, None, self._arena)
        return slab

    def _attach_worker(self, worker: WorkerHandle) -> None:
        if self._layout is None or self._segment is None:
            return
        self._message(worker, "attach", self._layout, self.recipe.num_slots, self._map)
        if worker.channel is not None:
            try:
                worker.channel.send_fds([self._segment.fd])
                worker.attached = True
            except Closed:
                self._mark_lost(worker)

    def _message(self, worker: WorkerHandle, *message: Any) -> None:
        super()._message(worker, *message)
        if self._exchange is not None and worker.attached:
            self._exchange.control(worker.index)

    # -- stepping -----------------------------------------------------------------------------------------------

    def submit(self, slots: Slots) -> None:
        """Put the slots into their workers' rings and ring."""
        if self._exchange is None:
            super().submit(slots)
            return
        if not self._all_alive:
            for index in np.unique(self.worker_of[slots]).tolist():
                if not self._workers[index].alive and not self._is_own(index):
                    self._launch(self._workers[index], build=False)
            self._all_alive = all(w.alive or self._is_own(w.index) for w in self._workers)
        self._exchange.submit(np.ascontiguousarray(slots), self.worker_of)

    def round(self, slots: Slots, timeout_s: float) -> Finished | None:
        """Ring, step, wait and take in one call of the compiled doorbell, as long as nothing is out of the ordinary."""
        if self._exchange is None or not self._all_alive or self.info or self.final_info or self._finished:
            return super().round(slots, timeout_s)
        self.handed_over = True
        if self._exchange.round(slots, self.worker_of, timeout_s, self._runner):
            return None
        return self.wait(len(slots), timeout_s)

    def wait(self, at_least: int, timeout_s: float) -> Finished:
        """Step the parent's own share, then wait for the workers; look after them whenever that takes long."""
        if self._exchange is None:
            return super().wait(at_least, timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            need = max(0, at_least - len(self._finished.done))
            enough = self._exchange.wait(need, max(0.0, deadline - time.monotonic()), self._runner)
            self._collect()
            if not enough:
                self._poll(0.0)
            if enough or self._finished.losses or time.monotonic() >= deadline:
                finished, self._finished = self._finished, Finished()
                return finished

    def _collect(self) -> None:
        count, sided = self._exchange.collect(self._out, self._arena, self.info, self.final_info)
        if count:
            self._finished.done += self._out[:count].tolist()
        for slot in sided:
            self._take_side(slot)

    def _take_side(self, slot: int) -> None:
        """What a slot left with Python: in our own life, or on its worker's socket, sent before the slot was done."""
        if slot in self._lives:
            life = self._lives[slot]
            part: dict[str, Any] = {"failure": life.failure} if life.failure is not None else {}
            for name in ("info", "final_info"):
                value = getattr(life, name)
                if value is not None:
                    part[name] = value
        else:
            worker = self._workers[self.worker_of[slot]]
            while slot not in self._parts and worker.alive:
                self._poll(0.05)
            part = self._parts.pop(slot, {})
        if "failure" in part:
            self._finished.failures[slot] = part["failure"]
        for kept, name in ((self.info, "info"), (self.final_info, "final_info")):
            if name in part:
                kept[slot] = part[name]  # what is not here may be in the arena, and was taken from there
        self._take_mail(slot, part)

    def _mark_lost(self, worker: WorkerHandle) -> None:
        was_alive = worker.alive
        super()._mark_lost(worker)
        if was_alive:
            self._drop_rings(worker)

    def kill(self, worker: int) -> str:
        """End the worker; what it had finished is kept."""
        stack = super().kill(worker)
        self._drop_rings(self._workers[worker])
        return stack

    def _drop_rings(self, worker: WorkerHandle) -> None:
        self._all_alive = False
        if self._exchange is not None:
            self._collect()
            self._exchange.forget(worker.index)

    # -- off the step path --------------------------------------------------------------------------------------

    def give_options(self, options: Mapping[int, dict[str, Any]]) -> None:
        """To the lives of the parent's share, and to the workers."""
        for slot, life in self._lives.items():
            if slot in options:
                life.options = options[slot]
        super().give_options({slot: value for slot, value in options.items() if slot not in self._lives})

    def give_mail(self, mail: Mapping[int, Mapping[int, Any]]) -> None:
        """To the parent's own mailbox, and to the workers."""
        for i, objects in mail.items():
            for slot in self._lives.keys() & objects.keys():
                self.slab.mail["action"][i][slot] = objects[slot]
        super().give_mail(mail)

    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """In the parent's own lives here, in the others by message."""
        for i, slot in enumerate(slots):
            mine = args[i] if each else args
            if slot in self._lives:
                try:
                    self._replies[slot] = call_life(self._lives[slot], phase, name, mine, kwargs)
                except (Exception, SystemExit) as error:
                    self._replies[slot] = Failure.of(error, phase)
            else:
                super().call([slot], phase, name, mine, kwargs)

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Close the parent's own envs, then the workers."""
        problems: list[tuple[int, Failure | Loss]] = []
        for life in self._lives.values():
            try:
                life.close()
            except (Exception, SystemExit) as error:
                problems.append((life.slot, Failure.of(error, "close")))
        problems += super().close(timeout_s)
        self._exchange = self._runner = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        return problems


def _unwatched(slot: int, phase: str) -> None:
    return None
