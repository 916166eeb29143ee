"""A thread pool that never keeps the interpreter alive.

The standard library's pool joins its threads at exit; one stuck call would then hang the program for good.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any


class DaemonPool(Executor):
    """At most `size` daemon threads, started as they are needed.

    Example:
        >>> pool = DaemonPool(2)
        >>> pool.submit(sum, [1, 2]).result()
        3
        >>> pool.shutdown()
    """

    def __init__(self, size: int, name: str = "envfleet-pool") -> None:
        self.size = size
        self._name = name
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._idle = threading.Semaphore(0)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call in one of the threads."""
        future: Future[Any] = Future()
        self._put((future, function, args, kwargs))
        return future

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Run a call of which nobody waits for the result; it must not raise."""
        self._put((None, function, args, {}))

    def _put(self, job: tuple[Future[Any] | None, Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> None:
        self._jobs.put(job)
        if not self._idle.acquire(blocking=False) and len(self._threads) < self.size:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def grow(self) -> None:
        """Allow one more thread: one of them is stuck for good."""
        self.size += 1

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            future, function, args, kwargs = job
            if future is None:
                function(*args, **kwargs)
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)
            del future, job
            self._idle.release()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, timeout_s: float = 5.0) -> None:
        """End the threads; waits for them at most `timeout_s`."""
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + (timeout_s if wait else 0.0)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
