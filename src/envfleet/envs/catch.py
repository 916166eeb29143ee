"""Catch on 10x10 pixels: the smallest task that needs an image network and shows within a minute that it learns."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument


class PixelCatch(gym.Env[NDArray[np.uint8], np.int64]):
    """A ball falls down a `size` x `size` picture; move the paddle (left, stay, right) under it for +1, else -1.

    The ball drifts sideways by -1, 0 or 1 pixel a row and bounces off the walls, so that two frames of the fall
    are not needed: the drift is drawn in the ball's brightness.

    Example:
        >>> env = PixelCatch()
        >>> observation, _ = env.reset(seed=0)
        >>> observation.shape, str(observation.dtype)
        ((10, 10, 1), 'uint8')
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - the attribute Gymnasium reads

    def __init__(self, size: int = 10, render_mode: str | None = None) -> None:
        if size < 4:
            raise BadArgument(f"PixelCatch(size={size}): at least 4 pixels are needed")
        self.size = size
        self.render_mode = render_mode
        self.observation_space = gym.spaces.Box(0, 255, (size, size, 1), np.uint8)
        self.action_space = gym.spaces.Discrete(3)
        self._ball = (0, 0)
        self._drift = 0
        self._paddle = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Drop a new ball from a random column."""
        super().reset(seed=seed)
        self._ball = (0, int(self.np_random.integers(self.size)))
        self._drift = int(self.np_random.integers(-1, 2))
        self._paddle = self.size // 2
        return self._picture(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Move the paddle, let the ball fall one row."""
        self._paddle = min(max(self._paddle + int(action) - 1, 0), self.size - 1)
        row, column = self._ball
        if not 0 <= column + self._drift < self.size:
            self._drift = -self._drift
        self._ball = (row + 1, column + self._drift)
        ended = self._ball[0] == self.size - 1
        reward = 0.0 if not ended else 1.0 if abs(self._ball[1] - self._paddle) <= 1 else -1.0
        return self._picture(), reward, ended, False, {}

    def render(self) -> NDArray[np.uint8]:
        """Return the picture as RGB, 16 times enlarged."""
        return np.repeat(np.repeat(np.repeat(self._picture(), 3, axis=2), 16, axis=0), 16, axis=1)

    def _picture(self) -> NDArray[np.uint8]:
        picture = np.zeros((self.size, self.size, 1), dtype=np.uint8)
        picture[self.size - 1, max(self._paddle - 1, 0) : self._paddle + 2, 0] = 128
        picture[self._ball[0], self._ball[1], 0] = 191 + 64 * self._drift
        return picture
