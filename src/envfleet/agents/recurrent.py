"""GRU and LSTM over [step, row] sequences whose state restarts at episode ends.

PyTorch's own recurrent layers cannot restart in the middle of a sequence, so others cut sequences up and pad them.
Here the time loop is ours: on CPU a hand-written forward and backward pass in NumPy (about 30 small array operations
a step and no autograd node), elsewhere the same equations in PyTorch. Several independent cores (actor and critic)
run in one loop as a leading axis, because on CPU the number of calls is what costs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Array = NDArray[np.float32]
NUM_GATES = {"gru": 3, "lstm": 4}


class Recurrent(nn.Module):
    """`cores` independent recurrent layers of one size, run together. State: [core, row, width].

    The width of the state is H for a GRU and 2H for an LSTM (output, then cell).

    Example:
        >>> layer = Recurrent("gru", input_size=3, state_size=4, cores=2)
        >>> out, state = layer(torch.zeros(2, 5, 7, 3), layer.initial(7), torch.zeros(5, 7, dtype=torch.bool))
        >>> tuple(out.shape), tuple(state.shape)
        ((2, 5, 7, 4), (2, 7, 4))
    """

    def __init__(self, kind: str, input_size: int, state_size: int, cores: int = 1) -> None:
        super().__init__()
        self.kind, self.state_size, self.cores = kind, state_size, cores
        self.width = state_size * (2 if kind == "lstm" else 1)
        gates = NUM_GATES[kind] * state_size
        self.w_in = nn.Parameter(torch.empty(cores, input_size, gates))
        self.w_state = nn.Parameter(torch.empty(cores, state_size, gates))
        self.b_in = nn.Parameter(torch.zeros(cores, 1, gates))
        # The GRU's candidate gate has its own bias inside the reset gate; the LSTM has no use for a second one.
        self.b_state = nn.Parameter(torch.zeros(cores, 1, state_size if kind == "gru" else 0))
        for core in range(cores):
            for gate in range(NUM_GATES[kind]):
                block = slice(gate * state_size, (gate + 1) * state_size)
                nn.init.orthogonal_(self.w_in.data[core, :, block])
                nn.init.orthogonal_(self.w_state.data[core, :, block])
        if kind == "lstm":
            self.b_in.data[..., state_size : 2 * state_size] = 1.0  # remember, until taught to forget

    def initial(self, rows: int) -> torch.Tensor:
        """Return the state at the beginning of an episode."""
        return torch.zeros(self.cores, rows, self.width, device=self.w_in.device)

    def forward(
        self, inputs: torch.Tensor, state: torch.Tensor, fresh: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run [core, step, row, input] from `state`; where `fresh` [step, row], the state restarts before the step.

        Returns outputs [core, step, row, H] and the state after the last step. No gradient reaches `state`.
        """
        outputs, states = self.run(inputs, state, fresh)
        return outputs, states[:, -1]

    def run(
        self, inputs: torch.Tensor, state: torch.Tensor, fresh: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like forward, but return the state after every step: [core, step, row, width], without gradient."""
        cores, steps, rows, size = inputs.shape
        gates = torch.baddbmm(self.b_in, inputs.reshape(cores, steps * rows, size), self.w_in)
        gates = gates.view(cores, steps, rows, -1)
        keep = (~fresh).to(gates.dtype)
        if gates.device.type == "cpu":
            scan: Any = _GruScan if self.kind == "gru" else _LstmScan
            outputs, cells = scan.apply(gates, self.w_state, self.b_state, state.detach(), keep)
        else:
            loop = _gru_loop if self.kind == "gru" else _lstm_loop
            outputs, cells = loop(gates, self.w_state, self.b_state, state.detach(), keep)
        return outputs, _join(outputs.detach(), cells)


def _join(outputs: torch.Tensor, cells: torch.Tensor | None) -> torch.Tensor:
    return outputs if cells is None else torch.cat([outputs, cells.detach()], dim=-1)


def _sigmoid(x: Array) -> None:
    # In place. tanh is vectorised in NumPy and never overflows, exp() does.
    x *= 0.5
    np.tanh(x, out=x)
    x += 1.0
    x *= 0.5


def step_numpy(
    kind: str, gates: Array, w_state: Array, b_state: Array, state: Array
) -> tuple[Array, Array]:
    """One step for one core: gates [k, G·H] (input part, overwritten), state [k, width] → output [k, H], new state."""
    size = w_state.shape[0]
    hidden = state[:, :size]
    inner = hidden @ w_state
    if kind == "gru":
        both = gates[:, : 2 * size]
        both += inner[:, : 2 * size]
        _sigmoid(both)
        candidate = inner[:, 2 * size :]
        candidate += b_state
        candidate *= both[:, :size]
        candidate += gates[:, 2 * size :]
        np.tanh(candidate, out=candidate)
        out = hidden - candidate
        out *= both[:, size:]
        out += candidate
        return out, out
    gates += inner
    _sigmoid(gates[:, : 3 * size])
    np.tanh(gates[:, 3 * size :], out=gates[:, 3 * size :])
    into, forget, emit, new = (gates[:, i * size : (i + 1) * size] for i in range(4))
    cell = forget * state[:, size:] + into * new
    out = emit * np.tanh(cell)
    return out, np.concatenate([out, cell], axis=1)


class _GruScan(torch.autograd.Function):
    """The GRU's time loop: gates order (reset, update, candidate)."""

    @staticmethod
    def forward(
        ctx: Any, gates: torch.Tensor, w_state: torch.Tensor, b_state: torch.Tensor, state: torch.Tensor, keep: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        x, w, b = gates.detach().numpy(), w_state.detach().numpy(), b_state.detach().numpy()
        kept, hidden = keep.numpy(), state.numpy()
        cores, steps, rows, _ = x.shape
        size = w.shape[1]
        before = np.empty((steps, cores, rows, size), np.float32)  # state entering the step, after a restart
        both = np.empty((steps, cores, rows, 2 * size), np.float32)  # reset and update gates
        inner = np.empty((steps, cores, rows, size), np.float32)  # candidate's recurrent part
        new = np.empty((steps, cores, rows, size), np.float32)
        out = np.empty((cores, steps, rows, size), np.float32)
        product = np.empty((cores, rows, 3 * size), np.float32)
        for t in range(steps):
            h = before[t]
            np.multiply(hidden, kept[t][:, None], out=h)
            np.matmul(h, w, out=product)
            gate = both[t]
            np.add(x[:, t, :, : 2 * size], product[..., : 2 * size], out=gate)
            _sigmoid(gate)
            np.add(product[..., 2 * size :], b, out=inner[t])
            n = new[t]
            np.multiply(gate[..., :size], inner[t], out=n)
            n += x[:, t, :, 2 * size :]
            np.tanh(n, out=n)
            hidden = out[:, t]
            np.subtract(h, n, out=hidden)
            hidden *= gate[..., size:]
            hidden += n
        ctx.saved = (w, kept, before, both, inner, new)
        return torch.from_numpy(out), None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        w, kept, before, both, inner, new = ctx.saved
        grad_out = grads[0].contiguous().numpy()
        steps, cores, rows, size = before.shape
        grad_gates = np.empty((cores, steps, rows, 3 * size), np.float32)
        # What w_state sees differs from grad_gates in the candidate's part (it lies inside the reset gate).
        grad_inner = np.empty((steps, cores, rows, 3 * size), np.float32)
        # d sigmoid and d tanh of every step at once: the loop below only multiplies.
        slope = both * (1.0 - both)
        slope_new = 1.0 - new * new
        gap = before - new
        w_t = np.ascontiguousarray(w.transpose(0, 2, 1))
        grad = np.zeros((cores, rows, size), np.float32)
        back = np.empty_like(grad)
        for t in range(steps - 1, -1, -1):
            grad += grad_out[:, t]
            update = both[t, ..., size:]
            gin = grad_inner[t]
            g_new = grad_gates[:, t, :, 2 * size :]
            np.subtract(1.0, update, out=g_new)
            g_new *= grad
            g_new *= slope_new[t]
            np.multiply(g_new, both[t, ..., :size], out=gin[..., 2 * size :])
            np.multiply(g_new, inner[t], out=gin[..., :size])
            np.multiply(grad, gap[t], out=gin[..., size : 2 * size])
            gin[..., : 2 * size] *= slope[t]
            np.matmul(gin, w_t, out=back)
            grad *= update
            grad += back
            grad *= kept[t][:, None]
        grad_gates[..., : 2 * size] = grad_inner[..., : 2 * size].transpose(1, 0, 2, 3)
        grad_w = _outer(before, grad_inner)
        grad_b = grad_inner[..., 2 * size :].sum(axis=(0, 2))[:, None, :]
        return torch.from_numpy(grad_gates), torch.from_numpy(grad_w), torch.from_numpy(grad_b), None, None


class _LstmScan(torch.autograd.Function):
    """The LSTM's time loop: gates order (input, forget, output, candidate)."""

    @staticmethod
    def forward(
        ctx: Any, gates: torch.Tensor, w_state: torch.Tensor, b_state: torch.Tensor, state: torch.Tensor, keep: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, w, kept = gates.detach().numpy(), w_state.detach().numpy(), keep.numpy()
        cores, steps, rows, _ = x.shape
        size = w.shape[1]
        hidden, cell = state.numpy()[..., :size], state.numpy()[..., size:]
        before = np.empty((steps, cores, rows, size), np.float32)
        cell_before = np.empty((steps, cores, rows, size), np.float32)
        gate_all = np.empty((steps, cores, rows, 4 * size), np.float32)
        squashed = np.empty((steps, cores, rows, size), np.float32)
        out = np.empty((cores, steps, rows, size), np.float32)
        cells = np.empty((cores, steps, rows, size), np.float32)
        for t in range(steps):
            k = kept[t][:, None]
            np.multiply(hidden, k, out=before[t])
            np.multiply(cell, k, out=cell_before[t])
            gate = gate_all[t]
            np.matmul(before[t], w, out=gate)
            gate += x[:, t]
            _sigmoid(gate[..., : 3 * size])
            np.tanh(gate[..., 3 * size :], out=gate[..., 3 * size :])
            cell = cells[:, t]
            np.multiply(gate[..., :size], gate[..., 3 * size :], out=cell)
            cell += gate[..., size : 2 * size] * cell_before[t]
            np.tanh(cell, out=squashed[t])
            hidden = out[:, t]
            np.multiply(gate[..., 2 * size : 3 * size], squashed[t], out=hidden)
        ctx.saved = (w, kept, before, cell_before, gate_all, squashed)
        ctx.mark_non_differentiable(cells_tensor := torch.from_numpy(cells))
        return torch.from_numpy(out), cells_tensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        w, kept, before, cell_before, gate_all, squashed = ctx.saved
        grad_out = grads[0].contiguous().numpy()
        steps, cores, rows, size = before.shape
        grad_gates = np.empty((steps, cores, rows, 4 * size), np.float32)
        slope = gate_all * (1.0 - gate_all)
        slope[..., 3 * size :] = 1.0 - gate_all[..., 3 * size :] ** 2
        through = gate_all[..., 2 * size : 3 * size] * (1.0 - squashed * squashed)  # d output / d cell
        w_t = np.ascontiguousarray(w.transpose(0, 2, 1))
        grad = np.zeros((cores, rows, size), np.float32)
        grad_cell = np.zeros((cores, rows, size), np.float32)
        for t in range(steps - 1, -1, -1):
            grad += grad_out[:, t]
            grad_cell += grad * through[t]
            gate, g = gate_all[t], grad_gates[t]
            np.multiply(grad_cell, gate[..., 3 * size :], out=g[..., :size])
            np.multiply(grad_cell, cell_before[t], out=g[..., size : 2 * size])
            np.multiply(grad, squashed[t], out=g[..., 2 * size : 3 * size])
            np.multiply(grad_cell, gate[..., :size], out=g[..., 3 * size :])
            g *= slope[t]
            np.matmul(g, w_t, out=grad)
            k = kept[t][:, None]
            grad *= k
            grad_cell *= gate[..., size : 2 * size]
            grad_cell *= k
        grad_w = _outer(before, grad_gates)
        grad_b = np.zeros((cores, 1, 0), np.float32)
        grad_x = np.ascontiguousarray(grad_gates.transpose(1, 0, 2, 3))
        return torch.from_numpy(grad_x), torch.from_numpy(grad_w), torch.from_numpy(grad_b), None, None


def _outer(before: Array, grad: Array) -> Array:
    # Sum over steps and rows of outer products, as one matrix product per core.
    steps, cores, rows, size = before.shape
    left = before.transpose(1, 3, 0, 2).reshape(cores, size, steps * rows)
    right = grad.transpose(1, 0, 2, 3).reshape(cores, steps * rows, -1)
    product: Array = np.matmul(left, right)
    return product


def _gru_loop(
    gates: torch.Tensor, w: torch.Tensor, b: torch.Tensor, state: torch.Tensor, keep: torch.Tensor
) -> tuple[torch.Tensor, None]:
    size = w.shape[1]
    hidden, outputs = state, []
    for t in range(gates.shape[1]):
        hidden = hidden * keep[t][:, None]
        inner, x = hidden @ w, gates[:, t]
        reset, update = (x[..., : 2 * size] + inner[..., : 2 * size]).sigmoid().chunk(2, dim=-1)
        new = torch.tanh(x[..., 2 * size :] + reset * (inner[..., 2 * size :] + b))
        hidden = new + update * (hidden - new)
        outputs.append(hidden)
    return torch.stack(outputs, dim=1), None


def _lstm_loop(
    gates: torch.Tensor, w: torch.Tensor, b: torch.Tensor, state: torch.Tensor, keep: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    size = w.shape[1]
    hidden, cell = state[..., :size], state[..., size:]
    outputs, cells = [], []
    for t in range(gates.shape[1]):
        hidden, cell = hidden * keep[t][:, None], cell * keep[t][:, None]
        x = gates[:, t] + hidden @ w
        into, forget, emit = x[..., : 3 * size].sigmoid().chunk(3, dim=-1)
        cell = forget * cell + into * torch.tanh(x[..., 3 * size :])
        hidden = emit * torch.tanh(cell)
        outputs.append(hidden)
        cells.append(cell)
    return torch.stack(outputs, dim=1), torch.stack(cells, dim=1)


def default_scale() -> float:
    """Return the gain for hidden layers: √2 keeps the variance of tanh and ReLU layers near one."""
    return math.sqrt(2.0)
