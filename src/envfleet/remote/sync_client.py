"""The blocking client: the async one, on one event loop in a thread of its own that all of them share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, Unpack

from envfleet.errors import FleetClosed, FleetError, ProtocolBroken
from envfleet.remote.client import AsyncEnvClient
from envfleet.remote.client_config import ClientOptions, ClientStats
from envfleet.remote.result import Fields, StepResult
from envfleet.util.loop_thread import LoopThread

T = TypeVar("T")


# One for all blocking clients: a hundred of them cost one thread, and a pause of the caller (a gradient step, a debugger)
# stops no keep-alives.
_io = LoopThread("envfleet-io")


class Call:
    """A coroutine on the loop, and a thread that waits for it.

    `is_over` is set when what it gave has reached the caller. A call that is not over and that no thread waits for was
    interrupted (by Ctrl-C, by a signal handler that raises) and may still be running.
    """

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        # Called on the loop: an interrupt before that leaves nothing behind. Then let go, for it holds the client.
        self._work: Callable[[], Coroutine[Any, Any, Any]] | None = work
        self._task: asyncio.Task[None] | None = None
        self._unwanted = False
        self._outcome: tuple[bool, Any] = (False, None)
        # A bare lock, not an Event or a Future: those are Python code, which an interrupt can leave half way.
        self._done = threading.Lock()
        self._done.acquire()
        self.is_over = False
        self.interrupted = False

    def outcome(self, loop: asyncio.AbstractEventLoop) -> tuple[bool, Any]:
        """Run the coroutine and wait: (True, what it returned) or (False, what it raised)."""
        try:
            loop.call_soon_threadsafe(self._start)
            self._done.acquire()
            return self._outcome
        except BaseException:
            self.interrupted = True
            loop.call_soon_threadsafe(self._cancel)
            raise
        finally:
            self._outcome = (False, None)  # an exception's traceback holds this object, and the client with it

    def _start(self) -> None:
        work, self._work = self._work, None
        if not self._unwanted and work is not None:
            self._task = asyncio.get_running_loop().create_task(self._perform(work))

    async def _perform(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        try:
            self._outcome = (True, await work())
        except BaseException as error:
            self._outcome = (False, error)
        self._done.release()

    def _cancel(self) -> None:
        self._unwanted, self._work = True, None
        if self._task is not None:
            self._task.cancel()

    async def gone(self) -> None:
        """Wait, on the loop, until the coroutine of an interrupted call has ended."""
        self._cancel()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=10.0)


class HttpEnvClient:
    """A session with an OpenEnv server, blocking. It uses the WebSocket `/ws`, because OpenEnv's HTTP has no episodes.

    As with `AsyncEnvClient`, after a timeout, Ctrl-C or a lost connection the episode is over and `reset` is
    required; a late answer is never taken for that of another request.

    Args:
        url: http, https, ws or wss address of a server, or a list of them, or a mapping with `env_url` and options.
        options: see ClientConfig.

    Example:
        >>> def episode(url):
        ...     with HttpEnvClient(url) as client:
        ...         client.reset(seed=1)
        ...         return client.step({"message": "hi"}).reward
    """

    def __init__(self, url: str | Sequence[str] | Mapping[str, Any], **options: Unpack[ClientOptions]) -> None:
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: dict[int, Call] = {}  # by thread: the last one, which may have been interrupted
        self._client = AsyncEnvClient(url, **options)

    def __repr__(self) -> str:
        return repr(self._client).replace("AsyncEnvClient", type(self).__name__, 1)

    def __reduce__(self) -> tuple[Any, ...]:
        """It travels as its addresses and options, without its session."""
        make, _ = self._client.__reduce__()
        return partial(type(self), *make.args, **make.keywords), ()

    def as_async(self) -> AsyncEnvClient:
        """Another client with the same addresses and options, for an event loop."""
        url, options = self._client._arguments
        return AsyncEnvClient(url, **options)

    @property
    def url(self) -> str:
        """The server of the current (or last) session, without secrets."""
        return self._client.url

    @property
    def stats(self) -> ClientStats:
        """Counts of this client."""
        return self._client.stats

    @property
    def connected(self) -> bool:
        """Whether a session is open."""
        return self._client.connected

    def reset(self, *, timeout_s: float | None = None, **kwargs: Any) -> StepResult:
        """Start an episode; `seed`, `episode_id` and the environment's own arguments go to the server."""
        return self._run(lambda: self._client.reset(timeout_s=timeout_s, **kwargs))

    def step(self, action: Any, *, timeout_s: float | None = None) -> StepResult:
        """Act: a mapping of fields, a dataclass, a pydantic model, or the value of a one-field action."""
        return self._run(lambda: self._client.step(action, timeout_s=timeout_s))

    def state(self, *, timeout_s: float | None = None) -> Fields:
        """The server's state of the episode."""
        return self._run(lambda: self._client.state(timeout_s=timeout_s))

    def schema(self) -> Any:
        """The server's `/schema`: JSON schemas of actions, observations and state."""
        return self._run(self._client.schema)

    def confirm(self, *, timeout_s: float | None = None) -> None:
        """Make sure that every answer of this episode so far belonged to its request; raises ProtocolBroken."""
        self._run(lambda: self._client.confirm(timeout_s=timeout_s))

    def offer_session(self) -> None:
        """Let others of this process that wait for a session have this one; the next `reset` opens another then."""
        if self._loop is not None and not self._closed:
            self._loop.call_soon_threadsafe(self._client.offer_session)

    def refuse(self, why: str) -> ProtocolBroken:
        """The error for an answer that does not fit the server's own schema; the session is dropped."""

        async def refuse() -> ProtocolBroken:
            return self._client.refuse(why)

        return self._run(refuse)

    def close(self) -> None:
        """End the session; the server closes its environment. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            try:
                self._settle(self._loop)
                ended, error = Call(self._client.close).outcome(self._loop)
                if not ended:
                    raise error
            finally:
                self._loop = None
                _io.let_go()

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._closed:
            raise FleetClosed("the client")
        if self._loop is None:
            self._loop = _io.hold()
        self._settle(self._loop)
        call = self._calls[threading.get_ident()] = Call(work)
        try:
            ok, value = call.outcome(self._loop)
            if not ok:
                raise value
            # Nothing may come between these two: an interrupt after the first belongs to the caller.
            call.is_over = True
            return value  # type: ignore[no-any-return]
        except FleetError:
            call.is_over = not call.interrupted  # the coroutine's own
            raise
        finally:
            # The exception's traceback holds this frame: without this a failed client would live, with its session,
            # until the garbage collector runs.
            value = None

    def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what an interrupted call has left, and its session with it: its answer must not meet this call."""
        me = threading.get_ident()
        for thread, call in list(self._calls.items()):
            if not call.is_over and (call.interrupted or thread == me):
                ended, error = Call(partial(self._abandon, call)).outcome(loop)
                if not ended:
                    raise error
            if call.is_over:
                self._calls.pop(thread, None)

    async def _abandon(self, call: Call) -> None:
        await call.gone()
        self._client.abandon()
        call.is_over = True

    def __enter__(self) -> HttpEnvClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Dropping the last reference ends the session too, but must never block a collector's thread.
        if not self._closed and self._loop is not None and not self._loop.is_closed():
            self._closed = True
            try:
                self._loop.call_soon_threadsafe(self._client._drop)
                self._loop.call_soon_threadsafe(_io.let_go)
            except RuntimeError:
                pass  # the loop stopped in between: the process is ending
