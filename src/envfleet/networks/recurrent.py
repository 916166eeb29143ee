"""GRU and LSTM over [step, row] sequences whose state restarts at episode ends.

PyTorch's own recurrent layers cannot restart in the middle of a sequence, so others cut sequences up and pad them.
Here the time loop is ours: on CPU a hand-written forward and backward pass in NumPy (about ten small array operations
a step and no autograd node), elsewhere the same equations in PyTorch. Several independent cores (actor and critic)
run in one loop as a leading axis, because on CPU the number of calls is what costs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from envfleet.slots.compiled_core import load

Array = NDArray[np.float32]
NUM_GATES = {"gru": 3, "lstm": 4}
COMPILED = load("_scan")  # compiled/scan.c, or None


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
        for core in range(cores):
            for gate in range(NUM_GATES[kind]):
                block = slice(gate * state_size, (gate + 1) * state_size)
                # Entries of about 1/sqrt(inputs): with three inputs and 64 units, plain orthogonal rows would be so
                # short that the gates hardly see the observation.
                gain = max(1.0, (state_size / input_size) ** 0.5)
                nn.init.orthogonal_(self.w_in.data[core, :, block], gain)
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
        self, inputs: torch.Tensor, state: torch.Tensor, fresh: torch.Tensor, states: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like forward, but return the state after every step: [core, step, row, width], without gradient.

        Learning does not look at the states (`states=False`): an LSTM need not put them together, and `state` comes back.
        """
        cores, steps, rows, size = inputs.shape
        if inputs.device.type == "cpu" and COMPILED is not None:
            outputs, cells = _NativeScan.apply(  # type: ignore[no-untyped-call]
                inputs, self.w_in, self.b_in, self.w_state, state.detach(), fresh
            )
            return outputs, _join(outputs.detach(), cells) if states else state
        gates = torch.baddbmm(self.b_in, inputs.reshape(cores, steps * rows, size), self.w_in)
        gates = gates.view(cores, steps, rows, -1)
        keep = (~fresh).to(gates.dtype)
        if gates.device.type == "cpu":
            scan: Any = _GruScan if self.kind == "gru" else _LstmScan
            outputs, cells = scan.apply(gates, self.w_state, state.detach(), keep)
        else:
            loop = _gru_loop if self.kind == "gru" else _lstm_loop
            outputs, cells = loop(gates, self.w_state, state.detach(), keep)
        return outputs, _join(outputs.detach(), cells) if states else state


def _join(outputs: torch.Tensor, cells: torch.Tensor | None) -> torch.Tensor:
    return outputs if cells is None else torch.cat([outputs, cells.detach()], dim=-1)


def _sigmoid(x: Array) -> None:
    torch.sigmoid_(torch.from_numpy(x))  # in place; three times as fast as anything NumPy has


def step(kind: str, x: Array, w_in: Array, bias: Array, w_state: Array, state: Array) -> tuple[Array, Array]:
    """One step for one core: inputs [k, D], state [k, width] → output [k, H], new state; the policy's, without gradient."""
    if COMPILED is None:
        return _step_numpy(kind, x @ w_in + bias, w_state, state)
    rows, size, gates = len(x), w_state.shape[0], NUM_GATES[kind]
    before, extra, out = (np.empty((rows, size), np.float32) for _ in range(3))
    act = np.empty((rows, gates * size), np.float32)
    cells = np.empty((rows, size) if gates == 4 else 0, np.float32)
    saved = (np.zeros(rows, bool), state, w_state, before, act, extra, cells)
    COMPILED.forward(gates, 1, 1, rows, x.shape[1], size, (*saved, np.ascontiguousarray(x), w_in, bias, out))
    return out, out if gates == 3 else np.concatenate([out, cells], axis=1)


