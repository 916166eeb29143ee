// GRU and LSTM over [step, row] sequences whose state restarts at episode ends, and bias and tanh of a dense layer.
//
// The loops at the end of src/envfleet/networks/recurrent.py have the same equations in PyTorch: they are the specification,
// and what runs without this file. A step multiplies a few rows with a small matrix, so the cost is in the calls around it:
// here a whole sequence is one call. Matrices are packed once per call into panels of 16 columns that stay in the nearest
// cache while all rows pass by.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "arrays.h"
#include "panels.h"

// -- elementwise ----------------------------------------------------------------------------------------------------------

// y [rows, size] becomes tanh(y + bias).
FAST static void bias_tanh(N rows, N size, float *restrict y, const float *restrict bias) {
    for (N row = 0; row < rows; row++, y += size)
        for (N j = 0; j < size; j++) y[j] = tanh_of(y[j] + bias[j]);
}

// out = grad (1 - y y), the gradient before a tanh with output y, and its sum over the rows.
FAST static void tanh_back(N rows, N size, const float *restrict grad, const float *restrict y, float *restrict out, float *restrict sum) {
    for (N row = 0; row < rows; row++, grad += size, y += size, out += size)
        for (N j = 0; j < size; j++) {
            out[j] = grad[j] * (1.0f - y[j] * y[j]);
            sum[j] += out[j];
        }
}

// -- rows [rows, depth] times a packed matrix -----------------------------------------------------------------------------

// c [rows, stride] (+)= a [rows, depth] · b, where `stride` is the number of columns, padded.
INLINE void multiply_with(const int wide, const float *a, N rows, N depth, const float *b, float *c, N stride, int add) {
    N panel = 0, panels = stride / PANEL;
    while (panel < panels) {
        const float *right = b + panel * depth * PANEL;
        float *out = c + panel * PANEL;
        if (rows <= 2 && panels - panel >= 3) {
            if (rows == 2) tile(wide, 2, 3, a, depth, 1, depth, right, PANEL, depth * PANEL, out, stride, add);
            else tile(wide, 1, 3, a, depth, 1, depth, right, PANEL, depth * PANEL, out, stride, add);
            panel += 3;
            continue;
        }
        rows_by_panel(wide, a, depth, 1, rows, depth, right, PANEL, out, stride, add);
        panel++;
    }
}
FAST static void narrow_multiply(const float *a, N rows, N depth, const float *b, float *c, N stride, int add) {
    multiply_with(0, a, rows, depth, b, c, stride, add);
}
WIDE static void wide_multiply(const float *a, N rows, N depth, const float *b, float *c, N stride, int add) {
    multiply_with(1, a, rows, depth, b, c, stride, add);
}
static void multiply(const float *a, N rows, N depth, const float *b, float *c, N stride, int add) {
    (use_wide ? wide_multiply : narrow_multiply)(a, rows, depth, b, c, stride, add);
}

// -- one recurrent layer --------------------------------------------------------------------------------------------------

typedef struct {
    N gates, steps, rows, inputs, size; // gates: 3 for a GRU (reset, update, candidate), 4 for an LSTM (input, forget, output, candidate)
    const float *x;                     // [step, row, inputs]
    const float *w_in, *bias, *w_state; // [inputs, gates * size], [gates * size], [size, gates * size]
    const float *state;                 // [row, size], for an LSTM [row, 2 * size]: output, then cell
    const uint8_t *fresh;               // [step, row] where the state restarts before the step
    const float *zeros;                 // [size] the cell after a restart
    float *before;                      // [step, row, size] state entering the step, after a restart
    float *act;                         // [step, row, gates * size] what the gates were
    float *extra;                       // [step, row, size] GRU: recurrent part of the candidate; LSTM: tanh of the cell
    float *out, *cells;                 // [step, row, size]; cells: LSTM only
    const float *grad_out;              // [step, row, size]
    float *grad;                        // [step, row, gates * size] by the recurrent part of the gates
    float *grad_new;                    // [step, row, size] GRU only: by the candidate's argument
} Scan;

