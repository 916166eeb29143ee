"""Environments that answer the calls of SB3's `VecEnv`, built in workers that need not import SB3 (and PyTorch)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Askable:
    """Builds an environment and adds the methods that `VecEnv` calls: no wrapper, so a step costs nothing more."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build

    def __call__(self) -> Any:
        """Build one."""
        import gymnasium as gym

        env = self.build()
        if not isinstance(env, gym.Env):
            from stable_baselines3.common.vec_env.patch_gym import _patch_env

            env = _patch_env(env)
        env.envfleet_is_wrapped = _Asker(env)
        env.envfleet_get_attr = env.get_wrapper_attr
        return env


class _Asker:
    def __init__(self, env: Any) -> None:
        self.env = env

    def __call__(self, wrapper_class: Any) -> bool:
        layer, bare = self.env, self.env.unwrapped
        while layer is not bare:
            if isinstance(layer, wrapper_class):
                return True
            layer = layer.env
        return False
