"""The world of the multi-agent grid: cells, obstacles, moves, rewards, views and pictures. It does not use an agent API."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from envfleet.errors import BadArgument

STAY, UP, DOWN, LEFT, RIGHT = range(5)
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))
Cell = tuple[int, int]
Reward = Literal["shaped", "sparse"]

#: Points of the shaped reward: for each cell nearer to the goal (and against, for each farther), and for each cycle.
NEARER, CYCLE = 0.1, -0.01
_COLOURS = ((220, 60, 60), (60, 110, 220), (50, 160, 80), (200, 150, 40), (150, 80, 190), (60, 170, 180))
_PIXELS = 24  # sides of a cell in a picture


class GridModel:
    """A square grid on which every agent has a goal cell of its own.

    A cycle moves the agents in the order of their numbers, each onto a cell that is free at that moment; a move into a
    wall, an obstacle or another agent has no effect. At its goal an agent leaves the grid. The free cells are connected,
    so every goal can be reached, and goals lie at least `min_distance` steps from where the agent starts.
    """

    def __init__(
        self,
        size: int,
        num_agents: int,
        num_obstacles: int,
        view: int,
        reward: Reward,
        min_distance: int | None,
        compass: bool = True,
    ) -> None:
        min_distance = size if min_distance is None else min_distance
        if size < 2 or num_agents < 1 or num_obstacles < 0 or view < 1:
            raise BadArgument(
                f"size={size}, num_agents={num_agents}, num_obstacles={num_obstacles}, view={view}: "
                "a grid needs size >= 2, at least one agent, view >= 1 and no negative number of obstacles"
            )
        if num_obstacles + 2 * num_agents > size * size // 2:
            raise BadArgument(
                f"{num_obstacles} obstacles and {num_agents} agents with their goals fill more than half of a "
                f"{size} x {size} grid: take a larger size, fewer agents or fewer obstacles"
            )
        if not 1 <= min_distance <= 2 * (size - 1):
            raise BadArgument(f"min_distance={min_distance}: on a {size} x {size} grid it is 1 to {2 * (size - 1)}")
        if reward not in ("shaped", "sparse"):
            raise BadArgument(f"reward={reward!r}: choose 'shaped' or 'sparse'")
        self.size, self.num_agents, self.num_obstacles, self.view = size, num_agents, num_obstacles, view
        self.reward, self.min_distance, self.compass = reward, min_distance, compass
        side = size + 2 * view  # a border as wide as the view: a window never leaves the array
        self.blocked = np.ones((side, side), np.float32)  # 1: wall or obstacle
        self.occupied = np.zeros((side, side), np.float32)  # 1: an agent stands there
        self.cells: list[Cell] = []  # [agent] where it is
        self.goals: list[Cell] = []
        self.inside: list[bool] = []  # [agent] whether it is still on the grid
        self._ways: list[npt.NDArray[np.int64]] = []  # [agent] steps to its goal from every cell, -1: no way

    # -- a new world -----------------------------------------------------------------------------------------------

    def reset(self, rng: np.random.Generator) -> None:
        """Draw obstacles, starts and goals."""
        self._draw_obstacles(rng)
        self.occupied[:] = 0
        self.cells, self.goals, self._ways = [], [], []
        self.inside = [True] * self.num_agents
        for _ in range(self.num_agents):
            start, goal, way = self._draw_pair(rng)
            self.cells.append(start)
            self.goals.append(goal)
            self._ways.append(way)
            self._put(start, 1.0)

    def _draw_obstacles(self, rng: np.random.Generator) -> None:
        size, view = self.size, self.view
        inner = self.blocked[view : view + size, view : view + size]
        inner[:] = 0
        left = self.num_obstacles
        for index in rng.permutation(size * size):
            if left == 0:
                break
            cell = divmod(int(index), size)
            inner[cell] = 1
            free = np.argwhere(inner == 0)
            if (self._steps_to(_cell(free[0])) >= 0).sum() == len(free):
                left -= 1
            else:  # it would cut the grid in two
                inner[cell] = 0

    def _draw_pair(self, rng: np.random.Generator) -> tuple[Cell, Cell, npt.NDArray[np.int64]]:
        """A start and a goal that no other agent has, far enough apart; the farthest goal if none is."""
        free = [cell for cell in map(_cell, np.argwhere(self._inner() == 0)) if cell not in self.goals]
        best: tuple[int, Cell, Cell] = (0, free[0], free[0])
        for index in rng.permutation(len(free)):
            start = free[index]
            if start in self.cells:
                continue
            steps = self._steps_to(start)
            goals = [cell for cell in free if steps[cell] >= self.min_distance and cell not in self.cells]
            if goals:
                goal = goals[int(rng.integers(len(goals)))]
                return start, goal, self._steps_to(goal)
            farthest = max((cell for cell in free if cell not in self.cells), key=lambda cell: int(steps[cell]))
            best = max(best, (int(steps[farthest]), start, farthest))
        return best[1], best[2], self._steps_to(best[2])

    def _steps_to(self, goal: Cell) -> npt.NDArray[np.int64]:
        """Steps from every cell to one, round the obstacles; -1 where there is no way."""
        steps = np.full((self.size, self.size), -1, np.int64)
        steps[goal] = 0
        inner = self._inner()
        queue = deque([goal])
        while queue:
            row, column = queue.popleft()
            for down, right in MOVES[1:]:
                r, c = row + down, column + right
                if 0 <= r < self.size and 0 <= c < self.size and steps[r, c] < 0 and not inner[r, c]:
                    steps[r, c] = steps[row, column] + 1
                    queue.append((r, c))
        return steps

    # -- a cycle ---------------------------------------------------------------------------------------------------

    def cycle(self, actions: Mapping[int, int]) -> tuple[dict[int, float], set[int]]:
        """Move the agents that act; returns their rewards and those that have arrived."""
        rewards, arrived = {}, set()
        for agent in sorted(actions):
            before, after = self.cells[agent], self._target(agent, actions[agent])
            if after != before and self._is_free(after):
                self._put(before, 0.0)
                self._put(after, 1.0)
                self.cells[agent] = after
            here = self.cells[agent] == self.goals[agent]
            if here:
                arrived.add(agent)
                self.inside[agent] = False
                self._put(self.cells[agent], 0.0)
            way = self._ways[agent]
            shaped = NEARER * int(way[before] - way[self.cells[agent]]) + CYCLE if self.reward == "shaped" else 0.0
            rewards[agent] = shaped + float(here)
        return rewards, arrived

    def _target(self, agent: int, action: int) -> Cell:
        if not 0 <= action < len(MOVES):
            raise BadArgument(f"action {action!r} of agent {agent}: give 0 to {len(MOVES) - 1}")
        (row, column), (down, right) = self.cells[agent], MOVES[action]
        return row + down, column + right

    def _is_free(self, cell: Cell) -> bool:
        place = (cell[0] + self.view, cell[1] + self.view)
        return not self.blocked[place] and not self.occupied[place]

    def _put(self, cell: Cell, value: float) -> None:
        self.occupied[cell[0] + self.view, cell[1] + self.view] = value

    def _inner(self) -> npt.NDArray[np.float32]:
        return self.blocked[self.view : self.view + self.size, self.view : self.view + self.size]

    # -- what is seen ----------------------------------------------------------------------------------------------

    @property
    def features(self) -> int:
        """How long an agent's observation is."""
        return 4 + 2 * (2 * self.view + 1) ** 2 + (4 if self.compass else 0)

    def observe(self, agent: int) -> npt.NDArray[np.float32]:
        """Own cell (2), the goal's from there (2), what is blocked and who stands near, and the compass (4)."""
        (row, column), goal = self.cells[agent], self.goals[agent]
        width, scale = 2 * self.view + 1, 1.0 / (self.size - 1)
        out = np.empty(self.features, np.float32)
        out[0], out[1] = row * scale, column * scale
        out[2], out[3] = (goal[0] - row) * scale, (goal[1] - column) * scale
        window = (slice(row, row + width), slice(column, column + width))
        half = 4 + width * width
        out[4:half] = self.blocked[window].reshape(-1)
        end = half + width * width
        out[half:end] = self.occupied[window].reshape(-1)
        out[half + width * width // 2] = 0.0  # itself
        if self.compass:
            out[end:] = self._compass(agent)
        return out

    def _compass(self, agent: int) -> list[float]:
        """For up, down, left and right: 1 if the way to the goal is shorter from there, -1 if longer or no way."""
        (row, column), way = self.cells[agent], self._ways[agent]
        here, out = way[row, column], []
        for down, right in MOVES[1:]:
            r, c = row + down, column + right
            inside = 0 <= r < self.size and 0 <= c < self.size
            out.append(1.0 if inside and 0 <= way[r, c] < here else -1.0)
        return out

    def mask(self, agent: int) -> npt.NDArray[np.int8]:
        """Which actions move (staying always can); an agent that has left may only stay."""
        out = np.ones(len(MOVES), np.int8)
        for action in range(1, len(MOVES)):
            out[action] = self.inside[agent] and self._is_free(self._target(agent, action))
        return out

    def state(self) -> npt.NDArray[np.float32]:
        """The whole world: the obstacles, then for each agent its cell, its goal and whether it is on the grid."""
        scale = 1.0 / (self.size - 1)
        agents = [
            [cell[0] * scale, cell[1] * scale, goal[0] * scale, goal[1] * scale, float(inside)]
            for cell, goal, inside in zip(self.cells, self.goals, self.inside)
        ]
        return np.concatenate([self._inner().reshape(-1), np.ravel(agents)]).astype(np.float32)

    # -- pictures --------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Rows of characters: # obstacle, A, B, … agents, a, b, … their goals."""
        rows = [["#" if cell else "." for cell in row] for row in self._inner().tolist()]
        for agent, (row, column) in enumerate(self.goals):
            rows[row][column] = _letter(agent).lower()
        for agent, (row, column) in enumerate(self.cells):
            if self.inside[agent]:
                rows[row][column] = _letter(agent)
        return "\n".join("".join(row) for row in rows)

    def picture(self) -> npt.NDArray[np.uint8]:
        """Pixels [height, width, 3]: black obstacles, agents as full squares, goals as frames of the same colour."""
        out = np.full((self.size * _PIXELS, self.size * _PIXELS, 3), 240, np.uint8)
        for row, column in map(_cell, np.argwhere(self._inner() == 1)):
            self._square(out, (row, column), 1, (40, 40, 40))
        for agent in range(self.num_agents):
            colour = _COLOURS[agent % len(_COLOURS)]
            self._square(out, self.goals[agent], 2, colour)
            self._square(out, self.goals[agent], 5, (240, 240, 240))
        for agent in range(self.num_agents):  # agents over goals
            if self.inside[agent]:
                self._square(out, self.cells[agent], 6, _COLOURS[agent % len(_COLOURS)])
        return out

    @staticmethod
    def _square(out: Any, cell: Cell, margin: int, colour: tuple[int, int, int]) -> None:
        top, left = cell[0] * _PIXELS, cell[1] * _PIXELS
        out[top + margin : top + _PIXELS - margin, left + margin : left + _PIXELS - margin] = colour


def _cell(pair: Any) -> Cell:
    return int(pair[0]), int(pair[1])


def _letter(agent: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[agent % 26]
