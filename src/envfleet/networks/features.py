"""From observations of any fixed-shape space to the inputs of a network: one flat vector, and pictures.

A centralised critic also reads the whole environment's `state()`. Learning then sees observations that carry it:
`{OWN: the agent's own observation, CENTRAL: the state}`. Acting sees the own observation alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from envfleet.errors import BadArgument

MASK_KEY = "action_mask"
OWN, CENTRAL = "own observation", "state()"
SMALLEST = 5  # pixels: below, the convolutions have nothing to slide over (a board of 3 x 3), and a picture is a vector

Inputs = dict[str, NDArray[Any]]
"""`vector` [..., D] float32 when there is one, `image0`, `image1`, … [..., C, H, W] as the environment gave them, and
`central` [..., S] float32 where the state comes along."""


@dataclass(frozen=True)
class Leaf:
    """One fixed-shape part of the observation: where it is and how it is read."""

    path: tuple[str | int, ...]
    kind: str  # "box", "onehot" or "image"
    size: int  # entries it takes in the vector (0 for a picture)
    shape: tuple[int, ...]  # of a picture: (C, H, W); otherwise as in the space
    counts: tuple[int, ...] = ()  # of "onehot": number of values per entry
    start: tuple[int, ...] = ()  # of "onehot": smallest value per entry
    add_channel_axis: bool = False  # of a picture: the space has two dimensions
    channels_last: bool = False
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

    def __init__(self, space: gym.Space[Any], state_space: gym.Space[Any] | None = None) -> None:
        self.space = space
        self.has_mask = isinstance(space, gym.spaces.Dict) and MASK_KEY in space.spaces
        leaves = list(_leaves(space, ()))
        self.vector_leaves = tuple(leaf for leaf in leaves if leaf.kind != "image")
        self.image_leaves = tuple(leaf for leaf in leaves if leaf.kind == "image")
        self.vector_size = sum(leaf.size for leaf in self.vector_leaves)
        self.image_shapes = tuple(leaf.shape for leaf in self.image_leaves)
        self.image_scales = tuple(leaf.scale for leaf in self.image_leaves)
        is_vector = isinstance(space, gym.spaces.Box) and len(space.shape) == 1
        self._flat = is_vector and state_space is None  # nothing to take apart
        if not leaves:
            raise BadArgument(f"the observation space {space} has nothing a network could read")
        if state_space is not None and not isinstance(state_space, gym.spaces.Box):
            raise BadArgument(f"a centralised critic reads states that are arrays; state() is of {state_space}")
        self.state_shape = tuple(state_space.shape) if state_space is not None else ()
        self.state_size = int(np.prod(self.state_shape, dtype=int)) if state_space is not None else 0

    def __call__(self, observation: Any) -> Inputs:
        """Read observations with any leading axes ([slot] while acting, [step, slot] while learning)."""
        if self._flat:  # the common case, at every step
            return {"vector": np.asarray(observation, dtype=np.float32)}
        if self._carries_state(observation):
            state = np.asarray(observation[CENTRAL])
            lead = state.shape[: state.ndim - len(self.state_shape)]
            flat = state.astype(np.float32, copy=False).reshape(*lead, self.state_size)
            return {**self(observation[OWN]), "central": flat}
        inputs: Inputs = {}
        if self.vector_leaves:
            parts = [_read(leaf, _at(observation, leaf.path)) for leaf in self.vector_leaves]
            inputs["vector"] = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        for index, leaf in enumerate(self.image_leaves):
            picture = np.asarray(_at(observation, leaf.path))
            if leaf.add_channel_axis:
                picture = picture[..., None, :, :]
            elif leaf.channels_last:
                picture = np.moveaxis(picture, -1, -3)
            inputs[f"image{index}"] = picture
        return inputs

    def mask(self, observation: Any) -> NDArray[np.bool_] | None:
        """Return the action mask that travels inside a Dict observation, if there is one."""
        if not self.has_mask:
            return None
        own = observation[OWN] if self._carries_state(observation) else observation
        return np.asarray(own[MASK_KEY]).astype(bool)

    def _carries_state(self, observation: Any) -> bool:
        return bool(self.state_size) and isinstance(observation, dict) and OWN in observation


def _leaves(space: gym.Space[Any], path: tuple[str | int, ...]) -> list[Leaf]:
    spaces = gym.spaces
    if isinstance(space, spaces.Dict):
        kept = [(key, part) for key, part in space.spaces.items() if path or key != MASK_KEY]
        return [leaf for key, part in kept for leaf in _leaves(part, (*path, key))]
    if isinstance(space, spaces.Tuple):
        return [leaf for index, part in enumerate(space.spaces) for leaf in _leaves(part, (*path, index))]
    if isinstance(space, spaces.Box):
        return [_box_leaf(space, path)]
    if isinstance(space, spaces.Discrete):
        return [Leaf(path, "onehot", int(space.n), (), (int(space.n),), (int(space.start),))]
    if isinstance(space, spaces.MultiDiscrete):
        counts = tuple(int(count) for count in space.nvec.ravel())
        start = tuple(int(first) for first in np.asarray(space.start).ravel())
        return [Leaf(path, "onehot", sum(counts), space.nvec.shape, counts, start)]
    if isinstance(space, spaces.MultiBinary):
        return [Leaf(path, "box", int(np.prod(space.shape)), tuple(space.shape))]
    where = "/".join(str(step) for step in path) or "the observation"
    raise BadArgument(
        f"{where} is a {type(space).__name__} space: the networks read Box, Discrete, MultiDiscrete, MultiBinary, "
        "Dict and Tuple. Wrap the environment so that it gives one of these"
    )


def _box_leaf(space: gym.spaces.Box, path: tuple[str | int, ...]) -> Leaf:
    shape = tuple(space.shape)
    is_bytes = space.dtype == np.uint8
    scale = 255.0 if is_bytes else 1.0
    if len(shape) == 2 and is_bytes:
        return Leaf(path, "image", 0, (1, *shape), add_channel_axis=True, scale=scale)
    if len(shape) == 3:
        # The channel axis is the short one: (84, 84, 3) and (4, 84, 84) are both common.
        channels_last = shape[2] < shape[0]
        chw = (shape[2], shape[0], shape[1]) if channels_last else shape
        if min(chw[1:]) < SMALLEST:
            return Leaf(path, "box", int(np.prod(shape, dtype=int)), shape)
        return Leaf(path, "image", 0, chw, channels_last=channels_last, scale=scale)
    return Leaf(path, "box", int(np.prod(shape, dtype=int)), shape)


def _at(observation: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        observation = observation[step]
    return observation


def _read(leaf: Leaf, value: Any) -> NDArray[np.float32]:
    array = np.asarray(value)
    lead = array.shape[: array.ndim - len(leaf.shape)]
    if leaf.kind == "box":
        return array.astype(np.float32, copy=False).reshape(*lead, leaf.size)
    flat = array.reshape(*lead, len(leaf.counts)) - np.array(leaf.start)
    parts = [np.eye(count, dtype=np.float32)[flat[..., index]] for index, count in enumerate(leaf.counts)]
    return np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
