"""The env of a `remote` slot: coroutines over one session, with spaces from the server's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from envfleet.errors import BadArgument, ConnectFailed
from envfleet.remote import space_views
from envfleet.remote.address import endpoints_of, get_json
from envfleet.remote.client import AsyncEnvClient
from envfleet.remote.client_config import ClientConfig
from envfleet.remote.result import StepResult

VIEW_OPTIONS = ("observation_mode", "action_mode", "actions", "text_length", "max_steps", "schema", "null_reward")


class RemoteEnv(gymnasium.Env[Any, Any]):
    """A session as an environment with `async def reset` and `step`, for the `remote` backend.

    Args:
        urls: the servers; a session opens wherever there is room.
        observation_mode: as in OpenEnvGymnasiumWrapper, or "auto": the served environment's own space, else what
            the schema describes, else text.
        action_mode: likewise; "auto" takes the own space, else an enum or integer bounds, else text.
        actions: the actions behind the numbers of "discrete".
        text_length: of text observations and actions.
        max_steps: truncate episodes after so many steps.
        null_reward: what a reward of null is: official servers say so where an environment gave none, and for NaN.
        schema: the servers' `/schema`, if it is known already.
        options: client options, see ClientConfig.

    Example:
        >>> async def one_step(url):
        ...     env = RemoteEnv([url])
        ...     await env.reset(seed=1)
        ...     return await env.step(env.action_space.sample())
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        observation_mode: str = "auto",
        action_mode: str = "auto",
        actions: Sequence[Any] | None = None,
        text_length: int = 4096,
        max_steps: int | None = None,
        null_reward: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise BadArgument("max_steps must be at least 1")
        schema = schema if schema is not None else shared_schema(urls, options)
        if actions is not None and action_mode == "auto":
            action_mode = "discrete"
        self._observe = space_views.auto_observation(observation_mode, schema, text_length)
        self._act = space_views.auto_action(action_mode, schema, actions, text_length)
        self.observation_space, self.action_space = self._observe.space, self._act.space
        self.render_mode = None
        self._max_steps, self._null_reward = max_steps, null_reward
        self._steps = 0
        self.client = AsyncEnvClient(urls, **options)

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
        self._steps += 1
        obs, info = self._see(result)
        cut = not result.done and self._max_steps is not None and self._steps >= self._max_steps
        if cut:
            await self.client.confirm()
        reward = self._null_reward if result.reward is None else result.reward
        return obs, reward, result.terminated, result.truncated or cut, info

    def _see(self, result: StepResult) -> tuple[Any, dict[str, Any]]:
        """Observation and info of an answer; one that does not fit the space is ProtocolBroken."""
        is_exact = result.ends is not None
        try:
            text = space_views.text_of(result.observation) if self._observe.needs_text else ""
            obs = self._observe.value(result.observation, text, is_exact)
        except (ValueError, TypeError, LookupError, ArithmeticError) as error:
            raise self.client.refuse(f"an observation that does not fit the schema: {str(error)[:300]}") from None
        info = {key: value for key, value in result.metadata.items() if is_exact or key != "truncated"}
        if text:
            info["text"] = text
        return obs, info

    async def close(self) -> None:  # type: ignore[override]
        """End the session in good order."""
        await self.client.close()

    def drop(self) -> None:
        """End the session at once, in the middle of whatever it is doing."""
        self.client._drop()


def shared_schema(urls: Sequence[str], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `/schema` of the first server that answers."""
    config = ClientConfig.of({key: value for key, value in options.items() if key not in VIEW_OPTIONS})
    failures = []
    for endpoint in endpoints_of(urls, config).values():
        try:
            found = get_json(endpoint, "/schema", config)
            return found if isinstance(found, Mapping) else {}
        except ConnectFailed as error:
            failures.append(f"{endpoint.public}: {error.why}")
    raise ConnectFailed(", ".join(urls), "; ".join(failures))