def _step_numpy(kind: str, gates: Array, w_state: Array, state: Array) -> tuple[Array, Array]:
    size = w_state.shape[0]
    hidden = state[:, :size]
    inner = hidden @ w_state
    if kind == "gru":
        both = gates[:, : 2 * size]
        both += inner[:, : 2 * size]
        _sigmoid(both)
        candidate = inner[:, 2 * size :]
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


def _enter(hidden: Array, out: Array, keep: Array, restarts: bool) -> None:
    if restarts:
        np.multiply(hidden, keep[:, None], out=out)
    else:  # most steps: a copy costs less than a product
        out[...] = hidden


class _NativeScan(torch.autograd.Function):
    """Both cells, the input's part of the gates included, in C. Which of the two it is shows in the number of gates."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        w_in: torch.Tensor,
        bias: torch.Tensor,
        w_state: torch.Tensor,
        state: torch.Tensor,
        fresh: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, w_x, b, w, start, restart = (
            np.ascontiguousarray(part.detach().numpy()) for part in (inputs, w_in, bias, w_state, state, fresh)
        )
        cores, steps, rows, num_inputs = x.shape
        size, gates = w.shape[1], w.shape[2] // w.shape[1]
        wide, flat = (cores, steps, rows, gates * size), (cores, steps, rows, size)
        before, act, extra, out = (np.empty(shape, np.float32) for shape in (flat, wide, flat, flat))
        cells = np.empty(flat if gates == 4 else 0, np.float32)
        ctx.sizes = (gates, cores, steps, rows, num_inputs, size)
        ctx.saved = (restart, start, w, before, act, extra, cells)
        ctx.inputs = (x, w_x)
        COMPILED.forward(*ctx.sizes, (*ctx.saved, x, w_x, b, out))
        if gates == 3:
            return torch.from_numpy(out), None
        remembered = torch.from_numpy(cells)
        ctx.mark_non_differentiable(remembered)
        return torch.from_numpy(out), remembered

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        gates, cores, steps, rows, num_inputs, size = ctx.sizes
        before, act = ctx.saved[3], ctx.saved[4]
        x, w_x = ctx.inputs
        grad = np.empty_like(act)
        grad_new = np.empty_like(before) if gates == 3 else np.empty(0, np.float32)
        nothing = np.empty(0, np.float32)
        COMPILED.backward(*ctx.sizes, (*ctx.saved, np.ascontiguousarray(grads[0].numpy()), grad, grad_new, nothing))
        by_gates = grad.reshape(cores, steps * rows, gates * size)
        by_w = np.matmul(before.reshape(cores, -1, size).transpose(0, 2, 1), by_gates)
        if gates == 3:  # what the input sees differs in the candidate alone
            grad[..., 2 * size :] = grad_new
        by_w_in = np.matmul(x.reshape(cores, -1, num_inputs).transpose(0, 2, 1), by_gates)
        by_bias = np.matmul(np.ones((1, steps * rows), np.float32), by_gates)
        by_x = None
        if ctx.needs_input_grad[0]:
            by_x = torch.from_numpy(np.matmul(by_gates, w_x.transpose(0, 2, 1)).reshape(x.shape))
        return by_x, *(torch.from_numpy(part) for part in (by_w_in, by_bias, by_w)), None, None


class _GruScan(torch.autograd.Function):
    """The GRU's time loop: gates in the order reset, update, candidate."""

    @staticmethod
    def forward(
        ctx: Any, gates: torch.Tensor, w_state: torch.Tensor, state: torch.Tensor, keep: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        x, w, kept, hidden = gates.detach().numpy(), w_state.detach().numpy(), keep.numpy(), state.numpy()
        cores, steps, rows, _ = x.shape
        size = w.shape[1]
        before = np.empty((steps, cores, rows, size), np.float32)  # state entering the step, after a restart
        inner = np.empty((steps, cores, rows, 3 * size), np.float32)  # recurrent part of the gates
        both = np.empty((steps, cores, rows, 2 * size), np.float32)  # reset and update gates
        new = np.empty((steps, cores, rows, size), np.float32)
        out = np.empty((cores, steps, rows, size), np.float32)
        restarts = (kept.min(axis=1) < 1).tolist()
        in_both, in_new = x[..., : 2 * size].swapaxes(0, 1), x[..., 2 * size :].swapaxes(0, 1)
        for t, sigmoid_here in enumerate(torch.from_numpy(both).unbind(0)):
            h, product, gate, n = before[t], inner[t], both[t], new[t]
            _enter(hidden, h, kept[t], restarts[t])
            np.matmul(h, w, out=product)
            np.add(in_both[t], product[..., : 2 * size], out=gate)
            torch.sigmoid_(sigmoid_here)
            np.multiply(gate[..., :size], product[..., 2 * size :], out=n)
            n += in_new[t]
            np.tanh(n, out=n)
            hidden = out[:, t]
            np.subtract(h, n, out=hidden)
            hidden *= gate[..., size:]
            hidden += n
        ctx.saved = (w, kept, restarts, before, inner, both, new)
        return torch.from_numpy(out), None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        w, kept, restarts, before, inner, both, new = ctx.saved
        grad_out = grads[0].numpy().swapaxes(0, 1)
        steps, cores, rows, size = before.shape
        reset, update = both[..., :size], both[..., size:]
        # Slopes of every step at once: the loop only multiplies.
        by_new = (1.0 - update) * (1.0 - new * new)
        by_reset = inner[..., 2 * size :] * reset * (1.0 - reset)
        by_update = (before - new) * update * (1.0 - update)
        w_back = np.ascontiguousarray(w.transpose(0, 2, 1))
        grad_inner = np.empty((steps, cores, rows, 3 * size), np.float32)
        grad_new = np.empty((steps, cores, rows, size), np.float32)
        grad = np.zeros((cores, rows, size), np.float32)
        back = np.empty_like(grad)
        for t in range(steps - 1, -1, -1):
            grad += grad_out[t]
            g, n = grad_inner[t], grad_new[t]
            np.multiply(grad, by_new[t], out=n)
            np.multiply(n, by_reset[t], out=g[..., :size])
            np.multiply(grad, by_update[t], out=g[..., size : 2 * size])
            np.multiply(n, reset[t], out=g[..., 2 * size :])
            np.matmul(g, w_back, out=back)
            grad *= update[t]
            grad += back
            if restarts[t]:
                grad *= kept[t][:, None]
        grad_w = _outer(before, grad_inner)
        # What the input sees differs in the candidate alone, whose recurrent part lies inside the reset gate.
        grad_inner[..., 2 * size :] = grad_new
        return torch.from_numpy(grad_inner).transpose(0, 1), torch.from_numpy(grad_w), None, None


class _LstmScan(torch.autograd.Function):
    """The LSTM's time loop: gates in the order input, forget, output, candidate."""

    @staticmethod
    def forward(
        ctx: Any, gates: torch.Tensor, w_state: torch.Tensor, state: torch.Tensor, keep: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, w, kept = gates.detach().numpy(), w_state.detach().numpy(), keep.numpy()
        cores, steps, rows, _ = x.shape
        size = w.shape[1]
        hidden, cell = state.numpy()[..., :size], state.numpy()[..., size:]
        before = np.empty((steps, cores, rows, size), np.float32)
        cell_before = np.empty((steps, cores, rows, size), np.float32)
        both = np.empty((steps, cores, rows, 4 * size), np.float32)
        squashed = np.empty((steps, cores, rows, size), np.float32)
        out = np.empty((cores, steps, rows, size), np.float32)
        cells = np.empty((cores, steps, rows, size), np.float32)
        product = np.empty((cores, rows, size), np.float32)
        restarts = (kept.min(axis=1) < 1).tolist()
        x = x.swapaxes(0, 1)
        for t, sigmoid_here in enumerate(torch.from_numpy(both)[..., : 3 * size].unbind(0)):
            gate = both[t]
            _enter(hidden, before[t], kept[t], restarts[t])
            _enter(cell, cell_before[t], kept[t], restarts[t])
            np.matmul(before[t], w, out=gate)
            gate += x[t]
            torch.sigmoid_(sigmoid_here)
            new = gate[..., 3 * size :]
            np.tanh(new, out=new)
            cell = cells[:, t]
            np.multiply(gate[..., size : 2 * size], cell_before[t], out=cell)
            np.multiply(gate[..., :size], new, out=product)
            cell += product
            np.tanh(cell, out=squashed[t])
            hidden = out[:, t]
            np.multiply(gate[..., 2 * size : 3 * size], squashed[t], out=hidden)
        ctx.saved = (w, kept, restarts, before, cell_before, both, squashed)
        remembered = torch.from_numpy(cells)
        ctx.mark_non_differentiable(remembered)
        return torch.from_numpy(out), remembered

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        w, kept, restarts, before, cell_before, both, squashed = ctx.saved
        grad_out = grads[0].numpy().swapaxes(0, 1)
        steps, cores, rows, size = before.shape
        into, forget, emit, new = (both[..., i * size : (i + 1) * size] for i in range(4))
        by_cell = emit * (1.0 - squashed * squashed)  # d output / d cell
        by_input = new * into * (1.0 - into)
        by_forget = cell_before * forget * (1.0 - forget)
        by_emit = squashed * emit * (1.0 - emit)
        by_new = into * (1.0 - new * new)
        w_back = np.ascontiguousarray(w.transpose(0, 2, 1))
        grad_gates = np.empty((steps, cores, rows, 4 * size), np.float32)
        grad = np.zeros((cores, rows, size), np.float32)
        grad_cell = np.zeros((cores, rows, size), np.float32)
        for t in range(steps - 1, -1, -1):
            grad += grad_out[t]
            grad_cell += grad * by_cell[t]
            g = grad_gates[t]
            np.multiply(grad_cell, by_input[t], out=g[..., :size])
            np.multiply(grad_cell, by_forget[t], out=g[..., size : 2 * size])
            np.multiply(grad, by_emit[t], out=g[..., 2 * size : 3 * size])
            np.multiply(grad_cell, by_new[t], out=g[..., 3 * size :])
            np.matmul(g, w_back, out=grad)
            grad_cell *= forget[t]
            if restarts[t]:
                grad *= kept[t][:, None]
                grad_cell *= kept[t][:, None]
        grad_w = _outer(before, grad_gates)
        return torch.from_numpy(grad_gates).transpose(0, 1), torch.from_numpy(grad_w), None, None


def _outer(before: Array, grad: Array) -> Array:
    # Sum over steps and rows of outer products, as one matrix product per core.
    steps, cores, rows, size = before.shape
    left = before.transpose(1, 3, 0, 2).reshape(cores, size, steps * rows)
    right = grad.transpose(1, 0, 2, 3).reshape(cores, steps * rows, -1)
    product: Array = np.matmul(left, right)
    return product


def _gru_loop(
    gates: torch.Tensor, w: torch.Tensor, state: torch.Tensor, keep: torch.Tensor
) -> tuple[torch.Tensor, None]:
    size = w.shape[1]
    hidden, outputs = state, []
    for t in range(gates.shape[1]):
        hidden = hidden * keep[t][:, None]
        inner, x = hidden @ w, gates[:, t]
        reset, update = (x[..., : 2 * size] + inner[..., : 2 * size]).sigmoid().chunk(2, dim=-1)
        new = torch.tanh(x[..., 2 * size :] + reset * inner[..., 2 * size :])
        hidden = new + update * (hidden - new)
        outputs.append(hidden)
    return torch.stack(outputs, dim=1), None


def _lstm_loop(
    gates: torch.Tensor, w: torch.Tensor, state: torch.Tensor, keep: torch.Tensor
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
