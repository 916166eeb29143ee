"""From observations of any fixed-shape space to the inputs of a network: one flat vector, and pictures.

A centralised critic also reads the whole environment's `state()`. Learning then sees observations that carry it:
`{OWN: the agent's own observation, CENTRAL: the state}`. Acting sees the own observation alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument
from envfleet.slots.layout import Leaf, leaves_of

MASK_KEY = "action_mask"
OWN, CENTRAL = "own observation", "state()"
SMALLEST = 5  # pixels: below, the convolutions have nothing to slide over (a board of 3 x 3), and a picture is a vector

Inputs = dict[str, NDArray[Any]]
"""`vector` [..., D] float32 when there is one, `image0`, `image1`, … [..., C, H, W] as the environment gave them, and
`central` [..., S] float32 where the state comes along."""


class Part(NamedTuple):
    """How one leaf of the observation is read."""

    path: tuple[Any, ...]
    size: int  # entries it takes in the vector (0 for a picture)
    read: Callable[[NDArray[Any]], NDArray[Any]]  # [..., leaf] → [..., size], or [..., C, H, W]
    shape: tuple[int, ...] = ()  # of a picture: (C, H, W)
    scale: float = 1.0  # of a picture: what divides it to reach 0..1


class Features:
    """Reads observations of a space (Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple) into network inputs.

    Boxes of three dimensions, and uint8 boxes of two, are pictures (from 5 pixels on); everything else is flattened into one vector
    (discrete values one-hot). A Dict key `action_mask` is not an input: it is handed to the action distribution.

    Example:
        >>> space = gym.spaces.Dict(pos=gym.spaces.Box(-1, 1, (2,)), door=gym.spaces.Discrete(3))
        >>> features = Features(space)
        >>> features({"pos": np.zeros((5, 2)), "door": np.ones(5, int)})["vector"].shape
        (5, 5)
        >>> features = Features(gym.spaces.Box(-1, 1, (2,)), state_space=gym.spaces.Box(-1, 1, (3, 2)))
        >>> inputs = features({OWN: np.zeros((5, 2)), CENTRAL: np.zeros((5, 3, 2))})
        >>> inputs["vector"].shape, inputs["central"].shape, sorted(features(np.zeros((5, 2))))
        ((5, 2), (5, 6), ['vector'])
    """

    def __init__(self, space: gym.Space[Any], state_space: gym.Space[Any] | None = None, previous_size: int = 0) -> None:
        self.space = space
        self.has_mask = isinstance(space, gym.spaces.Dict) and MASK_KEY in space.spaces
        parts = [_part(leaf) for leaf in leaves_of(space) if leaf.path[:1] != (MASK_KEY,)]
        self._vectors = [part for part in parts if not part.shape]
        self._images = [part for part in parts if part.shape]
        self.vector_size = sum(part.size for part in self._vectors) + previous_size
        self.image_shapes = tuple(part.shape for part in self._images)
        self.image_scales = tuple(part.scale for part in self._images)
        is_vector = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
        self._flat = is_vector and state_space is None  # nothing to take apart
        if not parts:
            raise BadArgument(f"the observation space {space} has nothing a network could read")
        if state_space is not None and not isinstance(state_space, gym.spaces.Box):
            raise BadArgument(f"a centralised critic reads states that are arrays; state() is of {state_space}")
        self._state_shape = tuple(state_space.shape) if state_space is not None else ()
        self.state_size = int(np.prod(self._state_shape, dtype=int)) if state_space is not None else 0

    def __call__(self, observation: Any, previous: NDArray[np.float32] | None = None) -> Inputs:
        """Read observations with any leading axes ([slot] while acting, [step, slot] while learning).

        `previous` [..., P] is what is told of the step before (`PreviousStep`); it becomes the end of the vector.
        """
        if previous is None:
            return self._read(observation)
        inputs = self._read(observation)
        inputs["vector"] = np.concatenate([inputs["vector"], previous], axis=-1) if "vector" in inputs else previous
        return inputs

    def _read(self, observation: Any) -> Inputs:
        if self._flat:  # the common case, at every step
            return {"vector": np.asarray(observation, dtype=np.float32)}
        if self._carries_state(observation):
            state = np.asarray(observation[CENTRAL])
            return {**self._read(observation[OWN]), "central": _flat(len(self._state_shape), self.state_size, state)}
        inputs: Inputs = {}
        if self._vectors:
            parts = [_read(part, observation) for part in self._vectors]
            inputs["vector"] = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        return inputs | {f"image{index}": _read(part, observation) for index, part in enumerate(self._images)}

    def mask(self, observation: Any) -> NDArray[np.bool_] | None:
        """Return the action mask that travels inside a Dict observation, if there is one."""
        if not self.has_mask:
            return None
        own = observation[OWN] if self._carries_state(observation) else observation
        return np.asarray(own[MASK_KEY]).astype(bool)

    def _carries_state(self, observation: Any) -> bool:
        return bool(self.state_size) and isinstance(observation, dict) and OWN in observation


def _read(part: Part, observation: Any) -> NDArray[Any]:
    for step in part.path:
        observation = observation[step]
    return part.read(np.asarray(observation))


def _part(leaf: Leaf) -> Part:
    space, path = leaf.space, leaf.path
    if isinstance(space, gym.spaces.Box):
        return _box_part(leaf)
    if isinstance(space, gym.spaces.MultiBinary):
        return _flat_part(leaf)
    if isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        counts = np.ravel(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec)
        return Part(path, int(counts.sum()), partial(_one_hot, len(leaf.shape), counts, np.ravel(space.start)))
    where = "/".join(str(step) for step in path) or "the observation"
    raise BadArgument(
        f"{where} is a {type(space).__name__} space: the networks read Box, Discrete, MultiDiscrete, MultiBinary, "
        "Dict and Tuple. Wrap the environment so that it gives one of these"
    )


def _box_part(leaf: Leaf) -> Part:
    shape, is_bytes = leaf.shape, leaf.dtype == np.uint8
    scale = 255.0 if is_bytes else 1.0
    if len(shape) == 2 and is_bytes:
        return Part(leaf.path, 0, partial(np.expand_dims, axis=-3), (1, *shape), scale)
    if len(shape) == 3:
        # The channel axis is the short one: (84, 84, 3) and (4, 84, 84) are both common.
        channels_last = shape[2] < shape[0]
        chw = (shape[2], shape[0], shape[1]) if channels_last else shape
        if min(chw[1:]) >= SMALLEST:
            read = partial(np.moveaxis, source=-1, destination=-3) if channels_last else np.asarray
            return Part(leaf.path, 0, read, chw, scale)
    return _flat_part(leaf)


def _flat_part(leaf: Leaf) -> Part:
    size = int(np.prod(leaf.shape, dtype=int))
    return Part(leaf.path, size, partial(_flat, len(leaf.shape), size))


def _flat(num_axes: int, size: int, array: NDArray[Any]) -> NDArray[np.float32]:
    return array.astype(np.float32, copy=False).reshape(*array.shape[: array.ndim - num_axes], size)


def _one_hot(num_axes: int, counts: NDArray[Any], start: NDArray[Any], array: NDArray[Any]) -> NDArray[np.float32]:
    flat = array.reshape(*array.shape[: array.ndim - num_axes], len(counts)) - start
    return np.concatenate([np.eye(count, dtype=np.float32)[flat[..., i]] for i, count in enumerate(counts)], axis=-1)