// One row of one step. The gates of a row lie behind each other, `n` apart, and never overlap: restrict and ivdep state
// this for the compiler, which otherwise would not vectorise.
#define IN const float *restrict
#define OUT float *restrict

FAST static void gru_row(N n, IN in, IN inner, IN before, OUT act, OUT recurrent, OUT out) {
#pragma GCC ivdep
    for (N j = 0; j < n; j++) {
        float r = sigmoid(in[j] + inner[j]), u = sigmoid(in[n + j] + inner[n + j]);
        float c = tanh_of(in[2 * n + j] + r * inner[2 * n + j]);
        act[j] = r, act[n + j] = u, act[2 * n + j] = c, recurrent[j] = inner[2 * n + j];
        out[j] = c + u * (before[j] - c);
    }
}

FAST static void lstm_row(N n, IN in, IN cell_before, OUT act, OUT squashed, OUT cell, OUT out) {
#pragma GCC ivdep
    for (N j = 0; j < n; j++) {
        float i = sigmoid(in[j]), f = sigmoid(in[n + j]), o = sigmoid(in[2 * n + j]), g = tanh_of(in[3 * n + j]);
        float c = f * cell_before[j] + i * g, s = tanh_of(c);
        act[j] = i, act[n + j] = f, act[2 * n + j] = o, act[3 * n + j] = g, squashed[j] = s, cell[j] = c;
        out[j] = o * s;
    }
}

FAST static void gru_row_back(N n, IN given, IN act, IN recurrent, IN before, OUT by_gates, OUT by_new, OUT grad) {
#pragma GCC ivdep
    for (N j = 0; j < n; j++) {
        float g = grad[j] + given[j], r = act[j], u = act[n + j], c = act[2 * n + j];
        float by_c = g * (1.0f - u) * (1.0f - c * c);
        by_new[j] = by_c;
        by_gates[j] = by_c * recurrent[j] * r * (1.0f - r);
        by_gates[n + j] = g * (before[j] - c) * u * (1.0f - u);
        by_gates[2 * n + j] = by_c * r;
        grad[j] = g * u;
    }
}

FAST static void lstm_row_back(N n, IN given, IN act, IN squashed, IN cell_before, OUT by_gates, OUT grad, OUT grad_cell) {
#pragma GCC ivdep
    for (N j = 0; j < n; j++) {
        float i = act[j], f = act[n + j], o = act[2 * n + j], g = act[3 * n + j], s = squashed[j], by_out = grad[j] + given[j];
        float by_cell = grad_cell[j] + by_out * o * (1.0f - s * s);
        by_gates[j] = by_cell * g * i * (1.0f - i);
        by_gates[n + j] = by_cell * cell_before[j] * f * (1.0f - f);
        by_gates[2 * n + j] = by_out * s * o * (1.0f - o);
        by_gates[3 * n + j] = by_cell * i * (1.0f - g * g);
        grad_cell[j] = by_cell * f;
        grad[j] = 0.0f;
    }
}

// The cell that a step of an LSTM begins with.
static const float *entering(const Scan *s, N t, N row) {
    if (s->fresh[t * s->rows + row]) return s->zeros;
    return t ? s->cells + ((t - 1) * s->rows + row) * s->size : s->state + (2 * row + 1) * s->size;
}

