"""One client's session on a server: frames in, frames out. It does not use sockets."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from envfleet.errors import FaultError, FleetError
from envfleet.remote import exact_protocol, wire
from envfleet.remote.exact_protocol import BadFrame, Message, NoWireForm
from envfleet.remote.session_env import OPENING
from envfleet.remote.session_host import FleetHost, Row
from envfleet.remote.space_codec import Dialect, to_binary, to_json, to_lists
from envfleet.remote.space_members import BadAction

MAX_BAD = 100  # bad messages in a row before a session is ended

Frame = str | bytes

_log = logging.getLogger("envfleet.remote")


class Over(Exception):
    """The session is to be closed; `frame` is the last message, if there is one."""

    def __init__(self, frame: Frame | None = None) -> None:
        self.frame = frame


def error_frame(code: str, message: str, *, number: int | None = None, **details: Any) -> Frame:
    """An error as the protocol spells it; `number` is that of the request, between our own ends."""
    data = {"message": message, "code": code, **details}
    return wire.encode("error", data) if number is None else exact_protocol.encode("error", number, data)


class Session:
    """A slot and the episode on it. `answer(frame)` gives the reply to a message; raises Over at the end.

    `protocol` is the subprotocol the client and this server agreed on: one of `exact_protocol.SUBPROTOCOLS`, or None for OpenEnv.
    """

    def __init__(self, host: FleetHost, slot: int, protocol: str | None = None) -> None:
        self._host, self._slot, self._protocol = host, slot, protocol
        self._dialect: Dialect = host.dialect
        self._number: int | None = None  # of the request that is being answered
        self._episode_id: str | None = None
        self._steps = 0
        self.in_episode = False  # an episode was begun and is not over
        self._fresh = True  # the first reset of a session builds its environment
        self._bad = 0
        self.dropped = 0  # requests that came twice
        self._answers: dict[str, Callable[[Any], Awaitable[Frame]]] = {
            "step": self._step,
            "reset": self._reset,
            "state": self._state,
        }

    async def answer(self, frame: Frame) -> Frame | None:
        """The reply to one message; None to a request that came a second time."""
        try:
            message = (exact_protocol if self._protocol else wire).decode(frame)
            if not self._is_next(message):
                return None
        except BadFrame as error:
            return self._reject("INVALID_JSON", str(error), unread=True)
        if message.kind == "close":
            raise Over
        handler = self._answers.get(message.kind)
        if handler is None:
            known = ", ".join([*self._answers, "close"])
            return self._reject("UNKNOWN_TYPE", f"unknown message type {message.kind[:40]!r}; there are {known}")
        try:
            reply = await handler(message.data)
        except BadAction as error:
            return self._reject("VALIDATION_ERROR", "Invalid message", errors=[{"msg": str(error)}])
        except FaultError as error:
            # The environment raised, overran its deadline or lost its process: the slot is usable, the episode is over.
            return self._episode_lost(error.fault.kind, error.fault.cause)
        except FleetError as error:
            raise Over(self._error("SESSION_ERROR", f"the server failed: {error}")) from error
        except Exception as error:  # a message must not fail more than its own session
            _log.warning("a %s request failed with %s", message.kind, type(error).__name__)
            return self._episode_lost("failed", f"the request failed with {type(error).__name__}")
        self._bad = 0
        return reply

    def _is_next(self, message: Message) -> bool:
        """Requests between our own ends are numbered: one that comes again is dropped, one that is missing ends it."""
        if self._protocol is None:
            return True
        if message.number is None:
            raise BadFrame("a request has an id")
        expected = message.number if self._number is None else self._number + 1
        if message.number < expected:
            self.dropped += 1
            return False
        if message.number > expected:
            raise Over(error_frame("SESSION_ERROR", f"request {expected} never came"))
        self._number = message.number
        return True

    def _error(self, code: str, message: str, **details: Any) -> Frame:
        return error_frame(code, message, number=self._number, **details)

    def _episode_lost(self, kind: str, why: str) -> Frame:
        self.in_episode, self._fresh = False, True
        return self._error("EXECUTION_ERROR", why, kind=kind, reset_needed=True)

    def _reject(self, code: str, message: str, unread: bool = False, **details: Any) -> Frame:
        """An error; without a number where the request could not be read, for then its number is not known."""
        number = None if unread else self._number
        self._bad += 1
        if self._bad >= MAX_BAD:
            last = f"{MAX_BAD} bad messages in a row; the last: {message}"
            raise Over(error_frame("SESSION_ERROR", last, number=number))
        return error_frame(code, message, number=number, **details)

    async def _state(self, data: Any) -> Frame:
        return self._encode("state", {"episode_id": self._episode_id, "step_count": self._steps})

    async def _reset(self, data: Any) -> Frame:
        seed, episode_id, options = reset_arguments(data)
        self.in_episode = False
        row = await self._host.reset(self._slot, seed, options, fresh=self._fresh)
        self.in_episode, self._fresh = True, False
        self._episode_id, self._steps = episode_id, 0
        return self._observation(row, None)

    async def _step(self, data: Any) -> Frame:
        if not self.in_episode:
            what = "reset before the first step" if self._fresh else "the episode is over: reset before the next step"
            return self._reject("EXECUTION_ERROR", what)
        row = await self._host.step(self._slot, self._dialect.action(data))
        self._steps += 1
        if row.terminated or row.truncated:
            self.in_episode = False
        return self._observation(row, row.reward)

    def _observation(self, row: Row, reward: float | None) -> Frame:
        try:
            if self._protocol is None:
                return self._encode("observation", result_data(self._dialect, row, reward))
            convert = to_binary if self._protocol == exact_protocol.BINARY else to_lists
            data = {
                "observation": self._dialect.observation(row.obs, row.info, convert),
                "reward": reward,
                "terminated": row.terminated,
                "truncated": row.truncated,
                "info": row.info,
            }
            try:
                return self._encode("observation", data)
            except NoWireForm:
                return self._encode("observation", {**data, "info": exact_protocol.sendable(row.info)})
        except (NoWireForm, ValueError, RecursionError, OverflowError) as error:
            why = f"the environment's result cannot be sent: {type(error).__name__}: {str(error)[:200]}"
            return self._episode_lost("unsendable", why)

    def _encode(self, kind: str, data: Any) -> Frame:
        if self._protocol is None:
            return wire.encode(kind, data)
        return exact_protocol.encode(kind, self._number, data, binary=self._protocol == exact_protocol.BINARY)


def reset_arguments(data: Any) -> tuple[int | None, str | None, dict[str, Any]]:
    """Seed, episode id and the environment's own options of a reset request; raises BadAction."""
    if data is None:
        return None, None, {}
    if not isinstance(data, Mapping):
        raise BadAction("reset's data is an object")
    seed, episode_id = data.get("seed"), data.get("episode_id")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63):
        raise BadAction("seed must be a whole number from 0 to 2**63 - 1")
    if episode_id is not None and not isinstance(episode_id, str):
        raise BadAction("episode_id must be a string")
    reserved = ("seed", "episode_id", OPENING)
    return seed, episode_id, {str(key): value for key, value in data.items() if key not in reserved}


def result_data(dialect: Dialect, row: Row, reward: float | None) -> dict[str, Any]:
    """The data of an observation frame as OpenEnv spells it."""
    info = row.info
    metadata = dialect.metadata(info) if info else {}
    if row.truncated and not row.terminated:
        metadata["truncated"] = True
    data = {
        "observation": dialect.observation(row.obs, info, to_json),
        "reward": reward if reward is None or math.isfinite(reward) else None,
        "done": row.terminated or row.truncated,
    }
    if metadata:
        data["metadata"] = metadata
    return data
