"""Peers of the main venv, driven as their documentation says, all with the same actions drawn beforehand."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from bench.contestants import Contestant, now
from bench.envs import factories, sampled_actions


class Vectorised(Contestant):
    """A peer whose `step` takes all actions; `_make` builds it and `_step` steps it once."""

    def __init__(self, env: str, slots: int) -> None:
        super().__init__(env, slots)
        self._actions = list(sampled_actions(env, slots))
        self._turn = 0
        self.vec = self._make(factories(env, slots))

    def _make(self, builders: list[Any]) -> Any:
        raise NotImplementedError

    def _step(self, action: Any) -> None:
        self.vec.step(action)

    def run(self, seconds: float) -> tuple[int, float]:
        step, actions = self._step, self._actions
        turn = self._turn
        start = now()
        end = start + seconds
        while now() < end:
            step(actions[turn % len(actions)])
            turn += 1
        took = now() - start
        steps, self._turn = (turn - self._turn) * self.slots, turn
        return steps, took

    def close(self) -> None:
        self.vec.close()


class GymSync(Vectorised):
    def _make(self, builders: list[Any]) -> Any:
        vec = gym.vector.SyncVectorEnv(builders, copy=False)
        vec.reset(seed=0)
        return vec


class GymSyncCopying(Vectorised):
    """As it comes: `copy=True`. PufferLib's earlier ratios on images are to this one."""

    def _make(self, builders: list[Any]) -> Any:
        vec = gym.vector.SyncVectorEnv(builders)
        vec.reset(seed=0)
        return vec


class GymAsync(Vectorised):
    def _make(self, builders: list[Any]) -> Any:
        vec = gym.vector.AsyncVectorEnv(builders, copy=False)
        vec.reset(seed=0)
        return vec


class Sb3Dummy(Vectorised):
    def _make(self, builders: list[Any]) -> Any:
        from stable_baselines3.common.vec_env import DummyVecEnv

        vec = DummyVecEnv(builders)
        vec.reset()
        return vec


class Sb3Subproc(Vectorised):
    def _make(self, builders: list[Any]) -> Any:
        from stable_baselines3.common.vec_env import SubprocVecEnv

        vec = SubprocVecEnv(builders, start_method="fork")
        vec.reset()
        return vec


class Tianshou(Vectorised):
    """Does not reset by itself: finished envs are reset in a second call, as its collector does."""

    kind = "DummyVectorEnv"

    def _make(self, builders: list[Any]) -> Any:
        import tianshou.env

        vec = getattr(tianshou.env, self.kind)(builders, **self._options(len(builders)))
        vec.reset()
        return vec

    def _options(self, slots: int) -> dict[str, Any]:
        return {}

    def _step(self, action: Any) -> None:
        _, _, terminated, truncated, _ = self.vec.step(action)
        ended = np.flatnonzero(terminated | truncated)
        if len(ended):
            self.vec.reset(ended)


class TianshouSubproc(Tianshou):
    kind = "SubprocVectorEnv"


class TianshouShmem(Tianshou):
    kind = "ShmemVectorEnv"


class TianshouAsync(Tianshou):
    """Its asynchronous mode: `step` comes back as soon as `wait_num` envs are done."""

    kind = "ShmemVectorEnv"

    def _options(self, slots: int) -> dict[str, Any]:
        return {"wait_num": max(1, slots // 8)}

    def run(self, seconds: float) -> tuple[int, float]:
        vec, actions = self.vec, self._actions
        ids = np.arange(self.slots)
        steps = turn = 0
        start = now()
        end = start + seconds
        while True:
            _, _, terminated, truncated, infos = vec.step(actions[turn % len(actions)][ids], ids)
            ids = np.array([info["env_id"] for info in infos])
            took = now() - start
            steps += len(ids)
            if start + took >= end:
                break
            turn += 1
            ended = ids[terminated | truncated]
            if len(ended):
                vec.reset(ended)
        while vec.waiting_id:  # what is in flight is received after the clock has stopped
            vec.step(None, [])
        return steps, took


class TorchRl(Vectorised):
    kind = "SerialEnv"

    def _make(self, builders: list[Any]) -> Any:
        import torch
        import torchrl.envs

        def wrapped(builder: Any) -> Any:
            return lambda: torchrl.envs.GymWrapper(builder(), categorical_action_encoding=True)

        options = {"mp_start_method": "fork"} if self.kind == "ParallelEnv" else {}
        vec = getattr(torchrl.envs, self.kind)(len(builders), [wrapped(one) for one in builders], **options)
        self._td = vec.reset()
        self._actions = [torch.as_tensor(batch) for batch in self._actions]
        return vec

    def _step(self, action: Any) -> None:
        self._td["action"] = action
        _, self._td = self.vec.step_and_maybe_reset(self._td)


class TorchRlParallel(TorchRl):
    kind = "ParallelEnv"


#: name -> (class, package it needs, does it start a process per env)
PEERS: dict[str, tuple[type[Vectorised], str, bool]] = {
    "gymnasium Sync": (GymSync, "gymnasium", False),
    "gymnasium Sync (copy)": (GymSyncCopying, "gymnasium", False),
    "gymnasium Async": (GymAsync, "gymnasium", True),
    "SB3 Dummy": (Sb3Dummy, "stable_baselines3", False),
    "SB3 Subproc (fork)": (Sb3Subproc, "stable_baselines3", True),
    "Tianshou Dummy": (Tianshou, "tianshou", False),
    "Tianshou Subproc": (TianshouSubproc, "tianshou", True),
    "Tianshou Shmem": (TianshouShmem, "tianshou", True),
    "Tianshou async": (TianshouAsync, "tianshou", True),
    "TorchRL Serial": (TorchRl, "torchrl", False),
    "TorchRL Parallel": (TorchRlParallel, "torchrl", True),
}
