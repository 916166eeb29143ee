"""thread: worker threads of this process. For envs that wait (I/O, sleeps, C code without the GIL).

A call that hangs in a thread cannot be ended: it is abandoned, its slot is quarantined, the other slots of its worker get
a new thread, and `close()` names the calls that still hang.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from queue import SimpleQueue
from typing import Any

import numpy as np

from envfleet.backends.base import spread
from envfleet.backends.done_list import DoneList, drain
from envfleet.backends.local import Described, LocalBackend
from envfleet.faults.failure import Failure, Loss
from envfleet.slots import compiled_core
from envfleet.slots.factories import Recipe
from envfleet.slots.layout import Layout
from envfleet.slots.slab import Slab, Slots
from envfleet.slots.slot_life import SlotLife
from envfleet.workers.shared_memory import Pulse
from envfleet.workers.worker import drive_here

#: To a thread that waits for jobs: there are rings now.
_LOOK = object()


class _Worker:
    """One thread and what it has to do. `jobs` survives the thread: a replacement takes it over."""

    def __init__(self, index: int, pulse: Pulse) -> None:
        self.index = index
        self.pulse = pulse
        self.jobs: SimpleQueue[Any] = SimpleQueue()
        self.thread: threading.Thread
        self.generation = 0
        self.runner: Any = None  # the compiled life over this thread's slots, where there is one
        self.exchange: Any = None  # and the rings its slots come by; all else comes by `jobs`


class ThreadBackend(LocalBackend):
    """Slots over threads; by default a thread per slot up to 64, since slots that wait should wait side by side."""

    name = "thread"

    def __init__(self, num_workers: int | None = None) -> None:
        super().__init__()
        self._wanted = num_workers
        self._done = DoneList()
        self._answers: SimpleQueue[tuple[int, int, Any]] = SimpleQueue()
        self._stuck: list[tuple[int, threading.Thread, str]] = []
        self._workers: list[_Worker] = []
        self._closing: list[tuple[int, Failure | Loss]] = []
        self._exchange: Any = None  # the compiled doorbell, where there is one
        self._sided: list[tuple[int, int, int]] = []  # (slot, turn, whether broken) with something beside their rows

    def start(self, recipe: Recipe) -> dict[int, Described]:
        """Start the threads and let them build their envs side by side."""
        self._make_lives(recipe)
        self._done.on_add = self.on_done
        self.num_workers = min(self._wanted or min(recipe.num_slots, 64), recipe.num_slots)
        self.worker_of = spread(recipe.num_slots, self.num_workers)
        self.pulses = Pulse.local(self.num_workers)
        self._workers = [_Worker(i, pulse) for i, pulse in enumerate(self.pulses)]
        for worker in self._workers:
            self._launch(worker)
        for life in self.lives:
            self._workers[self.worker_of[life.slot]].jobs.put(("build", life.slot))
        return self._collect_built()

    def _collect_built(self) -> dict[int, Described]:
        built: dict[int, Described] = {}
        while len(built) < len(self.lives):
            for slot in self._done.take(1, 0.1):
                built[slot] = self._described(self.lives[slot])
            for worker in self._workers:
                slot, _, since = worker.pulse.read()
                if slot >= 0 and time.monotonic() - since > self.recipe.init_timeout_s:
                    stack = self.kill(worker.index)
                    text = f"__init__ took longer than init_timeout_s={self.recipe.init_timeout_s:g}"
                    built[slot] = Failure("init", text, stack, kind="timeout")
        return built

    def attach(self, layout: Layout) -> Slab:
        """Rows on the heap; each thread drives its slots by a compiled runner of its own, where there is one."""
        slab = super().attach(layout)
        compiled = compiled_core.load()
        if compiled is None:
            return slab
        for worker in self._workers:
            self._make_runner(worker)
        # `on_done` is called by the thread that finished a slot, which the compiled loop cannot do.
        if hasattr(compiled, "Exchange") and self.on_done is None:
            self._memory = _aligned(compiled.Exchange.size(self.num_workers, slab.num_slots))
            board = (self.given, self.done, self.info, self.final_info, self._sided)
            self._exchange = self._open(compiled, -1, board)
            for worker in self._workers:
                worker.exchange = self._open(compiled, worker.index)
                worker.jobs.put(_LOOK)
        return slab

    def _open(self, compiled: Any, me: int, board: Any = None) -> Any:
        # No spinning: measured, it costs a core and gains nothing for envs that wait.
        return compiled.Exchange(self._memory, self.num_workers, self.slab.num_slots, me, 0.0, me < 0, True, board)

    def _make_runner(self, worker: _Worker) -> None:
        lives = {slot: self.lives[slot] for slot in np.flatnonzero(self.worker_of == worker.index).tolist()}
        words = worker.pulse.words
        worker.runner = compiled_core.make_runner(compiled_core.load(), self.slab, lives, worker.pulse.enter, words)

    def _post(self, worker: _Worker, job: Any) -> None:
        worker.jobs.put(job)
        if self._exchange is not None:
            self._exchange.control(worker.index)

    def _launch(self, worker: _Worker) -> None:
        worker.generation += 1
        worker.thread = threading.Thread(
            target=self._work, args=(worker, worker.generation), name=f"envfleet-{worker.index}", daemon=True
        )
        worker.thread.start()

    def _work(self, worker: _Worker, generation: int) -> None:
        exchange = worker.exchange
        while True:
            if exchange is not None and worker.jobs.empty():
                if exchange.work(worker.runner, None) < 0:
                    return
                continue
            job = worker.jobs.get()
            if worker.generation != generation:
                self._post(worker, job)  # this thread was given up just as it became free: its successor does the job
                return
            if job is None:
                return
            if job is _LOOK:
                exchange = worker.exchange
                continue
            if job[0] == "step":
                slot, turn = job[1:]
                if self._begun[slot] == turn or self.given[slot] != turn or self.lives[slot].abandoned:
                    continue  # put a second time, after an interrupt; or given up before a thread came to it
                self._begun[slot] = turn
                self._advance(worker, self.lives[slot], turn)
                if worker.generation != generation:
                    return  # given up earlier: another thread has this worker's slots and owns this row
                self._ended[slot] = turn
                self._done.add(slot)
            elif job[0] == "build":
                life = self.lives[job[1]]
                drive_here(life, life.build(), worker.pulse.enter)
                if worker.generation != generation:
                    return
                self._done.add(job[1])
            elif job[0] == "close":
                self._close_one(self.lives[job[1]], worker.pulse)
            else:
                slot, number, phase, name, args, kwargs = job[1:]
                worker.pulse.enter(slot, phase)
                answer = self._call_now(slot, phase, name, args, kwargs)
                if worker.generation != generation:
                    return
                worker.pulse.enter(-1, "idle")
                self._answers.put((slot, number, answer))

    def _advance(self, worker: _Worker, life: SlotLife, turn: int) -> None:
        life.turn = turn
        try:
            if worker.runner is not None:
                worker.runner.advance(life.slot, turn)
            else:
                drive_here(life, life.advance(), worker.pulse.enter)
        except BaseException as error:  # not a failure of the env, which is in the row: an error in the slot life itself
            life.fail_in(error, "step")

    def submit(self, slots: Slots) -> None:
        """Give the slots to their threads."""
        if self._exchange is not None:
            self._exchange.submit(np.ascontiguousarray(slots), self.worker_of)
            return
        self.given[slots] += np.uint32(1)  # from here on they are out: see `settle`
        self._put(slots.tolist())

    def _put(self, slots: list[int]) -> None:
        for slot in slots:
            self._workers[self.worker_of[slot]].jobs.put(("step", slot, int(self.given[slot])))

    def settle(self) -> None:
        """Put the jobs whose putting was interrupted; take over what was left beside rows."""
        if self._exchange is None:
            self._put(self._not_begun())
            self._collect()
            return
        while self._sided:
            slot, turn, broken = self._sided[0]
            self._finish(slot, turn, bool(broken))
            del self._sided[0]

    def wait(self, at_least: int, timeout_s: float) -> None:
        """Collect what the threads have finished."""
        target = self.num_out - at_least
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            if self._exchange is None:
                self._done.take(self.num_out - target, left)
                self._collect()
            else:
                self._exchange.wait(max(0, self.num_out - target), left, None)
                self.num_stale = self._exchange.collect(b"")
                if self._sided:
                    self.settle()
            if self.num_out <= target or time.monotonic() >= deadline:
                return

    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """Call in the slots' own threads: some envs may only be touched by the thread that built them."""
        for i, slot in enumerate(slots):
            job = ("call", slot, self._next_call(slot), phase, name, args[i] if each else args, kwargs)
            self._post(self._workers[self.worker_of[slot]], job)

    def replies(self, timeout_s: float) -> dict[int, Any]:
        """Answers so far; waits for one at most `timeout_s`."""
        return drain(self._answers, self._call_numbers, timeout_s)

    def kill(self, worker: int) -> str:
        """Give up the call the worker is in; a new thread takes its other slots."""
        stuck = self._workers[worker]
        slot, phase, _ = stuck.pulse.read()
        stack = _stack_of(stuck.thread)
        if slot >= 0:
            self.lives[slot].abandoned = True
            if stuck.runner is not None:
                stuck.runner.disarm(slot)  # what the call returns later is not written
            self._stuck.append((slot, stuck.thread, phase))
        # The thread that hangs keeps its own pulse, so that it cannot write that of its replacement.
        stuck.pulse = self.pulses[worker] = Pulse.local(1)[0]
        if stuck.runner is not None:
            self._make_runner(stuck)
        if stuck.exchange is not None:
            old, stuck.exchange = stuck.exchange, self._open(compiled_core.load(), worker)
            stuck.exchange.take_over(old)
        self._launch(stuck)
        return stack

    def give_up(self, slot: int) -> str:
        """As `kill`; a slot that waits behind another of its thread is not begun any more."""
        worker = self._workers[self.worker_of[slot]]
        if worker.pulse.read()[0] == slot:
            return self.kill(worker.index)
        self.lives[slot].abandoned = True
        if worker.runner is not None:
            worker.runner.disarm(slot)
        return ""

    def _close_one(self, life: SlotLife, pulse: Pulse) -> None:
        if life.abandoned:
            return
        pulse.enter(life.slot, "close")
        try:
            life.close()
        except BaseException as error:
            self._closing.append((life.slot, Failure.of(error, "close")))
        pulse.enter(-1, "idle")

    def is_own_thread(self) -> bool:
        """An env may drop or close its fleet, and so may the garbage collector in any thread."""
        return threading.current_thread() in [worker.thread for worker in self._workers]

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Close the envs in their threads, end the threads; name those that do not end."""
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            for slot in np.flatnonzero(self.worker_of == worker.index).tolist():
                worker.jobs.put(("close", slot))
            self._post(worker, None)
        late = [worker for worker in self._workers if not _joined(worker.thread, deadline)]
        for _ in range(self.recipe.num_slots if late else 0):
            # It hangs in one slot: give that call up, and let a new thread close the remaining slots.
            for worker in late:
                self.kill(worker.index)
            deadline = time.monotonic() + 0.2
            late = [worker for worker in late if not _joined(worker.thread, deadline)]
            if not late:
                break
        problems = self._closing
        for slot, thread, phase in self._stuck:
            if thread.is_alive():
                why = f"its thread {thread.name!r} is still stuck in {phase} and cannot be ended"
                problems.append((slot, Failure(phase, why, _stack_of(thread), kind="timeout")))
        self._workers = []
        return problems


def _aligned(size_bytes: int) -> np.ndarray[Any, Any]:
    """Zeros that begin at a cache line, so that threads do not share cache lines."""
    block = np.zeros(size_bytes + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + size_bytes]


def _joined(thread: threading.Thread, deadline: float) -> bool:
    thread.join(max(0.0, deadline - time.monotonic()))
    return not thread.is_alive()


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or -1)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
