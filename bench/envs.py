"""The environments that are measured. Each isolates one cost; all contestants build them the same way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Null(gym.Env[Any, Any]):
    """No work at all: the same result object every time. What is measured is the vectoriser alone."""

    def __init__(self, shape: tuple[int, ...] = (4,), dtype: Any = np.float32) -> None:
        high = 255 if dtype is np.uint8 else 1.0
        self.observation_space = spaces.Box(0, high, shape, dtype)
        self.action_space = spaces.Discrete(2)
        self._obs = np.ones(shape, dtype)
        self._result = (self._obs, 1.0, False, False, {})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._obs, {}

    def step(self, action: Any) -> Any:
        return self._result


class Uneven(Null):
    """Steps of two lengths: in each block of 20 steps, one at a drawn place is slow.

    Drawn by blocks, not by steps, so that every contestant does the same work in a slice of half a second.
    """

    def __init__(self, slot: int, fast_s: float, slow_s: float) -> None:
        super().__init__()
        self.fast_s, self.slow_s = fast_s, slow_s
        self._rng = np.random.default_rng(slot)
        self._left: list[float] = []

    def next_s(self) -> float:
        if not self._left:
            self._left = [self.fast_s] * 20
            self._left[int(self._rng.integers(20))] = self.slow_s
        return self._left.pop()


class UnevenCpu(Uneven):
    """0.2 ms of CPU time, 5 ms in one step of 20. CPU time, not wall time: waiting for a core is not work."""

    def __init__(self, slot: int = 0) -> None:
        super().__init__(slot, 0.0002, 0.005)

    def step(self, action: Any) -> Any:
        end = time.thread_time() + self.next_s()
        while time.thread_time() < end:
            pass
        return self._result


class UnevenSleep(Uneven):
    """Sleeps 1 ms, 50 ms in one step of 20."""

    def __init__(self, slot: int = 0) -> None:
        super().__init__(slot, 0.001, 0.05)

    def step(self, action: Any) -> Any:
        time.sleep(self.next_s())
        return self._result


class UnevenAwait(Uneven):
    """The same as a coroutine, as a client of a remote simulator would be."""

    def __init__(self, slot: int = 0) -> None:
        super().__init__(slot, 0.001, 0.05)

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(self.next_s())
        return self._result


class SlowStart(Null):
    """A constructor that takes a second, as one that loads a level does."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(1.0)


#: Sleeping 1 ms, 50 ms in one step of 20: what one slot could do at best, per second.
SLEEP_CEILING_PER_SLOT = 1.0 / (0.95 * 0.001 + 0.05 * 0.05)

_MADE: dict[str, Callable[[int], Any]] = {
    "null": lambda slot: Null(),
    "image": lambda slot: Null((84, 84, 4), np.uint8),
    "bigimage": lambda slot: Null((210, 160, 3), np.uint8),
    "unevencpu": UnevenCpu,
    "unevensleep": UnevenSleep,
    "unevenawait": UnevenAwait,
    "slowstart": lambda slot: SlowStart(),
}

#: What a case is called in tables.
TITLES = {
    "null": "null env",
    "image": "84×84×4 uint8",
    "bigimage": "210×160×3 uint8",
    "unevencpu": "uneven CPU steps",
    "unevensleep": "uneven sleeps",
}


class Factory:
    """Builds the env of one slot: one of the above, or what `gym.make` gives for any other name."""

    def __init__(self, name: str, slot: int) -> None:
        self.name, self.slot = name, slot

    def __call__(self) -> Any:
        return _MADE[self.name](self.slot) if self.name in _MADE else gym.make(self.name)


def factories(name: str, count: int) -> list[Callable[[], Any]]:
    return [Factory(name, slot) for slot in range(count)]


def sampled_actions(name: str, count: int, batches: int = 64) -> np.ndarray[Any, Any]:
    """Actions drawn before the clock runs: [batch, slot, ...]."""
    env = Factory(name, 0)()
    space = env.action_space
    space.seed(0)
    drawn = np.array([[space.sample() for _ in range(count)] for _ in range(min(batches, 65536 // count))])
    env.close()
    return drawn
