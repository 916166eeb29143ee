"""How a session is opened: wait in the queue, try a server, and count it as open only when it has answered."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from envfleet import errors
from envfleet.remote import wire
from envfleet.remote.address import Endpoint
from envfleet.remote.client_config import ClientConfig, ClientStats
from envfleet.remote.exact_protocol import BadFrame, Closed, Message, Unsolicited
from envfleet.remote.session_queue import CapacityTable, Waiter

_log = logging.getLogger("envfleet.remote")


class Opener:
    """Opens sessions for one client, wherever there is room."""

    def __init__(self, endpoints: Mapping[str, Endpoint], config: ClientConfig, table: CapacityTable, stats: ClientStats) -> None:
        self._endpoints, self._config, self._table, self._stats = endpoints, config, table, stats

    async def open(self) -> tuple[Any, str, Message]:
        """A session: its Link, its server, and the answer to its first `state`."""
        woken = asyncio.Event()
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set)
        waiter = self._table.enter(tuple(self._endpoints), wake)
        started = time.monotonic()
        last: errors.CapacityReached | None = None
        try:
            while True:
                choice = self._table.choose(waiter)
                if isinstance(choice, str):
                    found = await self._try(waiter, choice)
                    if isinstance(found, tuple):
                        return found
                    last = found or last
                    continue
                self._give_up(waiter, time.monotonic() - started, last)
                woken.clear()
                try:
                    await asyncio.wait_for(woken.wait(), choice)
                except TimeoutError:
                    pass  # not woken: look at the table again
        finally:
            self._table.leave(waiter)

    def _give_up(self, waiter: Waiter, waited: float, last: errors.CapacityReached | None) -> None:
        """Raise if waiting longer is useless, or the time is over."""
        down = self._table.all_down(waiter.urls)
        if down and waited >= self._config.down_timeout_s:
            reasons = "; ".join(waiter.failures.get(url, "down") for url in waiter.urls)
            raise errors.ConnectFailed(", ".join(waiter.urls), reasons)
        if down and self._table.is_new_outage(waiter.urls):
            wait_s = self._config.down_timeout_s
            _log.warning("no server answers at %s: waiting up to %g s for one", ", ".join(waiter.urls), wait_s)
        if not down and waited >= self._config.capacity_timeout_s:
            active, most = (last.active, last.max) if last else (None, None)
            raise errors.CapacityReached(", ".join(waiter.urls), active, most, round(waited, 3))

    async def _try(self, waiter: Waiter, url: str) -> tuple[Any, str, Message] | errors.CapacityReached | None:
        """One try at one server. Connected does not mean served: only an answer to a probe does."""
        from envfleet.remote.link import open_link

        link = None
        try:
            link = await open_link(self._endpoints[url], self._config)
            began = time.perf_counter()
            try:
                first = await link.ask(link.frame("state"), self._config.connect_timeout_s)
                learnt = self._table.learnt(url)
                learnt["round_trip_s"] = min(learnt.get("round_trip_s", math.inf), time.perf_counter() - began)
            except Closed:
                first = link.early() or Message("error", {"message": "closed at once", "code": "SESSION_ERROR"})
            except Unsolicited as refusal:
                first = refusal.message
            failure = wire.error_in(first.data, url) if first.kind == "error" else None
            if isinstance(failure, errors.CapacityReached):
                raise failure
            if isinstance(failure, errors.SessionRefused):
                raise errors.ConnectFailed(url, str(failure))
            if link.is_exact and (first.kind != "state" or not isinstance(first.data, dict)):
                raise BadFrame(f"{first.kind[:40]!r} is no answer to state")
            # Any other answer, an environment without a usable state included, means there is a session.
            self._table.opened(waiter)
            self._stats.connects += 1
            opened, link = link, None
            return opened, url, first
        except errors.CapacityReached as full:
            self._stats.refusals += 1
            self._table.refused(waiter)
            return full
        except errors.Unauthorized:
            raise
        except (errors.ConnectFailed, TimeoutError, BadFrame) as error:
            self._table.failed(waiter, getattr(error, "why", str(error)) or "no answer to the first message")
            return None
        finally:
            if link is not None:
                link.abort()
