"""The OpenEnv protocol: frames and answers. This module does no input or output.

A frame is JSON text, `{"type": …, "data": …}`. Between our client and our server it is replaced by
`envfleet.remote.exact_protocol`. Nothing that arrives is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.errors import BadMessage, BadRequest, CapacityReached, EnvError, RemoteError, ServerError, SessionRefused
from envfleet.remote import message_json
from envfleet.remote.exact_protocol import BadFrame, Message, NoWireForm
from envfleet.remote.result import Fields, StepResult
from envfleet.remote.space_codec import jsonable

_answer_text = message_json.writer(jsonable)


def _strict(value: Any) -> Any:
    """What a request holds: never replaced by null, as an answer's may be."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return list(value)
    raise NoWireForm(f"a {type(value).__name__} has no JSON form, so this server cannot be sent it")


_request_text = message_json.writer(_strict)


def encode(kind: str, data: Any = None) -> str:
    """A server's frame. Numbers that JSON lacks, and what has no JSON form, become null."""
    return _answer_text({"type": kind} if data is None else {"type": kind, "data": data})


def encode_request(kind: str, data: Any = None) -> str:
    """A client's frame; raises NoWireForm where `encode` would send null.

    NaN and infinities are sent as Python writes them: official servers read that, and others refuse it.
    """
    try:
        return _request_text({"type": kind} if data is None else {"type": kind, "data": data})
    except (RecursionError, ValueError, TypeError) as error:
        if isinstance(error, NoWireForm):
            raise
        raise NoWireForm(f"the {kind} request has no JSON form: {str(error)[:200]}") from None


def decode(frame: str | bytes) -> Message:
    """The message in a frame; raises BadFrame."""
    try:
        text = frame if isinstance(frame, str) else bytes(frame).decode()  # some WebSocket clients send JSON as bytes
        message = message_json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"not a frame: {str(error)[:200]}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise BadFrame('a frame is an object with a "type"')
    return Message(message["type"], message.get("data"), mark=hash(frame))


def parse_result(data: Any) -> StepResult:
    """The answer to a reset or a step. Metadata is taken from beside the observation or from inside it."""
    if not isinstance(data, dict) or not isinstance(data.get("observation"), dict):
        raise BadFrame("an answer without an observation")
    if "reward" not in data or type(data.get("done")) is not bool:
        raise BadFrame("an answer has a reward, and done is true or false")
    observation, reward = Fields(data["observation"]), data["reward"]
    nested = observation.pop("metadata", None)
    metadata = data.get("metadata") or nested or {}
    if not isinstance(metadata, dict) or type(metadata.get("truncated", False)) is not bool:
        raise BadFrame("metadata is an object, and truncated in it true or false")
    if reward is not None and type(reward) is not int and type(reward) is not float:
        raise BadFrame(f"a reward that is no number: {str(reward)[:40]!r}")
    try:
        return StepResult(observation, None if reward is None else float(reward), data["done"], metadata)
    except OverflowError:
        raise BadFrame("a reward larger than any float") from None


_BY_CODE: dict[str, type[ServerError]] = {
    "EXECUTION_ERROR": EnvError,
    "VALIDATION_ERROR": BadRequest,
    "INVALID_JSON": BadMessage,
    "UNKNOWN_TYPE": BadMessage,
    "FACTORY_ERROR": SessionRefused,
    "SESSION_ERROR": SessionRefused,
}


def error_in(data: Any, url: str) -> RemoteError:
    """The exception for an error frame's data."""
    data = data if isinstance(data, Mapping) else {"message": str(data)}
    code, message = str(data.get("code", "UNKNOWN")), str(data.get("message", "no message"))
    if code == "CAPACITY_REACHED":
        return CapacityReached(url, _count(data.get("active_sessions")), _count(data.get("max_sessions")))
    details = {key: value for key, value in data.items() if key not in ("code", "message")}
    return _BY_CODE.get(code, ServerError)(code, message, details)


def _count(value: Any) -> int | None:
    """A number of sessions as a server gives it, or None if it cannot be one."""
    return value if type(value) is int and 0 <= value < 2**31 else None