static int forward(void *given) {
    Scan *s = given;
    N n = s->size, rows = s->rows, width = s->gates * n, stride = padded(width), lstm = s->gates == 4;
    float *packed_in = calloc((s->inputs + n + 2 * rows) * stride + n, sizeof(float));
    if (!packed_in) return -1;
    float *packed_state = packed_in + s->inputs * stride;
    float *in = packed_state + n * stride, *inner = in + rows * stride; // [row, stride] the two parts of the gates
    s->zeros = inner + rows * stride;
    pack(s->w_in, width, 1, s->inputs, width, packed_in);
    pack(s->w_state, width, 1, n, width, packed_state);
    for (N t = 0; t < s->steps; t++) {
        for (N row = 0; row < rows; row++) {
            N at = t * rows + row;
            if (s->fresh[at]) memset(s->before + at * n, 0, n * sizeof(float));
            else memcpy(s->before + at * n, t ? s->out + (at - rows) * n : s->state + row * n * (lstm ? 2 : 1), n * sizeof(float));
            memcpy(in + row * stride, s->bias, width * sizeof(float));
        }
        multiply(s->x + t * rows * s->inputs, rows, s->inputs, packed_in, in, stride, 1);
        multiply(s->before + t * rows * n, rows, n, packed_state, lstm ? in : inner, stride, lstm);
        for (N row = 0; row < rows; row++) {
            N at = t * rows + row, flat = at * n, wide = at * width;
            if (lstm) lstm_row(n, in + row * stride, entering(s, t, row), s->act + wide, s->extra + flat, s->cells + flat, s->out + flat);
            else gru_row(n, in + row * stride, inner + row * stride, s->before + flat, s->act + wide, s->extra + flat, s->out + flat);
        }
    }
    free(packed_in);
    return 0;
}

static int backward(void *given) {
    Scan *s = given;
    N n = s->size, rows = s->rows, width = s->gates * n, stride = padded(n), lstm = s->gates == 4;
    float *packed = calloc((width + rows) * stride + rows * n + n, sizeof(float));
    if (!packed) return -1;
    float *grad = packed + width * stride, *grad_cell = grad + rows * stride; // [row, stride] and [row, size] by the state after a step
    s->zeros = grad_cell + rows * n;
    pack(s->w_state, 1, width, width, n, packed);
    for (N t = s->steps - 1; t >= 0; t--) {
        for (N row = 0; row < rows; row++) {
            N at = t * rows + row, flat = at * n, wide = at * width;
            float *here = grad + row * stride;
            if (lstm) lstm_row_back(n, s->grad_out + flat, s->act + wide, s->extra + flat, entering(s, t, row), s->grad + wide, here, grad_cell + row * n);
            else gru_row_back(n, s->grad_out + flat, s->act + wide, s->extra + flat, s->before + flat, s->grad + wide, s->grad_new + flat, here);
        }
        multiply(s->grad + t * rows * width, rows, width, packed, grad, stride, 1);
        for (N row = 0; row < rows; row++) {
            if (!s->fresh[t * rows + row]) continue;
            memset(grad + row * stride, 0, n * sizeof(float));
            memset(grad_cell + row * n, 0, n * sizeof(float));
        }
    }
    free(packed);
    return 0;
}

// -- Python ---------------------------------------------------------------------------------------------------------------

static int sizes(PyObject *args, Scan *s) {
    if (!PyArg_ParseTuple(args, "nnnnn", &s->gates, &s->steps, &s->rows, &s->inputs, &s->size)) return 0;
    if (s->gates == 3 || s->gates == 4) return 1;
    PyErr_SetString(PyExc_ValueError, "3 gates (GRU) or 4 (LSTM) are needed");
    return 0;
}

static PyObject *scan_forward(PyObject *self, PyObject *args, PyObject *given) {
    Scan s = {0};
    if (!sizes(args, &s)) return NULL;
    N at = s.steps * s.rows, width = s.gates * s.size, flat = at * s.size, lstm = s.gates == 4;
    Array arrays[] = {
        {"x", &s.x, at * s.inputs, 4, READ},           {"w_in", &s.w_in, s.inputs * width, 4, READ},
        {"bias", &s.bias, width, 4, READ},             {"w_state", &s.w_state, s.size * width, 4, READ},
        {"fresh", &s.fresh, at, 1, READ},              {"state", &s.state, s.rows * s.size * (lstm ? 2 : 1), 4, READ},
        {"before", &s.before, flat, 4, WRITE},         {"act", &s.act, at * width, 4, WRITE},
        {"extra", &s.extra, flat, 4, WRITE},           {"cells", &s.cells, lstm ? flat : 0, 4, WRITE},
        {"out", &s.out, flat, 4, WRITE},
    };
    return with_arrays(forward, &s, given, arrays, sizeof arrays / sizeof *arrays);
}

