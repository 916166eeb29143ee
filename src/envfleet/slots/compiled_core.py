"""The compiled core, if there is one: the slot life in C, its doorbell, and the wrappers it may replace.

`ENVFLEET_COMPILED=0` chooses the Python version, which is the specification; so does a machine without a compiler.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit

from envfleet.native.native_env import NativeEnv
from envfleet.slots.action_types import TYPES
from envfleet.slots.slab import Slab
from envfleet.slots.slot_life import SlotLife, drive

#: Bytes per slot for infos in shared memory; larger ones are sent over the worker's socket.
ARENA_BYTES = 4096


def load(name: str = "_compiled") -> Any:
    """The compiled module of that name, or None if it is missing or disabled."""
    if os.environ.get("ENVFLEET_COMPILED", "1") == "0":
        return None
    try:
        return importlib.import_module(f"envfleet.{name}")
    except ImportError:  # built without a compiler: `status()` says so, the Python version is used
        return None


def status() -> str:
    """One line for people: is the compiled core used, and if not, why.

    Example:
        >>> isinstance(status(), str)
        True
    """
    if os.environ.get("ENVFLEET_COMPILED", "1") == "0":
        return "off (ENVFLEET_COMPILED=0): the Python version is used"
    try:
        importlib.import_module("envfleet._compiled")
    except ImportError as missing:
        return f"absent ({missing}): the Python version is used; install again where there is a C compiler"
    return "present"


@functools.cache
def warn_if_absent() -> None:
    """One warning per process if the compiled core was not built; none if it was switched off."""
    if load() is None and os.environ.get("ENVFLEET_COMPILED", "1") != "0":
        text = (
            "envfleet runs without its compiled core, which was not built: stepping cheap environments is 2 to 12 times slower."
        )
        warnings.warn(
            f"{text} Install a C compiler and envfleet again; `envfleet doctor` says more", RuntimeWarning, stacklevel=4
        )


def make_runner(
    compiled: Any,
    slab: Slab,
    lives: Mapping[int, SlotLife],
    enter: Callable[[int, str], None],
    pulse: np.ndarray[Any, Any] | None = None,
    arena: np.ndarray[Any, Any] | None = None,
    interruptible: bool = False,
) -> Any:
    """A compiled runner over these lives. Each slot starts with the Python life and changes to C after its first checks.

    `interruptible`: it runs in the user's main thread, where a KeyboardInterrupt comes from the user, not from the env.
    """
    runner: Any = None

    def slow(slot: int, turn: int) -> bool:
        life = lives[slot]
        life.release()
        life.turn = turn
        try:
            drive(life, life.advance(), enter)
        except KeyboardInterrupt:
            if interruptible:
                raise
        if life.abandoned:
            return False
        if life.failure is None:
            parts = armed_parts(life)
            if parts is not None:
                life.runner = runner
                runner.arm(slot, *parts)
        return life.has_side

    obs = _only_array(slab, "obs")
    agents, groups = slab.layout.agents, slab.layout.groups
    space = groups[0].observation_space if agents else slab.layout.observation_space
    runner = compiled.Runner(
        head=slab.head,
        offsets={name: int(slab.head.dtype.fields[name][1]) for name in slab.head.dtype.names},
        obs=obs,
        final_obs=_only_array(slab, "final_obs"),
        obs_is_int64_scalar=isinstance(space, spaces.Discrete) and obs is not None and obs.dtype == np.int64,
        action=_only_array(slab, "action"),
        lives=dict(lives),
        slow=slow,
        on_end_reset=next(iter(lives.values())).on_end == "reset" if lives else True,
        has_columns=bool(slab.layout.columns) or slab.has_mail,  # Python writes these
        pulse=pulse,
        arena=arena,
        pickle=pickle.dumps if arena is not None else None,
        agents=agents,
        pulse_per_slot=pulse is not None and pulse.ndim == 2,
        kept=slab.kept,
        kept_turn=slab.arrays.get("kept_turn"),
        keep=slab.keep if slab.has_mail and slab.kept else None,
        interruptible=interruptible,
        wide_action=slab.arrays.get("wide_action/0"),
        action_types=TYPES,
    )
    return runner


def _only_array(slab: Slab, kind: str) -> np.ndarray[Any, Any] | None:
    """The array of an observation or action that is one array; None for nested ones."""
    arrays = slab.leaf_arrays(kind)
    leaves = slab.action_leaves if kind == "action" else slab.obs_leaves
    return arrays[0] if len(arrays) == 1 and not leaves[0].path else None


def armed_parts(life: SlotLife) -> tuple[Any, ...] | None:
    """The env's step and reset below the wrappers that only count or check, and the TimeLimit among them.

    Exact classes of Gymnasium only, and only when skipping them changes nothing one can see: the first checks have
    run, the first reset has been made, nothing was replaced on the instance. Others are kept. None: not yet.
    """
    env, limit, wrapped = life.env, 0, False
    life.time_limit = None
    if len(life.reset_needs) == 1:
        return None  # the compiled life passes both seed and options, or none
    if life.joint is not None:
        # Everyone acts at once, on one array each: the compiled life makes the ordinary steps of such an env.
        simple = life.env.acts_at_once and all(
            len(leaves) == 1 and not leaves[0].path for leaves in (life.slab.obs_leaves, life.slab.action_leaves)
        )
        return (life.env.step, life.env.reset, 0, bool(life.reset_needs), life.env.env) if simple else None
    while True:
        kind = type(env)
        if kind not in (TimeLimit, OrderEnforcing, PassiveEnvChecker) or {"step", "reset"} & vars(env).keys():
            break
        if kind is TimeLimit:
            if limit:
                break  # a second limit stays where it is
            if env._elapsed_steps != int(life.slab.head["now_length"][life.slot]):
                return None
            limit, life.time_limit = env._max_episode_steps, env
        elif (kind is OrderEnforcing and not env._has_reset) or (kind is PassiveEnvChecker and not _has_checked(env)):
            return None
        env, wrapped = env.env, True
    if inspect.iscoroutinefunction(env.step) or inspect.iscoroutinefunction(env.reset):
        return None
    return env.step, env.reset, limit, wrapped or bool(life.reset_needs), None, _native_parts(life, env)


def _native_parts(life: SlotLife, env: Any) -> Any:
    """What C needs to step a native environment by itself; None where Python takes part in its steps or writes its rows."""
    if not isinstance(env, NativeEnv) or type(env).step is not NativeEnv.step or type(env).reset is not NativeEnv.reset:
        return None
    slab = life.slab
    obs, action = _only_array(slab, "obs"), _only_array(slab, "action")
    if slab.layout.columns or slab.has_mail or obs is None or action is None or not env.fits_rows(obs, action):
        return None
    return None if {"step", "reset"} & vars(env).keys() else env.native_parts()


def _has_checked(env: Any) -> bool:
    # checked_data_reuse came with Gymnasium 1.4: before, the first step was the last check.
    return bool(env.checked_reset and env.checked_step and getattr(env, "checked_data_reuse", True))
