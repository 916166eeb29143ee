"""The forward pass of an actor in NumPy, for acting on a CPU.

Acting is a pass over a few rows at every step of the environments, and PyTorch spends more on each call than the
arithmetic takes. CPU time of `Policy.choose` with the default network (two layers of 64; GRU: 64 units), one thread:

==========  ========  =========================  ==========
rows        here      here, tanh not compiled    in PyTorch
==========  ========  =========================  ==========
8           15 µs     18 µs                      76 µs
64          32 µs     48 µs                      101 µs
8, GRU      31 µs                                164 µs
64, GRU     82 µs                                304 µs
==========  ========  =========================  ==========
"""

from __future__ import annotations

import numpy as np

from envfleet.networks import recurrent
from envfleet.networks.actor_critic import ActorCritic
from envfleet.networks.numpy_layers import Array, NumpyLayers


class NumpyActor:
    """The actor of a network, on the memory of its PyTorch parameters: nothing is copied when they change.

    Example:
        >>> import gymnasium as gym
        >>> from envfleet.networks.actor_critic import NetworkConfig
        >>> net = ActorCritic(gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2), NetworkConfig())
        >>> outputs, _ = NumpyActor(net)(np.zeros((3, 4), np.float32), None)
        >>> outputs.shape
        (3, 2)
    """

    @staticmethod
    def fits(net: ActorCritic) -> bool:
        """Say whether the actor can run here: on CPU, without pictures, with memory only where it is compiled."""
        has_step = net.num_cores < 2 or recurrent.COMPILED is not None
        return net.device.type == "cpu" and not net.features.image_shapes and has_step

    def __init__(self, net: ActorCritic) -> None:
        assert net.actor_encoder.layers is not None
        self._before = NumpyLayers(net.actor_encoder.layers)
        self._after = NumpyLayers([*net.actor_layers, net.actor_head])
        self._core: recurrent.CompiledStep | None = None
        if net.num_cores == 2:
            assert net.core is not None
            self._core = recurrent.CompiledStep(net.core, 0)

    def __call__(self, x: Array, state: Array | None) -> tuple[Array, Array | None]:
        """Run rows [k, D] with the actor's states [k, W]; return its outputs and the new states."""
        x = self._before(x)
        if self._core is not None:
            assert state is not None
            x, state = self._core(np.ascontiguousarray(x), state)
        return self._after(x), state
