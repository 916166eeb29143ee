"""A slot: the environment of one session at a time, as the engine's slots see it.

The engine builds all its slots when a fleet starts; a server must not build an environment before a client asks
for it, and must not hand one client's environment to the next. A slot therefore has the spaces from the start and
builds the environment inside when a session opens, closing the one before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector.utils import create_empty_array

from envfleet.remote.space_codec import Dialect
from envfleet.util.trees import space_tree, tree_map

OPENING = "envfleet.session"  # the reset option that opens ("open") or empties ("empty") a slot


class SessionEnv(gymnasium.Env[Any, Any]):
    """A place for one session's environment; `reset(options={OPENING: "open"})` builds a new one."""

    def __init__(self, factory: Callable[[], Any], dialect: Dialect) -> None:
        self._factory = factory
        self._env: Any = None
        self.observation_space, self.action_space = dialect.observation_space, dialect.action_space
        self._nothing = tree_map(_blank, space_tree(dialect.observation_space))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment inside, after opening or emptying the slot if the options say so."""
        own = dict(options or {})
        opening = own.pop(OPENING, None)
        if opening is not None:
            self.close()
        if opening == "empty":
            return self._nothing, {}
        if self._env is None:
            self._env = self._factory()
        return self._env.reset(seed=seed, options=own or None)  # type: ignore[no-any-return]

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment inside."""
        return self._env.step(action)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the environment inside, if there is one."""
        env, self._env = self._env, None
        if env is not None:
            env.close()


class AsyncSessionEnv(SessionEnv):
    """A slot for environments with coroutines."""

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment inside, after opening or emptying the slot if the options say so."""
        result = super().reset(seed=seed, options=options)
        return await result if inspect.isawaitable(result) else result

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # type: ignore[override]
        """Step the environment inside."""
        result = super().step(action)
        return await result if inspect.isawaitable(result) else result


def _blank(space: gymnasium.Space[Any]) -> Any:
    """A value of a leaf space: zeros where there are arrays."""
    if isinstance(space, gymnasium.spaces.Text):
        return ""
    if isinstance(space, gymnasium.spaces.Sequence):
        return ()
    empty: Any = create_empty_array(space, n=1)
    return empty[0]
