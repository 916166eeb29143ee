"""A fleet as a Tianshou vector environment: its `Collector` and `AsyncCollector` run over it unchanged."""

from __future__ import annotations

import copy
from typing import Any, Unpack

import numpy as np
from gymnasium import spaces

from envfleet.adapters.fleet_view import FleetView, refuse_agents
from envfleet.core.batch import Batch
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.core.fleet_options import EnvLike, FleetOptions
from envfleet.errors import BadArgument, RecvTimeout, SlotBusy
from envfleet.util.extras import from_extra
from envfleet.util.trees import tree_rows

with from_extra("tianshou"):
    from tianshou.env import BaseVectorEnv

Array = np.ndarray[Any, Any]


class FleetVectorEnv(FleetView, BaseVectorEnv):  # type: ignore[misc]
    """Environments behind Tianshou's `BaseVectorEnv`.

    The same meaning as Tianshou's own classes: ended environments wait until they are reset, `reset(seed=s)` gives every
    environment the seed `s`, `seed(s)` gives environment i the seed `s + i` and resets it, `info` is an array of dicts
    with `env_id`, and Dict observations are arrays of dicts. A row that holds no data because its environment failed has
    `envfleet.fault` in its info.

    Args:
        env: what `envfleet.make` takes (a list of callables, an id …), or a fleet made with `on_end="wait"`.
        wait_num: `step` returns when this many environments are done; the others are returned by later calls.
        timeout: `step` returns what is done after this many seconds, one environment at least.
        num_envs: how many environments; with a list, its length.
        options: those of `envfleet.make`.

    Example:
        >>> envs = FleetVectorEnv("CartPole-v1", num_envs=3, backend="serial")
        >>> obs, info = envs.reset(seed=1)
        >>> obs, reward, terminated, truncated, info = envs.step(np.array([0, 1]), id=[2, 0])
        >>> obs.shape, [one["env_id"] for one in info]
        ((2, 4), [2, 0])
        >>> envs.close()
    """

    def __init__(
        self,
        env: EnvLike | Fleet,
        wait_num: int | None = None,
        timeout: float | None = None,
        *,
        num_envs: int | None = None,
        **options: Unpack[FleetOptions],
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise BadArgument(f"timeout={timeout!r}: give seconds above 0, or None")
        fleet = env if isinstance(env, Fleet) else make(env, num_envs, on_end="wait", **options)
        refuse_agents(fleet)
        self.fleet, self.env_num, self.num_envs = fleet, fleet.num_envs, fleet.num_envs
        try:
            self._check(wait_num)
        except BadArgument:
            if fleet is not env:
                fleet.close()
            raise
        self.wait_num, self.timeout = wait_num or fleet.num_envs, timeout
        self.is_async = self.wait_num != fleet.num_envs or timeout is not None
        # One space each, because Tianshou seeds and samples them one by one.
        self._spaces = [copy.deepcopy(fleet.single_action_space) for _ in range(fleet.num_envs)]

    def _check(self, wait_num: int | None) -> None:
        if self.fleet.on_end != "wait":
            raise BadArgument('FleetVectorEnv needs a fleet made with on_end="wait": Tianshou resets ended environments itself')
        if isinstance(self.fleet.single_observation_space, spaces.Tuple):
            raise BadArgument("Tianshou has no Tuple observations: use a Dict space")
        if wait_num is not None and not 1 <= wait_num <= self.env_num:
            raise BadArgument(f"wait_num={wait_num!r}: give a number from 1 to {self.env_num}, or None")

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self.closed

    @property
    def waiting_id(self) -> list[int]:
        """The environments whose step has not been returned yet."""
        return np.flatnonzero(self.fleet.is_out).tolist()

    @property
    def ready_id(self) -> list[int]:
        """The environments that can be stepped."""
        return np.flatnonzero(~self.fleet.is_out).tolist()

    # -- stepping ---------------------------------------------------------------------------------------------------

    def reset(self, env_id: Any = None, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, Array]:
        """Reset some environments (default: all; what still runs is then waited for). Every one gets the same `seed`."""
        if env_id is None:
            self._drop_leftovers()
        slots = self._slots(env_id)
        batch = self.fleet.reset(seed=None if seed is None else [seed] * len(slots), slots=slots, options=options)
        rows = np.searchsorted(batch.slots, slots)
        return self._observations(batch, rows), _objects([batch.info[row] for row in rows.tolist()])

    def step(self, action: Any, id: Any = None) -> tuple[Array, Array, Array, Array, Array]:
        """Step some environments (default: all), in the order given; asynchronous: returns those that are done.

        Asynchronous and `action=None`: only waits for environments that were stepped before.
        """
        if action is not None:
            slots = self._slots(id)
            actions = action.detach().cpu().numpy() if hasattr(action, "detach") else np.asarray(action)
            self.fleet.send(list(actions) if actions.dtype == object else actions, slots)
        elif not self.is_async:
            raise BadArgument("action=None only goes with wait_num or timeout: give one action for every environment")
        if self.is_async:
            batch = self._recv_some()
            return self._result_rows(batch, np.arange(len(batch)))
        batch = self.fleet.recv(slots)
        return self._result_rows(batch, np.searchsorted(batch.slots, slots))

    def _recv_some(self) -> Batch:
        if (resetting := np.flatnonzero(self.fleet.is_resetting).tolist()) and not self.closed:
            raise SlotBusy(resetting, "their reset was interrupted: reset() again")
        at_least = min(self.wait_num, max(len(self.waiting_id), 1))
        try:
            return self.fleet.recv(at_least=at_least, timeout_s=self.timeout)
        except RecvTimeout:
            return self.fleet.recv(at_least=1)

    def _result_rows(self, batch: Batch, rows: Array) -> tuple[Array, Array, Array, Array, Array]:
        slots, faulted, said = batch.slots.tolist(), batch.faulted.tolist(), batch.info
        infos = [
            {**said[row], "env_id": slots[row], **({"envfleet.fault": True} if faulted[row] else {})} for row in rows.tolist()
        ]
        columns = (batch.reward[rows], batch.terminated[rows], batch.truncated[rows])
        return self._observations(batch, rows), *columns, _objects(infos)

    def _observations(self, batch: Batch, rows: Array) -> Array:
        obs = batch.obs
        return obs[rows] if isinstance(obs, np.ndarray) else _objects([tree_rows(obs, row) for row in rows.tolist()])

    # -- the environments' own interface ----------------------------------------------------------------------------

    def get_env_attr(self, key: str, id: Any = None) -> list[Any]:
        """An attribute of some environments. Spaces, spec and metadata are known here and do not wait for them."""
        slots = self._slots(id)
        if key == "action_space":
            return [self._spaces[slot] for slot in slots.tolist()]
        known = {"observation_space": "single_observation_space", "metadata": "metadata", "spec": "spec"}.get(key)
        return [getattr(self.fleet, known)] * len(slots) if known else list(self.fleet.get_attr(key, slots=slots))

    def set_env_attr(self, key: str, value: Any, id: Any = None) -> None:
        """Set an attribute of some environments to the same value."""
        slots = self._slots(id)
        self.fleet.set_attr(key, [value] * len(slots), slots=slots)

    def seed(self, seed: int | list[int] | None = None) -> list[list[int | None]]:
        """Seed the environments and their action spaces, and reset them: an int gives environment i `seed + i`."""
        seeds = (
            [None] * self.env_num if seed is None else [seed + i for i in range(self.env_num)] if isinstance(seed, int) else seed
        )
        for space, one in zip(self._spaces, seeds):
            space.seed(one)
        self.fleet.reset(seed=list(seeds))
        return [[one] for one in seeds]

    def render(self, **kwargs: Any) -> list[Any]:
        """One frame per environment."""
        return list(self.fleet.render_all())

    def _slots(self, id: Any) -> Array:
        return np.arange(self.env_num) if id is None else np.atleast_1d(np.asarray(id))


def _objects(values: list[Any]) -> Array:
    array = np.empty(len(values), object)
    array[:] = values
    return array
