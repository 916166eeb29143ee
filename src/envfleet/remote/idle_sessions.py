"""Which sessions are idle, and which of them makes room when a client waits for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Live:
    """An open session as others see it."""

    in_episode: Callable[[], bool]
    task: asyncio.Task[None] | None = None
    used_at: float = 0.0
    busy: bool = False
    reason: str | None = None  # why it was ended
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, reason: str) -> None:
        """Interrupt it; its own task says goodbye."""
        if self.reason is None and self.task is not None:
            self.reason = reason
            self.task.cancel()


@dataclass(frozen=True)
class IdleLimits:
    """How long a session may say nothing. `always`: in any case. While others wait: `waited_for` with no episode running,
    `in_episode` in the middle of one."""

    always: float
    waited_for: float
    in_episode: float

    def while_waited_for(self, in_episode: bool) -> float:
        """The limit that holds while a client waits for a session."""
        return min(self.in_episode if in_episode else self.waited_for, self.always)


class Sessions:
    """The open sessions of a server. All methods belong to its event loop."""

    def __init__(self, limits: IdleLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._live: set[Live] = set()
        self.handed_over = 0

    def __len__(self) -> int:
        return len(self._live)

    def enter(self, in_episode: Callable[[], bool]) -> Live:
        """A session begins, in the current task."""
        live = Live(in_episode, asyncio.current_task(), self._clock())
        self._live.add(live)
        return live

    def used(self, live: Live) -> None:
        """It has just answered a request."""
        live.used_at, live.busy = self._clock(), False

    def leave(self, live: Live) -> None:
        """It is over."""
        self._live.discard(live)

    def make_room(self) -> Live | None:
        """End the session that has been idle longest beyond its limit, for a client that waits; None if there is none."""
        now = self._clock()
        best: tuple[float, Live] | None = None
        for live in self._live:
            silent_s = now - live.used_at
            over_s = silent_s - self._limits.while_waited_for(live.in_episode())
            if not live.busy and live.reason is None and over_s >= 0 and (best is None or over_s > best[0]):
                best = (over_s, live)
        if best is None:
            return None
        self.handed_over += 1
        best[1].end(f"no message for {now - best[1].used_at:.3g} s while others wait for a session")
        return best[1]

    async def reap(self) -> None:
        """End sessions whose client says nothing for too long; half-open sockets are ended by the keep-alive."""
        while True:
            await asyncio.sleep(min(1.0, self._limits.always / 4))
            oldest = self._clock() - self._limits.always
            for live in list(self._live):
                if not live.busy and live.used_at < oldest:
                    live.end(f"no message for {self._limits.always:g} s")
