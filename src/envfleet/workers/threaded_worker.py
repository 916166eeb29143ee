"""A worker process whose slots do not wait for each other: every slot has a thread of its own.

An env is only ever touched by its slot's thread, from its constructor to its close. The main thread takes the parent's
messages and distributes the slots. Many threads woken at once compete for the interpreter lock. So slots with quick steps
are woken one after another: a thread that is done wakes the next, and the last one reports all of them to the parent. A
slot that was slow the last time is woken at once and reported by its own thread. If a quick slot becomes slow, the next
one is woken after a millisecond. So a slow step delays the others by that much, once.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any

import numpy as np

from envfleet.slots import compiled_core
from envfleet.slots.slot_life import SlotLife
from envfleet.workers.channel import Channel, Closed
from envfleet.workers.protocol import ADVANCE, FromWorker
from envfleet.workers.shared_memory import Pulse
from envfleet.workers.worker import Worker, drive_here

_QUICK_S = 0.001
_TOGETHER = 16  # reported in one message


class LockedChannel(Channel):
    """A channel that several threads send on."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel.sock)
        self._sent, self._got = channel._sent, channel._got  # it continues the numbers of the other one
        self.owner = channel.owner
        self._sending = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send one frame, whole."""
        with self._sending:
            super().send(data)


class SharingWorker(Worker):
    """The slots of this process, each with its own thread."""

    def __init__(self, channel: Channel, words: np.ndarray[Any, Any], start: dict[str, Any]) -> None:
        slots = start["slots"]
        self._jobs: dict[int, SimpleQueue[Any]] = {slot: SimpleQueue() for slot in slots}
        self._threads: list[threading.Thread] = []
        self._runners: dict[int, Any] = {}
        self._turn = threading.Lock()  # for all below
        self._slow = set(slots)  # took longer than _QUICK_S the last time; the first call builds an env
        self._alone: set[int] = set()  # out, and reported by their own threads
        self._queue: deque[int] = deque()  # quick ones, to be woken one after another
        self._running = -1  # the quick one that runs now
        self._passed = 0  # how often the next slot was woken
        self._done: list[int] = []  # quick ones that are done and not reported yet
        super().__init__(LockedChannel(channel), words, start)

    def _build(self, start: dict[str, Any]) -> None:
        self._pulses = {slot: Pulse(self.words[slot]) for slot in start["slots"]}
        for slot in start["slots"]:
            thread = threading.Thread(target=self._work, args=(slot,), name=f"envfleet-slot-{slot}", daemon=True)
            self._threads.append(thread)
            thread.start()
        super()._build(start)

    def pulse_of(self, slot: int) -> Pulse:
        """The pulse of this slot."""
        return self._pulses[slot]

    def _build_one(self, life: SlotLife) -> None:
        def build() -> None:
            drive_here(life, life.build(), self._pulses[life.slot].enter)
            self._reply(FromWorker.BUILT, life.slot, self._described(life))

        self._jobs[life.slot].put(build)

    def _make_runner(self, compiled: Any, arena: Any) -> None:
        assert self.slab is not None
        for slot, life in self.lives.items():
            pulse = self._pulses[slot]
            self._runners[slot] = compiled_core.make_runner(compiled, self.slab, {slot: life}, pulse.enter, pulse.words)

    # -- a slot's thread ----------------------------------------------------------------------------------------

    def _work(self, slot: int) -> None:
        jobs = self._jobs[slot]
        with contextlib.suppress(Closed):  # the parent is gone; the main thread notices too, and ends the process
            while (job := jobs.get()) is not None:
                if type(job) is int:
                    self._step(job)
                else:
                    job()

    def _step(self, slot: int) -> None:
        before = time.perf_counter()
        self._advance_one(slot)
        slow = time.perf_counter() - before > _QUICK_S
        report: list[int] = []
        with self._turn:
            if slow:
                self._slow.add(slot)
            else:
                self._slow.discard(slot)
            if slot in self._alone:
                self._alone.discard(slot)
                report = [slot]
            else:
                self._done.append(slot)
                self._pass_on()
                if self._running < 0 or len(self._done) >= _TOGETHER:
                    report, self._done = self._done, []
        if report:
            self._report(np.array(report))

    def _advance_one(self, slot: int) -> None:
        life, runner = self.lives[slot], self._runners.get(slot)
        life.turn = int(self._turns[slot])
        if runner is None:
            drive_here(life, life.advance(), self._pulses[slot].enter)
            return
        try:
            runner.advance(slot, life.turn)
        except BaseException as error:
            life.fail_in(error, "step")

    def _pass_on(self) -> None:
        """Wake the next of the quick ones, if there is one. The lock is held."""
        self._passed += 1
        self._running = self._queue.popleft() if self._queue else -1
        if self._running >= 0:
            self._jobs[self._running].put(self._running)

    # -- the main thread ----------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Read messages until close; check regularly whether the running slot delays the others."""
        poller = select.poll()
        poller.register(self.channel.sock, select.POLLIN)
        seen = -1
        while True:
            if self._running >= 0 and not poller.poll(_QUICK_S * 1000):
                seen = self._pass_by(seen)
                continue
            frame = self.channel.recv()
            if frame[:1] == ADVANCE:
                self._advance(frame)
            elif not self._message(*pickle.loads(memoryview(frame)[1:])):
                return

    def _pass_by(self, seen: int) -> int:
        """If a slot has run since the last check, let it run on its own and wake the next one."""
        report: list[int] = []
        with self._turn:
            if self._running >= 0 and self._passed == seen:
                self._alone.add(self._running)
                report, self._done = self._done, []
                self._pass_on()
            seen = self._passed
        if report:
            self._report(np.array(report))
        return seen

    def _advance(self, frame: bytes) -> None:
        slots = self._unpack(frame).tolist()
        with self._turn:
            for slot in slots:
                if slot in self._slow:
                    self._alone.add(slot)
                    self._jobs[slot].put(slot)
                else:
                    self._queue.append(slot)
            if self._running < 0:
                self._pass_on()

    def _call(self, slot: int, *args: Any) -> None:
        call = super()._call
        self._jobs[slot].put(lambda: call(slot, *args))

    def _close(self) -> None:
        for life in self.lives.values():
            self._jobs[life.slot].put(lambda life=life: self._close_one(life))
            self._jobs[life.slot].put(None)
        for thread in self._threads:
            thread.join()
        self._reply(FromWorker.BYE)
