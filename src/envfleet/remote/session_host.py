"""Where a server's sessions live: a fleet of slots, driven from the server's event loop.

Requests that arrive in one turn of the loop are sent to the fleet together, and what has finished is received
together, so all busy sessions share the cost of a send and a receive. Nothing here waits: the
loop is woken (by a file descriptor or a queue) when a worker has finished something.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from envfleet.backends.base import Backend
from envfleet.core.batch import Batch
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument, FaultError, SlotBusy
from envfleet.remote.server_config import ServerConfig
from envfleet.remote.session_env import OPENING, AsyncSessionEnv, SessionEnv
from envfleet.remote.space_codec import Dialect
from envfleet.remote.space_members import BadAction
from envfleet.slots.slab import Slots
from envfleet.util.machine import usable_cpus
from envfleet.util.trees import as_columns, tree_rows

_LOOK_S = 0.05  # how often deadlines are looked at while something is out
_KEPT_FAULTS = 1000  # a server runs for months
_GATHER_S = 0.0005  # a receive costs about this much for one row or for sixty: under load, wait for more


@dataclass(slots=True)
class Row:
    """What one reset or step gave."""

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def _choose_backend(config: ServerConfig, is_async: bool) -> tuple[Backend, str]:
    """The backend for the slots: its object, and its name.

    "auto" is the event loop for environments with coroutines, else worker processes: one for each processor (two at
    least), with a thread for every session. With as many workers as sessions each has a process of its own. `shm` is
    not among them: its workers signal through memory, which an event loop cannot wait for.
    """
    from envfleet.backends.pipe import PipeBackend
    from envfleet.backends.serial import SerialBackend
    from envfleet.backends.thread import ThreadBackend
    from envfleet.remote.loop_backend import LoopBackend

    backend, workers, slots = config.backend, config.num_workers, config.max_sessions
    if backend == "auto":
        backend = "aio" if is_async else "pipe" if hasattr(os, "fork") else "thread"
    if is_async != (backend == "aio"):
        raise BadArgument("backend 'aio' is for environments with coroutines, which need it; others: 'pipe' or 'thread'")
    if backend == "pipe":
        processes = min(workers or max(2, usable_cpus()), slots)
        return PipeBackend(processes, threads=processes < slots), backend
    if backend == "thread":
        return ThreadBackend(workers or slots), backend
    if backend == "aio":
        return LoopBackend(), backend
    if backend == "serial":
        return SerialBackend(), backend
    raise BadArgument(f"backend={backend!r}: choose auto, pipe, thread, aio or serial")


class FleetHost:
    """A slot for each session that the server may have. All methods belong to the event loop's thread."""

    def __init__(self, factory: Callable[[], Any], dialect: Dialect, is_async: bool, config: ServerConfig) -> None:
        self.dialect, self.config = dialect, config
        self._factory = partial(AsyncSessionEnv if is_async else SessionEnv, factory, dialect)
        self._backend, self.backend_name = _choose_backend(config, is_async)
        self._fleet: Fleet | None = None
        self._free: list[int] = []
        self.lost = 0
        self._steps: dict[int, Any] = {}
        self._resets: dict[int, tuple[int | None, dict[str, Any]]] = {}
        self._waiting: dict[int, asyncio.Future[Row]] = {}
        self._flushing = self._rung = False
        self._collected_at = 0.0
        self._readers: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the workers (their slots are empty, so this builds no environment)."""
        self._loop = asyncio.get_running_loop()
        config, slots = self.config, self.config.max_sessions
        self._backend.on_done = self._ring
        # In this thread: a fleet belongs to the thread that made it, and nothing is served yet.
        self._fleet = make(
            self._factory,
            slots,
            backend=self._backend,
            on_end="wait",
            init_timeout_s=config.init_timeout_s,
            reset_timeout_s=config.init_timeout_s + config.step_timeout_s,  # opening a slot builds its environment
            step_timeout_s=config.step_timeout_s,
        )
        self._rung = False
        workers = self._backend.worker_of
        # Neighbours share a worker only when there are more sessions than workers.
        self._free = sorted(range(slots), key=lambda s: (int(np.sum(workers[:s] == workers[s])), s), reverse=True)
        self._watch()

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    @property
    def active(self) -> int:
        """How many slots are taken, the ones that are still finishing a step included."""
        return self.config.max_sessions - self.free - self.lost

    def take(self) -> int | None:
        """A free slot, or None."""
        return self._free.pop() if self._free else None

    async def release(self, slot: int) -> None:
        """Give a slot back: once its running step is over, its environment is closed."""
        future = self._waiting.get(slot)
        if future is not None:
            await asyncio.wait([future])
        try:
            await self.reset(slot, None, {OPENING: "empty"})
        except FaultError:
            pass  # its close failed or its worker died: the slot is rebuilt when it is next opened
        if self._fleet is not None and slot in self._fleet.quarantined:
            self.lost += 1  # a thread that cannot be ended keeps its slot: one less to give out
        else:
            self._free.append(slot)

    def reset(self, slot: int, seed: int | None, options: dict[str, Any], fresh: bool = False) -> asyncio.Future[Row]:
        """Reset the slot's environment; `fresh` builds a new one first. Raises BadAction for options that cannot be sent."""
        if options:
            try:
                pickle.dumps(options)  # together with those of others it would fail them all
            except Exception as error:
                raise BadAction(f"reset's options cannot be passed on: {type(error).__name__}") from None
        self._resets[slot] = (seed, {**options, OPENING: "open"} if fresh else options)
        return self._expect(slot)

    def step(self, slot: int, action: Any) -> asyncio.Future[Row]:
        """Step the slot's environment."""
        self._steps[slot] = action
        return self._expect(slot)

    def close(self) -> None:
        """End the workers."""
        if self._timer is not None:
            self._timer.cancel()
        for fd in self._readers:
            self._loop.remove_reader(fd)
        self._readers = set()
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            fleet.close()
        for future in self._waiting.values():
            future.cancel()
        self._waiting = {}

    def _expect(self, slot: int) -> asyncio.Future[Row]:
        assert slot not in self._waiting, "a session sends one request at a time"
        future: asyncio.Future[Row] = self._loop.create_future()
        self._waiting[slot] = future
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return future

    def _flush(self) -> None:
        """Send what came in during this turn of the loop."""
        self._flushing = False
        fleet = self._fleet
        if fleet is None:
            return
        steps, self._steps = self._steps, {}
        resets, self._resets = self._resets, {}
        if steps:
            self._try(self._send, fleet, steps)
        if resets:
            self._try(self._send_resets, fleet, resets)
        self._watch()
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_S, self._look)
        if self.backend_name == "serial":
            self._collect()

    def _try(self, send: Callable[[Fleet, dict[int, Any]], None], fleet: Fleet, requests: dict[int, Any]) -> None:
        """Send together; if that fails (not in an environment: those come back as rows), each alone, so that
        only the request that caused it fails."""
        try:
            send(fleet, dict(requests))
        except Exception as error:
            for slot, request in requests.items():
                if slot not in self._waiting or isinstance(error, SlotBusy):
                    continue  # answered already; or it went out before the failure, and its row will come
                if len(requests) == 1:
                    self._fail(slot, error)
                else:
                    self._try(send, fleet, {slot: request})

    def _send(self, fleet: Fleet, steps: dict[int, Any]) -> None:
        while steps:
            slots = sorted(steps)
            try:
                fleet.send([steps[slot] for slot in slots], np.array(slots, np.int64))
                return
            except FaultError as error:
                # Its worker went down between two calls: the client gets the error now. Nothing was sent.
                del steps[error.fault.slot]
                self._fail(error.fault.slot, error)

    def _send_resets(self, fleet: Fleet, resets: dict[int, tuple[int | None, dict[str, Any]]]) -> None:
        slots = sorted(resets)
        options = [resets[slot][1] or None for slot in slots]
        fleet.send_reset([resets[slot][0] for slot in slots], slots=slots, options=options)

    def _look(self) -> None:
        self._timer = None
        if self._waiting and self._fleet is not None:
            self._collect()
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _ring(self) -> None:
        # Called by worker threads. Once is enough until the loop has run.
        if not self._rung:
            self._rung = True
            self._loop.call_soon_threadsafe(self._collect_soon)

    def _heard(self) -> None:
        # Called by the loop for every worker socket that has something: collect once for all of them.
        # No waiting for more here: sockets that are not read keep the loop awake.
        if not self._rung:
            self._rung = True
            self._loop.call_soon(self._answer_ring)

    def _collect_soon(self) -> None:
        """Collect at once, or a moment later when threads ring all the time."""
        wait_s = self._collected_at + _GATHER_S - self._loop.time()
        if wait_s > 0:
            self._loop.call_later(wait_s, self._answer_ring)
        else:  # a timer that is due already costs more than this
            self._loop.call_soon(self._answer_ring)

    def _answer_ring(self) -> None:
        self._rung = False
        self._collect()
        self._collected_at = self._loop.time()

    def _watch(self) -> None:
        """Listen to the workers' sockets; a restarted worker has a new one."""
        now = set(self._backend.sockets())
        if now == self._readers:
            return
        for fd in self._readers - now:
            self._loop.remove_reader(fd)
        for fd in now - self._readers:
            self._loop.add_reader(fd, self._heard)
        self._readers = now

    def _collect(self) -> None:
        """Receive what has finished and set the futures that wait for it."""
        fleet = self._fleet
        if fleet is None:
            return
        self._receive(fleet, fleet.ready())
        self._watch()

    def _receive(self, fleet: Fleet, ready: Slots) -> None:
        while len(ready):
            try:
                self._deliver(ready, fleet.recv(ready))
                return
            except FaultError as error:
                ready = self._drop_failed(fleet, ready, error)
            except Exception as error:
                if len(ready) == 1:
                    self._fail(int(ready[0]), error)
                else:  # each alone, so that only the slot that caused it fails
                    for slot in ready.tolist():
                        if slot in self._waiting:
                            self._receive(fleet, np.array([slot], np.int64))
                return

    def _drop_failed(self, fleet: Fleet, ready: Slots, error: FaultError) -> Slots:
        """Fail the requests of slots that failed; the receive took all of them and left the others, which are returned."""
        left = fleet.ready()
        for slot in np.setdiff1d(ready, left).tolist():
            fault = next(fault for fault in reversed(fleet.faults) if fault.slot == slot)
            self._fail(slot, error if fault is error.fault else fault.error())
        if len(fleet.faults) > _KEPT_FAULTS:
            fleet.faults[:] = {fault.slot: fault for fault in fleet.faults}.values()  # the newest of each slot
        return left

    def _deliver(self, slots: Slots, batch: Batch) -> None:
        reward, terminated, truncated = batch.reward.tolist(), batch.terminated.tolist(), batch.truncated.tolist()
        obs, info = as_columns(self.dialect.observation_space, batch.obs), batch.info
        for i, slot in enumerate(slots.tolist()):
            future = self._waiting.pop(slot, None)
            if future is not None and not future.done():
                future.set_result(Row(tree_rows(obs, i), reward[i], terminated[i], truncated[i], info[i]))

    def _fail(self, slot: int, error: Exception) -> None:
        future = self._waiting.pop(slot, None)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()  # read once: asyncio logs exceptions that are never read
