"""A thread pool that never keeps the interpreter alive.

The standard library's pool joins its threads at exit, without a timeout: one call that hangs would hang the
program forever. These threads are daemons, and the shutdown has a timeout.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from envfleet.errors import BadArgument, FleetClosed

P = ParamSpec("P")
T = TypeVar("T")
Job = tuple["Future[Any] | None", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class DaemonPool(Executor):
    """At most `size` daemon threads, started as they are needed.

    Example:
        >>> with DaemonPool(2) as pool:
        ...     pool.submit(max, 1, 2).result()
        2
    """

    def __init__(self, size: int, name: str = "envfleet-pool") -> None:
        if size < 1:
            raise BadArgument(f"a pool needs at least 1 thread, got {size}")
        self.size = size
        self._name = name
        self._shared = _Shared()
        self._closed = False
        # The threads refer to this object only: a pool that is dropped is collected, and they end.
        weakref.finalize(self, self._shared.dismiss)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call and return its future."""
        future: Future[T] = Future()
        self._put((future, fn, args, kwargs))
        return future

    def run(self, function: Callable[..., None], *args: Any) -> None:
        """Run a call whose result is not waited for; it must not raise."""
        self._put((None, function, args, {}))

    def _put(self, job: Job) -> None:
        shared = self._shared
        with shared.lock:
            if self._closed:
                raise FleetClosed("the executor")
            shared.queue.put(job)
            if shared.idle > 0:
                shared.idle -= 1  # promised to this call
            else:
                self._start_thread()

    def _start_thread(self) -> None:
        """Start a thread if there may be one more; the lock is held."""
        shared = self._shared
        if len(shared.threads) - len(shared.replaced) < self.size:
            thread = threading.Thread(target=shared.work, name=f"{self._name}-{len(shared.threads)}", daemon=True)
            shared.threads.append(thread)
            thread.start()

    def grow(self, by: int = 1) -> None:
        """Allow one more thread, because one of them hangs forever or waits for a call in this pool."""
        with self._shared.lock:
            self.size += by
            if not self._shared.queue.empty():
                self._start_thread()

    def replace(self, thread: threading.Thread) -> None:
        """Let another thread take the place of one whose call may never return: it ends with that call, and no one waits for it."""
        with self._shared.lock:
            if thread in self._shared.threads and not self._closed:
                self._shared.replaced.add(thread)
                if not self._shared.queue.empty():
                    self._start_thread()

    def is_own_thread(self) -> bool:
        """Whether the caller is a call in this pool."""
        return threading.current_thread() in self._shared.threads

    def shutdown(  # type: ignore[override]
        self, wait: bool = True, *, cancel_futures: bool = False, timeout: float | None = None, timeout_s: float | None = None
    ) -> bool:
        """Take no more work; with `wait`, join the threads, at most this long. True when all have ended."""
        with self._shared.lock:
            self._closed = True
            threads = list(self._shared.threads)
            waited_for = [thread for thread in threads if thread not in self._shared.replaced]
        if cancel_futures:
            self._shared.cancel_queued()
        self._shared.dismiss()
        limit = timeout_s if timeout_s is not None else timeout
        deadline = None if limit is None else time.monotonic() + limit
        if wait:
            for thread in waited_for:
                if thread is not threading.current_thread():
                    thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class _Shared:
    """What a pool and its threads share."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.replaced: set[threading.Thread] = set()  # threads in calls that were given up
        self.idle = 0
        self.dismissed = False

    def work(self) -> None:
        """The loop of a thread: make calls until the sentinel."""
        while True:
            job = self.queue.get()
            if job is None:
                return
            future, function, args, kwargs = job
            if future is None:
                function(*args, **kwargs)
            elif future.set_running_or_notify_cancel():
                try:
                    result = function(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                    del error
                else:
                    future.set_result(result)
                    del result
            del job, future, function, args, kwargs  # the idle thread must not keep the last episode alive
            with self.lock:
                me = threading.current_thread()
                if me in self.replaced:
                    self.replaced.discard(me)
                    self.threads.remove(me)
                    return
                self.idle += 1

    def dismiss(self) -> None:
        """Let every thread end when its queue is done; once."""
        with self.lock:
            if self.dismissed:
                return
            self.dismissed = True
            for _ in self.threads:
                self.queue.put(None)

    def cancel_queued(self) -> None:
        """Cancel what no thread has begun."""
        sentinels = 0
        while True:
            try:
                job = self.queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                sentinels += 1
            elif job[0] is not None:
                job[0].cancel()
        for _ in range(sentinels):
            self.queue.put(None)


def outcome(function: Any, args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    """A call's result or error as a value: futures cannot carry every exception (StopIteration, KeyboardInterrupt).

    Example:
        >>> outcome(next, (iter([]),), {})
        (None, StopIteration())
    """
    try:
        return function(*args, **kwargs), None
    except BaseException as error:
        return None, error
