"""vector: environments that Gymnasium registers with a vectorised version (`vector_entry_point`), such as CartPole-v1.

Gymnasium steps and resets all of them together, with one random stream. What happens at an end is the environment's own
choice: NextStep is on_end="wait", SameStep is on_end="reset".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from envfleet.backends.batch_engine import ASKED, Array, BatchEngine, Declared, Rows
from envfleet.errors import BadArgument
from envfleet.slots.layout import gather, leaves_of, scatter
from envfleet.slots.slab import Slots

_ON_END = {AutoresetMode.NEXT_STEP: "wait", AutoresetMode.SAME_STEP: "reset"}


class VectorEngine(BatchEngine):
    """A `gymnasium.vector.VectorEnv` as it is."""

    kind = "vector"

    def __init__(self, spec: EnvSpec, kwargs: Mapping[str, Any]) -> None:
        self._spec, self._kwargs = spec, dict(kwargs)
        self.name = f"vector:{spec.id}"
        self._env: Any = None
        self._seed: int | None = None
        if spec.vector_entry_point is None:
            raise BadArgument(f"{spec.id} has no vector_entry_point in Gymnasium's registry: use another backend")

    def build(self, num_slots: int, on_end: str, seed: int | None = None) -> None:
        """Make the vector environment and see what it does at an end."""
        self.close()
        env = self._env = gym.make_vec(self._spec, num_slots, vectorization_mode="vector_entry_point", **self._kwargs)
        mode = env.metadata.get("autoreset_mode")
        if mode not in _ON_END:
            raise BadArgument(f"{self.name} has autoreset_mode={mode}: an engine needs NextStep or SameStep")
        self.declared = Declared(seeds="start", partial=False, on_end=(_ON_END[mode],))
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.metadata, self._seed = env.metadata, seed

    def advance(self, slots: Slots, begin: Array, seeds: Array, actions: Any) -> Rows:
        """One step or one reset of all; the environment itself resets what ended before."""
        count = len(slots)
        if (begin == ASKED).any():
            if not (begin == ASKED).all():
                raise RuntimeError("some slots are to be reset and others stepped, which this engine cannot do in one call")
            seed, self._seed = (int(seeds[0]) if seeds[0] >= 0 else self._seed), None
            obs, infos = self._env.reset(seed=seed)
            no = np.zeros(count, np.bool_)
            return Rows(obs, np.zeros(count), no, no, info=infos)
        obs, reward, terminated, truncated, infos = self._env.step(actions)
        ended = np.asarray(terminated) | np.asarray(truncated)
        same_step = self.declared.on_end == ("reset",) and bool(ended.any())
        return Rows(obs, reward, terminated, truncated, self._last(infos, ended) if same_step else None, infos)

    def _last(self, infos: Mapping[str, Any], ended: Array) -> Any:
        """The last observations of ended episodes, batched: Gymnasium gives them as an array, or as objects."""
        final = infos.get("final_obs")
        if not (isinstance(final, np.ndarray) and final.dtype == object):
            return final
        leaves = leaves_of(self.observation_space)
        out = [np.zeros((len(ended), *leaf.shape), leaf.dtype) for leaf in leaves]
        for slot in np.flatnonzero(ended).tolist():
            for rows, value in zip(out, scatter(leaves, final[slot])):
                rows[slot] = value
        return gather(self.observation_space, out)

    def close(self) -> None:
        """Close the environment."""
        env, self._env = self._env, None
        if env is not None:
            env.close()
