"""The standard library's JSON without what it does anew for every message.

`json` builds its C encoder in every call and strips white space around every document; for the short messages of a step
that is most of the work. Both ways here fall back to the plain one for whatever is not the common case.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def encoder(default: Callable[[Any], Any]) -> Callable[[Any], str]:
    """A function that writes compact JSON; `default` says what to write for objects JSON does not know.

    Example:
        >>> encoder(str)({"a": [1, None], "b": 1j})
        '{"a":[1,null],"b":"1j"}'
    """
    plain = json.JSONEncoder(separators=(",", ":"), default=default)
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return plain.encode
    try:
        chunks = make(None, default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)
        chunks({}, 0)
    except TypeError:  # another Python, another signature
        return plain.encode

    def encode(value: Any) -> str:
        return "".join(chunks(value, 0))

    return encode


_scan: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]


def loads(text: str) -> Any:
    """What a JSON text says; raises ValueError or RecursionError.

    Example:
        >>> loads('{"a": 1}'), loads(" [2] ")
        ({'a': 1}, [2])
    """
    try:
        value, end = _scan(text, 0)
    except StopIteration:
        return json.loads(text)  # white space before, nothing at all, or an error with its place
    return value if end == len(text) else json.loads(text)
