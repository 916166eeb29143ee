"""Connect Four for two agents, as a PettingZoo AEC environment; the rules are those of `envfleet.envs.connect4`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from envfleet.envs.connect4 import COLUMNS, ROWS, Board, as_text, drop, wins
from envfleet.errors import BadArgument
from envfleet.util.extras import from_extra

with from_extra("multiagent"):
    from pettingzoo import AECEnv

Observation = dict[str, npt.NDArray[np.int8]]
_SIDES = (1, -1)  # the pieces of player_0 and player_1 on the board
_COLOURS = {0: (245, 245, 245), 1: (220, 60, 60), -1: (240, 200, 40)}
_PIXELS = 32


class Connect4AEC(AECEnv):  # type: ignore[misc]
    """Connect Four for `player_0` (who opens) and `player_1`: +1 for four in a line, -1 for the other, a full board is 0.

    Observations are as in PettingZoo's connect_four_v3: `observation` int8 [6, 7, 2], the player's own pieces and the
    other's, and `action_mask` int8 [7], the columns with room (all zero for the player whose turn it is not). Unlike
    there, an illegal move keeps the sum at zero: it loses the game (-1) and the other wins (+1), or, with
    `illegal="raise"`, is an error.

    Example:
        >>> env = Connect4AEC(render_mode="ansi")
        >>> env.reset()
        >>> for column in (3, 0, 3, 0, 3, 0, 3):
        ...     env.step(column)
        >>> env.rewards
        {'player_0': 1.0, 'player_1': -1.0}
        >>> env.render().splitlines()[-4:]
        ['O..X...', 'O..X...', 'O..X...', '0123456']
    """

    metadata: dict[str, Any] = {  # noqa: RUF012 (PettingZoo has it so)
        "name": "connect4_aec_v0",
        "render_modes": ["human", "rgb_array", "ansi"],
        "is_parallelizable": False,
        "render_fps": 2,
    }

    def __init__(self, illegal: Literal["lose", "raise"] = "lose", render_mode: str | None = None) -> None:
        if illegal not in ("lose", "raise"):
            raise BadArgument(f"illegal={illegal!r}: choose 'lose' or 'raise'")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise BadArgument(f"render_mode={render_mode!r}: choose 'human', 'rgb_array', 'ansi' or None")
        self.illegal, self.render_mode = illegal, render_mode
        self.possible_agents = ["player_0", "player_1"]
        self.agents: list[str] = []
        self._board: Board = np.zeros((ROWS, COLUMNS), np.int8)
        self.action_spaces = {agent: spaces.Discrete(COLUMNS) for agent in self.possible_agents}
        seen: dict[str, spaces.Space[Any]] = {
            "observation": spaces.Box(0, 1, (ROWS, COLUMNS, 2), np.int8),
            "action_mask": spaces.Box(0, 1, (COLUMNS,), np.int8),
        }
        self.observation_spaces = {agent: spaces.Dict(seen) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Dict:
        """The same Dict for both: `observation` and `action_mask`."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        """A column."""
        return self.action_spaces[agent]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        """An empty board. Nothing is random here, so the seed has no effect."""
        self._board = np.zeros((ROWS, COLUMNS), np.int8)
        self.agents = list(self.possible_agents)
        self.rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards: dict[str, float] = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.agent_selection = self.agents[0]
        self._skip_agent_selection = None  # of PettingZoo's dead steps: nothing is left of the last game

    def observe(self, agent: str) -> Observation:
        """The board as a player sees it."""
        side = _SIDES[self.possible_agents.index(agent)]
        board = np.stack([self._board == side, self._board == -side], axis=-1).astype(np.int8)
        mask = (self._board[0] == 0).astype(np.int8)
        to_move = agent == self.agent_selection and not self.terminations.get(agent, True)
        return {"observation": board, "action_mask": mask if to_move else np.zeros_like(mask)}

    def step(self, action: Any) -> None:
        """Drop a piece of the player whose turn it is."""
        mover = self.agent_selection
        if self.terminations[mover] or self.truncations[mover]:
            self._was_dead_step(action)
            return
        column = int(action)
        if not 0 <= column < COLUMNS:
            raise BadArgument(f"column must be 0 to {COLUMNS - 1}, got {column}")
        other = self.possible_agents[1 - self.possible_agents.index(mover)]
        self._cumulative_rewards[mover] = 0.0
        self._clear_rewards()
        if self._board[0, column] != 0:
            if self.illegal == "raise":
                raise BadArgument(f"column {column} is full; the action mask of {mover} said so")
            self._end(winner=other, loser=mover)
        elif wins(self._board, drop(self._board, column, _SIDES[self.possible_agents.index(mover)]), column):
            self._end(winner=mover, loser=other)
        elif self._board[0].all():
            self.terminations = dict.fromkeys(self.agents, True)
        self._accumulate_rewards()
        self.agent_selection = other
        self._deads_step_first()

    def _end(self, winner: str, loser: str) -> None:
        self.rewards[winner], self.rewards[loser] = 1.0, -1.0
        self.terminations = dict.fromkeys(self.agents, True)

    def render(self) -> Any:
        """The board as pixels, as text or printed, by `render_mode`."""
        if self.render_mode == "ansi":
            return as_text(self._board)
        if self.render_mode == "human":
            print(as_text(self._board))
        if self.render_mode != "rgb_array":
            return None
        out = np.full((ROWS * _PIXELS, COLUMNS * _PIXELS, 3), (40, 80, 170), np.uint8)
        down, right = np.mgrid[:_PIXELS, :_PIXELS] - (_PIXELS - 1) / 2
        disc = np.argwhere(down**2 + right**2 < (0.4 * _PIXELS) ** 2)
        for (row, column), side in np.ndenumerate(self._board):
            place = disc + [row * _PIXELS, column * _PIXELS]
            out[place[:, 0], place[:, 1]] = _COLOURS[int(side)]
        return out

    def close(self) -> None:
        """Nothing is held open."""


env = Connect4AEC  # the name PettingZoo's modules have for it
