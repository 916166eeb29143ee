"""Stable-Baselines3's `SubprocVecEnv` and `DummyVecEnv` over a fleet: real `VecEnv`s, SB3 trains on them unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from envfleet.adapters.askable import Askable
from envfleet.adapters.fleet_view import FleetView
from envfleet.core.batch import Batch
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.errors import EnvFailed
from envfleet.util.extras import from_extra
from envfleet.util.trees import tree_map

with from_extra("sb3"):
    from stable_baselines3.common.vec_env import VecEnv

Indices = None | int | Iterable[int]


class FleetVecEnv(FleetView, VecEnv):  # type: ignore[misc]
    """A fleet as an SB3 `VecEnv`.

    Same meaning as SB3's own classes: rewards are float32 (on every backend), `done` is terminated or truncated, an ended
    row's info holds `terminal_observation` and `TimeLimit.truncated`, and `reset_infos` the infos of the resets.
    What differs: an environment that raises gives its own traceback with slot, episode and step instead of `EOFError`.

    Example:
        >>> import gymnasium as gym
        >>> envs = DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2)
        >>> envs.seed(0)
        [0, 1]
        >>> envs.reset().shape
        (2, 4)
        >>> observation, reward, done, infos = envs.step(np.array([0, 1]))
        >>> reward.dtype, infos[0]
        (dtype('float32'), {'TimeLimit.truncated': False})
        >>> envs.close()
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        super().__init__(fleet.num_envs, fleet.single_observation_space, fleet.single_action_space)
        self.metadata: dict[str, Any] = {**fleet.metadata, "render_modes": self.metadata["render_modes"]}

    # -- stepping --------------------------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Reset all environments with the seeds and options set before; both are used once."""
        if any(self._options):
            batches = [
                self.fleet.reset(seed=[seed], slots=[slot], options=options or None)
                for slot, (seed, options) in enumerate(zip(self._seeds, self._options))
            ]
            observation = tree_map(lambda *rows: np.concatenate(rows), *(batch.obs for batch in batches))
            self.reset_infos = [batch.info[0] for batch in batches]
        else:
            batch = self.fleet.reset(seed=list(self._seeds))
            observation, self.reset_infos = batch.obs, list(batch.info)
        self._reset_seeds()
        self._reset_options()
        return observation

    def _result(self, batch: Batch) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any], list[dict[str, Any]]]:
        """Observations, rewards, dones and infos."""
        ended = batch.ended
        infos = list(batch.info) if not ended.any() else self._infos_with_ends(batch)
        cut = (batch.truncated & ~batch.terminated).tolist()
        infos = [{**info, "TimeLimit.truncated": was_cut} for info, was_cut in zip(infos, cut)]
        return batch.obs, batch.reward.astype(np.float32), ended, infos

    def _infos_with_ends(self, batch: Batch) -> list[dict[str, Any]]:
        infos, final_infos, final = list(batch.info), batch.final_info, batch.final_obs
        for row in np.flatnonzero(batch.ended).tolist():
            self.reset_infos[row] = infos[row]
            last = tree_map(lambda leaf, row=row: np.asarray(leaf[row]), final)
            infos[row] = {**final_infos[row], "terminal_observation": last}
            if batch.faulted[row]:
                infos[row]["envfleet.fault"] = True
        return infos

    # -- the environments' own interface ---------------------------------------------------------------------------

    render = VecEnv.render

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:  # type: ignore[override]  # SB3's signature
        """Return an attribute of each environment."""
        try:
            return list(self.fleet.call("envfleet_get_attr", attr_name, slots=self._slots(indices)))
        except EnvFailed as error:
            raise _as_attribute_error(error, attr_name) from error

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of each environment to the same value."""
        slots = self._slots(indices)
        self.fleet.set_attr(attr_name, [value] * len(slots), slots=slots)

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """Call a method of each environment."""
        try:
            return list(self.fleet.call(method_name, *args, slots=self._slots(indices), **kwargs))
        except EnvFailed as error:
            raise _as_attribute_error(error, method_name) from error

    def env_is_wrapped(self, wrapper_class: Any, indices: Indices = None) -> list[bool]:
        """Whether each environment is wrapped by a class."""
        return list(self.fleet.call("envfleet_is_wrapped", wrapper_class, slots=self._slots(indices)))

    def get_images(self) -> Sequence[Any]:
        """Return a picture of every environment (None without render_mode="rgb_array")."""
        if self.render_mode != "rgb_array":
            return [None] * self.num_envs
        return [self.fleet.render(slot) for slot in range(self.num_envs)]

    def _slots(self, indices: Indices) -> list[int]:
        # Negative numbers count from the end, as they do for SB3's lists of environments.
        return [int(index) % self.num_envs for index in self._get_indices(indices)]


class SubprocVecEnv(FleetVecEnv):
    """Drop-in for SB3's class of this name: environments in worker processes over shared memory.

    Many environments share a worker (one per CPU by default), so more environments than CPUs do not cost more
    processes. `options` are those of `envfleet.make`. The script needs no `if __name__ == "__main__"` guard.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        start_method: str | None = None,
        num_workers: int | None = None,
        **options: Any,
    ) -> None:
        backend = options.pop("backend", "shm")
        factories = [Askable(fn) for fn in env_fns]
        super().__init__(make(factories, backend=backend, start_method=start_method, num_workers=num_workers, **options))


class DummyVecEnv(FleetVecEnv):
    """Drop-in for SB3's class of this name: environments in this process, one after the other."""

    def __init__(self, env_fns: Sequence[Callable[[], Any]], **options: Any) -> None:
        super().__init__(make([Askable(fn) for fn in env_fns], backend="serial", **options))


def _as_attribute_error(error: EnvFailed, name: str) -> Exception:
    # SB3 asks "does it have …?" by catching AttributeError.
    if isinstance(error.__cause__, AttributeError):
        return AttributeError(f"the environments have no attribute {name!r}: {error}")
    return error
