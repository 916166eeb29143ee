"""Vectorised environments of Gymnasium that misbehave on order, for tests of the vector engine."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

OBS = spaces.Dict(count=spaces.Box(0, 999, (1,), np.float32), luck=spaces.Discrete(100))


class Counters(VectorEnv[Any, Any, Any]):
    """Each slot counts its steps, and ends after (slot + 2) of them; `trouble` maps the number of a call of step to an error."""

    trouble: dict[int, BaseException] = {}  # noqa: RUF012  # by the class: a rebuilt object must know it too
    num_calls = 0
    num_open = 0

    def __init__(self, num_envs: int, mode: str = "SameStep", wrong_shape: bool = False) -> None:
        self.num_envs, self.mode, self.wrong_shape = num_envs, AutoresetMode(mode), wrong_shape
        self.metadata = {"autoreset_mode": self.mode}
        self.single_observation_space, self.single_action_space = OBS, spaces.Discrete(5)
        self.observation_space, self.action_space = batch_space(OBS, num_envs), batch_space(spaces.Discrete(5), num_envs)
        self.over = np.zeros(num_envs, np.bool_)
        Counters.num_open += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = np.zeros(self.num_envs, np.int64)
        self.luck = self.np_random.integers(0, 100, self.num_envs)
        self.over[:] = False
        return self._obs(), {}

    def step(self, actions: Any) -> Any:
        Counters.num_calls += 1
        if Counters.num_calls in Counters.trouble:
            raise Counters.trouble.pop(Counters.num_calls)
        begins = self.over.copy()
        self.count = np.where(begins, 0, self.count + 1)
        self._draw(begins)
        reward = np.where(begins, 0.0, actions)
        ended = ~begins & (self.count == np.arange(self.num_envs) + 2)
        infos: dict[str, Any] = {"twice": 2 * self.count}
        if self.mode == AutoresetMode.SAME_STEP and ended.any():
            last = np.full(self.num_envs, None, object)
            for slot in np.flatnonzero(ended).tolist():
                last[slot] = {"count": np.array([self.count[slot]], np.float32), "luck": self.luck[slot]}
            infos |= {"final_obs": last, "_final_obs": ended}
            self.count[ended] = 0
            self._draw(ended)
        else:
            self.over = ended
        return self._obs(), reward, ended, np.zeros(self.num_envs, np.bool_), infos

    def _draw(self, which: Any) -> None:
        self.luck = np.where(which, self.np_random.integers(0, 100, self.num_envs), self.luck)

    def _obs(self) -> Any:
        width = 2 if self.wrong_shape else 1
        return {"count": np.repeat(self.count[:, None].astype(np.float32), width, axis=1), "luck": self.luck.copy()}

    def close_extras(self, **kwargs: Any) -> None:
        Counters.num_open -= 1


def counters(**kwargs: Any) -> EnvSpec:
    """A spec that only a vector engine can build."""
    Counters.trouble, Counters.num_calls, Counters.num_open = {}, 0, 0
    return EnvSpec("Counters-v0", vector_entry_point=Counters, kwargs=kwargs)
