"""What may be served: names, ids, classes and callables, all as a factory."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from envfleet.errors import BadArgument
from envfleet.recipe import factories_for


def _ours() -> dict[str, Callable[[], Any]]:
    from envfleet.envs import connect4, echo, levels

    named: dict[str, Callable[[], Any]] = {
        "Echo": echo.Echo,
        "AsyncEcho": echo.AsyncEcho,
        "Connect4": connect4.Connect4,
    }
    for level in levels.LEVELS:
        named[f"Connect4-{level}"] = partial(levels.make_level, level)
    return named


def environment_factory(env: Any, kwargs: dict[str, Any] | None = None) -> tuple[Callable[[], Any], str]:
    """A factory and a name from what users pass: "Echo", "CartPole-v1", "package.module:Class", a callable.

    Example:
        >>> environment_factory("Connect4-hard")[1]
        'Connect4-hard'
    """
    kwargs = kwargs or {}
    if isinstance(env, str):
        found = _ours().get(env) or _imported(env)
        if found is not None:
            return (partial(found, **kwargs) if kwargs else found), env.rpartition(":")[2]
        factories, _ = factories_for(env, 1, kwargs, ())
        return factories[0], env
    if callable(env):
        return (partial(env, **kwargs) if kwargs else env), getattr(env, "__name__", type(env).__name__)
    factories, spec = factories_for(env, 1, kwargs, ())
    return factories[0], spec.id if spec is not None else type(env).__name__


def _imported(name: str) -> Callable[[], Any] | None:
    """`package.module:Class`; None when it is a Gymnasium id (`module:Id-v0`) or no such thing."""
    module, _, attribute = name.partition(":")
    if not module or not attribute.isidentifier():
        return None
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise BadArgument(f"cannot import {module!r} for {name!r}: {error}") from error
    return found if callable(found) else None
