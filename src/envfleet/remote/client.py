"""The client: one session with an OpenEnv server, guarded so that no answer meets the wrong request."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from envfleet.errors import BadArgument, ResetNeeded
from envfleet.remote import errors, wire
from envfleet.remote.capacity import CapacityTable, Ticket, shared_table
from envfleet.remote.result import Fields, StepResult, action_payload

_log = logging.getLogger("envfleet.remote")


@dataclass(frozen=True)
class ClientConfig:
    """The options of a client; every one is a keyword argument of `HttpEnvClient` and `AsyncEnvClient`.

    Args:
        headers: sent with the handshake; `token` adds `Authorization: Bearer …`.
        connect_timeout_s: for one try at one server.
        message_timeout_s: for one request; `reset`, `step` and `state` take their own `timeout_s`.
        capacity_timeout_s: how long to wait for a free session before CapacityReached surfaces.
        down_timeout_s: how long to keep trying when no server answers at all.
        max_message_bytes: larger answers are refused (MessageTooBig).
        ping_interval_s, ping_timeout_s: WebSocket keep-alive.
        compression: permessage-deflate; it costs CPU and helps only on slow lines.
        ssl_context: for https/wss; None verifies certificates with the system's roots.
        binary: offer raw bytes for arrays to servers of ours.
        capacity: the table of sessions to share; None is the one of this process.
    """

    headers: Mapping[str, str] | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    connect_timeout_s: float = 10.0
    message_timeout_s: float = 60.0
    capacity_timeout_s: float = 60.0
    down_timeout_s: float = 0.0
    max_message_bytes: int = 100 * 2**20
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = 20.0
    compression: bool = False
    ssl_context: ssl.SSLContext | None = None
    binary: bool = True
    capacity: CapacityTable | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ClientConfig:
        """From keyword arguments; an unknown one is a BadArgument that lists the known."""
        known = [each.name for each in fields(cls)]
        unknown = sorted(set(options) - set(known))
        if unknown:
            raise BadArgument(f"unknown client options {unknown}; there are {', '.join(known)}")
        return cls(**options)


@dataclass
class ClientStats:
    """What a client has seen: counts, and the seconds it spent waiting for capacity and for answers."""

    steps: int = 0
    resets: int = 0
    connects: int = 0
    refusals: int = 0
    interruptions: int = 0
    waited_s: float = 0.0
    answered_s: float = 0.0


def endpoints_of(url: Any, config: ClientConfig) -> dict[str, wire.Endpoint]:
    """The servers of a URL, a list of them, or a mapping with `env_url`."""
    if isinstance(url, Mapping):
        if "env_url" not in url:
            raise BadArgument("a client's mapping needs the key 'env_url'")
        url = url["env_url"]
    urls = [url] if isinstance(url, str) else list(url)
    if not urls:
        raise BadArgument("a client needs at least one server address")
    parsed = [wire.Endpoint.parse(each, config.headers, config.token) for each in urls]
    return {endpoint.public: endpoint for endpoint in parsed}


class AsyncEnvClient:
    """A session with an OpenEnv server; `reset`, `step`, `state` and `close` are coroutines.

    It connects at the first `reset` and keeps the session across episodes. After a timeout, a cancellation
    or a lost connection the socket is dropped, `SessionInterrupted` (or the cancellation) is raised, and
    `step` raises `ResetNeeded` until the next `reset`, which opens a new session. With several servers a
    session is opened wherever there is room; when others in this process wait for one, it is handed on at
    an episode's end.

    Args:
        url: http, https, ws or wss address of a server, or a list of them, or a mapping with `env_url`.
        options: see ClientConfig.

    Example:
        >>> async def episode(url):
        ...     async with AsyncEnvClient(url) as client:
        ...         await client.reset(seed=1)
        ...         return (await client.step({"message": "hi"})).reward
    """

    def __init__(self, url: str | Sequence[str] | Mapping[str, Any], **options: Any) -> None:
        self.config = ClientConfig.of(options)
        self._endpoints = endpoints_of(url, self.config)
        self._table = self.config.capacity or shared_table()
        self._link: Any = None  # envfleet.remote.link.Link, imported when it is first needed
        self._url = next(iter(self._endpoints))
        self._busy = False
        self._running = False  # an episode was reset on this very session
        self._episode_steps = 0
        self._last_state: Fields | None = None
        self._action_name: str | None = None
        self.keeps_last_state = True  # whether a session handed on is asked for its state first
        self.stats = ClientStats()

    @property
    def url(self) -> str:
        """The server of the current (or last) session, without secrets."""
        return self._url

    @property
    def connected(self) -> bool:
        """Whether a session is open."""
        return self._link is not None

    async def reset(self, *, timeout_s: float | None = None, **kwargs: Any) -> StepResult:
        """Start an episode; `seed`, `episode_id` and the environment's own arguments go to the server."""
        self._enter()
        try:
            self._running = False
            self._last_state = None
            if self._link is None or self._table.contended(self._url):
                await self._hang_up()
                await self._open()
            result = await self._result("reset", kwargs, timeout_s)
            self.stats.resets += 1
            self._running, self._episode_steps = True, 0
            return result
        finally:
            self._busy = False

    async def step(self, action: Any, *, timeout_s: float | None = None) -> StepResult:
        """Act: a mapping of fields, a dataclass, a pydantic model, or the value of a one-field action."""
        self._enter()
        try:
            if not self._running:
                raise ResetNeeded([0], "call reset() first (also after an interruption)")
            if type(action) is dict:
                payload = action
            else:
                payload = action_payload(action, self._action_name or await self._find_action_name(action))
            result: StepResult = await self._request("step", payload, "observation", wire.parse_result, timeout_s)
            self.stats.steps += 1
            self._episode_steps += 1
            if result.done and self._table.contended(self._url):
                await self._hand_on()
            return result
        finally:
            self._busy = False

    async def state(self, *, timeout_s: float | None = None) -> Fields:
        """The server's state of the episode."""
        self._enter()
        try:
            if self._last_state is not None:
                return self._last_state
            if self._link is None:
                raise ResetNeeded([0])
            return await self._state(timeout_s)
        finally:
            self._busy = False

    async def schema(self) -> Any:
        """The server's `/schema`: JSON schemas of actions, observations and state."""
        from envfleet.remote.http import get_json

        endpoint = self._endpoints[self._url]
        return await asyncio.to_thread(get_json, endpoint, "/schema", self.config)

    async def close(self) -> None:
        """End the session; the server closes its environment. Safe to call twice."""
        self._running = False
        await self._hang_up()

    async def __aenter__(self) -> AsyncEnvClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _enter(self) -> None:
        if self._busy:
            raise errors.ClientBusy()
        self._busy = True

    async def _find_action_name(self, action: Any) -> str:
        """A bare value needs its field's name: the one property of the server's action schema."""
        if isinstance(action, Mapping) or hasattr(action, "model_dump") or hasattr(action, "__dataclass_fields__"):
            return "action"  # it brings its own names
        from envfleet.remote.http import only_field

        self._action_name = only_field(await self.schema())
        return self._action_name

    async def _result(self, kind: str, data: dict[str, Any], timeout_s: float | None) -> StepResult:
        result: StepResult = await self._request(kind, data, "observation", wire.parse_result, timeout_s)
        return result

    async def _state(self, timeout_s: float | None) -> Fields:
        def fields(data: Any) -> Fields:
            return Fields(data) if isinstance(data, Mapping) else Fields()

        state: Fields = await self._request("state", None, "state", fields, timeout_s)
        return state

    async def _request(
        self, kind: str, data: Any, expected: str, parse: Callable[[Any], Any], timeout_s: float | None
    ) -> Any:
        """Send one request and return what its answer says: the guard is here and nowhere else."""
        link = self._link
        timeout_s = self.config.message_timeout_s if timeout_s is None else timeout_s
        request = wire.encode(kind, data, binary=link.binary)
        started = time.perf_counter()
        try:
            answered, content = wire.decode(await link.ask(request, timeout_s))
            self.stats.answered_s += time.perf_counter() - started
            if answered == expected:
                return parse(content)
        except TimeoutError:
            raise self._broken(errors.MessageTimeout, f"no answer to {kind} in {timeout_s:g} s") from None
        except errors.Closed as error:
            broken = errors.MessageTooBig if error.too_big else errors.SessionLost
            why = f"{error}: a message over the limit of bytes" if error.too_big else str(error)
            raise self._broken(broken, why) from None
        except errors.Unsolicited as error:
            raise self._unsolicited(error.frame) from None
        except wire.BadFrame as error:
            raise self._broken(errors.ProtocolBroken, str(error)) from None
        except BaseException as error:
            # Cancelled (or interrupted) in the middle: the answer may still come, so the socket must go.
            self._broken(errors.SessionLost, type(error).__name__)
            raise
        if answered != "error":
            raise self._broken(errors.ProtocolBroken, f"{answered!r} is no answer to {kind}")
        failure = errors.from_frame(content, self._url)
        if isinstance(failure, (errors.CapacityReached, errors.SessionRefused)):
            self._drop()
        raise failure

    def _broken(self, kind: type[errors.SessionInterrupted], why: str) -> errors.SessionInterrupted:
        self.stats.interruptions += 1
        self._drop()
        return kind(self._url, why, self._episode_steps)

    def _unsolicited(self, frame: str | bytes) -> errors.RemoteError:
        """A server that ends a session on its own (idle, shutting down) says why before it closes."""
        try:
            kind, content = wire.decode(frame)
        except wire.BadFrame:
            kind, content = "", None
        if kind != "error":
            return self._broken(errors.ProtocolBroken, "a frame nobody asked for")
        failure = errors.from_frame(content, self._url)
        if isinstance(failure, errors.CapacityReached):
            self._drop()
            return failure
        return self._broken(errors.SessionLost, str(failure))

    def _drop(self) -> None:
        """Let go of the session at once; the server notices the closed socket."""
        link, self._link = self._link, None
        self._running = False
        if link is not None:
            link.abort()
            self._table.released(self._url)

    async def _hang_up(self) -> None:
        """End the session in good order: the server has freed it when this returns."""
        link, self._link = self._link, None
        if link is None:
            return
        try:
            await link.close()
        finally:
            link.abort()
            self._table.released(self._url)

    async def _hand_on(self) -> None:
        """Others wait and this episode is over: keep the final state for `state()`, free the session."""
        if self.keeps_last_state:
            try:
                self._last_state = await self._state(5.0)
            except errors.RemoteError:
                self._last_state = Fields()
        self._running = False
        await self._hang_up()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        ticket = self._table.enter(tuple(self._endpoints), wake)
        started = time.monotonic()
        last: errors.CapacityReached | None = None
        try:
            while self._link is None:
                waited = time.monotonic() - started
                choice = self._table.choose(ticket)
                if isinstance(choice, str):
                    last = await self._try(ticket, choice) or last
                    continue
                self._give_up(ticket, waited, last)
                woken.clear()
                try:
                    await asyncio.wait_for(woken.wait(), choice)
                except TimeoutError:
                    pass  # nobody called: look at the table again
        finally:
            self._table.leave(ticket)
            self.stats.waited_s += time.monotonic() - started

    def _give_up(self, ticket: Ticket, waited: float, last: errors.CapacityReached | None) -> None:
        """Raise when there is no point in waiting on, or no time left for it."""
        down = self._table.all_down(ticket.urls)
        if down and waited >= self.config.down_timeout_s:
            reasons = "; ".join(ticket.failures.get(url, "down") for url in ticket.urls)
            raise errors.ConnectFailed(", ".join(ticket.urls), reasons)
        if down and self._table.is_news(ticket.urls):
            wait_s = self.config.down_timeout_s
            _log.warning("no server answers at %s: waiting up to %g s for one", ", ".join(ticket.urls), wait_s)
        if not down and waited >= self.config.capacity_timeout_s:
            active, most = (last.active, last.max) if last else (None, None)
            raise errors.CapacityReached(", ".join(ticket.urls), active, most, round(waited, 3))

    async def _try(self, ticket: Ticket, url: str) -> errors.CapacityReached | None:
        """One try at one server. Connected does not mean served: only an answer to a probe does."""
        from envfleet.remote.link import open_link

        link = None
        try:
            link = await open_link(self._endpoints[url], self.config)
            try:
                frame = await link.ask(wire.encode("state"), self.config.connect_timeout_s)
            except (errors.Closed, errors.Unsolicited) as gone:
                frame = gone.frame if isinstance(gone, errors.Unsolicited) else link.early_frame() or ""
            kind, content = wire.decode(frame) if frame else ("error", {"message": "closed at once"})
            failure = errors.from_frame(content, url) if kind == "error" else None
            if isinstance(failure, errors.CapacityReached):
                raise failure
            if isinstance(failure, errors.SessionRefused) or not frame:
                raise errors.ConnectFailed(url, str(failure))
            # Any other answer, an environment without a usable state included, means there is a session.
            self._table.opened(ticket)
            self._link, self._url, link = link, url, None
            self.stats.connects += 1
            return None
        except errors.CapacityReached as full:
            self.stats.refusals += 1
            self._table.refused(ticket, full.active, full.max)
            return full
        except errors.Unauthorized:
            raise
        except (errors.ConnectFailed, TimeoutError, wire.BadFrame) as error:
            self._table.failed(ticket, getattr(error, "why", str(error)) or "no answer to the first message")
            return None
        finally:
            if link is not None:
                link.abort()
