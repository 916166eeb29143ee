"""The standard library's JSON without what it does anew for every message.

`json` builds its C encoder in every call and strips white space around every document; for the short messages of a step
that is most of the work. Both ways here fall back to the plain one for whatever is not the common case.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def encoder(default: Callable[[Any], Any], allow_nan: bool = True) -> Callable[[Any], str]:
    """A function that writes compact JSON; `default` says what to write for objects JSON does not know.

    With `allow_nan=False` it raises ValueError for numbers that JSON does not know.

    Example:
        >>> encoder(str)({"a": [1, None], "b": 1j})
        '{"a":[1,null],"b":"1j"}'
    """
    plain = json.JSONEncoder(separators=(",", ":"), default=default, allow_nan=allow_nan)
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    try:
        chunks = make(None, default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, allow_nan)
        chunks({}, 0)
    except TypeError:  # another Python, another signature
        return plain.encode

    def encode(value: Any) -> str:
        return "".join(chunks(value, 0))

    return encode


def decoder(hook: Callable[[dict[str, Any]], Any] | None = None) -> Callable[[str], Any]:
    """A function that reads JSON texts; raises ValueError or RecursionError. `hook` is called with every object.

    Example:
        >>> decoder(hook=len)('[{"a": 1}, {}]')
        [1, 0]
    """
    plain = json.JSONDecoder(object_hook=hook)
    scan: Callable[[str, int], tuple[Any, int]] = vars(plain)["scan_once"]

    def decode(text: str) -> Any:
        try:
            value, end = scan(text, 0)
        except StopIteration:
            return plain.decode(text)  # white space before, nothing at all, or an error with its place
        return value if end == len(text) else plain.decode(text)

    return decode


_decode = decoder()


def loads(text: str) -> Any:
    """What a JSON text says; raises ValueError or RecursionError.

    Example:
        >>> loads('{"a": 1}'), loads(" [2] ")
        ({'a': 1}, [2])
    """
    return _decode(text)
