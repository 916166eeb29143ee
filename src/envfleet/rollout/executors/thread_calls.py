"""Sync calls of an event loop, handed to threads together.

A switch to a thread and back costs about 0.1 ms, a quick agent a hundredth of that. Calls that become ready in the same
iteration of the loop therefore share one thread; if they are slow, more threads take from the same queue, up to one each.
The loop itself is never blocked, and an agent that blocks delays only its own episode.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any

from envfleet.util.daemon_pool import DaemonPool, outcome

Outcome = tuple[Any, BaseException | None]
Call = tuple["asyncio.Future[Outcome]", Callable[..., Any], tuple[Any, ...]]
Answer = tuple["asyncio.Future[Outcome]", Outcome]

#: How long one thread may work, and how long answers may wait for each other: about ten thread switches.
SHARE_S = 0.001


class Handover:
    """The queue of one event loop; used on that loop only.

    Example:
        >>> async def main():
        ...     handover = Handover(DaemonPool(2))
        ...     return await asyncio.gather(handover.call(max, (1, 2)), handover.call(min, (1, 2)))
        >>> asyncio.run(main())
        [(2, None), (1, None)]
    """

    def __init__(self, pool: DaemonPool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Call] = deque()
        self._answers: deque[Answer] = deque()
        self._threads: dict[asyncio.Future[Outcome], threading.Thread] = {}  # of calls that run
        self._given_up: dict[asyncio.Future[Outcome], Future[None]] = {}
        self._mean_s = 0.0  # of a call, of late
        self._helpers = 0  # started for what is waiting now
        self._handing = self._looking = False

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> asyncio.Future[Outcome]:
        """Run a call on a thread; the future gets its answer, or what it raised, as a pair."""
        future: asyncio.Future[Outcome] = self._loop.create_future()
        if not self._waiting:
            self._helpers = 0
        self._waiting.append((future, copy_context().run, (function, *args)))
        if not self._handing:
            self._handing = True
            self._loop.call_soon(self._hand_over)  # when all other tasks that are ready have made their calls, too
        return future

    def give_up(self, call: asyncio.Future[Outcome]) -> Future[None] | None:
        """Wait no longer for a call. If a thread is in it, that thread is replaced; the future tells when the call has ended."""
        thread = self._threads.get(call)
        if thread is None:
            return None
        ended = self._given_up[call] = Future()
        if call not in self._threads:  # it has ended just now
            self._given_up.pop(call, None)
            return None
        self._pool.replace(thread)
        return ended

    def _hand_over(self) -> None:
        """Start threads for the waiting calls, and check again: if they still wait then, they are slower than before."""
        self._handing = False
        waiting = len(self._waiting)
        if not waiting:
            return
        wanted = min(waiting, max(1, 2 * self._helpers, round(waiting * self._mean_s / SHARE_S)))
        for _ in range(wanted):
            self._pool.run(self._help)
        self._helpers += wanted
        if not self._looking:
            self._looking = True
            self._loop.call_later(SHARE_S, self._look)

    def _look(self) -> None:
        """No answer waits behind the slow call of another, and no call behind a slow one."""
        self._looking = False
        self._resolve()
        self._hand_over()

    def _resolve(self) -> None:
        while self._answers:
            future, answer = self._answers.popleft()
            if not future.done():  # its episode may have been given up
                future.set_result(answer)

    def _help(self) -> None:
        """On a thread: take calls until none is left."""
        begin = reported = time.perf_counter()
        while True:
            try:
                future, function, args = self._waiting.popleft()
            except IndexError:  # none is left
                break
            if not future.cancelled():
                self._threads[future] = threading.current_thread()
                answer = outcome(function, args, {})
                del self._threads[future]
                if (ended := self._given_up.pop(future, None)) is not None:
                    ended.set_result(None)
                self._answers.append((future, answer))
            now = time.perf_counter()
            self._mean_s += 0.1 * (now - begin - self._mean_s)
            begin = now
            if now - reported > SHARE_S:
                reported = now
                self._report()
        if self._answers:
            self._report()

    def _report(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._resolve)
        except RuntimeError:  # the loop was closed meanwhile: no episode waits any more
            return
