"""Environments that isolate one ability or one way to fail, for tests of fleets, backends and wrappers.

Each is a few lines of known arithmetic, so a test can say what every step must give.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Counting(gym.Env[Any, Any]):
    """Observation: the step number. Reward 1. Truncates after `limit` steps.

    With `reuse=True` it returns the same array every time, as some simulators do.

    Example:
        >>> env = Counting(limit=2)
        >>> env.reset()[0].tolist(), env.step(0)[0].tolist()
        ([0.0], [1.0])
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  # Gymnasium declares it so

    def __init__(self, limit: int = 5, reuse: bool = False, render_mode: str | None = None) -> None:
        self.limit = limit
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0.0, 1e6, (1,), np.float64)
        self.action_space = spaces.Discrete(2)
        self._buffer = np.zeros(1) if reuse else None
        self.count = 0

    def _obs(self) -> Any:
        if self._buffer is None:
            return np.array([float(self.count)])
        self._buffer[0] = self.count
        return self._buffer

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Back to 0."""
        super().reset(seed=seed)
        self.count = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        """One further."""
        self.count += 1
        return self._obs(), 1.0, False, self.count >= self.limit, {}

    def render(self) -> Any:
        """A picture whose brightness is the step number."""
        return np.full((16, 16, 3), self.count % 256, np.uint8)


class Tasked(Counting):
    """Reports the task it runs in every observation and info; episodes last 1 to 4 steps, drawn by its own generator.

    Example:
        >>> env = Tasked()
        >>> env.reset(options={"task": 7})[0].tolist()
        [7.0]
    """

    def __init__(self) -> None:
        super().__init__()
        self.task: Any = -1

    def _obs(self) -> Any:
        return np.array([float(self.task)])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Take the task from the options; none given means -1."""
        super().reset(seed=seed)
        self.task = (options or {}).get("task", -1)
        self.limit = int(self.np_random.integers(1, 5))
        return self._obs(), {"task": self.task}

    def step(self, action: Any) -> Any:
        """One further."""
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"task": self.task}


class Mixed(gym.Env[Any, Any]):
    """Dict observation with columns of several dtypes and a nested tuple; drawn from its own generator.

    Example:
        >>> sorted(Mixed().reset(seed=0)[0])
        ['image', 'pair', 'position']
    """

    def __init__(self, limit: int = 7) -> None:
        self.limit = limit
        self.observation_space = spaces.Dict(
            position=spaces.Box(-1.0, 1.0, (3,), np.float32),
            image=spaces.Box(0, 255, (4, 4), np.uint8),
            pair=spaces.Tuple((spaces.Discrete(5), spaces.MultiBinary(3))),
        )
        self.action_space = spaces.Dict(move=spaces.Discrete(3), force=spaces.Box(-1.0, 1.0, (2,), np.float32))
        self.count = 0

    def _obs(self) -> Any:
        rng = self.np_random
        return {
            "position": rng.uniform(-1, 1, 3).astype(np.float32),
            "image": rng.integers(0, 256, (4, 4), dtype=np.uint8),
            "pair": (int(rng.integers(5)), rng.integers(0, 2, 3).astype(np.int8)),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """A new draw."""
        super().reset(seed=seed)
        self.count = 0
        return self._obs(), {"first": True, "options": len(options or {})}

    def step(self, action: Any) -> Any:
        """Another draw; the reward is the action's sum."""
        self.count += 1
        reward = float(action["move"]) + float(np.sum(action["force"]))
        ended = self.count >= self.limit
        return self._obs(), reward, ended and self.count % 2 == 0, ended, {"count": self.count, "nested": {"a": 1.5}}


class Faulty(Counting):
    """Fails on purpose: in `phase` (init, reset, step, render, close), `how`, at step `at` of every episode or the first.

    `how`: "raise", "exit" (os._exit), "segv", "kill" (SIGKILL), "hang", "unpicklable", "bad" (a malformed result).
    `once_file`: a path; the fault happens only while it does not exist, and creates it (so a rebuilt env is healthy).

    Example:
        >>> env = Faulty("step", "raise", at=1)
        >>> env.reset()[0].tolist()
        [0.0]
        >>> env.step(0)
        Traceback (most recent call last):
        ...
        RuntimeError: planted fault in step
    """

    def __init__(
        self, phase: str = "step", how: str = "raise", at: int = 3, limit: int = 10, once_file: str | None = None
    ) -> None:
        super().__init__(limit)
        self.phase, self.how, self.at, self.once_file = phase, how, at, once_file
        self._maybe("init")

    def _maybe(self, phase: str) -> Any:
        if phase != self.phase or (phase == "step" and self.count != self.at):
            return None
        if self.once_file is not None:
            if os.path.exists(self.once_file):
                return None
            with open(self.once_file, "w") as file:
                file.write("done")
        return fail_now(self.how, phase)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Reset, or fail."""
        obs, info = super().reset(seed=seed, options=options)
        planted = self._maybe("reset")
        return (obs, {"bad": planted}) if planted is not None else (obs, info)

    def step(self, action: Any) -> Any:
        """Step, or fail."""
        result = super().step(action)
        planted = self._maybe("step")
        if planted == "bad":
            return result[:4]
        return (*result[:4], {"bad": planted}) if planted is not None else result

    def render(self) -> Any:
        """Render, or fail."""
        planted = self._maybe("render")
        return super().render() if planted is None else planted

    def close(self) -> None:
        """Close, or fail."""
        self._maybe("close")


def fail_now(how: str, phase: str) -> Any:
    """Fail in one of the ways real environments do; gives back what the env should return when it still returns."""
    if how == "raise":
        raise RuntimeError(f"planted fault in {phase}")
    if how == "exit":
        os._exit(7)
    if how == "segv":
        faulthandler.disable()  # it is planned: no stack on the terminal
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how in ("hang", "segv", "kill"):
        threading.Event().wait()
    if how == "unpicklable":
        return threading.Lock()
    return how


class Launcher(Counting):
    """Starts a process of its own (`sleep 1000`), as simulators do; `child` is its pid."""

    def __init__(self, detach: bool = False) -> None:
        super().__init__(limit=100)
        self.child = subprocess.Popen(["sleep", "1000"], start_new_session=detach).pid


class Waiting(Counting):
    """Sleeps `step_s` in every step, and `slow_s` in the share `slow` of them (drawn by its own generator)."""

    def __init__(self, step_s: float = 0.001, slow_s: float = 0.05, slow: float = 0.0, limit: int = 100) -> None:
        super().__init__(limit)
        self.step_s, self.slow_s, self.slow = step_s, slow_s, slow

    def step(self, action: Any) -> Any:
        """Wait, then one further."""
        time.sleep(self.slow_s if self.slow and self.np_random.random() < self.slow else self.step_s)
        return super().step(action)
