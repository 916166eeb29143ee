"""An OpenEnv environment as a Gymnasium one, with spaces from the server's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from envfleet.core.arguments import refuse_unknown
from envfleet.errors import BadArgument, SessionInterrupted
from envfleet.remote.address import shared_schema, split_mapping
from envfleet.remote.client_config import ClientOptions
from envfleet.remote.official_clients import ClientLike, as_client
from envfleet.remote.result import StepResult
from envfleet.remote.space_views import SessionView

ObservationMode = Literal["text", "raw_text", "json", "vector", "auto"]
ActionMode = Literal["text", "discrete", "json", "auto"]


class OpenEnvGymnasiumWrapper(SessionView):
    """A `gymnasium.Env` over an OpenEnv client, a server's address, or a mapping with `env_url`.

    Args:
        client: what `as_client` takes: "http://host:8000", a client of ours or an official one; or a mapping with `env_url`
            and any of the other arguments, as RLlib passes it.
        observation_mode: "text": the text as UTF-8 bytes in a Box of uint8, padded with zeros (the string is in
            `info["text"]`); "raw_text": a Text space (text outside its alphabet or length is unchanged); "json": a
            Dict space from the server's schema; "vector": numbers only, the served environment's own Box if it has one,
            else one flat float32 Box; "auto": the served environment's own space, else "json", else "raw_text".
        action_mode: "text": a string for the action's field; "discrete": the schema's enum or integer bounds, or
            `actions`; "json": the space of the schema's action; "auto": the first of these that the schema gives.
        actions: the actions behind the numbers of "discrete": values for the field, or mappings of fields.
        text_length: bytes (or characters) of a text observation and characters of a text action.
        max_steps: truncate episodes after so many steps; the protocol has no limit of its own.
        null_reward: what a reward of null means; official servers send it where an environment gave none, and for NaN.
        schema: JSON schemas to use instead of the server's `/schema`.
        on_interrupt: "raise" SessionInterrupted, or "truncate": the last observation again, reward 0,
            truncated, `info["interrupted"]` says why. The next reset opens a new session either way.
        options: client options (see ClientConfig) when `client` is an address.

    Example:
        >>> from envfleet.remote import EchoClient
        >>> env = OpenEnvGymnasiumWrapper(EchoClient(), observation_mode="raw_text", actions=["yes", "no"],
        ...                               action_mode="discrete")
        >>> _ = env.reset(seed=1)
        >>> env.step(0)[:2]
        ('yes', 0.3)
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012 (the base class has it so)

    def __init__(
        self,
        client: ClientLike,
        observation_mode: ObservationMode = "text",
        action_mode: ActionMode = "text",
        actions: Sequence[Any] | None = None,
        text_length: int = 256,
        *,
        max_steps: int | None = None,
        null_reward: float = 0.0,
        schema: Mapping[str, Any] | None = None,
        on_interrupt: Literal["raise", "truncate"] = "raise",
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        given: dict[str, Any] = {"observation_mode": observation_mode, "action_mode": action_mode, "actions": actions,
                 "text_length": text_length, "max_steps": max_steps, "null_reward": null_reward, "schema": schema,
                 "on_interrupt": on_interrupt, "render_mode": render_mode}  # fmt: skip
        address, merged = split_mapping(client, options)  # RLlib passes all arguments in one mapping
        own = {name: merged.pop(name) for name in given if name in merged}
        refuse_unknown(
            type(self).__name__, set(merged) - set(ClientOptions.__annotations__), [*given, *ClientOptions.__annotations__]
        )
        given |= own
        if given["on_interrupt"] not in ("raise", "truncate"):
            raise BadArgument("on_interrupt is 'raise' or 'truncate'")
        self.client = as_client(address, **merged)
        self.render_mode, self._on_interrupt, schema = given["render_mode"], given["on_interrupt"], given["schema"]
        try:
            self._set_views(schema if schema is not None else _schema_of(self.client), given)
        except BaseException:
            self.client.close()
            raise
        self._last: Any = None
        self._text = ""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; `options` become the keyword arguments of the server's reset."""
        super().reset(seed=seed)
        kwargs = dict(options or {})
        if seed is not None:
            kwargs["seed"] = seed
        result = self.client.reset(**kwargs)
        self._steps = 0
        return self._see(result)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Act on the server."""
        try:
            result = self.client.step(self._act.payload(action))
        except SessionInterrupted as error:
            if self._on_interrupt == "raise" or self._last is None:
                raise
            return self._last, 0.0, False, True, {"interrupted": error.reason, "text": self._text}
        reward, is_cut = self._count_step(result)
        obs, info = self._see(result)
        if is_cut and hasattr(self.client, "confirm"):
            self.client.confirm()
        return obs, reward, result.terminated, result.truncated or is_cut, info

    def render(self) -> str:
        """The text of the last observation."""
        return self._text

    def close(self) -> None:
        """End the session."""
        self.client.close()

    def _see(self, result: StepResult) -> tuple[Any, dict[str, Any]]:
        self._last, self._text = self._read(result, with_text=True)
        return self._last, {**result.metadata, "text": self._text}


def _schema_of(client: Any) -> Mapping[str, Any]:
    """The server's schema; a local client knows its dialect; an official one has only its address."""
    dialect = getattr(client, "dialect", None)
    if dialect is not None:
        return dict(dialect.schemas())
    if callable(getattr(client, "schema", None)):
        found = client.schema()
        return found if isinstance(found, Mapping) else {}
    inner = getattr(client, "_client", client)
    inner = getattr(inner, "async_client", inner)
    url = getattr(inner, "base_url", None) or getattr(inner, "_ws_url", None)
    return shared_schema([url], {}) if isinstance(url, str) else {}
