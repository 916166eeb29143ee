"""Interrupts at random moments: SIGINT, or a SIGALRM handler that raises an exception of its own."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from typing import Any


class Alarm(Exception):
    """What the SIGALRM handler raises."""


class AlarmBase(BaseException):
    """The same, as no Exception."""


INTERRUPTS = (KeyboardInterrupt, Alarm, AlarmBase)


class Interrupter:
    """`call(function)` lets an interrupt happen somewhere inside."""

    def __init__(self, rng: random.Random, kinds: tuple[str, ...] = ("int", "alarm", "base")) -> None:
        self.rng, self.kinds = rng, kinds
        self.count = 0
        self._armed = ""
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.signal(signal.SIGINT, self._on_int)

    def _on_alarm(self, *args: Any) -> None:
        armed = self._armed
        if armed == "int":
            os.kill(os.getpid(), signal.SIGINT)
        elif armed:
            self._armed = ""
            self.count += 1
            raise Alarm if armed == "alarm" else AlarmBase

    def _on_int(self, *args: Any) -> None:
        if self._armed:
            self._armed = ""
            self.count += 1
            raise KeyboardInterrupt

    def call(self, function: Callable[[], Any], longest_s: float) -> Any:
        """Call a function that may be interrupted after up to so long."""
        # Mostly early, where handing over and taking back happen; sometimes late.
        delay_s = 2e-5 + longest_s * self.rng.random() ** 3
        try:
            self._armed = self.rng.choice(self.kinds)
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            return function()
        finally:
            self._armed = ""
            signal.setitimer(signal.ITIMER_REAL, 0)
