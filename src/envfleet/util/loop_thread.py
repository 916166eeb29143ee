"""An event loop on a thread of its own, for sync code that drives async clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

#: How long a loop that is being closed waits for its cancelled tasks.
_GRACE_S = 10.0


class LoopThread:
    """An event loop on a daemon thread, started when first used.

    It ends with `close`, with the last `let_go` of those that called `hold`, or when the object is dropped.

    Example:
        >>> thread = LoopThread()
        >>> thread.wait_for(asyncio.sleep(0, "done"))
        'done'
        >>> thread.close()
        True
    """

    def __init__(self, name: str = "envfleet-loop") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._holders = 0
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; it is running."""
        with self._lock:
            return self._started()

    def hold(self) -> asyncio.AbstractEventLoop:
        """The running loop, for one of several users; each calls `let_go` once."""
        with self._lock:
            loop = self._started()
            self._holders += 1
            return loop

    def let_go(self) -> None:
        """End one `hold`; the last one stops the loop and joins the thread."""
        with self._lock:
            if self._pid != os.getpid():
                return
            self._holders -= 1
            thread = None if self._holders else self._stopped()
        _join(thread, 5.0)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel what runs, stop the loop and join the thread; True when it has ended."""
        with self._lock:
            thread = self._stopped()
        return _join(thread, timeout_s)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Block until an awaitable is done there."""
        return wait_on(self.loop, awaitable)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is not None and self._pid == os.getpid():
            return self._loop
        # The first use, or a forked child, which has the object but not the thread. Interrupted here, nothing has begun.
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(loop,), name=self._name, daemon=True)
        try:
            thread.start()
            weakref.finalize(self, _stop, loop).atexit = False
            self._holders, self._pid, self._loop, self._thread = 0, os.getpid(), loop, thread
        except BaseException:
            _stop(loop)
            raise
        return loop

    def _stopped(self) -> threading.Thread | None:
        """Stop the loop and forget it; returns its thread."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None:
            _stop(loop)
        return thread


def wait_on(loop: asyncio.AbstractEventLoop, awaitable: Awaitable[T]) -> T:
    """Block this thread until an awaitable is done on a loop that runs in another one."""

    async def wait() -> T:
        return await awaitable

    return asyncio.run_coroutine_threadsafe(wait(), loop).result()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=_GRACE_S))
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()  # here, where no signal handler can cut it short


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # it is closed already
        loop.call_soon_threadsafe(loop.stop)


def _join(thread: threading.Thread | None, timeout_s: float) -> bool:
    if thread is None:
        return True
    if thread is not threading.current_thread():
        thread.join(timeout_s)
    return not thread.is_alive()
