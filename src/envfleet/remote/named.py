"""What may be served: names, ids, classes and callables, all as a factory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from envfleet.envs.registry import resolve_env
from envfleet.slots.factories import factories_for


def environment_factory(env: Any, kwargs: Mapping[str, Any] | None = None) -> tuple[Callable[[], Any], str]:
    """A factory and a name from what users pass: "Echo", "CartPole-v1", "package.module:Class", a callable.

    Example:
        >>> environment_factory("Connect4-hard")[1]
        'Connect4-hard'
    """
    name = env.rpartition(":")[2] if isinstance(env, str) else getattr(env, "__name__", type(env).__name__)
    found = resolve_env(env) if isinstance(env, str) else env
    if callable(found):
        return (partial(found, **kwargs) if kwargs else found), name
    factories, spec = factories_for(found, 1, kwargs, ())
    return factories[0], spec.id if spec is not None else name
