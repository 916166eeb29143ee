"""remote: a slot is a session with an OpenEnv server; all of them on one event loop in a thread of its own.

The slot life is the one of every backend; here its reset and step are WebSocket calls. A pause of the caller never
stops the loop, so keep-alives continue. A call past its deadline is cancelled, its session dropped, and the slot
rebuilt, on any server with a free session.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import Any

from envfleet.core.construct import is_remote
from envfleet.errors import BadArgument, CapacityReached, ConnectFailed
from envfleet.faults.failure import Failure, Loss
from envfleet.remote.address import shared_schema
from envfleet.remote.client import AsyncEnvClient
from envfleet.remote.loop_backend import RenewingBackend
from envfleet.remote.result import StepResult
from envfleet.remote.session_queue import CapacityTable
from envfleet.remote.space_views import VIEW_OPTIONS, SessionView


class RemoteEnv(SessionView):
    """A session as an environment with `async def reset` and `step`, for the `remote` backend.

    The options of its factory are those of OpenEnvGymnasiumWrapper, with the modes "auto" by default, and the client's.
    """

    def __init__(self, factory: RemoteFactory) -> None:
        self.render_mode = None
        self._set_views(factory.schema, factory.view)
        self.client = AsyncEnvClient(factory.urls, **factory.client)

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None, task: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode. A task that is a mapping becomes reset arguments; any other is sent as `task`."""
        kwargs = dict(options or {})
        if task is not None:
            kwargs.update(task if isinstance(task, Mapping) else {"task": task})
        if seed is not None:
            kwargs["seed"] = seed
        result = await self.client.reset(**kwargs)
        self._steps = 0
        if result.done:
            raise self.client.refuse("an episode that is over at its reset")
        return self._see(result)

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        """Act on the server."""
        result = await self.client.step(self._act.payload(action))
        reward, is_cut = self._count_step(result)
        obs, info = self._see(result)
        if is_cut:
            await self.client.confirm()
        return obs, reward, result.terminated, result.truncated or is_cut, info

    def _see(self, result: StepResult) -> tuple[Any, dict[str, Any]]:
        obs, text = self._read(result, self._observe.needs_text)
        info = {key: value for key, value in result.metadata.items() if result.ends is not None or key != "truncated"}
        if text:
            info["text"] = text
        return obs, info

    async def close(self) -> None:  # type: ignore[override]
        """End the session with a closing handshake."""
        await self.client.close()

    def drop(self) -> None:
        """End the session at once, in the middle of whatever it is doing."""
        self.client._drop()


@dataclasses.dataclass(frozen=True)
class RemoteFactory:
    """Builds the env of a slot: a session with one of the servers, opened at its first reset."""

    urls: tuple[str, ...]
    schema: Mapping[str, Any] = dataclasses.field(repr=False)
    view: Mapping[str, Any] = dataclasses.field(repr=False)  # every one of VIEW_OPTIONS
    client: Mapping[str, Any] = dataclasses.field(repr=False)  # those of ClientConfig

    def __call__(self) -> RemoteEnv:
        """Build one env."""
        return RemoteEnv(self)


def remote_factory(env: Any, env_kwargs: Mapping[str, Any] | None = None) -> RemoteFactory:
    """The factory of every slot, from addresses and the options of `RemoteEnv`.

    The spaces are asked for once, here, not by every slot.
    """
    if isinstance(env, Mapping):
        env_kwargs = {**{key: value for key, value in env.items() if key != "env_url"}, **(env_kwargs or {})}
        env = env["env_url"]
    urls = (env,) if isinstance(env, str) else tuple(env)
    if not is_remote(urls):
        raise BadArgument("a remote fleet needs addresses like http://host:8000")
    client = dict(env_kwargs or {})
    schema = client.pop("schema", None)
    view = {name: client.pop(name, default) for name, default in VIEW_OPTIONS.items()}
    return RemoteFactory(urls, shared_schema(urls, client) if schema is None else schema, view, client)


class RemoteBackend(RenewingBackend):
    """Slots as sessions."""

    name = "remote"

    def _discard(self, env: RemoteEnv) -> None:
        self._loop.call_soon_threadsafe(env.drop)

    def runnable(self) -> list[int] | None:
        """Slots that have a session, and as many more as the servers have free: asks them. One at least, to wait."""
        factory = self.recipe.factories[0]
        if not isinstance(factory, RemoteFactory):
            return None
        lives = [life for life in self.lives if life.env is not None]
        connected = [life.slot for life in lives if life.env.client.connected]
        waiting = [life.slot for life in self.lives if life.slot not in connected]
        if not waiting:
            return None
        asking = asyncio.run_coroutine_threadsafe(_count_sessions(factory.urls, len(waiting), 1.0, factory.client), self._loop)
        try:
            found = asking.result()
        except CapacityReached:
            found = 0 if connected else 1
        except ConnectFailed:
            return None  # they may come back; the slots have deadlines of their own
        return sorted(connected + waiting[:found])

    async def _close_all(self, problems: list[tuple[int, Failure | Loss]], timeout_s: float) -> None:
        # All at the same time: one server that no longer answers must not use up the time of the others.
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


def count_sessions(urls: Any, wanted: int, timeout_s: float = 1.0, **options: Any) -> int:
    """How many sessions these servers give right now, up to `wanted`: opens them and lets them go again.

    A fleet that is stepped as a whole needs as many sessions as slots, and a server shows its limit only by refusing.
    Raises CapacityReached or ConnectFailed when there is not even one.

    Example:
        >>> def as_many_as_there_are(url):
        ...     return envfleet.make(url, num_envs=count_sessions(url, 64))
    """
    return asyncio.run(_count_sessions(urls, wanted, timeout_s, options))


async def _count_sessions(urls: Any, wanted: int, timeout_s: float, options: Mapping[str, Any]) -> int:
    # A table of its own: what is learnt from asking for too many must not slow down later clients.
    mine = {**options, "capacity": CapacityTable(), "capacity_timeout_s": timeout_s}
    clients = [AsyncEnvClient(urls, **mine) for _ in range(wanted)]
    results = await asyncio.gather(*(client._open() for client in clients), return_exceptions=True)
    await asyncio.gather(*(client.close() for client in clients))
    failures = [result for result in results if isinstance(result, BaseException)]
    if len(failures) == wanted:
        raise failures[0]
    return wanted - len(failures)
