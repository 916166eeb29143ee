"""What the trainer's tests share. Importable by workers and child processes."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from envfleet.train import PPOConfig, PPOTrainer


def config(**changes: Any) -> PPOConfig:
    base: dict[str, Any] = {
        "env": "CartPole-v1", "num_envs": 4, "num_steps": 16, "total_steps": 4 * 16 * 8, "seed": 3,
        "preset": "none", "backend": "serial", "tensorboard": False, "report": False,
    }  # fmt: skip
    return PPOConfig(**{**base, **changes})


def weights(trainer: PPOTrainer) -> torch.Tensor:
    return trainer.learner.flat


def trained(settings: PPOConfig) -> torch.Tensor:
    with PPOTrainer(settings) as trainer:
        trainer.train()
        return weights(trainer)


class Masked(gym.Env):
    """Action 1 is forbidden in every other step, and counts as a mistake that ends everything."""

    observation_space = gym.spaces.Dict(
        observation=gym.spaces.Box(-1, 1, (2,), np.float32), action_mask=gym.spaces.MultiBinary(2)
    )
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.see(), {}

    def see(self):
        return {"observation": np.zeros(2, np.float32), "action_mask": np.array([1, self.time % 2], np.int8)}

    def step(self, action):
        if action == 1 and self.time % 2 == 0:
            raise RuntimeError("a masked action was taken")
        self.time += 1
        return self.see(), float(action), self.time == 10, False, {}


class MaskedByInfo(Masked):
    """The same with the mask as a declared column."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed)
        return observation["observation"], {"action_mask": observation["action_mask"]}

    def step(self, action):
        observation, *rest, _ = super().step(action)
        return observation["observation"], *rest, {"action_mask": observation["action_mask"]}


class Poisoned(gym.Env):
    """Gives NaN at the 30th step of an episode."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        value = np.nan if self.time == 30 else 0.1
        return np.full(2, value, np.float32), 1.0, self.time == 40, False, {}


class Restless(gym.Env):
    """Not determined by its seed: every process and every instance goes its own way."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.rng = np.random.default_rng()
        self.time = 0
        return self.rng.random(2, dtype=np.float32), {}

    def step(self, action):
        self.time += 1
        return self.rng.random(2, dtype=np.float32), 1.0, self.time == 25, False, {}


class Counting(gym.Env):
    """Its state outlives episodes (a counter of all steps ever), and it can be put back by get_state/set_state."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.total = 0
        self.time = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.see(), {}

    def see(self):
        return np.array([np.sin(self.total), self.time / 10], np.float32)

    def step(self, action):
        self.total += 1 + int(action)
        self.time += 1
        return self.see(), float(np.cos(self.total)), self.time == 11, False, {}

    def get_state(self):
        return [self.total, self.time]

    def set_state(self, state):
        self.total, self.time = state


class Fragile(gym.Env):
    """Raises in its 13th step."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        self.limit = int(self.np_random.integers(3, 15))
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.time += 1
        if self.time == 13:
            raise RuntimeError("broken")
        return np.full(2, self.time / 20, np.float32), 1.0, self.time == self.limit, False, {}


class WithLimit(gym.Env):
    """Box actions, and episodes that end by truncation only."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.random(2).astype(np.float32)
        self.time = 0
        return self.place.copy(), {}

    def step(self, action):
        self.place += 0.1 * action
        self.time += 1
        return self.place.copy(), -float(np.square(self.place).sum()), False, self.time == 9, {}
