"""An event loop on a thread of its own, for sync code that drives async clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop on its own thread, started when first used, so that sync code can drive async clients."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; it is running."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name="envfleet-loop", daemon=True)
                self._thread.start()
            return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Block until an awaitable is done there."""

        async def wait() -> T:
            return await awaitable

        return self.submit(wait()).result()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Cancel what runs, stop the loop and join the thread; True when it has ended."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return True

        def stop() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon(loop.call_soon, loop.stop)  # after the cancelled tasks had their turn

        loop.call_soon_threadsafe(stop)
        thread.join(timeout_s)
        return not thread.is_alive()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()  # here, where no signal handler can cut it short
