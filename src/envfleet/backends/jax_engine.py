"""jax: functional environments in the style of gymnax, all slots in one compiled call, on whatever device JAX uses.

An environment has `reset_env(key, params)`, `step_env(key, state, action, params)`, `default_params`, `observation_space(params)`
and `action_space(params)`; `is_truncated(state, params)` if it can tell a time limit from an end. Every call has the full width:
XLA's bits differ between batch sizes, so that slots that were not sent are computed too, and keep their state by a mask.

JAX starts threads, which a fork does not survive: make fleets with worker processes that are forked before this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from envfleet.backends.batch_engine import GO, Array, BatchEngine, Declared, Rows
from envfleet.errors import BadArgument, MissingExtra
from envfleet.slots.slab import Slots
from envfleet.util.extras import from_extra


class JaxEngine(BatchEngine):
    """A functional environment, vmapped over slots. Each slot has a random key of its own, from its seed."""

    kind = "jax"
    declared = Declared(seeds="slot", partial=True, on_end=("reset", "wait"))

    def __init__(self, env: Any, kwargs: Mapping[str, Any]) -> None:
        with from_extra("jax"):
            import jax
        self._jax = jax
        self._given, self._kwargs = env, dict(kwargs)
        self.name = f"gymnax:{env}" if isinstance(env, str) else f"jax:{getattr(env, '__name__', type(env).__name__)}"
        self._state: Any = None  # [slot]: (key, state of the environment), a tree of arrays

    def build(self, num_slots: int, on_end: str, seed: int | None = None) -> None:
        """Make the environment and compile nothing yet: JAX does that at the first reset and step."""
        jax = self._jax
        env, params = self._make()
        one = _advance_one(jax, env, params, on_end == "reset")
        self._advance = jax.jit(jax.vmap(one), donate_argnums=0)
        self._num_slots = num_slots
        # Random until a seed is given, as environments of Gymnasium are.
        keys = np.random.SeedSequence().generate_state(2 * num_slots, np.uint32).reshape(num_slots, 2)
        obs, shapes = jax.eval_shape(lambda data: env.reset_env(_key(jax, data), params), keys[0])
        self.observation_space = as_gymnasium(env.observation_space(params), self.name, obs)
        self.action_space = as_gymnasium(env.action_space(params), self.name)
        zeros = jax.tree.map(lambda leaf: jax.numpy.zeros((num_slots, *leaf.shape), leaf.dtype), shapes)
        self._state = (jax.numpy.asarray(keys), zeros)

    def _make(self) -> tuple[Any, Any]:
        """The environment and its parameters; keyword arguments that are fields of the parameters go there."""
        env = self._given
        kwargs = dict(self._kwargs)
        params = kwargs.pop("params", None)
        if isinstance(env, str):
            env = _gymnax().make(env, **kwargs)[0]
        elif isinstance(env, type):
            env = env(**kwargs)
        elif kwargs:
            raise BadArgument(
                f"{self.name}: {', '.join(kwargs)} in env_kwargs only go with a name or a class, not with an object"
            )
        return env, env.default_params if params is None else params

    def advance(self, slots: Slots, begin: Array, seeds: Array, actions: Any) -> Rows:
        """One compiled call over all slots, with masks; the rows of those asked for."""
        jax, count = self._jax, self._num_slots
        whole = len(slots) == count

        def wide(rows: Array, rest: Any) -> Array:
            if whole:
                return rows
            out = np.full((count, *rows.shape[1:]), rest, rows.dtype)
            out[slots] = rows
            return out

        # 64 bits as two words, as `jax.random.PRNGKey` has them: JAX's own integers have 32 bits by default.
        words = np.stack([seeds >> 32, seeds & 0xFFFFFFFF], axis=1).astype(np.uint32)
        asked = wide(np.ones(len(slots), np.bool_), False)
        inputs = (
            asked,
            wide(begin != GO, False),
            wide(seeds >= 0, False),
            wide(words, 0),
            jax.tree.map(lambda rows: wide(rows, 0), actions),
        )
        self._state, out = self._advance(self._state, *inputs)
        # On a CPU these are views of JAX's own memory, and on a GPU one transfer.
        obs, last, reward, terminated, truncated, info = jax.tree.map(np.asarray, out)
        if not whole:
            obs, last, reward, terminated, truncated, info = jax.tree.map(
                lambda leaf: leaf[slots], (obs, last, reward, terminated, truncated, info)
            )
        return Rows(obs, reward, terminated, truncated, last, info)

    def close(self) -> None:
        """Let the state go; JAX itself stays in the process."""
        self._state = self._advance = None


def _gymnax() -> Any:
    try:
        import gymnax
    except ImportError as missing:
        why = 'Install it in a venv of its own: pip install gymnax six "gymnasium<1.4"'
        raise MissingExtra(missing.name or "gymnax", why=why) from missing
    return gymnax


def _key(jax: Any, data: Any) -> Any:
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def _advance_one(jax: Any, env: Any, params: Any, resets: bool) -> Callable[..., Any]:
    """One slot's turn as a function of arrays: what the slot life does, for code without branches."""
    where, is_truncated = jax.numpy.where, getattr(env, "is_truncated", None)

    def choose(condition: Any, one: Any, other: Any) -> Any:
        return jax.tree.map(lambda a, b: where(condition, a, b).astype(jax.numpy.result_type(b)), one, other)

    def advance(held: Any, asked: Any, begin: Any, has_seed: Any, seed: Any, action: Any) -> Any:
        data, state = held
        # Streams: one for the step, one for a reset; a seed begins them anew at the reset that it is for.
        data, for_step = _split(jax, data)
        seeded, for_reset = _split(jax, where(has_seed, seed, data))
        obs, next_state, reward, terminated, info = env.step_env(for_step, state, action, params)
        terminated = jax.numpy.asarray(terminated, bool)
        truncated = jax.numpy.asarray(is_truncated(next_state, params) if is_truncated else False, bool)
        first, first_state = env.reset_env(for_reset, params)
        fresh = begin | (terminated | truncated if resets else False)
        shown = choose(fresh, first, obs)
        kept = (where(fresh, seeded, data), choose(fresh, first_state, next_state))
        kept = choose(asked, kept, held)
        return kept, (shown, obs, reward, terminated, truncated, info)

    return advance


def _split(jax: Any, data: Any) -> tuple[Any, Any]:
    """The next key of a stream as plain words, and a key to use now."""
    following, now = jax.random.split(_key(jax, data))
    return jax.random.key_data(following), now


def as_gymnasium(space: Any, name: str, value: Any = None) -> gym.Space[Any]:
    """A space of Gymnasium from one of gymnax, by what it has.

    `value` is what an environment returns, where that is known: a Box takes its dtype, since some environments of gymnax
    say another one than they have.
    """
    if isinstance(space, gym.Space):
        return space
    inner = getattr(space, "spaces", None)
    if isinstance(inner, Mapping):
        return spaces.Dict({key: as_gymnasium(sub, name, value and value[key]) for key, sub in inner.items()})
    if isinstance(inner, (list, tuple)):
        return spaces.Tuple([as_gymnasium(sub, name, value and value[i]) for i, sub in enumerate(inner)])
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    if hasattr(space, "low") and hasattr(space, "high"):
        shape, dtype = tuple(space.shape), np.dtype(getattr(value, "dtype", space.dtype))
        low, high = (np.broadcast_to(np.asarray(bound, dtype), shape) for bound in (space.low, space.high))
        return spaces.Box(low, high, shape, dtype.type)
    raise BadArgument(f"{name} has the space {space!r}: only Discrete, Box, Dict and Tuple can be laid out")
