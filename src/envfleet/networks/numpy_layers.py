"""Dense layers in NumPy, on the memory of PyTorch's parameters: forward for acting, and as one autograd node for learning.

A layer of 64 units over a few hundred rows is about 20 µs of arithmetic, and PyTorch spends more than that on the calls
around it. CPU time of the two 64 x 64 networks of an update (actor and critic, forward and backward, one thread):

=====  ========  ==========
rows   here      in PyTorch
=====  ========  ==========
256    336 µs    447 µs
2,048  1,495 µs  2,574 µs
=====  ========  ==========

Most of the second difference is PyTorch's tanh, which takes ten times as long as its sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from envfleet.slots.compiled_core import load

Array = NDArray[np.float32]
COMPILED = load("_scan")  # compiled/scan.c, or None
DENSE = load("_dense")  # compiled/dense.c, or None
MOST_LAYERS = 16  # LAYERS in dense.c


class ParameterMemory:
    """Where parameters are in memory, for those who hold NumPy views of it.

    They move when they become views of one flat tensor, are replaced, or are copied with their network.
    """

    def __init__(self, names: Iterable[tuple[nn.Module, str]]) -> None:
        # Each parameter where its module keeps it: `module.name` takes 0.4 µs, and this is asked on every step of the envs.
        self._kept = [(module._parameters, name) for module, name in names]
        self._seen: list[int] = []

    def has_moved(self) -> bool:
        """Whether any of them is elsewhere than at the last call; true at the first."""
        now = [kept[name].data_ptr() for kept, name in self._kept]  # type: ignore[union-attr]
        moved, self._seen = now != self._seen or not now, now
        return moved

    def __getstate__(self) -> dict[str, Any]:
        # Views that are copied are views no longer, and in another process the address may be another tensor's.
        return {**self.__dict__, "_seen": []}


class NumpyLayers:
    """Linear layers and their activations in a row, taken from PyTorch modules.

    Example:
        >>> modules = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)]
        >>> x = torch.randn(2, 5, 3)
        >>> torch.allclose(NumpyLayers(modules).learn(x), nn.Sequential(*modules)(x), atol=1e-6)
        True
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._linear: list[nn.Linear] = []
        self._kinds: list[type[nn.Module]] = []  # the activation behind each linear layer; Linear: none
        for module in modules:
            if isinstance(module, nn.Linear):
                self._linear.append(module)
                self._kinds.append(nn.Linear)
            else:
                self._kinds[-1] = type(module)
        # Layers that one compiled call runs: linear with or without a tanh.
        known = {nn.Linear, nn.Tanh}.issuperset(self._kinds) and 0 < len(self._linear) <= MOST_LAYERS
        self._in_one_call = known and DENSE is not None
        self._places: tuple[tuple[int, int, int, int, bool], ...] = ()  # of every layer, for that call
        self._memory = ParameterMemory((layer, name) for layer in self._linear for name in ("weight", "bias"))
        self._parameters: list[torch.Tensor] = []
        self._layers: list[tuple[Array, Array, type[nn.Module]]] = []

    def layers(self) -> list[tuple[Array, Array, type[nn.Module]]]:
        """(transposed weight, bias, activation) of every layer."""
        if self._memory.has_moved():
            self._parameters = [one for layer in self._linear for one in (layer.weight, layer.bias)]
            arrays = [one.detach().numpy() for one in self._parameters]
            self._layers = [(w.T, b, kind) for w, b, kind in zip(arrays[::2], arrays[1::2], self._kinds)]
            in_one_piece = all(one.is_contiguous() and one.dtype == torch.float32 for one in self._parameters)
            in_one_piece &= all(b.shape == w.shape[1:] for w, b, _ in self._layers)
            self._places = tuple(
                (*w.shape, one.weight.data_ptr(), one.bias.data_ptr(), kind is nn.Tanh)
                for one, (w, _, kind) in zip(self._linear, self._layers)
                if in_one_piece
            )
        return self._layers

    def __call__(self, x: Array, num_threads: int = 1) -> Array:
        """Run rows [k, D]. In one compiled call a row has the same bits in any company and on any number of threads."""
        layers = self.layers()
        if self._in_one_call and self._places and x.dtype == np.float32:
            assert DENSE is not None
            y = np.empty((len(x), self._places[-1][1]), np.float32)
            DENSE.forward(self._places, len(x), num_threads, x=np.ascontiguousarray(x), y=y)
            return y
        for weight, bias, kind in layers:
            x = x @ weight
            _FINISH[kind](x, bias)
        return x

    def learn(self, x: torch.Tensor) -> torch.Tensor:
        """Run rows with any leading axes, such that gradients flow."""
        if not self._linear:
            return x
        flat = x.reshape(-1, x.shape[-1])
        layers = self.layers()
        y: torch.Tensor = _Node.apply(flat, layers, *self._parameters)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], self._linear[-1].out_features)


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: Any, *parameters: torch.Tensor) -> torch.Tensor:
        values = [x.detach().numpy()]
        for weight, bias, kind in layers:
            y = values[-1] @ weight
            _FINISH[kind](y, bias)
            values.append(y)
        ctx.values, ctx.layers = values, layers
        return torch.from_numpy(values[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad, found = grads[0].numpy(), []
        for index in range(len(ctx.layers) - 1, -1, -1):
            weight, _, kind = ctx.layers[index]
            grad, total = _before(np.ascontiguousarray(grad), ctx.values[index + 1], kind)
            found += [torch.from_numpy(total), torch.from_numpy(grad.T @ ctx.values[index])]
            if index or ctx.needs_input_grad[0]:
                # BLAS is not used for rank-1 products, which then take six times as long.
                grad = grad * weight.T if grad.shape[1] == 1 else grad @ weight.T
        return torch.from_numpy(grad) if ctx.needs_input_grad[0] else None, None, *reversed(found)


def _before(grad: Array, y: Array, kind: type[nn.Module]) -> tuple[Array, Array]:
    """The gradient before an activation whose output was `y`, and its sum over the rows."""
    if kind is nn.Tanh and COMPILED is not None:
        out, total = np.empty_like(y), np.zeros(y.shape[1], np.float32)
        COMPILED.tanh_back(grad, y, out, total)
        return out, total
    if kind is not nn.Linear:
        grad = grad * _SLOPE[kind](y)
    return grad, grad.sum(axis=0)


def _add(y: Array, bias: Array) -> None:
    y += bias


def _tanh(y: Array, bias: Array) -> None:
    if COMPILED is not None:
        COMPILED.bias_tanh(y, bias)
        return
    y += bias
    np.tanh(y, out=y)


def _relu(y: Array, bias: Array) -> None:
    y += bias
    np.maximum(y, 0.0, out=y)


def _elu(y: Array, bias: Array) -> None:
    y += bias
    np.copyto(y, np.expm1(np.minimum(y, 0.0)), where=y < 0)


#: Adds the bias and applies the activation, in place.
_FINISH: dict[type[nn.Module], Callable[[Array, Array], None]] = {nn.Linear: _add, nn.Tanh: _tanh, nn.ReLU: _relu, nn.ELU: _elu}
#: The derivative of an activation, from its output.
_SLOPE: dict[type[nn.Module], Callable[[Array], Any]] = {
    nn.Tanh: lambda y: 1.0 - y * y,
    nn.ReLU: lambda y: y > 0,
    nn.ELU: lambda y: np.where(y > 0, np.float32(1), y + np.float32(1)),
}
