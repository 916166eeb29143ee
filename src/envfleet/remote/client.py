"""The client: one session with an OpenEnv server; no answer is given to the wrong request."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, Unpack

from envfleet import errors
from envfleet.errors import FleetError, ResetNeeded
from envfleet.remote import exact_protocol, wire
from envfleet.remote.address import endpoints_of, get_json, split_mapping
from envfleet.remote.answer_check import AnswerChecker
from envfleet.remote.client_config import ClientConfig, ClientOptions, ClientStats
from envfleet.remote.connecting import Opener
from envfleet.remote.exact_protocol import BadFrame, Closed, Message, Unsolicited
from envfleet.remote.result import Fields, StepResult, action_payload
from envfleet.remote.session_queue import CapacityTable, shared_table

E = TypeVar("E", bound=errors.SessionInterrupted)
_LOOK_AGAIN_S = 0.02  # until a session that is in use may be passed on


class AsyncEnvClient:
    """A session with an OpenEnv server; `reset`, `step`, `state` and `close` are coroutines.

    It connects at the first `reset` and keeps the session across episodes. After a timeout, a cancellation
    or a lost connection the socket is dropped, `SessionInterrupted` (or the cancellation) is raised, and
    `step` raises `ResetNeeded` until the next `reset`, which opens a new session. So does a `reset` that finds its
    session ended by the server. With several servers a session is opened where one is free; while others in this
    process wait for one, it is passed on at the end of an episode.

    Our servers number their answers; with other servers every episode is checked before its last answer is returned
    (`envfleet.remote.answer_check`). An answer to another request is ProtocolBroken.

    Args:
        url: http, https, ws or wss address of a server, or a list of them, or a mapping with `env_url` and options.
        options: see ClientConfig.

    Example:
        >>> async def episode(url):
        ...     async with AsyncEnvClient(url) as client:
        ...         await client.reset(seed=1)
        ...         return (await client.step({"message": "hi"})).reward
    """

    def __init__(self, url: str | Sequence[str] | Mapping[str, Any], **options: Unpack[ClientOptions]) -> None:
        url, options = split_mapping(url, options)
        self.config = ClientConfig.of(options)
        self._arguments: tuple[Any, dict[str, Any]] = url, options  # type: ignore[assignment]
        self._endpoints = endpoints_of(url, self.config)
        self._table = self.config.capacity or shared_table()
        self._link: Any = None  # envfleet.remote.link.Link, imported when it is first needed
        self._url = next(iter(self._endpoints))
        self._busy = False
        self._running = False  # an episode was reset on this very session
        self._episode_id: Any = None
        self._episode_steps = 0
        self._checkers = {url: AnswerChecker(self._table.learnt(url)) for url in self._endpoints}
        self._offer: object | None = None  # made by `offer_session`, until the next reset
        self._passing_on: asyncio.Future[None] | None = None  # a task is kept alive by who refers to it
        self._last_state: Fields | None = None  # of an episode whose session was handed on
        self._end_state: Fields | None = None  # of an episode that is over, as its last check found it
        self.stats = ClientStats()
        self._opener = Opener(self._endpoints, self.config, self._table, self.stats)

    @property
    def url(self) -> str:
        """The server of the current (or last) session, without secrets."""
        return self._url

    @property
    def connected(self) -> bool:
        """Whether a session is open."""
        return self._link is not None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(repr(url) for url in self._endpoints)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """It travels as its addresses and options, without its session."""
        url, options = self._arguments
        return partial(type(self), url, **{key: value for key, value in options.items() if key != "capacity"}), ()

    async def reset(self, *, timeout_s: float | None = None, **kwargs: Any) -> StepResult:
        """Start an episode; `seed`, `episode_id` and the environment's own arguments go to the server."""
        self._enter()
        try:
            self._running = False
            self._last_state = self._end_state = None
            self._offer = None
            self._table.withdraw(self)
            if self._link is not None and not self._link.is_clean:
                self.stats.renewed += 1
                self._drop()  # between episodes nothing is lost with it
            if self._link is None or self._table.contended(self._url):
                await self._hang_up()
                await self._open()
            self._episode_id, self._episode_steps = kwargs.get("episode_id"), 0
            self._checkers[self._url].began()
            result = await self._result("reset", kwargs, timeout_s)
            self.stats.resets += 1
            self._running = True
            return result
        except FleetError:
            raise
        except BaseException:
            self._drop()  # interrupted: a late answer must not be taken for that of a later request
            raise
        finally:
            self._busy = False

    async def step(self, action: Any, *, timeout_s: float | None = None) -> StepResult:
        """Act: a mapping of fields, a dataclass, a pydantic model, or the value of a one-field action."""
        self._enter()
        try:
            if not self._running:
                raise ResetNeeded(hint="call reset() first (also after an interruption)")
            if type(action) is dict:
                payload = action
            else:
                payload = action_payload(action, await self._action_name(action))
            result = await self._result("step", payload, timeout_s)
            self.stats.steps += 1
            if result.done:
                self._end_state = await self._check(timeout_s, at_end=True)
                if self._table.contended(self._url):  # others wait, and this episode is over
                    await self._hand_on()
                else:
                    self.offer_session()
            return result
        except FleetError:
            raise
        except BaseException:
            self._drop()
            raise
        finally:
            self._busy = False

    async def confirm(self, *, timeout_s: float | None = None) -> None:
        """Make sure that every answer of this episode so far belonged to its request; raises ProtocolBroken.

        `step` does so at an episode's end; for callers that end episodes themselves. Costs nothing with our servers.
        """
        self._enter()
        try:
            if self._running:
                await self._check(timeout_s, at_end=True)
        finally:
            self._busy = False

    def offer_session(self) -> None:
        """Let others of this process that wait for a session have this one; the next `reset` opens another then.

        `step` does so at an episode's end; for callers that end episodes themselves. `step` and `state` still work
        until someone takes it.
        """
        if self._link is not None:
            with suppress(RuntimeError):  # no loop runs here: the session cannot be passed on
                loop, me = asyncio.get_running_loop(), weakref.ref(self)  # the table keeps no client alive
                self._offer = offer = object()
                self._table.offer(self, self._url, partial(loop.call_soon_threadsafe, _pass_on, me, offer))

    def _hand_on(self) -> Coroutine[Any, Any, None]:
        """Give the session away, at once; what is returned ends it at the server."""
        counted = Fields(episode_id=self._episode_id, step_count=self._episode_steps)
        self._last_state = counted if self._end_state is None else self._end_state
        self._running = False
        return self._hang_up()

    async def state(self, *, timeout_s: float | None = None) -> Fields:
        """The server's state of the episode."""
        self._enter()
        try:
            if self._last_state is not None:
                return self._last_state
            if self._link is None:
                raise ResetNeeded()
            return await self._state(timeout_s)
        finally:
            self._busy = False

    async def schema(self) -> Any:
        """The server's `/schema`: JSON schemas of actions, observations and state."""
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

    async def _action_name(self, action: Any) -> str:
        """A bare value needs its field's name: the one property of the server's action schema, which is asked for once."""
        if isinstance(action, Mapping) or hasattr(action, "model_dump") or hasattr(action, "__dataclass_fields__"):
            return "action"  # it brings its own names
        learnt = self._table.learnt(self._url)
        if "action_name" not in learnt:
            await asyncio.to_thread(self._learn_action_name, self._url, learnt)
        return str(learnt["action_name"])

    def _learn_action_name(self, url: str, learnt: dict[str, Any]) -> None:
        from envfleet.remote.space_views import only_field

        with self._table.asking(url):  # one client asks, the others wait for what it learns
            if "action_name" not in learnt:
                learnt["action_name"] = only_field(get_json(self._endpoints[url], "/schema", self.config))

    async def _result(self, kind: str, data: dict[str, Any], timeout_s: float | None) -> StepResult:
        """Reset or step; with servers that do not number their answers, a repeated one is looked into."""
        link, is_step = self._link, kind == "step"
        checker = None if link.is_exact else self._checkers[self._url]
        repeated = False

        def parse(message: Message) -> StepResult:
            nonlocal repeated
            repeated = checker is not None and checker.repeats(message.mark)
            return exact_protocol.parse_result(message.data, is_step) if checker is None else wire.parse_result(message.data)

        try:
            result: StepResult = await self._request(kind, data, "observation", parse, timeout_s)
        except errors.ServerError:
            if checker is not None:
                checker.failed()
            raise
        self._episode_steps += is_step
        if checker is None:
            return result
        if is_step:
            checker.stepped()
        verdict = checker.watch(result.observation, repeated)
        if verdict == "duplicate" or (repeated and self.config.repeats == "fault"):
            raise self._broken(errors.ProtocolBroken, "an answer came a second time")
        if is_step and result.done:
            return result  # `step` checks at the end
        if verdict == "check" or result.done:
            await self._check(timeout_s)
        if verdict == "check" and not repeated:
            checker.unlearn()
        return result

    async def _check(self, timeout_s: float | None, at_end: bool = False) -> Fields | None:
        """Ask an official server's state: it must be the next answer, and count as many steps as were taken."""
        if self._link.is_exact:
            return None
        checker = self._checkers[self._url]
        if checker.stateless is not None:
            if not at_end:
                await self._check_stateless(checker.stateless, timeout_s)
            return None
        self.stats.checks += 1
        try:
            state = await self._state(timeout_s)
        except errors.ServerError as error:
            if checker.has_state:
                raise self._broken(errors.ProtocolBroken, f"state was answered with {error}") from None
            return None  # an environment without a usable state cannot be asked
        wrong = checker.disagrees(state) if self.config.step_counts else None
        if wrong is not None:
            hint = "an answer was duplicated or lost (step_counts=False if this server counts otherwise)"
            raise self._broken(errors.ProtocolBroken, f"{wrong}: {hint}")
        return state

    async def _check_stateless(self, known: Message, timeout_s: float | None) -> None:
        """A server that answers `state` with something else must at least give the answer it gave at first."""
        self.stats.checks += 1
        mark = await self._request("state", None, known.kind, lambda message: message.mark, timeout_s)
        if mark != known.mark:
            raise self._broken(errors.ProtocolBroken, "an answer came a second time, and the next is out of turn")

    async def _state(self, timeout_s: float | None) -> Fields:
        def parse(message: Message) -> Fields:
            if not isinstance(message.data, dict):
                raise BadFrame("a state that is no object")
            return Fields(message.data)

        return await self._request("state", None, "state", parse, timeout_s)  # type: ignore[no-any-return]

    async def _request(
        self, kind: str, data: Any, expected: str, parse: Callable[[Message], Any], timeout_s: float | None
    ) -> Any:
        """Send one request and return its answer. The session guard is here only."""
        link = self._link
        timeout_s = self.config.message_timeout_s if timeout_s is None else timeout_s
        request = link.frame(kind, data)
        try:
            answer = await link.ask(request, timeout_s)
            if answer.kind == expected:
                return parse(answer)
            if answer.kind != "error":
                raise BadFrame(f"{answer.kind[:40]!r} is no answer to {kind}")
            failure = wire.error_in(answer.data, self._url)
        except TimeoutError:
            raise self._broken(errors.MessageTimeout, f"no answer to {kind} in {timeout_s:g} s") from None
        except Closed as error:
            broken = errors.MessageTooBig if error.too_big else errors.SessionLost
            why = f"{error}: a message over the limit of bytes" if error.too_big else str(error)
            raise self._broken(broken, why) from None
        except Unsolicited as error:
            raise self._unsolicited(error.message) from None
        except BadFrame as error:
            raise self._broken(errors.ProtocolBroken, str(error)) from None
        except BaseException as error:
            # Cancelled or interrupted: the answer may still come, so the socket is dropped.
            self._broken(errors.SessionLost, type(error).__name__)
            raise
        finally:
            self.stats.dropped += link.dropped
            link.dropped = 0
        if isinstance(failure, (errors.CapacityReached, errors.SessionRefused)):
            self._drop()
        raise failure

    def abandon(self) -> None:
        """Drop the session of a call that was interrupted; the next one must be a `reset`."""
        self._drop()
        self._busy = False

    def refuse(self, why: str) -> errors.ProtocolBroken:
        """The error for an answer that does not fit the server's own schema; the session is dropped."""
        return self._broken(errors.ProtocolBroken, why)

    def _broken(self, kind: type[E], why: str) -> E:
        self.stats.interruptions += 1
        self._drop()
        return kind(self._url, why, self._episode_steps)

    def _unsolicited(self, message: Message) -> errors.RemoteError:
        """A server that ends a session on its own (idle, shutting down) says why before it closes."""
        if message.kind != "error":
            return self._broken(errors.ProtocolBroken, "a frame without a request")
        failure = wire.error_in(message.data, self._url)
        if isinstance(failure, errors.CapacityReached):
            self._drop()
            return failure
        return self._broken(errors.SessionLost, str(failure))

    def _drop(self) -> None:
        """Drop the session at once; the server notices the closed socket."""
        link, self._link = self._link, None
        self._running = False
        self._table.withdraw(self)
        if link is not None:
            link.abort()
            self._table.released(self._url)

    def _hang_up(self) -> Coroutine[Any, Any, None]:
        """Let go of the session, at once; what is returned ends it with a closing handshake.

        At once, because a `reset` may come before that is complete: it must find no session, and may go to another server.
        """
        link, self._link = self._link, None
        self._table.withdraw(self)
        return _closed(link, self._table, self._url)

    async def _open(self) -> None:
        began = time.perf_counter()
        try:
            self._link, self._url, first = await self._opener.open()
        finally:
            self.stats.opening_s += time.perf_counter() - began
        self.stats.round_trip_s = self._table.learnt(self._url).get("round_trip_s", 0.0)
        self._checkers[self._url].connected(first)


async def _closed(link: Any, table: CapacityTable, url: str) -> None:
    """End a session with a closing handshake: the server has freed it when this returns."""
    if link is None:
        return
    try:
        await link.close()
    finally:
        link.abort()
        table.released(url)


def _pass_on(offered: weakref.ref[AsyncEnvClient], offer: object) -> None:
    """On a client's loop: give its session to another, unless an episode was begun since it was offered."""
    client = offered()
    if client is None or client._offer is not offer or not client.connected:
        return  # who took the offer may be on another thread, and late
    if client._busy:  # in a call that needs the session for a moment, such as `state`
        asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, _pass_on, offered, offer)
    else:
        client._passing_on = asyncio.ensure_future(client._hand_on())
