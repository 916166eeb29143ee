"""CAGE 2 for the views of older scripts: the names of their arguments, and the version of the environment that suits a backend."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from envfleet.envs.cage2.env import Cage2Env
from envfleet.envs.cage2.face import checked_options
from envfleet.envs.cage2.native_cage2 import NativeCage2Env
from envfleet.envs.cage2.scenario import NUM_ACTIONS, NUM_BITS
from envfleet.errors import BadArgument
from envfleet.native.library import is_built

_NAMES = ("cage2", "Cage2-v0", "envfleet/Cage2-v0")


def is_cage2(env: Any) -> bool:
    """Whether a view was asked for CAGE 2 by name.

    Example:
        >>> is_cage2("cage2"), is_cage2("CartPole-v1")
        (True, False)
    """
    return isinstance(env, str) and env in _NAMES


def cage2_recipe(env: str, options: dict[str, Any]) -> tuple[Any, int | None]:
    """What builds CAGE 2 for a view on `options["backend"]`, and how long its own observation is if the state is added to it.

    `red_agent_type` in the options becomes `red_agent`.
    The environment's options are checked here, before a worker is started. In worker processes observations carry the state, which
    the view takes off again: true states then need no message.
    """
    arguments = dict(options.get("env_kwargs") or {})
    for given in (options, arguments):
        if "red_agent_type" in given:
            if "red_agent" in options or "red_agent" in arguments:
                raise BadArgument("red_agent and red_agent_type are the same: give one")
            given["red_agent"] = given.pop("red_agent_type")
    if "env_kwargs" in options:
        options["env_kwargs"] = arguments
    named = {**arguments, **options}
    checked_options(**{name: named[name] for name in inspect.signature(checked_options).parameters if name in named})
    if options["backend"] not in ("shm", "pipe"):
        return env, None
    version = NativeCage2Env if is_built() else Cage2Env
    if "state_in_obs" in named:
        return version, None
    options["state_in_obs"] = True
    return version, NUM_BITS


def refuse_missing_actions(actions: Any) -> None:
    """Name the first slot whose action does not exist. Wrong shapes are the fleet's to refuse.

    Example:
        >>> refuse_missing_actions([0, 145])
        Traceback (most recent call last):
        ...
        envfleet.errors.BadArgument: slot 1: action 145 does not exist: actions are 0 to 144, see action_meanings
    """
    rows = np.asarray(actions)
    if rows.ndim != 1:
        return
    if rows.dtype.kind not in "iu":
        raise BadArgument(f"actions of type {rows.dtype}: give whole numbers from 0 to {NUM_ACTIONS - 1}, one per slot")
    missing = np.flatnonzero((rows < 0) | (rows >= NUM_ACTIONS))
    if len(missing):
        slot = int(missing[0])
        raise BadArgument(
            f"slot {slot}: action {rows[slot]} does not exist: actions are 0 to {NUM_ACTIONS - 1}, see action_meanings"
        )
