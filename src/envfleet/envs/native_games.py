"""GridNavi, the team on the grid, and Connect Four in C++. The Python classes of the same names define what they do; `info` is empty here."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envfleet.envs.connect4 import COLUMNS, DEPTHS, LEVELS, ROWS, Board, Connect4
from envfleet.envs.gridmodel import Reward
from envfleet.envs.gridnavi import GridNavi
from envfleet.envs.gridworld_team import GridWorldTeam
from envfleet.errors import BadArgument
from envfleet.native.native_env import NativeEnv

_ILLEGAL, _FIRST = ("lose", "skip", "raise"), ("agent", "opponent", "random")
_NOBODY_YET = 2


class NativeGridNavi(NativeEnv):
    """`envfleet.envs.gridnavi.GridNavi` in C++; tasks are goal cells, and `task` is the goal of the episode.

    Example:
        >>> env = NativeGridNavi()
        >>> _ = env.reset(seed=0, options={"task": (2, 0)})
        >>> env.task, [env.step(np.int64(action))[1] for action in (2, 2, 0)]
        ((2, 0), [-0.1, 1.0, 1.0])
    """

    def __init__(self, size: int = 5, horizon: int = 15, render_mode: str | None = None) -> None:
        super().__init__(name="GridNavi", render_mode=render_mode, size=size, horizon=horizon)
        self.task_space = GridNavi(size, horizon).task_space

    def encode_task(self, task: Any) -> Any:
        """The goal's cell, checked."""
        return self.task_space.checked(task)

    @property
    def task(self) -> tuple[int, int] | None:
        """The goal of the episode; None before the first."""
        x, y = self.state_view[:8].view(np.int32).tolist()
        return None if x < 0 else (x, y)

    @property
    def task_vector(self) -> Any:
        """The goal as numbers."""
        return self.task_space.vector(self.task)


class NativeGridWorld(NativeEnv):
    """`envfleet.envs.gridworld_team.GridWorldTeam` in C++: up to 16 cells a side, 8 agents, a view of 16, and drawn as text only.

    Example:
        >>> env = NativeGridWorld(size=4, num_obstacles=1, render_mode="ansi")
        >>> env.reset(seed=3)[0].shape, env.inside.tolist()
        ((2, 63), [True, True])
        >>> print(env.render())
        B...
        .A..
        ...#
        ..ba
    """

    def __init__(
        self,
        size: int = 5,
        num_agents: int = 2,
        num_obstacles: int = 3,
        max_cycles: int = 50,
        view: int = 2,
        reward: Reward = "shaped",
        min_distance: int | None = None,
        compass: bool = True,
        render_mode: str | None = None,
    ) -> None:
        if render_mode == "rgb_array":
            raise BadArgument("the native GridWorld draws no pictures: use another backend for render_mode='rgb_array'")
        GridWorldTeam(size, num_agents, num_obstacles, max_cycles, view, reward, min_distance, compass, render_mode)  # its checks
        for name, given, most in (("size", size, 16), ("num_agents", num_agents, 8), ("view", view, 16)):
            if given > most:
                raise BadArgument(f"{name}={given}: the native GridWorld has room for {most}; use another backend for more")
        chosen: dict[str, Any] = {"size": size, "num_agents": num_agents, "num_obstacles": num_obstacles, "view": view}
        chosen |= {"max_cycles": max_cycles, "sparse": reward == "sparse", "compass": compass}
        chosen["min_distance"] = size if min_distance is None else min_distance
        super().__init__(name="GridWorld", render_mode=render_mode, **chosen)
        self._num_agents = num_agents

    @property
    def agent_rewards(self) -> NDArray[np.float64]:
        """The agents' rewards of the last step, a copy."""
        return self.state_view[: 8 * self._num_agents].view(np.float64).copy()

    @property
    def inside(self) -> NDArray[np.bool_]:
        """Which agents are still on the grid."""
        flags: NDArray[np.bool_] = self.state_view[64 : 64 + 4 * self._num_agents].view(np.int32).astype(bool)
        return flags


class NativeConnect4(NativeEnv):
    """`envfleet.envs.connect4.Connect4` in C++, with vector observations. What `info` has there is an attribute here.

    Example:
        >>> env = NativeConnect4(opponent="minimax-2")
        >>> env.reset(seed=3)[0].shape, env.action_mask.tolist(), env.winner
        ((6, 7), [1, 1, 1, 1, 1, 1, 1], None)
    """

    def __init__(
        self,
        opponent: str = "random",
        observation: str = "vector",
        illegal: str = "lose",
        first: str = "agent",
        render_mode: str | None = None,
    ) -> None:
        Connect4(opponent, observation, illegal, first)  # type: ignore[arg-type]  # its checks of the arguments
        if observation != "vector":
            raise BadArgument("the native Connect4 has no text observations: use another backend for observation='text'")
        chosen: dict[str, Any] = {"depth": DEPTHS[opponent], "illegal": _ILLEGAL.index(illegal), "first": _FIRST.index(first)}
        super().__init__(name="Connect4", render_mode=render_mode, **chosen)

    def use_options(self, options: dict[str, Any]) -> None:
        """`options` may have "level" or "opponent", as in Python."""
        for name, known in (("level", LEVELS), ("opponent", DEPTHS)):
            if name in options:
                if options[name] not in known:
                    raise BadArgument(f"{name} must be one of {', '.join(known)}; got {options[name]!r}")
                self._numbers[0] = DEPTHS[LEVELS.get(options[name], options[name])]
                break

    @property
    def _numbers(self) -> NDArray[np.int32]:
        return self.state_view[:16].view(np.int32)

    @property
    def board(self) -> Board:
        """The board, a copy."""
        cells: Board = self.state_view[16 : 16 + ROWS * COLUMNS].view(np.int8).reshape(ROWS, COLUMNS).copy()
        return cells

    @property
    def action_mask(self) -> NDArray[np.int8]:
        """Which columns have room."""
        mask: NDArray[np.int8] = (self.board[0] == 0).astype(np.int8)
        return mask

    @property
    def winner(self) -> int | None:
        """1 the agent, -1 the opponent, 0 a draw; None while the game runs."""
        winner = int(self._numbers[1])
        return None if winner == _NOBODY_YET else winner


NativeConnect4Easy, NativeConnect4Medium, NativeConnect4Hard = (
    functools.partial(NativeConnect4, opponent=opponent) for opponent in LEVELS.values()
)
