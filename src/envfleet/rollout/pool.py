"""A thread pool whose shutdown is bounded, and an event loop on a thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from envfleet.errors import BadArgument, FleetClosed

P = ParamSpec("P")
T = TypeVar("T")
Work = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class WorkerThreads(Executor):
    """A `ThreadPoolExecutor` with a bounded shutdown; a stuck call cannot keep the interpreter alive.

    The standard pool joins its threads when the interpreter exits, for as long as that takes; these are
    daemons.

    Example:
        >>> with WorkerThreads(2) as pool:
        ...     pool.submit(max, 1, 2).result()
        2
    """

    def __init__(self, max_workers: int, name: str = "envfleet-rollout") -> None:
        if max_workers < 1:
            raise BadArgument(f"max_workers must be at least 1, got {max_workers}")
        self.max_workers = max_workers
        self._name = name
        self._desk = _Desk()
        self._closed = False
        # The threads know the desk only, so a pool nobody refers to any more can go, and they with it.
        weakref.finalize(self, self._desk.dismiss)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call and return its future."""
        future: Future[T] = Future()
        desk = self._desk
        with desk.lock:
            if self._closed:
                raise FleetClosed("the executor")
            desk.queue.put((future, fn, args, kwargs))
            if desk.idle > 0:
                desk.idle -= 1  # promised to this call
            elif len(desk.threads) < self.max_workers:
                name = f"{self._name}-{len(desk.threads)}"
                thread = threading.Thread(target=desk.work, name=name, daemon=True)
                desk.threads.append(thread)
                thread.start()
        return future

    def shutdown(  # type: ignore[override]
        self,
        wait: bool = True,
        *,
        cancel_futures: bool = False,
        timeout: float | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Take no more work; with `wait`, join the threads, at most this long. True when all have ended."""
        with self._desk.lock:
            self._closed = True
            threads = list(self._desk.threads)
        if cancel_futures:
            self._desk.cancel_queued()
        self._desk.dismiss()
        limit = timeout_s if timeout_s is not None else timeout
        deadline = None if limit is None else time.monotonic() + limit
        if wait:
            for thread in threads:
                if thread is not threading.current_thread():
                    thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


class _Desk:
    """What a pool and its threads share."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []
        self.idle = 0
        self.dismissed = False

    def work(self) -> None:
        """A thread's life: calls until the sentinel."""
        while True:
            work = self.queue.get()
            if work is None:
                return
            future, fn, args, kwargs = work
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:
                    future.set_exception(error)
                    del error
                else:
                    future.set_result(result)
                    del result
            del work, future, fn, args, kwargs  # the idle thread must not keep the last episode alive
            with self.lock:
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
                work = self.queue.get_nowait()
            except queue.Empty:
                break
            if work is None:
                sentinels += 1
            else:
                work[0].cancel()
        for _ in range(sentinels):
            self.queue.put(None)


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
                self._thread = threading.Thread(target=self._loop.run_forever, name="envfleet-loop", daemon=True)
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
        if not thread.is_alive():
            loop.close()
        return not thread.is_alive()
