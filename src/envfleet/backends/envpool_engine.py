"""envpool: EnvPool's C++ environments, stepped by its own threads. Slots are its env_ids.

EnvPool resets an ended environment in the next step (on_end="wait"). For on_end="reset" the ended ones are reset by a second
call in the same turn. It is seeded when it is made: a seed makes the pool anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.backends.batch_engine import ASKED, GO, Array, BatchEngine, Declared, Rows
from envfleet.errors import BadArgument
from envfleet.slots.layout import gather, leaves_of, scatter
from envfleet.slots.slab import Slots
from envfleet.util.extras import from_extra
from envfleet.util.machine import usable_cpus

#: Keyword arguments that the fleet sets.
_OURS = ("num_envs", "batch_size", "num_threads", "seed", "env_seed", "gym_reset_return_info")
_MAX_SEED = 2**31 - 1


class EnvPoolEngine(BatchEngine):
    """One pool in its synchronous mode, in which any part of the environments can be stepped or reset."""

    kind = "envpool"
    has_threads = True
    declared = Declared(seeds="start", partial=True, on_end=("reset", "wait"))

    def __init__(self, task: str, kwargs: Mapping[str, Any], num_threads: int | None = None) -> None:
        self._task, self._kwargs, self._num_threads = task, dict(kwargs), num_threads
        self.name = f"envpool:{task}"
        self._pool: Any = None
        ours = [name for name in _OURS if name in self._kwargs]
        if ours:
            raise BadArgument(f"{self.name}: leave {', '.join(ours)} out of env_kwargs; use num_envs, num_workers, reset(seed=…)")

    def build(self, num_slots: int, on_end: str, seed: int | None = None) -> None:
        """Make the pool, with a random seed if none is given."""
        with from_extra("envpool"):
            import envpool
        self.close()
        if seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0])
        threads = min(num_slots, self._num_threads or usable_cpus())
        sizes = {"num_envs": num_slots, "batch_size": num_slots, "num_threads": threads}
        self._pool = envpool.make_gymnasium(self._task, seed=small_seed(seed, num_slots), **sizes, **self._kwargs)
        if self._pool.config.get("max_num_players", 1) != 1:
            raise BadArgument(f"{self.name} has several players, and slots of an engine have one agent")
        self.observation_space, self.action_space = self._pool.spec.observation_space, self._pool.spec.action_space
        self._leaves = leaves_of(self.observation_space)
        self._num_slots, self._resets = num_slots, on_end == "reset"

    def advance(self, slots: Slots, begin: Array, seeds: Array, actions: Any) -> Rows:
        """Reset some, step the others, and reset those that ended."""
        if seeds[0] >= 0 and (begin == ASKED).all():
            self.build(self._num_slots, "reset" if self._resets else "wait", int(seeds[0]))
        count = len(slots)
        out = [np.zeros((count, *leaf.shape), leaf.dtype) for leaf in self._leaves]
        reward, terminated, truncated = np.zeros(count), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        info: dict[str, Any] = {}
        go = begin == GO
        if not go.all():
            self._begin(slots, ~go, out)
        if go.any():
            # The actions' leaves in the order of the space, as rows of those that step.
            acts = actions[go] if isinstance(actions, np.ndarray) else {key: rows[go] for key, rows in actions.items()}
            obs, step_reward, step_terminated, step_truncated, step_info = self._pool.step(acts, slots[go].astype(np.int32))
            at = self._places(slots, step_info)
            self._put(out, at, obs)
            reward[at], terminated[at], truncated[at] = step_reward, step_terminated, step_truncated
            info = _columns(step_info, at, count)
        ended, final = terminated | truncated, None
        if self._resets and ended.any():
            final, out = out, [leaf.copy() for leaf in out]
            self._begin(slots, ended, out)
        last = None if final is None else gather(self.observation_space, final)
        return Rows(gather(self.observation_space, out), reward, terminated, truncated, last, info)

    def _begin(self, slots: Slots, which: Array, out: list[Array]) -> None:
        obs, info = self._pool.reset(slots[which].astype(np.int32))
        self._put(out, self._places(slots, info), obs)

    def _places(self, slots: Slots, info: Mapping[str, Any]) -> Array:
        """Where the pool's rows belong among `slots`, which are ascending: it may return them in another order."""
        return np.searchsorted(slots, np.asarray(info["env_id"]))

    def _put(self, out: list[Array], at: Array, obs: Any) -> None:
        for rows, value in zip(out, scatter(self._leaves, obs)):
            rows[at] = value

    def close(self) -> None:
        """Close the pool; its threads end when it is gone."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


def small_seed(seed: int, num_slots: int) -> int:
    """A seed that EnvPool can hold, with room for one per environment. Small ones stay as they are.

    Example:
        >>> small_seed(7, 4), small_seed(2**62, 4) < 2**31
        (7, True)
    """
    most = _MAX_SEED - num_slots
    return seed if seed <= most else int(np.random.SeedSequence(seed).generate_state(1)[0]) % most


def _columns(info: Mapping[str, Any], at: Array, count: int) -> dict[str, Any]:
    """The arrays of an info that have a row per environment, in our order; zeros where an environment was not stepped."""
    out = {}
    for name, value in info.items():
        if isinstance(value, np.ndarray) and len(value) == len(at):
            out[name] = np.zeros((count, *value.shape[1:]), value.dtype)
            out[name][at] = value
    return out
