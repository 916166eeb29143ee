"""The OpenEnv wire, once: addresses, frames, answers. No input or output happens here.

A frame is JSON text, `{"type": …, "data": …}`. Between two ends of ours (they agree on it as a WebSocket
subprotocol) a frame with arrays is binary instead: a magic, the length of a JSON head, the head, then the
arrays' raw bytes one after another. In the head an array is `{"$nd": i}`; `arrays` gives dtype and shape of
each. Nothing that arrives is ever unpickled.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import numpy as np

from envfleet.errors import BadArgument
from envfleet.remote import quickjson
from envfleet.remote.codec import jsonable
from envfleet.remote.result import Fields, StepResult

SUBPROTOCOL = "envfleet.v1"
_MAGIC = b"EFR1"
_DTYPE = re.compile(r"^[<>|=]?[biufc]\d{1,2}$")
_SCHEMES = {"http": "http", "ws": "http", "https": "https", "wss": "https"}


class BadFrame(ValueError):
    """A frame that is not one of the protocol's."""


@dataclass(frozen=True)
class Endpoint:
    """A server's address. `public` is what may be shown: no user, password, query or header.

    Example:
        >>> Endpoint.parse("https://me:secret@host/space").public
        'https://host/space'
        >>> Endpoint.parse("http://127.0.0.1:8000").ws
        'ws://127.0.0.1:8000/ws'
    """

    public: str
    ws: str = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    loopback: bool = False

    @classmethod
    def parse(cls, url: str, headers: Mapping[str, str] | None = None, token: str | None = None) -> Endpoint:
        """From a URL with any of http, https, ws and wss; a path before `/ws` is kept."""
        parts = urlsplit(url if isinstance(url, str) else "")
        scheme = _SCHEMES.get(parts.scheme)
        if scheme is None or not parts.hostname:
            raise BadArgument("a server's address looks like http://host:8000 (or https, ws, wss)")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        netloc = f"{host}:{parts.port}" if parts.port else host
        path = parts.path.rstrip("/").removesuffix("/ws")
        sent = dict(headers or {})
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            sent.setdefault("Authorization", "Basic " + base64.b64encode(pair.encode()).decode())
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        socket_scheme = "wss" if scheme == "https" else "ws"
        return cls(
            public=urlunsplit((scheme, netloc, path, "", "")),
            ws=urlunsplit((socket_scheme, netloc, path + "/ws", parts.query, "")),
            headers=sent,
            loopback=parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127."),
        )

    def http(self, path: str) -> str:
        """The address of an HTTP endpoint, such as `/schema`."""
        return self.public + path


class _HasArray(Exception):
    pass


def _unless_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        raise _HasArray
    return jsonable(value)


_text = quickjson.encoder(jsonable)
_text_unless_array = quickjson.encoder(_unless_array)


def encode(kind: str, data: Any = None, *, binary: bool = False) -> str | bytes:
    """A frame. With `binary`, arrays in `data` travel as raw bytes; otherwise as JSON lists.

    Example:
        >>> encode("step", {"message": "hi"})
        '{"type":"step","data":{"message":"hi"}}'
    """
    message = {"type": kind} if data is None else {"type": kind, "data": data}
    return encode_binary(message) if binary else _text(message)


def encode_binary(message: dict[str, Any]) -> str | bytes:
    """A frame with its arrays as raw bytes; plain text when there are none."""
    try:
        return _text_unless_array(message)
    except _HasArray:
        pass  # raw bytes then, below
    arrays: list[np.ndarray[Any, Any]] = []

    def default(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            arrays.append(np.ascontiguousarray(value))
            return {"$nd": len(arrays) - 1}
        return jsonable(value)

    body = json.dumps(message, separators=(",", ":"), default=default)
    listed = json.dumps([[array.dtype.str, list(array.shape)] for array in arrays], separators=(",", ":"))
    head = f'{{"arrays":{listed},"message":{body}}}'.encode()
    return b"".join([_MAGIC, struct.pack("<I", len(head)), head, *(array.tobytes() for array in arrays)])


def decode(frame: str | bytes) -> tuple[str, Any]:
    """The type and the data of a frame; raises BadFrame."""
    try:
        message = quickjson.loads(frame) if isinstance(frame, str) else _decode_binary(frame)
    except (ValueError, RecursionError, KeyError, TypeError, struct.error) as error:
        raise BadFrame(f"not a frame: {str(error)[:200]}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise BadFrame('a frame is an object with a "type"')
    return message["type"], message.get("data")


def _decode_binary(frame: bytes) -> Any:
    if frame[:4] != _MAGIC:
        return json.loads(frame)  # JSON text in a binary frame: some WebSocket clients send it so
    size = struct.unpack_from("<I", frame, 4)[0]
    head = bytes(frame[8 : 8 + size])
    offset, arrays = 8 + size, []
    listed = json.loads(head)["arrays"] if len(head) == size else None
    if not isinstance(listed, list) or len(listed) > 1024:
        raise BadFrame("the head is cut short, or lists no arrays")
    for dtype_text, shape in listed:
        if not _DTYPE.match(dtype_text) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise BadFrame("an array's dtype or shape is not one that may travel")
        dtype, count = np.dtype(dtype_text), math.prod(shape)
        # frombuffer refuses to read past the end; copying gives aligned, writable memory of its own.
        arrays.append(np.frombuffer(frame, dtype, count, offset).reshape(shape).copy())
        offset += count * dtype.itemsize
    if offset != len(frame):
        raise BadFrame("the arrays do not fill the frame")

    def hook(value: dict[str, Any]) -> Any:
        index = value.get("$nd")
        return arrays[index] if isinstance(index, int) and 0 <= index < len(arrays) else value

    return json.loads(head, object_hook=hook)["message"]


def parse_result(data: Any) -> StepResult:
    """The answer to a reset or a step. Metadata is taken from beside the observation or from inside it."""
    if not isinstance(data, dict) or "observation" not in data:
        raise BadFrame("an answer without an observation")
    observation, metadata = data["observation"], data.get("metadata")
    if isinstance(observation, dict):
        nested = observation.pop("metadata", None)
        metadata = metadata or nested
        observation = Fields(observation)
    reward = data.get("reward")
    if reward is not None and not isinstance(reward, (int, float)):
        raise BadFrame(f"a reward that is no number: {str(reward)[:40]!r}")
    return StepResult(
        observation,
        None if reward is None else float(reward),
        bool(data.get("done", False)),
        metadata if isinstance(metadata, dict) else {},
    )
