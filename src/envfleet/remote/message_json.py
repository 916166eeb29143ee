"""The JSON of a message: read with a limit on its depth, at both ends.

Values nested deeper than the limit break code that walks them later (pickle, comparisons, copies), possibly in the
middle of another session's work. A message that passed here can be walked by anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 128  # levels of lists and objects in a message, its envelope included


class TooDeep(ValueError):
    """A value is nested deeper than a message may be."""

    def __init__(self) -> None:
        super().__init__(f"nested more than {MAX_DEPTH} levels deep")


def writer(default: Callable[[Any], Any], allow_nan: bool = True) -> Callable[[Any], str]:
    """A function that writes compact ASCII JSON; `default` converts objects that JSON does not know."""
    plain = json.JSONEncoder(separators=(",", ":"), default=default, allow_nan=allow_nan)
    # `encode` makes a new C encoder in every call. Made once: a client step takes 36 to 42 us instead of 44 to 49.
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    try:
        chunks = make(None, default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, allow_nan)
        chunks({}, 0)
    except TypeError:  # another Python: none, or another signature
        return plain.encode
    return lambda value: "".join(chunks(value, 0))


def reader(hook: Callable[[dict[str, Any]], Any] | None = None) -> Callable[[str], Any]:
    """A function that reads JSON; it raises ValueError (TooDeep) or RecursionError. `hook` is called with every object."""
    decoder = json.JSONDecoder(object_hook=hook)

    def read(text: str) -> Any:
        # raw_decode does not look for white space around the document: 1.3 us instead of 2.1 for a step's message.
        try:
            value, end = decoder.raw_decode(text)
        except json.JSONDecodeError:
            end = -1
        if end != len(text):
            value = decoder.decode(text)
        check_depth(value, text.count("[") + text.count("{"))
        return value

    return read


loads = reader()


def load_bytes(body: bytes | bytearray) -> Any:
    """The JSON document in the body of an HTTP message; raises ValueError (TooDeep) or RecursionError."""
    return loads(body.decode(json.detect_encoding(body), "surrogatepass"))


def check_depth(value: Any, brackets: int) -> None:
    """Raise TooDeep when the value has more levels than MAX_DEPTH.

    `brackets` is how many "[" and "{" its text has: no more than that many levels are possible, so that the short
    messages of a step are not walked at all.
    """
    if brackets <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list or type(inner) is tuple
        ]
        if not level:
            return
    raise TooDeep
