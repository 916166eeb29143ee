"""The env of a `remote` slot: coroutines over one session, with spaces from the server's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envfleet.errors import ConnectFailed
from envfleet.remote.address import endpoints_of, get_json
from envfleet.remote.client import AsyncEnvClient
from envfleet.remote.client_config import ClientConfig
from envfleet.remote.result import StepResult
from envfleet.remote.space_views import VIEW_OPTIONS, SessionView


class RemoteEnv(SessionView):
    """A session as an environment with `async def reset` and `step`, for the `remote` backend.

    Args:
        urls: the servers; a session opens wherever there is room.
        schema: the servers' `/schema`, if it is known already.
        options: `observation_mode`, `action_mode`, `actions`, `text_length`, `max_steps` and `null_reward` as in
            OpenEnvGymnasiumWrapper, with the modes "auto" by default; all others are client options, see ClientConfig.
    """

    def __init__(self, urls: Sequence[str], *, schema: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.render_mode = None
        schema = schema if schema is not None else shared_schema(urls, options)
        self._set_views(schema, {**VIEW_OPTIONS, **options})
        self.client = AsyncEnvClient(urls, **client_options(options))

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
        """End the session in good order."""
        await self.client.close()

    def drop(self) -> None:
        """End the session at once, in the middle of whatever it is doing."""
        self.client._drop()


def client_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are the client's, not the view's."""
    return {key: value for key, value in options.items() if key not in VIEW_OPTIONS and key != "schema"}


def shared_schema(urls: Sequence[str], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `/schema` of the first server that answers."""
    config = ClientConfig.of(client_options(options))
    failures = []
    for endpoint in endpoints_of(urls, config).values():
        try:
            found = get_json(endpoint, "/schema", config)
            return found if isinstance(found, Mapping) else {}
        except ConnectFailed as error:
            failures.append(f"{endpoint.public}: {error.why}")
    raise ConnectFailed(", ".join(urls), "; ".join(failures))
