"""A worker that shares no memory with the parent tells by messages what it is doing: a thread beside the environments' sends it.

The parent's supervisor reads the same three numbers as in shared memory (`Pulse`). A thread that cannot run (the process was
stopped, the machine is silent, an environment keeps the interpreter lock) sends nothing, and the last numbers age.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import Any

import numpy as np

from envfleet.slots.slot_life import PHASES
from envfleet.workers.channel import Channel, Closed
from envfleet.workers.protocol import pack_pulse

_IDLE = (-1, PHASES.index("idle"), 0)


class Beats:
    """Looks every period: sends a PULSE frame for a call that the last look did not see, and one when the worker is idle again.

    `stack_after_s`: a call that lasts longer is sent once more, with the Python stack of the thread `watched`.
    """

    def __init__(self, channel: Channel, words: np.ndarray[Any, Any], period_s: float, stack_after_s: float) -> None:
        self._channel, self._words = channel, words
        self._period_s, self._stack_after_s = period_s, stack_after_s
        self._watched = threading.get_ident()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="envfleet-beats", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more frames after this."""
        self._stopping.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        told, told_stack = _IDLE, _IDLE
        try:
            while not self._stopping.wait(self._period_s):
                slot, phase, since = (int(word) for word in self._words[:3])
                now = (slot, phase, since) if slot >= 0 else _IDLE
                elapsed_ns = time.monotonic_ns() - since if slot >= 0 else 0
                is_late = now != _IDLE and elapsed_ns > self._stack_after_s * 1e9 and told_stack != now
                if is_late or now != told:
                    self._channel.send(pack_pulse(now, elapsed_ns, self._stack() if is_late else ""))
                    told, told_stack = now, now if is_late else told_stack
        except Closed:
            return  # the parent is gone: the worker's own loop notices it too

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""
