"""What an env may return from `step`: odd results that are accepted, and wrong ones with the words of their fault."""

from __future__ import annotations

from typing import Any

import numpy as np

from envfleet.envs.probe import Counting


class Odd(Counting):
    """Returns one odd thing at the fifth step (or reset, for `phase`), otherwise behaves."""

    def __init__(self, change: Any, phase: str = "step") -> None:
        super().__init__(limit=100)
        self.change, self.phase = change, phase

    def step(self, action: Any) -> Any:
        result = super().step(action)
        return self.change(*result) if self.phase == "step" and self.count == 5 else result


READ_ONLY = np.array([5.0])
READ_ONLY.flags.writeable = False

ACCEPTED = {
    "list instead of tuple": lambda o, r, t, u, i: [o, r, t, u, i],
    "numpy reward": lambda o, r, t, u, i: (o, np.float32(0.5), t, u, i),
    "numpy int reward": lambda o, r, t, u, i: (o, np.int16(3), t, u, i),
    "0-d reward": lambda o, r, t, u, i: (o, np.array(0.5), t, u, i),
    "1-element reward": lambda o, r, t, u, i: (o, np.array([0.5]), t, u, i),
    "bool reward": lambda o, r, t, u, i: (o, True, t, u, i),
    "int flags": lambda o, r, t, u, i: (o, r, 0, 1, i),
    "numpy flags": lambda o, r, t, u, i: (o, r, np.bool_(False), np.bool_(True), i),
    "0-d flags": lambda o, r, t, u, i: (o, r, np.array(False), np.array(True), i),
    "float32 obs": lambda o, r, t, u, i: (o.astype(np.float32), r, t, u, i),
    "big-endian obs": lambda o, r, t, u, i: (o.astype(">f8"), r, t, u, i),
    "list obs": lambda o, r, t, u, i: ([5.0], r, t, u, i),
    "read-only obs": lambda o, r, t, u, i: (READ_ONLY, r, t, u, i),
    "strided obs": lambda o, r, t, u, i: (np.arange(10.0)[5:6:2], r, t, u, i),
    "subclass obs": lambda o, r, t, u, i: (o.view(np.matrix).A1.view(np.recarray), r, t, u, i),
    "nan obs": lambda o, r, t, u, i: (np.array([np.nan]), r, t, u, i),
    "nan reward": lambda o, r, t, u, i: (o, float("nan"), t, u, i),
    "inf reward": lambda o, r, t, u, i: (o, float("inf"), t, u, i),
    "info": lambda o, r, t, u, i: (o, r, t, u, {"x": np.arange(3), "nested": {"y": [1, 2]}}),
    "big info": lambda o, r, t, u, i: (o, r, t, u, {"x": np.arange(3000)}),
}

REFUSED = {
    "four values": (lambda o, r, t, u, i: (o, r, t, i), "returned 4 values"),
    "six values": (lambda o, r, t, u, i: (o, r, t, u, i, 1), "returned 6 values"),
    "None": (lambda o, r, t, u, i: None, "returned NoneType"),
    "wrong shape": (lambda o, r, t, u, i: (np.zeros(2), r, t, u, i), "shape (2,)"),
    "wrong rank": (lambda o, r, t, u, i: (np.zeros((1, 1)), r, t, u, i), "shape (1, 1)"),
    "no array": (lambda o, r, t, u, i: (None, r, t, u, i), "shape ()"),
    "text obs": (lambda o, r, t, u, i: (np.array(["a"]), r, t, u, i), "dtype <U1"),
    "complex obs": (lambda o, r, t, u, i: (np.array([1j]), r, t, u, i), "dtype complex128"),
    "text reward": (lambda o, r, t, u, i: (o, "much", t, u, i), "reward is 'much'"),
    "None reward": (lambda o, r, t, u, i: (o, None, t, u, i), "reward is None"),
    "two rewards": (lambda o, r, t, u, i: (o, np.zeros(2), t, u, i), "reward is array"),
    "flag array": (lambda o, r, t, u, i: (o, r, np.zeros(2, bool), u, i), "ambiguous"),
    "info list": (lambda o, r, t, u, i: (o, r, t, u, []), "info is list"),
    "info None": (lambda o, r, t, u, i: (o, r, t, u, None), "info is NoneType"),
    "reused info subclass": (lambda o, r, t, u, i: (o, r, t, u, 3), "info is int"),
}
