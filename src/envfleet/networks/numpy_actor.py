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

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from torch import nn

from envfleet.networks import recurrent
from envfleet.networks.actor_critic import ActorCritic
from envfleet.slots.compiled_core import load

Array = NDArray[np.float32]
COMPILED = load("_scan")  # compiled/scan.c, or None
Layer = tuple[Array, Array, type[nn.Module] | None]  # transposed weight, bias, activation


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
        self._before = _layers(net.actor_encoder.layers)
        self._after = _layers([*net.actor_layers, net.actor_head])
        self._core: tuple[Array, Array, Array] | None = None
        if net.num_cores == 2:
            assert net.core is not None
            w_in, bias, w_state = (p.detach()[0].numpy() for p in (net.core.w_in, net.core.b_in, net.core.w_state))
            self._core = w_in, bias, w_state

    def __call__(self, x: Array, state: Array | None) -> tuple[Array, Array | None]:
        """Run rows [k, D] with the actor's states [k, W]; return its outputs and the new states."""
        for layer in self._before:
            x = _run(x, *layer)
        if self._core is not None:
            assert state is not None
            x, state = recurrent.step(np.ascontiguousarray(x), *self._core, state)
        for layer in self._after:
            x = _run(x, *layer)
        return x, state


def _layers(modules: Iterable[nn.Module]) -> list[Layer]:
    """The linear layers among modules, each with the activation behind it."""
    layers: list[Layer] = []
    for module in modules:
        if isinstance(module, nn.Linear):
            layers.append((module.weight.detach().numpy().T, module.bias.detach().numpy(), None))
        else:
            layers[-1] = (*layers[-1][:2], type(module))
    return layers


def _run(x: Array, weight: Array, bias: Array, activation: type[nn.Module] | None) -> Array:
    y: Array = x @ weight
    if activation is nn.Tanh and COMPILED is not None:
        COMPILED.bias_tanh(y, bias)
        return y
    y += bias
    if activation is nn.Tanh:
        np.tanh(y, out=y)
    elif activation is nn.ReLU:
        np.maximum(y, 0.0, out=y)
    elif activation is nn.ELU:
        np.copyto(y, np.expm1(np.minimum(y, 0.0)), where=y < 0)
    return y
