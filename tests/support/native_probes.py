"""Native twins of the probe environments: a library that is built when a test first needs it."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from envfleet.native.build_library import build_library
from envfleet.native.native_env import NativeEnv

#: How a `Faulty` fails.
HOW = {"raise": 0, "number": 1, "segv": 2, "hang": 3, "long": 4}
#: Long enough that a batch of a few slots is shared out to threads.
BUSY_US = 12


@functools.cache
def library() -> str:
    """The path of the library, with the sanitizers in it where the compiled core has them (`make sanitize`)."""
    folder = tempfile.mkdtemp(prefix="envfleet-probes-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    kind = "sanitize" if os.environ.get("ENVFLEET_BUILD") == "sanitize" else "fast"
    return str(build_library(Path(__file__).parent / "native_probes.cpp", Path(folder) / "probes.so", kind)[0])


class NativeProbe(NativeEnv):
    """A twin: the attributes of the Python class, over the numbers of the state."""

    def encode_task(self, task: Any) -> Any:
        """Tests give all kinds of tasks."""
        return float(task) if isinstance(task, (int, float)) else 0.0

    @property
    def count(self) -> int:
        return int(self.state_view[:8].view(np.int64)[0])

    @property
    def limit(self) -> int:
        return int(self.state_view[8:16].view(np.int64)[0])

    @limit.setter
    def limit(self, value: int) -> None:
        self.state_view[8:16].view(np.int64)[0] = value

    def render(self) -> Any:
        return np.full((16, 16, 3), self.count % 256, np.uint8)


class NativeCounting(NativeProbe):
    """`envfleet.envs.probe.Counting`."""

    def __init__(self, limit: int = 5, reuse: bool = False, render_mode: str | None = None, busy_us: int = BUSY_US) -> None:
        super().__init__(library(), "Counting", render_mode, limit=limit, busy_us=busy_us)

    @property
    def in_step(self) -> bool:
        return bool(self.state_view[24:32].view(np.int64)[0])


class NativeTasked(NativeProbe):
    """`envfleet.envs.probe.Tasked`, without infos."""

    def __init__(self, busy_us: int = BUSY_US) -> None:
        super().__init__(library(), "Tasked", busy_us=busy_us)


class NativeFaulty(NativeProbe):
    """`envfleet.envs.probe.Faulty`, for faults in reset and step."""

    def __init__(self, phase: str = "step", how: str = "raise", at: int = 3, limit: int = 10, busy_us: int = BUSY_US) -> None:
        chosen = {"phase": ("reset", "step").index(phase), "how": HOW[how], "at": at, "limit": limit, "busy_us": busy_us}
        super().__init__(library(), "Faulty", **chosen)


def probe(name: str, **options: Any) -> functools.partial[NativeEnv]:
    """A factory of one of the other environments of the library."""
    return functools.partial(NativeEnv, library(), name, **options)
