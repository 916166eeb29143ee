"""A fleet as a TorchRL environment with batch size [num_envs]."""

from __future__ import annotations

from typing import Any, Unpack

import numpy as np
import torch
from gymnasium import spaces

from envfleet.adapters.fleet_view import refuse_agents
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.core.fleet_options import EnvLike, FleetOptions
from envfleet.errors import BadArgument
from envfleet.util.extras import from_extra

with from_extra("torchrl"):
    from tensordict import TensorDict, TensorDictBase
    from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, Unbounded
    from torchrl.envs import EnvBase

#: Keys of TorchRL's own, which parts of a Dict observation must not have.
_TAKEN = {"action", "reward", "done", "terminated", "truncated", "next", "_reset"}


class FleetEnv(EnvBase):  # type: ignore[misc]
    """N environments stepped together, with TorchRL's keys and its own partial resets.

    Ended rows wait (the fleet's `on_end="wait"`) until TorchRL resets them by its `_reset` mask, so `next` holds the
    real last observation and nothing is reset twice. Takes an environment and the options of `envfleet.make`, or a fleet
    made with `on_end="wait"`.

    The parts of a Dict observation have their own keys; any other observation is "observation". A Dict action is nested:
    `("action", "steer")`. The parts of a Tuple have the keys "0", "1" …. Discrete values are categorical: integers that
    count from 0, also where the space has a `start`.

    Example:
        >>> env = FleetEnv("CartPole-v1", num_envs=3, backend="serial")
        >>> env.rollout(5, break_when_any_done=False).batch_size
        torch.Size([3, 5])
        >>> env.close()
    """

    def __init__(
        self, env: EnvLike | Fleet, num_envs: int | None = None, *, device: str = "cpu", **options: Unpack[FleetOptions]
    ) -> None:
        fleet = env if isinstance(env, Fleet) else make(env, num_envs, on_end="wait", **options)
        refuse_agents(fleet)
        if fleet.on_end != "wait":
            raise BadArgument('FleetEnv needs a fleet made with on_end="wait": TorchRL resets ended environments itself')
        super().__init__(device=device, batch_size=torch.Size([fleet.num_envs]))
        self.fleet = fleet
        self._next_seed: int | None = None
        try:
            self._make_specs()
        except BadArgument:
            fleet.close()
            raise

    def _make_specs(self) -> None:
        count, device = self.fleet.num_envs, self.device
        seen, done = self.fleet.single_observation_space, self.fleet.single_action_space
        if taken := _TAKEN & set(seen.spaces if isinstance(seen, spaces.Dict) else ()):
            raise BadArgument(f"parts of the observation are named {sorted(taken)}, which are TorchRL's own keys: rename them")
        observation = _spec(seen, count, device)
        if not isinstance(seen, spaces.Dict):
            observation = Composite(observation=observation, shape=(count,), device=device)
        flag = Categorical(2, shape=(count, 1), dtype=torch.bool, device=device)
        self.observation_spec = observation
        self.action_spec = Composite(action=_spec(done, count, device), shape=(count,), device=device)
        self.reward_spec = Unbounded(shape=(count, 1), dtype=torch.float32, device=device)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=(count,), device=device)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        seed, self._next_seed = self._next_seed, None
        mask = tensordict.get("_reset", None) if tensordict is not None else None
        slots = None if mask is None else np.flatnonzero(mask.reshape(-1).cpu().numpy())
        if self.fleet.is_out.any():
            self.fleet.drop()  # what an interrupted call has left
        self.fleet.reset(seed=seed, slots=slots)
        # Rows that are not reset keep the observation they stopped at: it is still in the slab.
        observation = self.fleet.slab.tree("obs", slice(None), True)
        out = TensorDict(self._named(observation), batch_size=self.batch_size, device=self.device)
        for name in ("done", "terminated", "truncated"):
            out.set(name, torch.zeros(self.fleet.num_envs, 1, dtype=torch.bool, device=self.device))
        return out

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        batch = self.fleet.step(_to_arrays(self.fleet.single_action_space, tensordict.get("action")))
        count = self.fleet.num_envs

        def column(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(np.array(values), dtype=dtype, device=self.device).view(count, 1)

        named = self._named(batch.obs)
        named["reward"] = column(batch.reward, torch.float32)
        for name, values in (("terminated", batch.terminated), ("truncated", batch.truncated), ("done", batch.ended)):
            named[name] = column(values, torch.bool)
        return TensorDict(named, batch_size=self.batch_size, device=self.device)

    def _named(self, observation: Any) -> dict[str, Any]:
        """Tensors by TorchRL's names; dicts in dicts become TensorDicts with the batch size of the whole."""
        named = _to_tensors(self.fleet.single_observation_space, observation, self.device)
        return named if isinstance(observation, dict) else {"observation": named}

    def _set_seed(self, seed: int | None) -> None:
        self._next_seed = seed

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the fleet."""
        self.fleet.close()
        if not self.is_closed:
            super().close(raise_if_closed=raise_if_closed)


def _parts(space: Any) -> dict[Any, Any] | None:
    """The parts of a Dict or Tuple space by their place in a value; None for any other space."""
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    return dict(enumerate(space.spaces)) if isinstance(space, spaces.Tuple) else None


def _spec(space: Any, count: int, device: Any) -> Any:
    """TorchRL's spec of `count` values of a space."""
    parts = _parts(space)
    if parts is not None:
        return Composite({str(key): _spec(part, count, device) for key, part in parts.items()}, shape=(count,), device=device)
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), shape=(count,), device=device)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(torch.as_tensor(space.nvec), shape=space.nvec.shape, device=device).expand(
            count, *space.nvec.shape
        )
    if isinstance(space, spaces.MultiBinary):
        return Binary(shape=(count, *space.shape), dtype=torch.int8, device=device)
    if not isinstance(space, spaces.Box):
        raise BadArgument(
            f"TorchRL has no spec for {space}: use Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple spaces"
        )
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    shape = (count, *space.shape)
    if low.isinf().all() and high.isinf().all():
        return Unbounded(shape=shape, dtype=low.dtype, device=device)
    return Bounded(low.expand(shape), high.expand(shape), shape=shape, dtype=low.dtype, device=device)


def _to_tensors(space: Any, value: Any, device: Any) -> Any:
    """Batched values of a space as (dicts of) tensors."""
    parts = _parts(space)
    if parts is not None:
        return {str(key): _to_tensors(part, value[key], device) for key, part in parts.items()}
    start = getattr(space, "start", None)
    return torch.as_tensor(np.array(value) if start is None else np.asarray(value) - start, device=device)


def _to_arrays(space: Any, value: Any) -> Any:
    """The inverse of `_to_tensors`."""
    if isinstance(space, spaces.Dict):
        return {key: _to_arrays(part, value.get(key)) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_to_arrays(part, value.get(str(i))) for i, part in enumerate(space.spaces))
    array, start = value.cpu().numpy(), getattr(space, "start", None)
    return array if start is None else array + start
