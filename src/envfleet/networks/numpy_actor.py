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

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray
from torch import nn

from envfleet.networks import recurrent
from envfleet.networks.actor_critic import ActorCritic
from envfleet.slots.compiled_core import load

Array = NDArray[np.float32]
COMPILED = load("_scan")  # compiled/scan.c, or None
Layer = tuple[Array, Array, Callable[[Array, Array], None]]  # transposed weight, bias, what adds it and activates


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
        self._core: recurrent.CompiledStep | None = None
        if net.num_cores == 2:
            assert net.core is not None
            self._core = recurrent.CompiledStep(net.core, 0)

    def __call__(self, x: Array, state: Array | None) -> tuple[Array, Array | None]:
        """Run rows [k, D] with the actor's states [k, W]; return its outputs and the new states."""
        for weight, bias, finish in self._before:
            x = x @ weight
            finish(x, bias)
        if self._core is not None:
            assert state is not None
            x, state = self._core(np.ascontiguousarray(x), state)
        for weight, bias, finish in self._after:
            x = x @ weight
            finish(x, bias)
        return x, state


def _layers(modules: Iterable[nn.Module]) -> list[Layer]:
    """The linear layers among modules, each with the activation behind it."""
    finish = {nn.Tanh: _tanh if COMPILED is None else COMPILED.bias_tanh, nn.ReLU: _relu, nn.ELU: _elu}
    layers: list[Layer] = []
    for module in modules:
        if isinstance(module, nn.Linear):
            layers.append((module.weight.detach().numpy().T, module.bias.detach().numpy(), _add))
        else:
            layers[-1] = (*layers[-1][:2], finish[type(module)])
    return layers


def _add(y: Array, bias: Array) -> None:
    y += bias


def _tanh(y: Array, bias: Array) -> None:
    y += bias
    np.tanh(y, out=y)


def _relu(y: Array, bias: Array) -> None:
    y += bias
    np.maximum(y, 0.0, out=y)


def _elu(y: Array, bias: Array) -> None:
    y += bias
    np.copyto(y, np.expm1(np.minimum(y, 0.0)), where=y < 0)
