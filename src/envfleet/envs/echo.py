"""Echo: returns what it is sent. The smallest environment that still has rewards, ends and latency."""

from __future__ import annotations

import asyncio
import string
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
from gymnasium import spaces

from envfleet.errors import BadArgument

_CHARSET = string.ascii_letters + string.digits + string.punctuation + " "


class Echo(gymnasium.Env[str, str]):
    """Echoes a message; the reward is 0.1 a character; the episode ends after `horizon` messages.

    `info["n"]` counts the steps of the episode. The message "ready" is what a reset says.

    Args:
        horizon: steps in an episode; `reset(options={"horizon": 3})` sets it from then on.
        latency_s: how long a step takes (it sleeps), to stand for a tool, a browser or a network.
        max_length: longer messages are cut.

    Example:
        >>> env = Echo(horizon=2)
        >>> env.reset(seed=0)
        ('ready', {'n': 0})
        >>> env.step("hello")
        ('hello', 0.5, False, False, {'n': 1})
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (the base class has it so)
    openenv: ClassVar[dict[str, Any]] = {"action": "message", "observation": "echoed", "info": ("n",)}

    def __init__(self, horizon: int = 10, latency_s: float = 0.0, max_length: int = 256) -> None:
        if horizon < 1 or latency_s < 0 or max_length < 5:
            raise BadArgument("Echo needs horizon >= 1, latency_s >= 0 and max_length >= 5")
        self.horizon, self.latency_s, self.max_length = horizon, latency_s, max_length
        self.observation_space = spaces.Text(max_length, min_length=0, charset=_CHARSET)
        self.action_space = spaces.Text(max_length, min_length=0, charset=_CHARSET)
        self.render_mode = None
        self._n = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start counting again."""
        super().reset(seed=seed)
        horizon = (options or {}).get("horizon", self.horizon)
        if not isinstance(horizon, int) or horizon < 1:
            raise BadArgument(f"horizon must be an integer >= 1, got {horizon!r}")
        self.horizon, self._n = horizon, 0
        return "ready", {"n": 0}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Echo the message."""
        if self.latency_s:
            time.sleep(self.latency_s)
        return self._echo(action)

    def _echo(self, message: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not isinstance(message, str):
            raise BadArgument(f"Echo's action is a string, got {type(message).__name__}")
        self._n += 1
        echoed = message[: self.max_length]
        return echoed, round(0.1 * len(echoed), 6), self._n >= self.horizon, False, {"n": self._n}


class AsyncEcho(Echo):
    """Echo with coroutines for `reset` and `step`: its latency costs no thread, so hundreds wait at once.

    Example:
        >>> import asyncio
        >>> async def talk():
        ...     env = AsyncEcho(latency_s=0.001)
        ...     await env.reset()
        ...     return (await env.step("hi"))[0]
        >>> asyncio.run(talk())
        'hi'
    """

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start counting again."""
        return super().reset(seed=seed, options=options)

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        """Echo the message, without holding a thread while it takes its time."""
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        return self._echo(action)


@dataclass(frozen=True)
class EchoAction:
    """The action of `envfleet.remote.EchoClient`, which also takes a mapping or a string."""

    message: str
