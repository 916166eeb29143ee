"""What pipe and shm share: workers in processes of their own, started and ended by a keeper.

The two differ in where rows are: `pipe` sends them by value over the worker's socket, `shm` keeps them in memory that
parent and workers share. A worker that dies is started again when one of its slots is submitted next.
"""

from __future__ import annotations

import abc
import os
import pickle
import select
import struct
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

import cloudpickle
import numpy as np

from envfleet.backends.base import Backend, Finished, Loss, spread
from envfleet.backends.handle import WorkerHandle
from envfleet.layout import Layout
from envfleet.recipe import Recipe
from envfleet.slab import Slab, Slots
from envfleet.supervise.channel import Closed, pair
from envfleet.supervise.faults import Failure
from envfleet.supervise.keeper import checked_pid
from envfleet.supervise.launcher import Keeper, check_start_method
from envfleet.supervise.machine import usable_cpus
from envfleet.supervise.memory import Pulse, Segment
from envfleet.supervise.worker import DONE_HEAD, DOWN, STACK_SIGNAL, UP


class ProcessBackend(Backend):
    """Common to pipe and shm."""

    can_kill = True
    by_value: bool
    threads = False  # whether every slot has a thread of its own in its worker

    def __init__(self, num_workers: int | None = None, start_method: str | None = None) -> None:
        super().__init__()
        self._wanted = num_workers
        self.start_method = check_start_method(start_method)
        self._replies: dict[int, Any] = {}
        self._tasks: dict[int, bytes] = {}
        self._workers: list[WorkerHandle] = []
        self._keeper: Keeper | None = None
        self._layout: Layout | None = None
        self._parts: dict[int, dict[str, Any]] = {}  # what slots left beside their rows, until they are told to be done
        self._built: dict[int, dict[str, Any] | Failure | Loss] = {}
        self._finished = Finished()
        self._closing: list[tuple[int, Failure | Loss]] = []
        self._poller = select.poll()
        self._by_fd: dict[int, WorkerHandle] = {}

    # -- starting -----------------------------------------------------------------------------------------------

    def start(self, recipe: Recipe) -> dict[int, dict[str, Any] | Failure | Loss]:
        """Start the keeper and the workers; each builds its own envs, all at once."""
        self.recipe = recipe
        self._factories = recipe.pack()  # before any process starts: what cannot be pickled is refused here
        self.num_workers = min(self._wanted or usable_cpus(), recipe.num_slots)
        self.worker_of = spread(recipe.num_slots, self.num_workers)
        self._pulse_segment = Segment.create((recipe.num_slots if self.threads else self.num_workers) * 64)
        words = np.frombuffer(self._pulse_segment.map, np.int64).reshape(-1, 8)
        words[:, 0] = -1
        self.pulses = [Pulse(row) for row in words]
        self._keeper = Keeper(self.start_method or "")
        for i in range(self.num_workers):
            slots = np.flatnonzero(self.worker_of == i).tolist()
            pulses = [self.pulses[slot] for slot in slots] if self.threads else [self.pulses[i]]
            self._workers.append(WorkerHandle(i, slots, pulses))
        for worker in self._workers:
            if not self._is_own(worker.index):
                self._launch(worker, build=True)
        self._build_own()
        return self._collect_built()

    def _is_own(self, worker: int) -> bool:
        """Whether this worker's slots are stepped by the parent itself."""
        return False

    def _build_own(self) -> None:
        """Build the parent's own share of the envs, where it has one."""

    def _launch(self, worker: WorkerHandle, build: bool) -> None:
        assert self._keeper is not None
        ours, theirs = pair()
        # The deadline begins now: starting the process and loading the factory may hang as a constructor may.
        worker.pulses[0].enter(worker.slots[0], "init")
        os.ftruncate(worker.stack_fd, 0)
        try:
            fds = [theirs.fileno(), self._pulse_segment.fd, worker.stack_fd]
            worker.pid = self._keeper.start_worker(worker.index, fds, self.recipe.init_timeout_s)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        worker.channel = ours
        self._by_fd[ours.fileno()] = worker
        self._poller.register(ours.sock, select.POLLIN)
        start = {
            "path": list(sys.path),
            "cwd": os.getcwd(),
            "worker": worker.index,
            "pulse_bytes": self._pulse_segment.size_bytes,
            "by_value": self.by_value,
            "threads": self.threads,
            "factories": self._factories,
            "slots": worker.slots,
            "on_end": self.recipe.on_end,
            "tasks": dict(self._tasks),
            "blas_threads": self.recipe.blas_threads,
            "build": build,
        }
        self._send(worker, pickle.dumps(start))
        if not build:
            self._attach_worker(worker)

    def _collect_built(self) -> dict[int, dict[str, Any] | Failure | Loss]:
        """Wait until every slot is built, failed, or lost with its worker. Deadlines are per constructor."""
        while len(self._built) < self.recipe.num_slots:
            self._poll(0.05)
            finished, self._finished = self._finished, Finished()
            for loss in finished.losses:
                for slot in self._workers[loss.worker].slots:
                    self._built.setdefault(slot, loss)
            for worker in self._workers:
                slot, phase, since = worker.doing()
                if slot >= 0 and worker.alive and time.monotonic() - since > self.recipe.init_timeout_s:
                    text = f"__init__ took longer than init_timeout_s={self.recipe.init_timeout_s:g}"
                    self._built[slot] = Failure("init", text, self.kill(worker.index))
                    for other in worker.slots:
                        self._built.setdefault(other, Loss(worker.index, None, slot, phase))
        return self._built

    def attach(self, layout: Layout) -> Slab:
        """Lay out the rows here and in every worker."""
        self._layout = layout
        self.slab = self._make_slab(layout)
        for worker in self._workers:
            if worker.alive:
                self._attach_worker(worker)
        return self.slab

    @abc.abstractmethod
    def _make_slab(self, layout: Layout) -> Slab:
        """The rows, where parent and workers will find them."""

    @abc.abstractmethod
    def _attach_worker(self, worker: WorkerHandle) -> None:
        """Tell a worker where its rows are. Does nothing before there are any."""

    # -- stepping -----------------------------------------------------------------------------------------------

    def submit(self, slots: Slots) -> None:
        """One message per worker: the list of its slots (and, for pipe, their rows)."""
        owners = self.worker_of[slots]
        for index in np.unique(owners):
            mine = slots[owners == index]
            worker = self._workers[index]
            if not worker.alive:
                self._launch(worker, build=False)
            frame = b"S" + struct.pack("=I", len(mine)) + mine.astype(np.int32).tobytes()
            if self.by_value:
                frame += self.slab.pack(mine, self.slab.names(*DOWN))
            self._send(worker, frame)

    def wait(self, at_least: int, timeout_s: float) -> Finished:
        """Take in messages until enough is done, a worker is lost, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while True:
            enough = len(self._finished.done) >= at_least or self._finished.losses
            left = 0.0 if enough else deadline - time.monotonic()
            self._poll(max(0.0, left))
            if enough or left <= 0:
                finished, self._finished = self._finished, Finished()
                return finished

    def sockets(self) -> Collection[int]:
        """Of the living workers."""
        return self._by_fd.keys()

    def _poll(self, timeout_s: float) -> None:
        for fd, _ in self._poller.poll(timeout_s * 1000):
            worker = self._by_fd[fd]
            if worker.channel is None:
                continue
            worker.channel.pump()
            self._take(worker)

    def _take(self, worker: WorkerHandle) -> None:
        channel = worker.channel
        assert channel is not None
        while channel.inbox:
            frame = channel.inbox.popleft()
            if frame[:1] == b"D":
                self._take_done(frame)
            elif frame[:1] == b"I":
                self._parts.update(pickle.loads(memoryview(frame)[1:]))
            else:
                self._take_reply(*cloudpickle.loads(memoryview(frame)[1:]))
        if channel.eof:
            self._mark_lost(worker)

    def _take_done(self, frame: bytes) -> None:
        _, count, row_bytes = DONE_HEAD.unpack_from(frame)
        at = DONE_HEAD.size
        slots = np.frombuffer(frame, np.int32, count, at).astype(np.int64)
        at += 4 * count
        if row_bytes:
            self.slab.unpack(slots, self.slab.names(*UP), frame, at)
        parts = pickle.loads(memoryview(frame)[at + row_bytes :]) if len(frame) > at + row_bytes else {}
        for slot in slots.tolist():
            self._take_part(slot, parts.get(slot, {}))
            self._finished.done.append(slot)

    def _take_part(self, slot: int, part: dict[str, Any]) -> None:
        if "failure" in part:
            self._finished.failures[slot] = part["failure"]
        self._keep_side(slot, part.get("info"), part.get("final_info"))
        self._take_mail(slot, part)

    def _take_mail(self, slot: int, part: dict[str, Any]) -> None:
        for kind, boxes in part.get("mail", {}).items():
            for i, value in boxes.items():
                self.slab.mail[kind][i][slot] = None if value is None else pickle.loads(value)

    def _take_reply(self, what: str, *args: Any) -> None:
        if what == "built":
            self._built[args[0]] = args[1]
        elif what == "called":
            slot, ticket, answer = args
            if self._tickets.get(slot) == ticket:
                self._replies[slot] = answer
        elif what == "closed":
            self._closing.append((args[0], args[1]))

    def _mark_lost(self, worker: WorkerHandle) -> None:
        """The worker's socket ended: learn how its process did, and say so once."""
        if worker.channel is None:
            return
        self._forget(worker)
        slot, phase = worker.last_seen()
        worker.rest()
        assert self._keeper is not None
        code = self._keeper.exit_code(worker.pid, 2.0)
        if code is None:  # it closed its socket but lives on: end it
            self._keeper.kill(worker.pid)
            code = self._keeper.exit_code(worker.pid, 2.0)
        self._finished.losses.append(Loss(worker.index, code, slot, phase))

    def _forget(self, worker: WorkerHandle) -> None:
        channel, worker.channel = worker.channel, None
        worker.attached = False
        if channel is not None:
            self._poller.unregister(channel.sock)
            self._by_fd.pop(channel.fileno(), None)
            channel.close()

    def _send(self, worker: WorkerHandle, frame: bytes) -> None:
        if worker.channel is None:
            return
        try:
            worker.channel.send(frame)
        except Closed:
            worker.channel.pump()
            self._take(worker)
            self._mark_lost(worker)

    def _message(self, worker: WorkerHandle, *message: Any) -> None:
        self._send(worker, b"M" + cloudpickle.dumps(message))

    # -- off the step path --------------------------------------------------------------------------------------

    def give_tasks(self, tasks: Mapping[int, bytes]) -> None:
        """Every living worker learns them now, a restarted one when it starts."""
        self._tasks.update(tasks)
        for worker in self._workers:
            self._message(worker, "tasks", dict(tasks))

    def give_options(self, options: Mapping[int, dict[str, Any]]) -> None:
        """To the workers of these slots."""
        self._by_worker("options", options)

    def give_mail(self, mail: Mapping[int, Mapping[int, Any]]) -> None:
        """To the workers of these slots."""
        grouped: dict[int, dict[int, dict[int, Any]]] = {}
        for i, objects in mail.items():
            for slot, value in objects.items():
                grouped.setdefault(int(self.worker_of[slot]), {}).setdefault(i, {})[slot] = value
        for index, mine in grouped.items():
            self._message(self._workers[index], "mail", mine)

    def _by_worker(self, what: str, values: Mapping[int, Any]) -> None:
        for worker in self._workers:
            mine = {slot: value for slot, value in values.items() if self.worker_of[slot] == worker.index}
            if mine:
                if not worker.alive:
                    self._launch(worker, build=False)
                self._message(worker, what, mine)

    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """One message per slot."""
        for i, slot in enumerate(slots):
            worker = self._workers[self.worker_of[slot]]
            if not worker.alive:
                self._launch(worker, build=False)
            self._message(worker, "call", slot, self._ticket(slot), phase, name, args[i] if each else args, kwargs)

    def replies(self, timeout_s: float) -> dict[int, Any]:
        """Answers that have arrived."""
        if not self._replies:
            self._poll(timeout_s)
        replies, self._replies = self._replies, {}
        return replies

    # -- ending -------------------------------------------------------------------------------------------------

    def kill(self, worker: int) -> str:
        """Ask for the Python stacks, then end the worker and all it started."""
        stuck = self._workers[worker]
        assert self._keeper is not None
        stack = self._stack(stuck)
        self._forget(stuck)
        stuck.rest()
        self._keeper.kill(stuck.pid)
        self._keeper.exit_code(stuck.pid, 2.0)
        return stack

    def _stack(self, worker: WorkerHandle) -> str:
        try:
            checked_pid(worker.pid)
            os.kill(worker.pid, STACK_SIGNAL)
        except ProcessLookupError:  # it has ended by itself: no stack is left to show
            return ""
        deadline = time.monotonic() + 1.0
        size = -1
        while time.monotonic() < deadline:
            now = os.fstat(worker.stack_fd).st_size
            if now and now == size:
                break
            size = now
            time.sleep(0.01)
        return os.pread(worker.stack_fd, 1 << 16, 0).decode(errors="replace")

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Ask, wait, kill; then end the keeper, which ends whatever is left, also when this is interrupted."""
        if self._keeper is None:
            return []
        try:
            return self._close_workers(timeout_s)
        finally:
            self._release()

    def _close_workers(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            self._message(worker, "close")
        while any(worker.alive for worker in self._workers) and time.monotonic() < deadline:
            self._poll(min(0.2, max(0.0, deadline - time.monotonic())))
        problems = self._closing
        for worker in self._workers:
            if worker.alive:
                slot, phase, _ = worker.doing()
                stack = self.kill(worker.index)
                if slot >= 0:
                    why = f"did not return within {timeout_s:g} s; its worker was killed"
                    problems.append((slot, Failure(phase, why, stack)))
        for loss in self._finished.losses:
            if loss.exit_code and loss.slot >= 0:
                problems.append((loss.slot, loss))
        return problems

    def _release(self) -> None:
        for worker in self._workers:
            self._forget(worker)
            os.close(worker.stack_fd)
        if self._keeper is not None:
            self._keeper.close()
        self._keeper = None
        self.pulses = []
        self._pulse_segment.close()
