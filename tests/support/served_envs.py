"""Environments that misbehave, for servers under test; importable by the server's workers."""

import os
import threading
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Misbehaving(gymnasium.Env):
    """Does what the action says: 0 steps, 1 raises, 2 hangs, 3 kills its process, 4 gives NaN; counts its builds."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Discrete(6)

    def __init__(self):
        self.n = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = 0
        if options and options.get("fail"):
            raise ValueError("asked to fail in reset")
        return np.array([0.0, os.getpid(), id(self) % 1000]), {"options": options or {}, "seed": seed}

    def step(self, action):
        self.n += 1
        if action == 1:
            raise ValueError("asked to raise")
        if action == 2:
            time.sleep(60)
        if action == 3:
            os._exit(7)
        if action == 5:
            time.sleep(0.5)
        value = float("nan") if action == 4 else 1.0
        return np.array([self.n, os.getpid(), value]), value, False, self.n >= 5, {}


class Pixels(gymnasium.Env):
    """Observations of some size, to see how they travel."""

    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Box(-1, 1, (3,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._frame(0), {}

    def step(self, action):
        return self._frame(int(10 * action[0])), float(action.sum()), False, False, {}

    def _frame(self, n):
        return ((np.arange(84 * 84 * 4) + n) % 256).astype(np.uint8).reshape(84, 84, 4)


class Hidden(gymnasium.Env):
    """Keeps something across resets, which the next session must not see."""

    observation_space = spaces.Discrete(1000)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.total = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.total, {}

    def step(self, action):
        self.total += 1
        return self.total, 0.0, False, False, {}


class Homesick(gymnasium.Env):
    """Refuses to be touched by another thread than the one that built it; action 1 takes its time."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def __init__(self):
        self.home = threading.get_ident()

    def _stay(self):
        if threading.get_ident() != self.home:
            raise RuntimeError("another thread")

    def reset(self, *, seed=None, options=None):
        self._stay()
        return 0, {}

    def step(self, action):
        self._stay()
        if action:
            time.sleep(0.02)
        return int(action), float(action), False, False, {}

    def close(self):
        self._stay()


TEXTS = [
    "",
    "plain",
    "日本語のテキスト",
    "ﷺ עברית \u202e",
    "🂡🏳️‍🌈",
    "half \ud800 of it \udfff",
    '\x00\x01\x7f\n\r\t"\\',
    "ü" * 70_000,
]
NUMBERS = [0.0, -0.0, 1.5, float("nan"), float("inf"), float("-inf"), 5e-324, 1.7e308, -1e-40]


class Everything(gymnasium.Env):
    """Gives what JSON lacks: numbers that are not finite, -0.0, text of every kind, every dtype, infos of many types."""

    observation_space = spaces.Dict(
        {
            "f2": spaces.Box(-np.inf, np.inf, (2,), np.float16),
            "f4": spaces.Box(-np.inf, np.inf, (2, 2), np.float32),
            "f8": spaces.Box(-np.inf, np.inf, (), np.float64),
            **{
                name: spaces.Box(np.iinfo(name).min, np.iinfo(name).max, (2,), np.dtype(name).type)
                for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
            },
            "bits": spaces.MultiBinary(3),
            "many": spaces.MultiDiscrete([3, 4]),
            "one": spaces.Discrete(5, start=-2),
            "pair": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (1,), np.float32)]),
            "metadata": spaces.Discrete(2),
            "text": spaces.Text(200_000),
            "some": spaces.Sequence(spaces.Box(-np.inf, np.inf, (2,), np.float32)),
        }
    )
    action_space = spaces.Dict({"say": spaces.Text(100), "push": spaces.Box(-1, 1, (2,), np.float32)})

    def _see(self, said):
        n = self.n
        number = NUMBERS[n % len(NUMBERS)]
        limits = {name: np.iinfo(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")}
        with np.errstate(all="ignore"):
            floats = {
                "f2": np.array([number, -0.0]).astype(np.float16),
                "f4": np.array([[number, -number], [n, 0.1]]).astype(np.float32),
                "f8": np.array(number, np.float64),
                "some": tuple(np.array([number, i]).astype(np.float32) for i in range(n % 3)),
            }
        return {
            **floats,
            **{name: np.array([limit.min, limit.max], name) for name, limit in limits.items()},
            "bits": np.array([n % 2, 1, 0], np.int8),
            "many": np.array([n % 3, 3]),
            "one": n % 5 - 2,
            "pair": (n % 3, np.array([0.5], np.float32)),
            "metadata": n % 2,
            "text": said + TEXTS[n % len(TEXTS)],
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n = int((options or {}).get("start", 0))
        return self._see(""), {"options": options, "none": None}

    def step(self, action):
        self.n += 1
        number = NUMBERS[self.n % len(NUMBERS)]
        info = {
            "number": number, "numbers": NUMBERS, "array": np.array(NUMBERS), "scalar": np.float32(min(number, 1e9)),
            "tuple": (1, (number, None)), "big": 10**5000, "text": TEXTS, "bytes": b"\x00\xff", "keys": {1: "a", (2, 3): "b"},
            "truncated": "mine", "set": {1}, "none": None, "bool": np.bool_(True), "complex": complex(number, -0.0),
        }  # fmt: skip
        end = self.n % 7 == 6
        return self._see(action["say"]), number, end and self.n % 2 == 0, end, info


class Unsendable(gymnasium.Env):
    """Infos that no frame can hold: 0 an object, 1 a list that holds itself, 2 one nested too deep."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        ring, deep = [], []
        ring.append(ring)
        for _ in range(200):
            deep = [deep]
        odd = [object, ring, deep][int(action)]
        return np.ones(1, np.float32), 0.0, False, False, {"odd": odd, "fine": (1,)}
