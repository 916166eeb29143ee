"""Slots that threads have finished, and the waiting for them: one wake-up per batch, not one per slot."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any


class DoneList:
    """Threads `add` slots; one thread `take`s them when enough are there.

    The waiter publishes how many it wants before it looks a last time; a thread that adds checks for a waiter
    after it has added. Under the GIL one of the two always sees the other, so no wake-up is lost.

    Example:
        >>> done = DoneList()
        >>> done.add(3); done.add(1)
        >>> done.take(at_least=2, timeout_s=1.0)
        [3, 1]
    """

    def __init__(self) -> None:
        self.on_add: Callable[[], None] | None = None  # called after every `add`, in the thread that adds
        self._slots: deque[int] = deque()
        self._target = 0  # how many the waiter wants; 0: there is no waiter
        self._bell = threading.Lock()
        self._bell.acquire()

    def add(self, slot: int) -> None:
        """A slot is done."""
        self._slots.append(slot)
        target = self._target
        if target and len(self._slots) >= target:
            self._target = 0
            try:
                self._bell.release()
            except RuntimeError:
                pass  # another thread rang in the same moment
        if self.on_add is not None:
            self.on_add()

    def take(self, at_least: int, timeout_s: float) -> list[int]:
        """Everything done, once that is `at_least` slots or the time is over."""
        slots = self._slots
        if len(slots) < at_least and timeout_s > 0:
            deadline = time.monotonic() + timeout_s
            while len(slots) < at_least:
                self._target = at_least
                left = deadline - time.monotonic()
                if len(slots) >= at_least or left <= 0:
                    break
                self._bell.acquire(timeout=left)  # a signal from before only costs one more check
            self._target = 0
        return [slots.popleft() for _ in range(len(slots))]


def drain(answers: SimpleQueue[tuple[int, int, Any]], call_numbers: dict[int, int], timeout_s: float) -> dict[int, Any]:
    """The answers (slot, number, value) to the slots' last calls, waiting for a first one at most `timeout_s`."""
    found: dict[int, Any] = {}
    try:
        slot, number, value = answers.get(timeout=max(timeout_s, 1e-4))
        while True:
            if call_numbers.get(slot) == number:
                found[slot] = value
            slot, number, value = answers.get_nowait()
    except Empty:
        return found
