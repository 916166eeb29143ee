"""How long to wait before something is tried again."""

from __future__ import annotations


def backoff_s(attempt: int, first_s: float, max_s: float, factor: float = 2.0) -> float:
    """Seconds to wait after failure number `attempt` (from 1): `first_s`, then `factor` times as long each time.

    Example:
        >>> [backoff_s(attempt, first_s=0.1, max_s=1.0) for attempt in (1, 2, 3, 9)]
        [0.1, 0.2, 0.4, 1.0]
    """
    # The exponent is bounded, because a float overflows after a thousand attempts.
    return min(max_s, first_s * factor ** min(attempt - 1, 64))
