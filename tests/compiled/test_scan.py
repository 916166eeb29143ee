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
    """Outputs [core, step, row, size] in float64."""
    size = w_state.shape[1]
    hidden, cell = state[..., :size], state[..., size:]
    outputs = []
    for t in range(x.shape[1]):
        keep = ~fresh[t][:, None]
        hidden, cell = hidden * keep, cell * keep
        outer, inner = x[:, t] @ w_in + bias, hidden @ w_state
        if gates == 3:
            reset, update = np.split(sigmoid(outer + inner)[..., : 2 * size], 2, axis=-1)
            new = np.tanh(outer[..., 2 * size :] + reset * inner[..., 2 * size :])
            hidden = new + update * (hidden - new)
        else:
            into, forget, emit, new = np.split(outer + inner, 4, axis=-1)
            cell = sigmoid(forget) * cell + sigmoid(into) * np.tanh(new)
            hidden = sigmoid(emit) * np.tanh(cell)
        outputs.append(hidden)
    return np.stack(outputs, axis=1)


@pytest.mark.parametrize("gates", [3, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("size", [3, 16])
def test_native_scan(gates, rows, size):
    rng = np.random.default_rng(rows)
    cores, steps, inputs = 2, 4, 2
    sizes = (gates, cores, steps, rows, inputs, size)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x, w_in, bias = (
        normal(cores, steps, rows, inputs),
        normal(cores, inputs, gates * size),
        normal(cores, 1, gates * size),
    )
    w_state, state = normal(cores, size, gates * size), normal(cores, rows, size * (gates - 2))
    fresh = rng.random((steps, rows)) < 0.3
    flat, wide = (cores, steps, rows, size), (cores, steps, rows, gates * size)
    before, extra, out, weight = np.empty(flat, "f"), np.empty(flat, "f"), np.empty(flat, "f"), normal(*flat)
    act, cells, grad = np.empty(wide, "f"), np.empty(flat if gates == 4 else 0, "f"), np.empty(wide, "f")
    saved = (fresh, state, w_state, before, act, extra, cells)
    SCAN.forward(*sizes, (*saved, x, w_in, bias, out))
    given = [array.astype(np.float64) for array in (x, w_in, bias, w_state, state)]
    np.testing.assert_allclose(out, reference(gates, *given, fresh), atol=1e-5)
    by_new, nothing = np.empty(flat if gates == 3 else 0, "f"), np.empty(0, "f")
    SCAN.backward(*sizes, (*saved, weight, grad, by_new, nothing))
    by_w = np.einsum("ctri,ctrj->cij", before, grad)
    step = 1e-6
    for index in [(0, 0, 0), (1, size - 1, gates * size - 1), (0, 1, size), (1, 0, 2 * size)]:
        moved = []
        for sign in (1, -1):
            given[3][index] += sign * step
            moved.append((reference(gates, *given, fresh) * weight).sum())
            given[3][index] -= sign * step
        assert by_w[index] == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-3, abs=1e-3)


def test_native_tanh_and_back():
    rng = np.random.default_rng(0)
    y, bias = rng.standard_normal((7, 13)).astype(np.float32) * 3, rng.standard_normal(13).astype(np.float32)
    wanted = np.tanh(y + bias)
    SCAN.bias_tanh(y, bias)
    np.testing.assert_allclose(y, wanted, atol=1e-6)
    grad, out, total = rng.standard_normal((7, 13)).astype(np.float32), np.empty_like(y), np.zeros(13, np.float32)
    SCAN.tanh_back(grad, y, out, total)
    np.testing.assert_allclose(out, grad * (1 - y * y), atol=1e-6)
    np.testing.assert_allclose(total, out.sum(0), atol=1e-5)
