"""How deep a message may be nested: checked once, where it is decoded, at both ends.

Whatever is nested deeper breaks code that walks it later (pickle, comparisons, copies), possibly in the middle of
somebody else's work. A message that passed here can be walked by anything.
"""

from __future__ import annotations

from typing import Any

MAX_DEPTH = 128  # levels of lists and objects in a message, its envelope included


class TooDeep(ValueError):
    """A value is nested deeper than a message may be."""

    def __init__(self) -> None:
        super().__init__(f"nested more than {MAX_DEPTH} levels deep")


def check_depth(value: Any, brackets: int) -> None:
    """Raise TooDeep when the value has more levels than MAX_DEPTH.

    `brackets` is how many "[" and "{" its text has: no more than that many levels are possible, so that the short
    messages of a step are not walked at all.

    Example:
        >>> check_depth([[1]], brackets=2)
        >>> deep = []
        >>> for _ in range(MAX_DEPTH):
        ...     deep = [deep]
        >>> check_depth(deep, brackets=MAX_DEPTH + 1)
        Traceback (most recent call last):
        ...
        envfleet.remote.json_depth.TooDeep: nested more than 128 levels deep
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
