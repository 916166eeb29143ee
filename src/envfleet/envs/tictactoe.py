"""A scripted opponent for PettingZoo's tictactoe: looks a few plies ahead, and plays at random what looks equal."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
#: The eight lines of three, over the nine squares in the order of the observation.
LINES = np.array([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]], dtype=np.int64)


def has_line(stones: Bools) -> bool:
    """Whether stones on the nine squares make a line.

    Example:
        >>> has_line(np.array([1, 1, 1, 0, 0, 0, 0, 0, 0], bool))
        True
    """
    return bool(stones[LINES].all(axis=1).any())


class Minimax:
    """Minimax of a given depth in plies, for one side: `play(observation, mask, rng) -> square`.

    The observation is PettingZoo's ([3, 3, 2]: own stones, the other's). Depth 2 wins when it can and blocks when it
    must, and sees no further.

    Example:
        >>> board = np.zeros((3, 3, 2), np.int8)
        >>> board[0, 0, 0] = board[0, 1, 0] = 1  # own stones on squares 0 and 3 or 1, as the axes are read
        >>> play = Minimax(depth=2)
        >>> open_squares = (board.sum(axis=2).ravel() == 0).astype(np.int8)
        >>> int(play({"observation": board, "action_mask": open_squares}, open_squares, np.random.default_rng(0)))
        2
    """

    def __init__(self, depth: int = 2) -> None:
        self.depth = depth

    def __call__(self, observation: Any, mask: Any, rng: np.random.Generator) -> int:
        """Return the square to play."""
        board = np.asarray(observation["observation"] if isinstance(observation, dict) else observation)
        stones = board.reshape(9, 2).astype(bool)
        own, other = stones[:, 0].copy(), stones[:, 1].copy()
        squares = np.flatnonzero(~(own | other))
        values = np.array([self._value(own, other, int(square), self.depth) for square in squares])
        return int(rng.choice(squares[values == values.max()]))

    def _value(self, own: Bools, other: Bools, square: int, depth: int) -> int:
        """The value of a move for the player who makes it: 1 won, 0 open or drawn, -1 lost, within `depth` plies."""
        own[square] = True
        try:
            if has_line(own):
                return 1
            squares = np.flatnonzero(~(own | other))
            if depth <= 1 or not len(squares):
                return 0
            return -max(self._value(other, own, int(reply), depth - 1) for reply in squares)
        finally:
            own[square] = False


minimax2 = Minimax(depth=2)
