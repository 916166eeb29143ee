"""remote: a slot is a session with an OpenEnv server; all of them on one event loop in a thread of its own.

The slot life is the one of every backend; here its reset and step are WebSocket calls. A pause of the caller never
stops the loop, so keep-alives go on. A call past its deadline is cancelled, its session dropped, and the slot built
anew, on whichever server has room.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envfleet.backends.aio import AioBackend
from envfleet.core.construct import is_remote
from envfleet.errors import BadArgument, CapacityReached, ConnectFailed
from envfleet.faults.failure import Failure, Loss
from envfleet.multiagent.agent_support import AGENTS
from envfleet.slots.slot_life import SlotLife

if TYPE_CHECKING:
    from envfleet.remote.remote_env import RemoteEnv


class RenewingBackend(AioBackend):
    """aio for envs whose every wait can be cancelled: an abandoned slot is rebuilt, not given up."""

    can_rebuild_abandoned = True

    def kill(self, worker: int) -> str:
        """Cancel the slot's call and put a fresh life in its place: the old one may never write its row again."""
        old = self.lives[worker]
        stack = super().kill(worker)
        env, old.env = old.env, None
        fresh = SlotLife(worker, old.make_env, old.on_end, self._tasks, AGENTS)
        if getattr(self, "slab", None) is not None:
            fresh.attach(self.slab)
        self.lives[worker] = fresh
        if env is not None:
            self._discard(env)
        return stack

    def _discard(self, env: Any) -> None:
        """Let go of an env in the middle of a call, without waiting for it."""


class RemoteBackend(RenewingBackend):
    """Slots as sessions."""

    name = "remote"

    def _discard(self, env: RemoteEnv) -> None:
        self._loop.call_soon_threadsafe(env.drop)

    def runnable(self) -> list[int] | None:
        """Slots that have a session, and as many more as the servers have free: asks them. One at least, to wait."""
        from envfleet.remote.remote_env import client_options

        factory = self.recipe.factories[0]
        if not isinstance(factory, RemoteFactory):
            return None
        lives = [life for life in self.lives if life.env is not None]
        connected = [life.slot for life in lives if life.env.client.connected]
        waiting = [life.slot for life in self.lives if life.slot not in connected]
        if not waiting:
            return None
        asking = asyncio.run_coroutine_threadsafe(
            _count_sessions(factory.urls, len(waiting), 1.0, client_options(factory.options)), self._loop
        )
        try:
            found = asking.result()
        except CapacityReached:
            found = 0 if connected else 1
        except ConnectFailed:
            return None  # they may come back; the slots have deadlines of their own
        return sorted(connected + waiting[:found])

    async def _close_all(self, problems: list[tuple[int, Failure | Loss]], timeout_s: float) -> None:
        # All at once: one server that no longer answers must not use up the time of the others.
        waiting = [task for task in (*self._running.values(), *self._calling.values()) if not task.done()]
        for task in waiting:
            task.cancel()
        envs = [life.env for life in self.lives if life.env is not None and not life.abandoned]
        if waiting:
            await asyncio.wait(waiting, timeout=timeout_s / 4)
        if envs:
            await asyncio.wait([asyncio.ensure_future(env.close()) for env in envs], timeout=timeout_s / 2)
        for env in envs:
            env.drop()
        await super()._close_all(problems, timeout_s)


@dataclasses.dataclass(frozen=True)
class RemoteFactory:
    """Builds the env of a slot: a session with one of the servers, opened at its first reset."""

    urls: tuple[str, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def __call__(self) -> RemoteEnv:
        """Build one env."""
        from envfleet.remote.remote_env import RemoteEnv

        return RemoteEnv(self.urls, **self.options)


def remote_factory(env: Any, env_kwargs: Mapping[str, Any] | None = None) -> RemoteFactory:
    """The factory of every slot, from addresses and the options of `RemoteEnv`.

    The spaces are asked for once, here, not by every slot.
    """
    from envfleet.remote.remote_env import shared_schema

    if isinstance(env, Mapping):
        env_kwargs = {**{key: value for key, value in env.items() if key != "env_url"}, **(env_kwargs or {})}
        env = env["env_url"]
    urls = (env,) if isinstance(env, str) else tuple(env)
    if not is_remote(urls):
        raise BadArgument("a remote fleet needs addresses like http://host:8000")
    options = dict(env_kwargs or {})
    if options.get("schema") is None:
        options["schema"] = shared_schema(urls, options)
    return RemoteFactory(urls, options)


def count_sessions(urls: Any, wanted: int, timeout_s: float = 1.0, **options: Any) -> int:
    """How many sessions these servers give right now, up to `wanted`: opens them and lets them go again.

    A fleet that is stepped as a whole needs as many sessions as slots, and a server tells its limit only by refusing.
    Raises CapacityReached or ConnectFailed when there is not even one.

    Example:
        >>> def as_many_as_there_are(url):
        ...     return envfleet.make(url, num_envs=count_sessions(url, 64))
    """
    return asyncio.run(_count_sessions(urls, wanted, timeout_s, options))


async def _count_sessions(urls: Any, wanted: int, timeout_s: float, options: Mapping[str, Any]) -> int:
    from envfleet.remote.client import AsyncEnvClient
    from envfleet.remote.session_queue import CapacityTable

    # A table of its own: what is learnt from asking for too many must not slow down those who come after.
    mine = {**options, "capacity": CapacityTable(), "capacity_timeout_s": timeout_s}
    clients = [AsyncEnvClient(urls, **mine) for _ in range(wanted)]
    results = await asyncio.gather(*(client._open() for client in clients), return_exceptions=True)
    await asyncio.gather(*(client.close() for client in clients))
    failures = [result for result in results if isinstance(result, BaseException)]
    if len(failures) == wanted:
        raise failures[0]
    return wanted - len(failures)
