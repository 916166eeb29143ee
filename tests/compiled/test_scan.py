"""The compiled recurrent layers, without PyTorch: values against the equations, gradients against differences."""

from __future__ import annotations

import numpy as np
import pytest

from envfleet.slots.compiled_core import load

SCAN = load("_scan")
pytestmark = pytest.mark.skipif(SCAN is None, reason="envfleet._scan is not built")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(gates, x, w_in, bias, w_state, state, fresh):
    """Outputs [step, row, size] in float64."""
    size = len(w_state)
    hidden, cell = state[..., :size], state[..., size:]
    outputs = []
    for t in range(len(x)):
        keep = ~fresh[t][:, None]
        hidden, cell = hidden * keep, cell * keep
        outer, inner = x[t] @ w_in + bias, hidden @ w_state
        if gates == 3:
            reset, update = np.split(sigmoid(outer + inner)[..., : 2 * size], 2, axis=-1)
            new = np.tanh(outer[..., 2 * size :] + reset * inner[..., 2 * size :])
            hidden = new + update * (hidden - new)
        else:
            into, forget, emit, new = np.split(outer + inner, 4, axis=-1)
            cell = sigmoid(forget) * cell + sigmoid(into) * np.tanh(new)
            hidden = sigmoid(emit) * np.tanh(cell)
        outputs.append(hidden)
    return np.stack(outputs)


@pytest.mark.parametrize("gates", [3, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("size", [3, 16])
def test_the_compiled_scan_and_its_gradients_follow_the_equations(gates, rows, size):
    rng = np.random.default_rng(rows)
    steps, inputs = 4, 2
    sizes = (gates, steps, rows, inputs, size)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def room(width):
        return np.empty((steps, rows, width), np.float32)

    x, w_in, bias = normal(steps, rows, inputs), normal(inputs, gates * size), normal(1, gates * size)
    w_state, state = normal(size, gates * size), normal(rows, size * (gates - 2))
    fresh, weight = rng.random((steps, rows)) < 0.3, normal(steps, rows, size)
    saved = {"before": room(size), "act": room(gates * size), "extra": room(size)}
    saved |= {"cells": room(size if gates == 4 else 0), "w_state": w_state, "state": state, "fresh": fresh}
    out, grad = room(size), room(gates * size)
    SCAN.forward(*sizes, x=x, w_in=w_in, bias=bias, out=out, **saved)
    is_wide, narrow = SCAN.use_wide(False), out.copy()  # longer vectors, where the processor has them, change no bit
    SCAN.forward(*sizes, x=x, w_in=w_in, bias=bias, out=narrow, **saved)
    SCAN.use_wide(True)
    assert not is_wide and narrow.tobytes() == out.tobytes()
    given = [array.astype(np.float64) for array in (x, w_in, bias, w_state, state)]
    np.testing.assert_allclose(out, reference(gates, *given, fresh), atol=1e-5)
    SCAN.backward(*sizes, grad_out=weight, grad=grad, grad_new=room(size if gates == 3 else 0), **saved)
    by_w = np.einsum("tri,trj->ij", saved["before"], grad)
    step = 1e-6
    for index in [(0, 0), (size - 1, gates * size - 1), (1, size), (0, 2 * size)]:
        moved = []
        for sign in (1, -1):
            given[3][index] += sign * step
            moved.append((reference(gates, *given, fresh) * weight).sum())
            given[3][index] -= sign * step
        assert by_w[index] == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-3, abs=1e-3)


def test_compiled_bias_and_tanh():
    rng = np.random.default_rng(0)
    y, bias = rng.standard_normal((7, 13)).astype(np.float32) * 3, rng.standard_normal(13).astype(np.float32)
    wanted = np.tanh(y + bias)
    SCAN.bias_tanh(y, bias)
    np.testing.assert_allclose(y, wanted, atol=1e-6)
