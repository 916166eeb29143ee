"""Which sessions are idle, and which of them is ended when a client waits for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from envfleet.remote.server_config import ServerConfig


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
        """Cancel its task, which sends the reason to the client."""
        if self.reason is None and self.task is not None:
            self.reason = reason
            self.task.cancel()


class Sessions:
    """The open sessions of a server. All methods belong to its event loop."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._live: set[Live] = set()
        self.handed_over = 0

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
        now, config = self._clock(), self._config

        def over_s(live: Live) -> float:
            limit_s = config.episode_idle_s if live.in_episode() else config.handover_s
            return now - live.used_at - min(limit_s, config.idle_timeout_s)

        idle = [live for live in self._live if not live.busy and live.reason is None and over_s(live) >= 0]
        if not idle:
            return None
        self.handed_over += 1
        longest = max(idle, key=over_s)
        longest.end(f"no message for {now - longest.used_at:.3g} s while others wait for a session")
        return longest

    async def reap(self) -> None:
        """End sessions without a message for too long; half-open sockets are ended by the keep-alive."""
        limit_s = self._config.idle_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            for live in list(self._live):
                if not live.busy and self._clock() - live.used_at > limit_s:
                    live.end(f"no message for {limit_s:g} s")
