"""Which environments `auto` may step in the caller's own process: those whose code we know. One short list, by name.

An env in the caller's process can end that process (a crash) or block it (a hang). So only code that is known to do
neither runs there by default; all other code, including the user's, runs in worker processes. `isolate=False` means that
the user trusts the env, `isolate=True` that no env is trusted.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from gymnasium.envs.registration import load_env_creator

from envfleet.native.native_env import NativeEnv
from envfleet.slots.factories import Recipe, SpecFactory, WrappedFactory

#: Python and NumPy, nothing else: no crash, no wait, no loop without an end.
PURE = ("gymnasium.envs.classic_control.", "gymnasium.envs.toy_text.", "envfleet.envs.")
#: Gymnasium's own over a C library: sound, but such a library can abort its process.
COMPILED = ("gymnasium.envs.mujoco.", "gymnasium.envs.box2d.")
#: Ours that fail or wait on purpose.
NOT_OURS = ("envfleet.envs.probe",)
#: Wrappers of Gymnasium that run no code of the user's (a `func`) and no library beside NumPy.
WRAPPERS = frozenset((
    "PassiveEnvChecker", "OrderEnforcing", "TimeLimit", "Autoreset",
    "RecordEpisodeStatistics", "ClipAction", "RescaleAction", "ClipReward",
    "FlattenObservation", "FilterObservation", "DtypeObservation", "ReshapeObservation",
    "RescaleObservation", "NormalizeObservation", "NormalizeReward", "TimeAwareObservation",
    "FrameStackObservation", "DelayObservation",
))  # fmt: skip

Trust = Literal["pure", "compiled", "unknown"]


def trust_of(recipe: Recipe) -> Trust:
    """What is known about the code of all slots, from the recipe alone: nothing is imported or built.

    Example:
        >>> from envfleet.slots.factories import factories_for
        >>> [trust_of(Recipe(factories_for(name, 2, None, ())[0])) for name in ("CartPole-v1", "Ant-v5")]
        ['pure', 'compiled']
        >>> trust_of(Recipe((lambda: 0,)))
        'unknown'
    """
    found = {_of_factory(factory) for factory in {id(factory): factory for factory in recipe.factories}.values()}
    return "unknown" if "unknown" in found else "compiled" if "compiled" in found else "pure"


def may_run_here(trust: Trust, isolate: bool | None, on_fault: str) -> bool:
    """Whether the caller's process may step such envs: compiled ones only with `on_fault="raise"`.

    Example:
        >>> may_run_here("compiled", None, "raise"), may_run_here("compiled", None, "restart")
        (True, False)
    """
    if isolate is not None:
        return not isolate
    return trust == "pure" or (trust == "compiled" and on_fault == "raise")


def is_native(recipe: Recipe) -> bool:
    """Whether every slot has a native environment and nothing around it that is Python.

    Example:
        >>> from envfleet.envs.native_classic import NativeCartPole
        >>> is_native(Recipe((NativeCartPole, NativeCartPole))), is_native(Recipe((dict,)))
        (True, False)
    """
    return all(_is_native(factory) for factory in {id(factory): factory for factory in recipe.factories}.values())


def _is_native(factory: Any) -> bool:
    if isinstance(factory, functools.partial):
        return _is_native(factory.func)
    if isinstance(factory, SpecFactory) and isinstance(factory.spec.entry_point, str):
        if not factory.spec.entry_point.startswith("envfleet."):
            return False  # nothing of the user's is imported only to look at it
        factory = load_env_creator(factory.spec.entry_point)
    return isinstance(factory, type) and issubclass(factory, NativeEnv)


def _of_factory(factory: Any) -> Trust:
    if isinstance(factory, WrappedFactory):
        return _of_factory(factory.inner) if all(_is_known_wrapper(one) for one in factory.wrappers) else "unknown"
    if isinstance(factory, SpecFactory):
        spec = factory.spec
        # A spec's kwargs and wrappers are Gymnasium's or the user's, as its entry point is.
        wrappers = [one.entry_point for one in spec.additional_wrappers]
        given = {**spec.kwargs, **factory.kwargs}
        if not all(_is_known_wrapper_name(one) for one in wrappers) or not _is_plain(given):
            return "unknown"
        return _of_module(spec.entry_point.partition(":")[0]) if isinstance(spec.entry_point, str) else "unknown"
    if isinstance(factory, functools.partial):
        return _of_factory(factory.func) if _is_plain([*factory.args, factory.keywords]) else "unknown"
    return _of_module(factory.__module__) if _is_what_it_says(factory) else "unknown"


def _of_module(name: str) -> Trust:
    if name.startswith(NOT_OURS):
        return "unknown"
    return "pure" if name.startswith(PURE) else "compiled" if name.startswith(COMPILED) else "unknown"


def _is_known_wrapper(wrapper: Any) -> bool:
    if isinstance(wrapper, functools.partial):
        return _is_known_wrapper(wrapper.func) and _is_plain([*wrapper.args, wrapper.keywords])
    return _is_what_it_says(wrapper) and _is_known_wrapper_name(f"{wrapper.__module__}:{wrapper.__qualname__}")


def _is_known_wrapper_name(entry_point: str) -> bool:
    module, _, name = entry_point.partition(":")
    return module.startswith("gymnasium.wrappers") and name in WRAPPERS


def _is_what_it_says(value: Any) -> bool:
    """Whether a class or function is the one of that name in its module: names can be set to anything."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return False
    module = sys.modules.get(value.__module__)
    return getattr(module, value.__qualname__, None) is value


def _is_plain(value: Any) -> bool:
    """Numbers, text, arrays and containers of them: no code. A window does not count as plain: it is a C library that waits."""
    if isinstance(value, Mapping):
        return value.get("render_mode") != "human" and all(_is_plain(one) for one in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_plain(one) for one in value)
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return value is None or isinstance(value, (bool, int, float, str, np.generic))
