"""Stable-Baselines3's `SubprocVecEnv` and `DummyVecEnv` over a fleet: real `VecEnv`s, SB3 trains on them unchanged."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

import numpy as np

from envfleet.adapters.askable import Askable
from envfleet.adapters.fleet_view import FleetView
from envfleet.adapters.peer_errors import as_env_raised
from envfleet.core.batch import Batch
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.core.fleet_options import BackendName, EnvOptions, StartMethod
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

    @property
    def waiting(self) -> bool:
        """Whether actions were sent whose results were not fetched yet."""
        return bool(self.fleet.is_out.any())

    # -- stepping --------------------------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Reset all environments with the seeds and options set before; both are used once."""
        options: Any = [option or None for option in self._options] if any(self._options) else None
        with self._peer_errors():
            self._drop_leftovers()
            batch = self.fleet.reset(seed=list(self._seeds), options=options)
        self.reset_infos = list(batch.info)
        self._reset_seeds()
        self._reset_options()
        return batch.obs

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
        with self._peer_errors():
            return list(self.fleet.call("envfleet_get_attr", attr_name, slots=self._slots(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of each environment to the same value."""
        slots = self._slots(indices)
        self.fleet.set_attr(attr_name, [value] * len(slots), slots=slots)

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """Call a method of each environment."""
        with self._peer_errors():
            return list(self.fleet.call(method_name, *args, slots=self._slots(indices), **kwargs))

    def env_is_wrapped(self, wrapper_class: Any, indices: Indices = None) -> list[bool]:
        """Whether each environment is wrapped by a class."""
        return list(self.fleet.call("envfleet_is_wrapped", wrapper_class, slots=self._slots(indices)))

    def get_images(self) -> Sequence[Any]:
        """Return a picture of every environment (None without render_mode="rgb_array")."""
        if self.render_mode != "rgb_array":
            warnings.warn(f"the environments have render_mode={self.render_mode!r}; pictures need 'rgb_array'", stacklevel=2)
            return [None] * self.num_envs
        return [self.fleet.render(slot) for slot in range(self.num_envs)]

    def _slots(self, indices: Indices) -> list[int]:
        # Negative numbers count from the end, as they do for SB3's lists of environments.
        return [int(index) % self.num_envs for index in self._get_indices(indices)]


class SubprocVecEnv(FleetVecEnv):
    """Drop-in for SB3's class of this name: environments in worker processes over shared memory.

    Every environment has its own process, so that environments that wait do so at the same time. With cheap environments and
    few CPUs a `num_workers` of the number of CPUs is faster: environments then share workers. `options` are those of
    `envfleet.make`. The script needs no `if __name__ == "__main__"` guard.

    Example:
        >>> import gymnasium as gym
        >>> envs = SubprocVecEnv([lambda: gym.make("CartPole-v1")] * 2, num_workers=1)
        >>> envs.reset().shape
        (2, 4)
        >>> envs.close()
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        start_method: StartMethod | None = None,
        num_workers: int | None = None,
        backend: BackendName = "shm",
        **options: Unpack[EnvOptions],
    ) -> None:
        workers = len(env_fns) or None if num_workers is None else num_workers
        super().__init__(_fleet(env_fns, backend=backend, start_method=start_method, num_workers=workers, **options))


class DummyVecEnv(FleetVecEnv):
    """Drop-in for SB3's class of this name: environments in this process, one after the other.

    Example:
        >>> import gymnasium as gym
        >>> envs = DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2)
        >>> envs.reset().shape, len(envs.envs)
        ((2, 4), 2)
        >>> envs.close()
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]], **options: Unpack[EnvOptions]) -> None:
        super().__init__(_fleet(env_fns, backend="serial", **options))


def _fleet(env_fns: Sequence[Callable[[], Any]], **options: Any) -> Fleet:
    try:
        return make([Askable(fn) for fn in env_fns], **options)
    except EnvFailed as error:
        raise as_env_raised(error) from error.__cause__
