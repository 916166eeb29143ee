"""The gradient of one minibatch in one compiled call (`compiled/dense.c`), for the plain case: dense tanh networks on a CPU.

A block of rows goes through forward, loss and backward while it is in the cache. What does not fit (`FusedStep.of`) is learned
layer by layer, as `PolicyLearner._step` has it; both follow the same equations and differ by rounding only. With the same
seed every number of threads gives the same bits: see `dense.c`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from envfleet.networks.actor_critic import ActorCritic
from envfleet.networks.numpy_layers import NumpyLayers
from envfleet.slots.compiled_core import load
from envfleet.train.objective import Coefficients, Tensors

COMPILED = load("_dense")  # compiled/dense.c, or None
MAX_PARTS = MAX_LAYERS = 16  # LAYERS in dense.c
REPORTED = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


class FusedStep:
    """Gradients of minibatches of one segment, written to `flat.grad`."""

    @classmethod
    def of(cls, net: ActorCritic, flat: nn.Parameter, num_threads: int) -> FusedStep | None:
        """Return one for this network, or None where the network or the machine is not the plain case."""
        actions, config = net.actions, net.config
        dense = not net.num_cores and not net.shared and not net.features.image_shapes and not net.features.state_size
        small = len(config.hidden) < MAX_LAYERS and len(actions.counts) <= MAX_PARTS
        head = bool(actions.counts) or not (actions.state_std or actions.squash)
        on_cpu = flat.device.type == "cpu" and flat.dtype == torch.float32
        fits = COMPILED is not None and dense and small and head and on_cpu and config.activation == "tanh"
        return cls(net, flat, num_threads) if fits else None

    def __init__(self, net: ActorCritic, flat: nn.Parameter, num_threads: int) -> None:
        self.net, self.flat, self.num_threads = net, flat, num_threads
        sides = (
            (net.actor_encoder.layers, net.actor_layers, net.actor_head),
            (net.critic_encoder.layers, net.critic_layers, net.critic_head),
        )
        self._nets = [tuple(self._place(one) for part in side for one in _linear(part)) for side in sides]
        self._sides = [NumpyLayers([*(encoder or ()), *layers, head]) for encoder, layers, head in sides]  # forward only
        self._log_std = self._begin(net.log_std) if net.log_std is not None else -1
        self._rows: dict[str, NDArray[Any]] = {}

    def _begin(self, parameter: torch.Tensor) -> int:
        return (parameter.data_ptr() - self.flat.data_ptr()) // 4

    def _place(self, layer: nn.Linear) -> tuple[int, int, int, int]:
        return layer.in_features, layer.out_features, self._begin(layer.weight), self._begin(layer.bias)

    def run(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [T, B, P] and values [T, B] for inputs [T, B, D], without gradients; the same bits on any number of threads."""
        rows = x.flatten(0, 1).numpy()
        outputs, value = (torch.from_numpy(side(rows, self.num_threads)) for side in self._sides)
        return outputs.view(*x.shape[:2], -1), value.view(x.shape[:2])

    def take(self, data: Tensors) -> None:
        """Take the rows [T, B] of a segment; indices count them through."""
        names = {"x": "vector", "raw": "raw", "log_prob": "log_prob", "value": "value", "advantage": "advantage"}
        names |= {"target": "target"} | ({"mask": "mask"} if "mask" in data else {})
        self._rows = {name: np.ascontiguousarray(data[key].numpy()) for name, key in names.items()}
        if not self.net.actions.counts:
            self._rows["raw"] = self._rows["raw"].astype(np.float32, copy=False)

    def __call__(self, index: NDArray[np.int64], now: Coefficients, normalise: bool) -> tuple[float, dict[str, float]]:
        """Write the gradient of these rows; return its norm and the parts of the objective."""
        assert COMPILED is not None and self.flat.grad is not None
        norm, *parts = COMPILED.ppo_step(
            *self._nets,
            self.net.actions.counts,
            self.flat.numel(),
            self._log_std,
            self._rows["advantage"].size,
            len(index),
            "mask" in self._rows,
            self.num_threads,
            now.clip,
            now.entropy,
            now.value,
            -1.0 if now.value_clip is None else now.value_clip,
            normalise,
            flat=self.flat.detach().numpy(),
            grad=self.flat.grad.numpy(),
            index=index,
            **self._rows,
        )
        return norm, dict(zip(REPORTED, parts))


def _linear(part: Any) -> list[nn.Linear]:
    return [module for module in part.modules() if isinstance(module, nn.Linear)]
