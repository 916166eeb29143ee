"""Functional environments in the style of gymnax, for tests of the jax engine without gymnax."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces


class DriftState(NamedTuple):
    """Where the walker is, and for how long."""

    place: Any
    time: Any


class Drift:
    """A random walk: moves by the action and by noise, ends when it is far away, and is cut after `limit` steps."""

    default_params: Any = {"far": 1.5, "noise": 0.1}  # noqa: RUF012

    def __init__(self, limit: int = 12) -> None:
        self.limit = limit

    def reset_env(self, key: Any, params: Any) -> Any:
        state = DriftState(jax.random.uniform(key, (2,), minval=-0.5, maxval=0.5), 0)
        return self._obs(state), state

    def step_env(self, key: Any, state: DriftState, action: Any, params: Any) -> Any:
        place = state.place + 0.2 * (action - 1.0) + params["noise"] * jax.random.normal(key, (2,))
        state = DriftState(place, state.time + 1)
        away = jnp.abs(place).max()
        return self._obs(state), state, -away, away > params["far"], {"away": away}

    def is_truncated(self, state: DriftState, params: Any) -> Any:
        return state.time >= self.limit

    def _obs(self, state: DriftState) -> Any:
        return {"place": state.place, "time": jnp.asarray(state.time, jnp.int32)}

    def observation_space(self, params: Any) -> Any:
        return spaces.Dict(place=spaces.Box(-9, 9, (2,), np.float32), time=spaces.Box(0, 99, (), np.int32))

    def action_space(self, params: Any) -> Any:
        return spaces.Discrete(3)


class FlatDrift(Drift):
    """The same with an array as its observation, for learners."""

    def _obs(self, state: DriftState) -> Any:
        return state.place

    def observation_space(self, params: Any) -> Any:
        return spaces.Box(-9, 9, (2,), np.float32)
