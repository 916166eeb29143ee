"""A fleet as a `gymnasium.vector.VectorEnv`: the same observations, rewards, flags and infos, to the byte."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from envfleet.adapters.fleet_view import SingleAgentView
from envfleet.core.batch import Batch, decoded
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument, ResetNeeded


def parse_autoreset_mode(mode: Any) -> AutoresetMode:
    """Gymnasium's enum from its value, its name, or itself.

    Example:
        >>> parse_autoreset_mode("NextStep"), parse_autoreset_mode("SAME_STEP")
        (<AutoresetMode.NEXT_STEP: 'NextStep'>, <AutoresetMode.SAME_STEP: 'SameStep'>)
    """
    for known in AutoresetMode:
        if mode in (known, known.value, known.name):
            return known
    raise BadArgument(f"autoreset_mode={mode!r}: choose one of {', '.join(repr(m.value) for m in AutoresetMode)}")


class FleetVectorEnv(SingleAgentView, VectorEnv[Any, Any, Any]):
    """The vector environment that `make_vec` returns; `fleet` is the fleet below it."""

    def __init__(self, fleet: Fleet, mode: AutoresetMode, copy: bool = True) -> None:
        super().__init__(fleet)
        self.copy = copy
        self.autoreset_mode = mode
        self.metadata = {**fleet.metadata, "autoreset_mode": mode}
        self.render_mode = fleet.render_mode
        self.spec = fleet.spec
        self._ended = np.zeros(self.num_envs, bool)

    # VectorEnv's own np_random belongs to the vector; Gymnasium's Sync and Async show the sub-environments' instead.
    @property
    def np_random_seed(self) -> Any:
        """The seeds of the environments' generators."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc]  # read-only here: the generators live in the workers
    def np_random(self) -> Any:
        """The environments' generators."""
        return self.get_attr("np_random")

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all, or the environments of `options["reset_mask"]`."""
        mask = None
        if options is not None and "reset_mask" in options:
            mask = _checked_mask(options.pop("reset_mask"), self.num_envs)
        slots = None if mask is None else np.flatnonzero(mask)
        if seed is not None and not isinstance(seed, (int, np.integer)):
            if len(seed) != self.num_envs:
                raise ValueError(
                    f"If seeds are passed as a list the length must match num_envs={self.num_envs} but got length={len(seed)}."
                )
            seed = list(seed) if slots is None else [seed[slot] for slot in slots]
        batch = self.fleet.reset(seed=seed, slots=slots, options=options)
        self._ended[batch.slots] = False
        infos: dict[str, Any] = {}
        for slot, info in zip(batch.slots.tolist(), batch.info):
            if info:
                infos = self._add_info(infos, info, slot)
        return self._observations(), infos

    def _actions(self, actions: Any) -> Any:
        if self.autoreset_mode == AutoresetMode.DISABLED and self._ended.any():
            raise ResetNeeded(np.flatnonzero(self._ended).tolist(), "reset them by options={'reset_mask': …} first")
        return actions

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step all environments."""
        return self._result(self.fleet.step(self._actions(actions), copy=False))

    def step_wait(
        self, timeout_s: float | None = None, *, timeout: float | None = None
    ) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Wait for the result of `step_async`. `timeout` is Gymnasium's name for `timeout_s`."""
        return self._result(self.fleet.recv(timeout_s=timeout_s if timeout is None else timeout, copy=False))

    def _result(self, batch: Batch) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        same_step = self.autoreset_mode == AutoresetMode.SAME_STEP
        terminated, truncated = batch.terminated.copy(), batch.truncated.copy()
        self._ended = terminated | truncated
        infos: dict[str, Any] = {}
        if same_step and self._ended.any():
            ended, final_info = self._ended.tolist(), batch.final_info
            for slot, info in enumerate(batch.info):
                if ended[slot]:
                    final = {"final_obs": self._final_obs(slot), "final_info": final_info[slot]}
                    infos = self._add_info(infos, final, slot)
                infos = self._add_info(infos, info, slot)
        elif batch._info:
            for slot in sorted(batch._info):
                infos = self._add_info(infos, decoded(batch._info, slot), slot)
        return self._observations(), batch.reward.copy(), terminated, truncated, infos

    def _observations(self) -> Any:
        return self.fleet.slab.tree("obs", slice(None), self.copy)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment (a list or tuple: one value each)."""
        if isinstance(values, (list, tuple)) and len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        self.fleet.set_attr(name, values)


def _checked_mask(mask: Any, num_envs: int) -> np.ndarray[Any, Any]:
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"`options['reset_mask']` must be a numpy array, got {type(mask)}")
    if mask.shape != (num_envs,):
        raise ValueError(f"`options['reset_mask']` must have shape `({num_envs},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"`options['reset_mask']` must have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError("`options['reset_mask']` must contain at least one True value")
    return mask


def make_vec(env: Any, num_envs: int | None = None, *, autoreset_mode: Any = "NextStep", **options: Any) -> FleetVectorEnv:
    """A `gymnasium.vector.VectorEnv` over a fleet: a drop-in for `SyncVectorEnv` and `AsyncVectorEnv`.

    `autoreset_mode` is "NextStep", "SameStep" or "Disabled" (or Gymnasium's enum); all other options are `make`'s.

    Example:
        >>> import envfleet as ef
        >>> envs = ef.make_vec("CartPole-v1", num_envs=3, backend="serial")
        >>> obs, infos = envs.reset(seed=42)
        >>> envs.step(envs.action_space.sample())[0].shape
        (3, 4)
        >>> envs.close()
    """
    mode = parse_autoreset_mode(autoreset_mode)
    if "on_end" in options:
        raise BadArgument("make_vec decides on_end by autoreset_mode; leave it out")
    copy = options.pop("copy", True)
    fleet = make(env, num_envs, on_end="reset" if mode == AutoresetMode.SAME_STEP else "wait", **options)
    return FleetVectorEnv(fleet, mode, copy=copy)
