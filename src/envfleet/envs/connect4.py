"""Connect Four against an opponent that plays at random or looks ahead, with text or vector observations."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.errors import BadArgument

ROWS, COLUMNS = 6, 7
Board = npt.NDArray[np.int8]  # [row from the top, column]: 1 the agent's, -1 the opponent's, 0 empty

#: How many moves ahead each opponent looks.
DEPTHS = {"random": 0, "minimax-1": 1, "minimax-2": 2}
#: One family for curricula: the same spaces, a stronger opponent.
LEVELS = {"easy": "random", "medium": "minimax-1", "hard": "minimax-2"}
_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))
_TEXT_LENGTH = ROWS * (COLUMNS + 1) + COLUMNS


def _windows() -> npt.NDArray[np.intp]:
    """The flat indices of every line of four on the board, [line, 4]."""
    lines = []
    for row in range(ROWS):
        for column in range(COLUMNS):
            for down, right in _DIRECTIONS:
                cells = [(row + down * i, column + right * i) for i in range(4)]
                if all(0 <= r < ROWS and 0 <= c < COLUMNS for r, c in cells):
                    lines.append([r * COLUMNS + c for r, c in cells])
    return np.array(lines, dtype=np.intp)


WINDOWS = _windows()
_VALUE = np.array([0, 1, 4, 16, 10_000])  # what a line is worth by how many of its four one side holds alone


def legal_columns(board: Board) -> list[int]:
    """The columns that still have room."""
    return [column for column in range(COLUMNS) if board[0, column] == 0]


def drop(board: Board, column: int, side: int) -> int:
    """Let a piece fall; returns the row it lands in. The column must have room."""
    row = int(np.flatnonzero(board[:, column] == 0)[-1])
    board[row, column] = side
    return row


def wins(board: Board, row: int, column: int) -> bool:
    """Whether the piece at this place completes a line of four.

    Example:
        >>> board = np.zeros((6, 7), np.int8)
        >>> [wins(board, drop(board, 3, 1), 3) for _ in range(4)]
        [False, False, False, True]
    """
    side = board[row, column]
    for down, right in _DIRECTIONS:
        run = 1
        for sign in (1, -1):
            r, c = row + sign * down, column + sign * right
            while 0 <= r < ROWS and 0 <= c < COLUMNS and board[r, c] == side:
                run, r, c = run + 1, r + sign * down, c + sign * right
        if run >= 4:
            return True
    return False


def as_text(board: Board) -> str:
    """The board drawn: X for 1, O for -1, the numbers of the columns below."""
    rows = ["".join(".XO"[cell] for cell in row) for row in board.tolist()]
    return "\n".join([*rows, "".join(map(str, range(COLUMNS)))])


def evaluate(board: Board, side: int) -> int:
    """How good the board looks for a side: lines only it holds, minus lines only the other holds."""
    lines = board.reshape(-1)[WINDOWS] * side
    mine, other = (lines == 1).sum(axis=1), (lines == -1).sum(axis=1)
    return int(_VALUE[mine[other == 0]].sum() - _VALUE[other[mine == 0]].sum())


def minimax_scores(board: Board, side: int, depth: int) -> dict[int, int]:
    """The worth of each legal column for a side that looks `depth` moves ahead (its own is the first)."""
    scores = {}
    for column in legal_columns(board):
        row = drop(board, column, side)
        if wins(board, row, column):
            scores[column] = 1_000_000 + depth
        elif depth <= 1 or not legal_columns(board):
            scores[column] = evaluate(board, side)
        else:
            scores[column] = -max(minimax_scores(board, -side, depth - 1).values())
        board[row, column] = 0
    return scores


class Connect4(gymnasium.Env[Any, Any]):
    """Connect Four: four in a line win (+1) or lose (-1), a full board is a draw (0).

    `info` has `action_mask` (which columns have room), `legal_actions`, `text` (the board drawn) and, at the
    end, `winner` (1 the agent, -1 the opponent, 0 a draw).

    Args:
        opponent: "random", or "minimax-1" / "minimax-2": that many moves ahead, ties broken at random.
        observation: "vector" (int8 6 x 7: 1 own, -1 the opponent's) or "text" (the board drawn).
        illegal: a full column is "lose" (the game ends, -1), "skip" (-0.1, nothing moves) or "raise".
        first: who opens: "agent", "opponent" or "random".

    `reset(options={"level": "hard"})` or `{"opponent": "random"}` changes the opponent from then on.

    Example:
        >>> env = Connect4(opponent="minimax-2")
        >>> obs, info = env.reset(seed=3)
        >>> obs.shape, info["legal_actions"]
        ((6, 7), [0, 1, 2, 3, 4, 5, 6])
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012 (the base class has it so)
    openenv: ClassVar[dict[str, Any]] = {"action": "column", "observation": "board", "info": ("text", "legal_actions", "winner")}
    envfleet_columns: ClassVar[dict[str, spaces.Space[Any]]] = {"action_mask": spaces.MultiBinary(COLUMNS)}

    def __init__(
        self,
        opponent: str = "random",
        observation: Literal["vector", "text"] = "vector",
        illegal: Literal["lose", "skip", "raise"] = "lose",
        first: Literal["agent", "opponent", "random"] = "agent",
        render_mode: str | None = None,
    ) -> None:
        _check("observation", observation, ("vector", "text"))
        _check("illegal", illegal, ("lose", "skip", "raise"))
        _check("first", first, ("agent", "opponent", "random"))
        self.observation, self.illegal, self.first = observation, illegal, first
        self.render_mode = render_mode
        self._depth = _depth(opponent)
        self.action_space = spaces.Discrete(COLUMNS)
        if observation == "vector":
            self.observation_space: spaces.Space[Any] = spaces.Box(-1, 1, (ROWS, COLUMNS), np.int8)
        else:
            self.observation_space = spaces.Text(_TEXT_LENGTH, min_length=_TEXT_LENGTH, charset="XO.0123456\n")
        self._board: Board = np.zeros((ROWS, COLUMNS), np.int8)
        self._winner: int | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """An empty board (or one with the opponent's first piece)."""
        super().reset(seed=seed)
        options = options or {}
        if "level" in options:
            _check("level", options["level"], tuple(LEVELS))
            self._depth = _depth(LEVELS[options["level"]])
        elif "opponent" in options:
            self._depth = _depth(options["opponent"])
        self._board = np.zeros((ROWS, COLUMNS), np.int8)
        self._winner = None
        opens = self.first
        if opens == "random":
            opens = "agent" if self.np_random.random() < 0.5 else "opponent"
        if opens == "opponent":
            drop(self._board, self._reply(), -1)
        return self._obs(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Drop a piece; the opponent answers."""
        column = int(action)
        if not 0 <= column < COLUMNS:
            raise BadArgument(f"column must be 0 to {COLUMNS - 1}, got {column}")
        if self._winner is not None or self._board[0, column] != 0:
            return self._illegal(column)
        reward = self._play(column)
        return self._obs(), reward, self._winner is not None, False, self._info()

    def render(self) -> str:
        """The board drawn: X is the agent, O the opponent."""
        return as_text(self._board)

    def _play(self, column: int) -> float:
        if wins(self._board, drop(self._board, column, 1), column):
            self._winner = 1
            return 1.0
        if not legal_columns(self._board):
            self._winner = 0
            return 0.0
        reply = self._reply()
        if wins(self._board, drop(self._board, reply, -1), reply):
            self._winner = -1
            return -1.0
        if not legal_columns(self._board):
            self._winner = 0
        return 0.0

    def _illegal(self, column: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._winner is not None:
            raise BadArgument("the game is over: reset() first")
        if self.illegal == "raise":
            raise BadArgument(f"column {column} is full; legal are {legal_columns(self._board)}")
        if self.illegal == "skip":
            return self._obs(), -0.1, False, False, self._info()
        self._winner = -1
        return self._obs(), -1.0, True, False, self._info()

    def _reply(self) -> int:
        legal = legal_columns(self._board)
        if self._depth:
            scores = minimax_scores(self._board, -1, self._depth)
            best = max(scores.values())
            legal = [column for column in legal if scores[column] == best]
        return int(legal[self.np_random.integers(len(legal))])

    def _obs(self) -> Any:
        return self._board.copy() if self.observation == "vector" else self.render()

    def _info(self) -> dict[str, Any]:
        info: dict[str, Any] = {
            "action_mask": (self._board[0] == 0).astype(np.int8),
            "legal_actions": legal_columns(self._board),
            "text": self.render(),
        }
        if self._winner is not None:
            info["winner"] = self._winner
        return info


def _check(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadArgument(f"{name} must be one of {', '.join(allowed)}; got {value!r}")


def _depth(opponent: str) -> int:
    _check("opponent", opponent, tuple(DEPTHS))
    return DEPTHS[opponent]


@dataclass(frozen=True)
class Connect4Action:
    """The action of `envfleet.remote.Connect4Client`, which also takes a mapping or an integer."""

    column: int


Connect4Easy, Connect4Medium, Connect4Hard = (functools.partial(Connect4, opponent=opponent) for opponent in LEVELS.values())
