"""One client's session on a server: frames in, frames out. It knows nothing of sockets."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from envfleet.errors import FaultError, FleetError
from envfleet.remote import wire
from envfleet.remote.codec import BadAction, Dialect, to_binary, to_json
from envfleet.remote.host import FleetHost, Row
from envfleet.remote.seats import SEAT

MAX_BAD = 100  # bad messages in a row before a session is ended: nobody is served by going on

Frame = str | bytes


class Over(Exception):
    """The session is to be closed; `frame` says why, if there is something to say."""

    def __init__(self, frame: Frame | None = None) -> None:
        self.frame = frame


def error_frame(code: str, message: str, **details: Any) -> Frame:
    """An error as the protocol spells it."""
    return wire.encode("error", {"message": message, "code": code, **details})


class Session:
    """A seat and the episode on it. `answer(frame)` gives the reply to a message; raises Over at the end."""

    def __init__(self, host: FleetHost, seat: int, binary: bool) -> None:
        self._host, self._seat, self._binary = host, seat, binary
        self._dialect: Dialect = host.dialect
        self._episode_id: str | None = None
        self._steps = 0
        self._running = False
        self._fresh = True  # the first reset of a session builds its environment
        self._bad = 0
        self._answers: dict[str, Callable[[Any], Awaitable[Frame]]] = {
            "step": self._step,
            "reset": self._reset,
            "state": self._state,
        }

    async def answer(self, frame: Frame) -> Frame:
        """The reply to one message."""
        try:
            kind, data = wire.decode(frame)
        except wire.BadFrame as error:
            return self._reject("INVALID_JSON", str(error))
        if kind == "close":
            raise Over
        handler = self._answers.get(kind)
        if handler is None:
            known = ", ".join([*self._answers, "close"])
            return self._reject("UNKNOWN_TYPE", f"unknown message type {kind[:40]!r}; there are {known}")
        try:
            reply = await handler(data)
        except BadAction as error:
            return self._reject("VALIDATION_ERROR", "Invalid message", errors=[{"msg": str(error)}])
        except FaultError as error:
            # The environment raised, overran its deadline or lost its process: the seat is there, the episode not.
            self._running, self._fresh = False, True
            fault = error.fault
            return error_frame("EXECUTION_ERROR", fault.cause, kind=fault.kind, reset_needed=True)
        except FleetError as error:
            raise Over(error_frame("SESSION_ERROR", f"the server failed: {error}")) from error
        self._bad = 0
        return reply

    def _reject(self, code: str, message: str, **details: Any) -> Frame:
        self._bad += 1
        if self._bad >= MAX_BAD:
            raise Over(error_frame("SESSION_ERROR", f"{MAX_BAD} bad messages in a row; the last: {message}"))
        return error_frame(code, message, **details)

    async def _state(self, data: Any) -> Frame:
        return wire.encode("state", {"episode_id": self._episode_id, "step_count": self._steps})

    async def _reset(self, data: Any) -> Frame:
        seed, episode_id, options = reset_arguments(data)
        self._running = False
        row = await self._host.reset(self._seat, seed, options, fresh=self._fresh)
        self._running, self._fresh = True, False
        self._episode_id, self._steps = episode_id, 0
        return self._observation(row, None)

    async def _step(self, data: Any) -> Frame:
        if not self._running:
            what = "reset before the first step" if self._fresh else "the episode is over: reset before the next step"
            return self._reject("EXECUTION_ERROR", what)
        row = await self._host.step(self._seat, self._dialect.action(data))
        self._steps += 1
        if row.terminated or row.truncated:
            self._running = False
        return self._observation(row, row.reward)

    def _observation(self, row: Row, reward: float | None) -> Frame:
        data = result_data(self._dialect, row, reward, self._binary)
        return wire.encode("observation", data, binary=self._binary)


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
    reserved = ("seed", "episode_id", SEAT)
    return seed, episode_id, {str(key): value for key, value in data.items() if key not in reserved}


def result_data(dialect: Dialect, row: Row, reward: float | None, binary: bool) -> dict[str, Any]:
    """The data of an observation frame."""
    info = row.info
    metadata = dialect.metadata(info) if info else {}
    if row.truncated and not row.terminated:
        metadata["truncated"] = True
    data = {
        "observation": dialect.observation(row.obs, info, to_binary if binary else to_json),
        "reward": reward if reward is None or math.isfinite(reward) else None,
        "done": row.terminated or row.truncated,
    }
    if metadata:
        data["metadata"] = metadata
    return data