static PyObject *scan_backward(PyObject *self, PyObject *args, PyObject *given) {
    Scan s = {0};
    if (!sizes(args, &s)) return NULL;
    N at = s.steps * s.rows, width = s.gates * s.size, flat = at * s.size, lstm = s.gates == 4;
    Array arrays[] = {
        {"w_state", &s.w_state, s.size * width, 4, READ}, {"fresh", &s.fresh, at, 1, READ},
        {"state", &s.state, s.rows * s.size * (lstm ? 2 : 1), 4, READ},
        {"before", &s.before, flat, 4, READ},             {"act", &s.act, at * width, 4, READ},
        {"extra", &s.extra, flat, 4, READ},               {"cells", &s.cells, lstm ? flat : 0, 4, READ},
        {"grad_out", &s.grad_out, flat, 4, READ},         {"grad", &s.grad, at * width, 4, WRITE},
        {"grad_new", &s.grad_new, lstm ? 0 : flat, 4, WRITE},
    };
    return with_arrays(backward, &s, given, arrays, sizeof arrays / sizeof *arrays);
}

static PyObject *scan_bias_tanh(PyObject *self, PyObject *args) {
    Py_buffer y, bias;
    if (!PyArg_ParseTuple(args, "w*y*", &y, &bias)) return NULL;
    N size = bias.len / 4, rows = size ? y.len / 4 / size : 0;
    if (y.itemsize == 4 && bias.itemsize == 4 && y.len == rows * size * 4) bias_tanh(rows, size, y.buf, bias.buf);
    else PyErr_SetString(PyExc_ValueError, "float32 arrays [rows, size] and [size] are needed");
    PyBuffer_Release(&y);
    PyBuffer_Release(&bias);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *scan_tanh_back(PyObject *self, PyObject *args) {
    Py_buffer grad, y, out, sum;
    if (!PyArg_ParseTuple(args, "y*y*w*w*", &grad, &y, &out, &sum)) return NULL;
    N size = sum.len / 4, rows = size ? y.len / 4 / size : 0, bytes = rows * size * 4;
    int fits = grad.itemsize == 4 && y.itemsize == 4 && out.itemsize == 4 && sum.itemsize == 4;
    if (fits && grad.len == bytes && y.len == bytes && out.len == bytes) tanh_back(rows, size, grad.buf, y.buf, out.buf, sum.buf);
    else PyErr_SetString(PyExc_ValueError, "float32 arrays [rows, size], three times, and [size] are needed");
    PyBuffer_Release(&grad);
    PyBuffer_Release(&y);
    PyBuffer_Release(&out);
    PyBuffer_Release(&sum);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

// use_wide(on) -> whether it is on: the two ways to multiply, for tests that compare them.
static PyObject *set_wide(PyObject *self, PyObject *on) {
    use_wide = HAS_WIDE && on == Py_True;
    return PyBool_FromLong(use_wide);
}

static PyMethodDef methods[] = {
    {"use_wide", (PyCFunction)set_wide, METH_O, "use_wide(on): multiply with vectors of sixteen numbers, where the processor has them"},
    {"forward", (PyCFunction)scan_forward, METH_VARARGS | METH_KEYWORDS, "forward(gates, steps, rows, inputs, size, **arrays)"},
    {"backward", (PyCFunction)scan_backward, METH_VARARGS | METH_KEYWORDS, "backward(gates, steps, rows, inputs, size, **arrays)"},
    {"bias_tanh", scan_bias_tanh, METH_VARARGS, "bias_tanh(y, bias): y becomes tanh(y + bias)"},
    {"tanh_back", scan_tanh_back, METH_VARARGS, "tanh_back(grad, y, out, sum): out = grad (1 - y y), and its sum over rows"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "envfleet._scan", "Recurrent layers over sequences with restarts.", -1, methods,
    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scan(void) {
    use_wide = HAS_WIDE;
    return PyModule_Create(&module);
}
