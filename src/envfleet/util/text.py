"""Values as short text, for messages and tables."""

from __future__ import annotations

import ast
from typing import Any


class Hint(str):
    """A note of an exception that says what to do next: commands show it beside the message."""


def short(value: Any, most: int = 80) -> str:
    """The repr of a value, cut to `most` characters.

    Example:
        >>> short([1] * 100, most=12)
        '[1, 1, 1, 1…'
    """
    text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"


def first_line(error: object) -> str:
    """The first line of a message; the type's name where the message is empty.

    Example:
        >>> first_line(ValueError("no\\nmore")), first_line(ValueError())
        ('no', 'ValueError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


def number(value: Any, digits: int = 3) -> str:
    """A number with so many digits; a dash for what is none.

    Example:
        >>> number(0.12345), number(12345.6), number(None)
        ('0.123', '12,346', '–')
    """
    if not isinstance(value, (int, float)):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def duration(seconds: float) -> str:
    """Seconds in the unit that fits.

    Example:
        >>> duration(2.5), duration(0.0042), duration(17e-6), duration(4e-7)
        ('2.5 s', '4.2 ms', '17 µs', '400 ns')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def read_pairs(text: str) -> dict[str, Any]:
    """Read "name=value,other=2". ValueError for what are no pairs.

    Example:
        >>> read_pairs("num_cpus=0.5,kind=fast,wide=true")
        {'num_cpus': 0.5, 'kind': 'fast', 'wide': True}
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    if any(not sign for _, sign, _ in pairs):
        raise ValueError(text)
    return {key.strip(): _literal(value.strip()) for key, _, value in pairs}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)
