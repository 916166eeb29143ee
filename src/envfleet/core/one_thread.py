"""One thread at a time drives a fleet: find out who is in a call of it.

Calls take no lock, which would cost every step. The stacks of the threads say it, and they are looked at only where something is odd:
a call begins while another has not ended (which may have been interrupted), or the fleet is closed.
"""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

#: Methods of `Fleet` that every call is in while it may change slots.
_CALLS = frozenset({"_do", "step", "send", "recv"})


def other_caller(fleet: object) -> str | None:
    """The name of another thread that is in a call of this fleet, if there is one. A call that is over and closes the fleet is none."""
    here = threading.get_ident()
    for ident, top in sys._current_frames().items():
        if ident != here and _innermost(top, fleet, _CALLS | {"_end"}) in _CALLS:
            return next((thread.name for thread in threading.enumerate() if thread.ident == ident), str(ident))
    return None


def interrupts_call(fleet: object) -> bool:
    """Whether the call that asks was made by a signal handler (or a finalizer) in the middle of another call, or of a `close`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_locals.get("self") is fleet:  # the call that asks, and what it came through
        frame = frame.f_back
    return _innermost(frame, fleet, _CALLS | {"close", "_end"}) is not None


def wait_for_callers(fleet: object, timeout_s: float) -> None:
    """Wait until no other thread is in a call of this fleet, or the time is over."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and other_caller(fleet):
        time.sleep(0.002)  # a call that waits looks every few milliseconds whether the fleet is closed


def _innermost(frame: FrameType | None, fleet: object, methods: frozenset[str]) -> str | None:
    """Which of these methods of the fleet a stack goes through last."""
    while frame is not None:
        if frame.f_code.co_name in methods and frame.f_locals.get("self") is fleet:
            return frame.f_code.co_name
        frame = frame.f_back
    return None
