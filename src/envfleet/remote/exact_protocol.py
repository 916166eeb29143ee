"""The protocol between a client and a server of ours: numbered messages whose values arrive as they were sent, bit for bit.

Our client offers one of two WebSocket subprotocols; our server accepts it. Every other server ignores it, and the client
uses plain OpenEnv (`envfleet.remote.wire`). A message is `{"type": …, "id": …, "data": …}` and nothing else.
An answer carries the number of its request; only an error that ends the session has none.

Values that JSON lacks are sent as an object with one key that begins with "$":

* `$f` a float that is not finite (its 8 bytes in hex), `$i` an integer of thousands of digits, `$c` a complex number
* `$t` a tuple, `$s` a set, `$z` a frozenset, `$b` bytes, `$d` a dict whose keys are not plain strings
* `$n` a NumPy scalar, `$a` an array: dtype, shape and base64, or the number of one of the raw parts of a binary frame

A binary frame is a magic, the length of a JSON head, the head, then the arrays' raw bytes one after another. Text is
ASCII with JSON's escapes, so lone surrogates pass. Nothing that arrives is ever unpickled.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from envfleet.errors import BadArgument
from envfleet.remote import message_json
from envfleet.remote.message_json import MAX_DEPTH, TooDeep, check_depth
from envfleet.remote.result import Fields, StepResult

BINARY, TEXT = "envfleet.v2", "envfleet.v2.text"  # the subprotocols: arrays as raw bytes, or text frames only
SUBPROTOCOLS = (BINARY, TEXT)
MAX_ARRAYS = 1024  # raw parts of one frame
_MAGIC = b"EFR2"
_BIG_BITS = 8192  # Python refuses to read decimal numbers of more than 4,300 digits
_DTYPE = re.compile(r"^[<>|=]?(?:[biufcSU]\d{1,6}|[mM]8\[[a-zA-Z0-9]{1,8}\])$")
_RESULT = {"observation", "reward", "terminated", "truncated", "info"}


class BadFrame(ValueError):
    """A frame that is not one of the protocol's."""


class Unsolicited(Exception):
    """Between link and client: a frame came without a request; it must not answer a later request."""

    def __init__(self, message: Any) -> None:
        self.message = message
        super().__init__("a frame without a request")


class Closed(Exception):
    """Between link and client: the connection ended; `too_big` when a size limit was the reason."""

    def __init__(self, why: str, too_big: bool = False) -> None:
        self.too_big = too_big
        super().__init__(why)


class NoWireForm(BadArgument):
    """A value that cannot be sent: it is no number, text, array or collection of them, or nested too deep."""


class Message(NamedTuple):
    """A frame that was read. `number` is None where the protocol has none; `mark` is equal for equal frames."""

    kind: str
    data: Any
    number: int | None = None
    mark: int = 0


# -- writing ------------------------------------------------------------------------------------------------------

_dumps = message_json.writer(lambda value: pack(value, None, 1), allow_nan=False)


def encode(kind: str, number: int | None, data: Any = None, *, binary: bool = False) -> str | bytes:
    """A frame; raises NoWireForm. It is text unless it has arrays and `binary` is true.

    Example:
        >>> encode("step", 7, {"action": float("inf")})
        '{"type":"step","id":7,"data":{"action":{"$f":"7ff0000000000000"}}}'
    """
    message: dict[str, Any] = {"type": kind} if number is None else {"type": kind, "id": number}
    parts: list[np.ndarray[Any, Any]] | None = [] if binary else None
    if data is not None:
        message["data"] = pack(data, parts, MAX_DEPTH - 3)
    if not parts:
        return _dumps(message)
    if len(parts) > MAX_ARRAYS:
        return encode(kind, number, data)  # so many are small, and text holds any number of them
    listed = [[part.dtype.str, list(part.shape)] for part in parts]
    head = _dumps({"arrays": listed, "message": message}).encode()
    return b"".join([_MAGIC, struct.pack("<I", len(head)), head, *(part.tobytes() for part in parts)])


