"""Stacks of dense layers as one autograd node.

A layer of 64 units over a few hundred rows is about 20 µs of arithmetic; PyTorch's dispatcher and autograd spend more
than that around it. On CPU the whole stack therefore runs, forward and backward, as one node written in NumPy on the
memory of the parameters; elsewhere it is the ordinary chain of modules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from envfleet.slots.compiled_core import load

Array = NDArray[np.float32]
COMPILED = load("_scan")  # compiled/scan.c, or None
SMALL = 4096  # entries from which the detour through sigmoid pays
_NAMES: dict[type[nn.Module], str] = {nn.Tanh: "tanh", nn.ReLU: "relu", nn.ELU: "elu"}


class DenseStack:
    """Linear layers and activations in a row, taken from existing modules; calling it runs them.

    Example:
        >>> layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> x = torch.randn(2, 5, 3)
        >>> torch.allclose(DenseStack(layers)(x), layers(x), atol=1e-6)
        True
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.layers: list[nn.Linear] = []
        self.activations: list[str] = []  # one per linear layer, "" for none
        for module in modules:
            for part in module if isinstance(module, nn.Sequential) else [module]:
                if isinstance(part, nn.Linear):
                    self.layers.append(part)
                    self.activations.append("")
                else:
                    self.activations[-1] = _NAMES[type(part)]
        self.modules = modules
        self._views: list[tuple[Array, Array, str]] = []
        self._seen = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run rows with any leading axes."""
        return run_stacks(x, [self])[0]

    @property
    def views(self) -> list[tuple[Array, Array, str]]:
        """(transposed weight, bias, activation) of every layer, in NumPy, on the parameters' own memory."""
        where = self.layers[0].weight.data_ptr() if self.layers else 0
        if where != self._seen:  # moved, once, when the parameters were made views of one flat tensor
            self._seen = where
            self._views = [
                (layer.weight.detach().numpy().T, layer.bias.detach().numpy(), activation)
                for layer, activation in zip(self.layers, self.activations)
            ]
        return self._views


def run_stacks(x: torch.Tensor, stacks: list[DenseStack]) -> list[torch.Tensor]:
    """Run several stacks on the same rows: on CPU they share one autograd node."""
    if x.device.type != "cpu":
        outputs = []
        for stack in stacks:
            y = x
            for module in stack.modules:
                y = module(y)
            outputs.append(y)
        return outputs
    stacks = [stack for stack in stacks if stack.layers]
    if not stacks:
        return [x]
    parameters = [tensor for stack in stacks for layer in stack.layers for tensor in (layer.weight, layer.bias)]
    flat = x.reshape(-1, x.shape[-1])
    results: tuple[torch.Tensor, ...] = _Dense.apply(  # type: ignore[no-untyped-call]
        flat, [stack.views for stack in stacks], *parameters
    )
    return [out.view(*x.shape[:-1], -1) for out in results]


def layer(x: Array, weight: Array, bias: Array, activation: str) -> Array:
    """One dense layer over rows [k, D]."""
    y: Array = x @ weight
    if activation == "tanh" and COMPILED is not None:
        COMPILED.bias_tanh(y, bias)
        return y
    y += bias
    _activate(y, activation)
    return y


def _activate(x: Array, name: str) -> None:
    if name == "tanh":
        if x.size < SMALL:
            np.tanh(x, out=x)
            return
        # 2·sigmoid(2x) - 1: PyTorch's sigmoid takes a third of the time of anybody's tanh.
        x += x
        torch.sigmoid_(torch.from_numpy(x))
        x += x
        x -= 1.0
    elif name == "relu":
        np.maximum(x, 0.0, out=x)
    elif name == "elu":
        np.copyto(x, np.expm1(np.minimum(x, 0.0)), where=x < 0)


def _through(grad: Array, y: Array, name: str) -> tuple[Array, Array]:
    """The gradient before an activation, and its sum over the rows; the derivative is known from the output `y`."""
    if name == "tanh" and COMPILED is not None:
        out, total = np.empty_like(y), np.zeros(y.shape[1], np.float32)
        COMPILED.tanh_back(np.ascontiguousarray(grad), y, out, total)
        return out, total
    if name:
        grad = grad.copy()  # the caller's: not ours to change
    if name == "tanh":
        slope = y * y
        np.subtract(1.0, slope, out=slope)
        grad *= slope
    elif name == "relu":
        grad *= y > 0
    elif name == "elu":
        grad *= np.where(y > 0, np.float32(1), y + np.float32(1))
    return grad, grad.sum(axis=0)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, stacks: list[list[tuple[Array, Array, str]]], *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        rows = x.detach().numpy()
        saved = []
        for stack in stacks:
            values = [rows]
            for weight, bias, activation in stack:
                values.append(layer(values[-1], weight, bias, activation))
            saved.append(values)
        ctx.saved = (saved, stacks)
        return tuple(torch.from_numpy(values[-1]) for values in saved)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        of_parameters: list[torch.Tensor] = []
        of_input: Array | None = None
        for values, stack, given in zip(*ctx.saved, grads):
            grad = given.numpy()
            of_stack: list[torch.Tensor] = []
            for index in range(len(stack) - 1, -1, -1):
                weight, _, activation = stack[index]
                grad, total = _through(grad, values[index + 1], activation)
                of_stack += [torch.from_numpy(total), torch.from_numpy(grad.T @ values[index])]
                if index or ctx.needs_input_grad[0]:
                    # NumPy hands a product of a column and a row to nobody, and takes six times as long over it.
                    grad = grad * weight.T if grad.shape[1] == 1 else grad @ weight.T
            of_parameters += reversed(of_stack)
            if ctx.needs_input_grad[0]:
                of_input = grad if of_input is None else of_input + grad
        return torch.from_numpy(of_input) if of_input is not None else None, None, *of_parameters
