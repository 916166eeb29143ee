"""A fleet as a TorchRL environment with batch size [num_envs]."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from envfleet.adapters.fleet_view import refuse_agents
from envfleet.core.construct import make
from envfleet.core.fleet import Fleet
from envfleet.errors import BadArgument
from envfleet.util.extras import from_extra
from envfleet.util.trees import tree_map

with from_extra("torchrl"):
    from tensordict import TensorDict, TensorDictBase
    from torchrl.data import Categorical, Composite, Unbounded
    from torchrl.envs import EnvBase
    from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform


class FleetEnv(EnvBase):  # type: ignore[misc]
    """N environments stepped together, with TorchRL's keys and its own partial resets.

    Ended rows wait (the fleet's `on_end="wait"`) until TorchRL resets them by its `_reset` mask, so `next` holds the
    real last observation and nothing is reset twice. Discrete actions are categorical (integers). Takes an environment
    and the options of `envfleet.make`, or a fleet made with `on_end="wait"`.

    Example:
        >>> env = FleetEnv("CartPole-v1", num_envs=3, backend="serial")
        >>> env.rollout(5, break_when_any_done=False).batch_size
        torch.Size([3, 5])
        >>> env.close()
    """

    def __init__(self, env: Any, num_envs: int | None = None, *, device: str = "cpu", **options: Any) -> None:
        fleet = env if isinstance(env, Fleet) else make(env, num_envs, on_end="wait", **options)
        refuse_agents(fleet)
        if fleet.on_end != "wait":
            raise BadArgument('FleetEnv needs a fleet made with on_end="wait": TorchRL resets ended environments itself')
        super().__init__(device=device, batch_size=torch.Size([fleet.num_envs]))
        self.fleet = fleet
        self._next_seed: int | None = None
        self._make_specs()

    def _make_specs(self) -> None:
        count = self.fleet.num_envs

        def batched(space: Any) -> Any:
            spec = _gym_to_torchrl_spec_transform(space, device=self.device, categorical_action_encoding=True)
            return spec.expand(count, *spec.shape)

        observation = batched(self.fleet.single_observation_space)
        if not isinstance(observation, Composite):
            observation = Composite(observation=observation, shape=(count,))
        flag = Categorical(2, shape=(count, 1), dtype=torch.bool, device=self.device)
        self.observation_spec = observation
        self.action_spec = batched(self.fleet.single_action_space)
        self.reward_spec = Unbounded(shape=(count, 1), dtype=torch.float32, device=self.device)
        self.done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=(count,), device=self.device)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        seed, self._next_seed = self._next_seed, None
        mask = tensordict.get("_reset", None) if tensordict is not None else None
        slots = None if mask is None else np.flatnonzero(mask.reshape(-1).cpu().numpy())
        self.fleet.reset(seed=seed, slots=slots)
        # Rows that are not reset keep the observation they stopped at: it is still in the slab.
        observation = self.fleet.slab.tree("obs", slice(None), True)
        out = TensorDict(self._named(observation), batch_size=self.batch_size, device=self.device)
        for name in ("done", "terminated", "truncated"):
            out.set(name, torch.zeros(self.fleet.num_envs, 1, dtype=torch.bool, device=self.device))
        return out

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict.get("action").cpu().numpy()
        batch = self.fleet.step(action)
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
        named = observation if isinstance(observation, dict) else {"observation": observation}
        return dict(tree_map(lambda leaf: torch.as_tensor(np.array(leaf), device=self.device), named))

    def _set_seed(self, seed: int | None) -> None:
        self._next_seed = seed

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the fleet."""
        self.fleet.close()
        if not self.is_closed:
            super().close(raise_if_closed=raise_if_closed)