def pack(value: Any, parts: list[np.ndarray[Any, Any]] | None, depth: int = MAX_DEPTH) -> Any:
    """A value as JSON data; arrays are appended to `parts`, if there is such a list. Raises NoWireForm."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$f": struct.pack(">d", value).hex()}
    if kind is int:
        return value if value.bit_length() <= _BIG_BITS else {"$i": hex(value)}
    if depth < 3:
        raise NoWireForm(str(TooDeep()))
    if kind is dict or kind is Fields:
        return _pack_dict(value, parts, depth)
    if kind is list:
        return [pack(inner, parts, depth - 1) for inner in value]
    if isinstance(value, np.ndarray):
        return {"$a": _pack_array(value, parts)}
    if isinstance(value, np.generic):
        return {"$n": _pack_array(np.asarray(value), None)}
    return _pack_other(value, parts, depth)


def _pack_dict(value: Mapping[Any, Any], parts: Any, depth: int) -> Any:
    if all(type(key) is str and key[:1] != "$" for key in value):
        return {key: pack(inner, parts, depth - 1) for key, inner in value.items()}
    pairs = [[pack(key, parts, depth - 3), pack(inner, parts, depth - 3)] for key, inner in value.items()]
    return {"$d": pairs}


def _pack_array(value: np.ndarray[Any, Any], parts: list[np.ndarray[Any, Any]] | None) -> Any:
    """Where the array is in `parts`, or the array in base64."""
    if not _DTYPE.match(value.dtype.str):
        raise NoWireForm(f"values of dtype {value.dtype} cannot be sent")
    if parts is None:
        return [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]
    parts.append(np.ascontiguousarray(value).reshape(value.shape))
    return len(parts) - 1


def _pack_other(value: Any, parts: Any, depth: int) -> Any:
    """Rare values: other collections, bytes, and subclasses of common types."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool | int):
        return pack(int(value), parts, depth)
    if isinstance(value, float):
        return pack(float(value), parts, depth)
    if isinstance(value, complex):
        return {"$c": [pack(value.real, parts, depth), pack(value.imag, parts, depth)]}
    if isinstance(value, bytes | bytearray):
        return {"$b": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _pack_dict(value, parts, depth)
    for tag, collection in (("$t", tuple), ("$s", set), ("$z", frozenset)):
        if isinstance(value, collection):
            return {tag: [pack(inner, parts, depth - 2) for inner in value]}
    if isinstance(value, list):
        return [pack(inner, parts, depth - 1) for inner in value]
    raise NoWireForm(f"a {type(value).__name__} cannot be sent")


def sendable(info: Mapping[str, Any]) -> dict[str, Any]:
    """The items of an info that can be sent: what has no wire form is left out."""
    kept = {}
    for key, value in info.items():
        try:
            pack([key, value], None, MAX_DEPTH - 6)
            kept[key] = value
        except NoWireForm:
            pass
    return kept


# -- reading ------------------------------------------------------------------------------------------------------


def decode(frame: str | bytes) -> Message:
    """The message in a frame; raises BadFrame."""
    try:
        message = _scan_text(frame) if isinstance(frame, str) else _scan_binary(frame)
    except (ValueError, RecursionError, KeyError, TypeError, OverflowError, struct.error) as error:
        raise BadFrame(f"not a frame: {str(error)[:200]}") from None
    if not isinstance(message, dict) or not message.keys() <= {"type", "id", "data"}:
        raise BadFrame('a frame is an object with "type", "id" and "data", and nothing else')
    kind, number = message.get("type"), message.get("id")
    if type(kind) is not str or (number is not None and type(number) is not int):
        raise BadFrame("a frame's type is a string and its id a number")
    return Message(kind, message.get("data"), number)


def parse_result(data: Any, is_step: bool) -> StepResult:
    """The answer to a reset or a step: every field there, of its type, and no other; raises BadFrame."""
    if not isinstance(data, dict) or data.keys() != _RESULT:
        raise BadFrame(f"an answer has exactly {', '.join(sorted(_RESULT))}")
    reward, ends = data["reward"], (data["terminated"], data["truncated"])
    if not isinstance(data["observation"], dict) or not isinstance(data["info"], dict):
        raise BadFrame("the observation and the info are objects")
    if type(ends[0]) is not bool or type(ends[1]) is not bool or (any(ends) and not is_step):
        raise BadFrame("terminated and truncated are true or false, and false after a reset")
    if (type(reward) is not float) if is_step else (reward is not None):
        raise BadFrame("the reward is a float after a step, and null after a reset")
    return StepResult(Fields(data["observation"]), reward, any(ends), data["info"], ends)


def _scan_text(text: str) -> Any:
    # Most messages have no tag, and calling back for each object is half the cost of reading them.
    return _loads(text) if '"$' in text else message_json.loads(text)


def _scan_binary(frame: bytes) -> Any:
    if frame[:4] != _MAGIC:
        return _scan_text(bytes(frame).decode())
    size = struct.unpack_from("<I", frame, 4)[0]
    head = bytes(frame[8 : 8 + size])
    if len(head) != size:
        raise BadFrame("the head is cut short")
    text = head.decode()
    arrays, used = _read_arrays(frame, 8 + size, json.loads(text)), []

    def part(index: Any) -> Any:
        if type(index) is not int or not 0 <= index < len(arrays) or index in used:
            raise BadFrame("an array that is not in the frame, or twice")
        used.append(index)
        return arrays[index]

    outer = json.loads(text, object_hook=lambda value: _untag(value, part))
    if outer.keys() != {"arrays", "message"} or len(used) != len(arrays):
        raise BadFrame("the head has exactly arrays and message, and every array has its place")
    check_depth(outer["message"], text.count("[") + text.count("{"))
    return outer["message"]


def _read_arrays(frame: bytes, offset: int, head: Any) -> list[np.ndarray[Any, Any]]:
    arrays = []
    listed = head["arrays"]
    if type(listed) is not list or len(listed) > MAX_ARRAYS:
        raise BadFrame("the head lists no arrays, or too many")
    for dtype_text, shape in listed:
        size = _size(dtype_text, shape)
        arrays.append(_array(dtype_text, shape, frame[offset : offset + size]))
        offset += size
    if offset != len(frame):
        raise BadFrame("the arrays do not fill the frame")
    return arrays


def _size(dtype_text: Any, shape: Any) -> int:
    if type(dtype_text) is not str or not _DTYPE.match(dtype_text):
        raise BadFrame("an array's dtype is not one that may travel")
    if type(shape) is not list or len(shape) > 32 or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise BadFrame("an array's shape is not one that may travel")
    return math.prod(shape) * np.dtype(dtype_text).itemsize


def _array(dtype_text: Any, shape: Any, raw: bytes) -> np.ndarray[Any, Any]:
    if _size(dtype_text, shape) != len(raw):
        raise BadFrame("an array's bytes do not fill its shape")
    dtype = np.dtype(dtype_text)
    if dtype.itemsize == 0 or not raw:
        return np.zeros(shape, dtype)
    # Copying gives aligned, writable memory of its own.
    array = np.frombuffer(raw, dtype).reshape(shape).copy()
    if dtype.kind == "b" and array.view(np.uint8).max() > 1:
        raise BadFrame("a truth value that is neither 0 nor 1")
    if dtype.kind == "U" and array.astype(dtype.newbyteorder("=")).reshape(-1).view(np.uint32).max() > 0x10FFFF:
        raise BadFrame("a character that does not exist")
    return array


def _from_base64(value: Any) -> np.ndarray[Any, Any]:
    dtype_text, shape, text = value
    return _array(dtype_text, shape, base64.b64decode(text, validate=True))


def _items(value: Any) -> list[Any]:
    if type(value) is not list:
        raise BadFrame("a collection is a list")
    return value


def _float(text: Any) -> float:
    number: float = struct.unpack(">d", bytes.fromhex(text))[0]
    if math.isfinite(number):
        raise BadFrame("a finite float is written as a number")
    return number


def _integer(text: Any) -> int:
    if type(text) is not str or not re.fullmatch("-?0x[0-9a-f]+", text):
        raise BadFrame("not an integer")
    return int(text, 16)


_UNTAG: dict[str, Callable[[Any], Any]] = {
    "$f": _float,
    "$i": _integer,
    "$c": lambda value: complex(*_items(value)),
    "$t": lambda value: tuple(_items(value)),
    "$s": lambda value: set(_items(value)),
    "$z": lambda value: frozenset(_items(value)),
    "$b": lambda value: base64.b64decode(value, validate=True),
    "$d": lambda value: {key: inner for key, inner in _items(value)},
    "$n": lambda value: _from_base64(value)[()],
}


def _untag(value: dict[str, Any], part: Callable[[Any], Any] = _from_base64) -> Any:
    tags = [key for key in value if key[:1] == "$"]
    if not tags:
        return value
    if len(value) != 1 or (tags[0] != "$a" and tags[0] not in _UNTAG):
        raise BadFrame(f"an object with the unknown tag {tags[0][:20]!r}")
    return part(value["$a"]) if tags[0] == "$a" else _UNTAG[tags[0]](value[tags[0]])


_loads = message_json.reader(_untag)
