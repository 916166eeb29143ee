"""Environments whose observations say which episode and step they belong to, and that can be made to fail."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np


class Counting(gym.Env):
    """Observation (instance, episode, step); an episode has `length` steps and terminates, or is truncated if `cut`.

    `fails` are (instance, step it has made in all) at which a step raises; with step 0 its resets raise. Instances are
    numbered from 0 in every process, after `start_counting`.
    """

    made: ClassVar[int] = 0
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int = 5, cut: bool = False, fails: tuple[tuple[int, int], ...] = (), shape: str = "box") -> None:
        self.instance, Counting.made = Counting.made, Counting.made + 1
        self.length, self.cut, self.shape = length, cut, shape
        self.fails = {step for instance, step in fails if instance == self.instance}
        self.episode, self.steps, self.t = -1, 0, 0
        box = gym.spaces.Box(-1.0, 1e6, (3,), np.float32)
        self.observation_space = {
            "box": box,
            "discrete": gym.spaces.Discrete(1000),
            "dict": gym.spaces.Dict({"a": box, "b": gym.spaces.Discrete(1000)}),
            "tuple": gym.spaces.Tuple([box, gym.spaces.Discrete(1000)]),
        }[shape]

    @classmethod
    def start_counting(cls) -> type[Counting]:
        cls.made = 0
        return cls

    def _obs(self) -> Any:
        box = np.array([self.instance, self.episode, self.t], np.float32)
        number = 100 * self.instance + self.t
        return {"box": box, "discrete": number, "dict": {"a": box, "b": number}, "tuple": (box, number)}[self.shape]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if 0 in self.fails:
            raise ValueError("no reset today")
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t, self.steps = self.t + 1, self.steps + 1
        if self.steps in self.fails:
            raise ValueError("no step today")
        over = self.t >= self.length
        return self._obs(), 1.0, over and not self.cut, over and self.cut, {}


def counting_from_mapping(config: dict[str, Any]) -> Counting:
    """As environments written for RLlib: one mapping with everything."""
    return Counting(**config)
