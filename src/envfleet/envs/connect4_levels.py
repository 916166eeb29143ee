"""Connect Four in three levels, one family for curricula: the same spaces, a stronger opponent.

Example:
    >>> env = make_level("hard")
    >>> _ = env.reset(seed=0, options={"level": "easy"})  # or pick the level at each reset
"""

from __future__ import annotations

from typing import Any

from envfleet.envs.connect4 import LEVELS, Connect4
from envfleet.errors import BadArgument

__all__ = ["LEVELS", "Connect4Easy", "Connect4Hard", "Connect4Medium", "level_tasks", "make_level"]


class Connect4Easy(Connect4):
    """Against an opponent that plays at random."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(opponent=LEVELS["easy"], **kwargs)


class Connect4Medium(Connect4):
    """Against an opponent that takes a win and builds lines, but does not look at the answer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(opponent=LEVELS["medium"], **kwargs)


class Connect4Hard(Connect4):
    """Against an opponent that looks two moves ahead: it takes a win and blocks one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(opponent=LEVELS["hard"], **kwargs)


def make_level(level: str, **kwargs: Any) -> Connect4:
    """The environment of a level: "easy", "medium" or "hard"."""
    if level not in LEVELS:
        raise BadArgument(f"level must be one of {', '.join(LEVELS)}; got {level!r}")
    return Connect4(opponent=LEVELS[level], **kwargs)


def level_tasks() -> list[dict[str, str]]:
    """The levels as tasks, easiest first: each is the reset options that select it."""
    return [{"level": level} for level in LEVELS]
