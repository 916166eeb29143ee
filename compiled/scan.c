// GRU and LSTM over [core, step, row] sequences whose state restarts at episode ends, and what a dense layer does beside its product.
//
// src/envfleet/networks/recurrent.py has the same equations in NumPy: that is the specification, and what runs without this.
// A step multiplies a few rows with a small matrix, so the cost is in the calls around it: here a whole sequence is one call.
// Matrices are packed once per call into panels of 16 columns that stay in the nearest cache while all rows pass by.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define PANEL 16
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_ADDRESS__)
#define FAST __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FAST
#endif
// Eight numbers that may lie anywhere; the compiler splits them where registers are shorter.
typedef float v8 __attribute__((vector_size(32), aligned(4)));
typedef Py_ssize_t N;

// -- elementwise ----------------------------------------------------------------------------------------------------------

// exp to about two units in the last place: 2^n by its bits, the rest by a polynomial. NaN stays NaN.
INLINE float exp_of(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    union { float f; uint32_t u; } shifted = {x * 1.44269504f + 12582912.0f}, power;
    float n = shifted.f - 12582912.0f;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    power.u = (shifted.u + 127u) << 23; // the low bits of `shifted` are n
    return p * power.f;
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }
INLINE float tanh_of(float x) { return 2.0f / (1.0f + exp_of(-2.0f * x)) - 1.0f; }

// y [rows, size] becomes tanh(y + bias).
FAST static void bias_tanh(N rows, N size, float *restrict y, const float *restrict bias) {
    for (N row = 0; row < rows; row++, y += size)
        for (N j = 0; j < size; j++) y[j] = tanh_of(y[j] + bias[j]);
}

// Back through it: out = grad · (1 - y²), and its sum over the rows, which is the gradient by the bias.
FAST static void tanh_back(N rows, N size, const float *restrict grad, const float *restrict y, float *restrict out, float *restrict sum) {
    for (N row = 0; row < rows; row++, grad += size, y += size, out += size)
        for (N j = 0; j < size; j++) {
            out[j] = grad[j] * (1.0f - y[j] * y[j]);
            sum[j] += out[j];
        }
}

// -- rows [rows, depth] times a packed matrix -----------------------------------------------------------------------------

static N padded(N columns) { return (columns + PANEL - 1) / PANEL * PANEL; }

// Element (k, n) of the matrix is at from[k * by_k + n * by_n]: a transposed one is packed by swapping the strides.
static void pack(const float *from, N by_k, N by_n, N depth, N columns, float *to) {
    for (N first = 0; first < columns; first += PANEL)
        for (N k = 0; k < depth; k++)
            for (N n = 0; n < PANEL; n++) *to++ = first + n < columns ? from[k * by_k + (first + n) * by_n] : 0.0f;
}

// `count` rows by `panels` panels at once: as many sums as fit into the registers of AVX2.
INLINE void tile(const int count, const int panels, const float *a, N depth, const float *b, float *c, N stride, int add) {
    v8 sum[12];
    for (int r = 0; r < count; r++)
        for (int p = 0; p < 2 * panels; p++)
            sum[r * 2 * panels + p] = add ? *(const v8 *)(c + r * stride + 8 * p) : (v8){0};
    for (N k = 0; k < depth; k++) {
        v8 column[6];
        for (int p = 0; p < 2 * panels; p++) column[p] = *(const v8 *)(b + (p / 2) * depth * PANEL + k * PANEL + 8 * (p % 2));
        for (int r = 0; r < count; r++) {
            float x = a[r * depth + k];
            for (int p = 0; p < 2 * panels; p++) sum[r * 2 * panels + p] += x * column[p];
        }
    }
    for (int r = 0; r < count; r++)
        for (int p = 0; p < 2 * panels; p++) *(v8 *)(c + r * stride + 8 * p) = sum[r * 2 * panels + p];
}

// c [rows, stride] (+)= a [rows, depth] · b, where `stride` is the number of columns, padded.
FAST static void multiply(const float *a, N rows, N depth, const float *b, float *c, N stride, int add) {
    N panel = 0, panels = stride / PANEL;
    while (panel < panels) {
        const float *right = b + panel * depth * PANEL;
        float *out = c + panel * PANEL;
        if (rows <= 2 && panels - panel >= 3) {
            if (rows == 2) tile(2, 3, a, depth, right, out, stride, add);
            else tile(1, 3, a, depth, right, out, stride, add);
            panel += 3;
            continue;
        }
        for (N row = 0; row < rows;) {
            const float *left = a + row * depth;
            float *here = out + row * stride;
            switch (rows - row) {
            case 1: tile(1, 1, left, depth, right, here, stride, add); row += 1; break;
            case 2: tile(2, 1, left, depth, right, here, stride, add); row += 2; break;
            case 3: tile(3, 1, left, depth, right, here, stride, add); row += 3; break;
            case 4: case 8: tile(4, 1, left, depth, right, here, stride, add); row += 4; break;
            case 5: tile(5, 1, left, depth, right, here, stride, add); row += 5; break;
            default: tile(6, 1, left, depth, right, here, stride, add); row += 6;
            }
        }
        panel++;
    }
}

// -- one core -------------------------------------------------------------------------------------------------------------

typedef struct {
    N cores, steps, rows, inputs, size, gates; // gates: 3 for a GRU, 4 for an LSTM
    const float *x, *w_in, *bias, *w_state, *state;
    const uint8_t *fresh; // [step, row]
    const float *zeros;   // [size]
    float *before;        // [step, row, size] state entering the step, after a restart
    float *act;           // [step, row, gates * size] what the gates were
    float *extra;         // [step, row, size] GRU: recurrent part of the candidate; LSTM: tanh of the cell
    float *out, *cells;   // [step, row, size]
    const float *grad_out;
    float *grad, *grad_new; // [step, row, gates * size] by the recurrent part of the gates; GRU: by the candidate, [step, row, size]
} Scan;

// Rows are restrict pointers, one per gate, or the compiler would not dare to take eight entries at a time.
#define IN const float *restrict
#define OUT float *restrict

FAST static void gru_row(N size, IN in_reset, IN in_update, IN in_new, IN inner_reset, IN inner_update, IN inner_new, IN before,
                         OUT reset, OUT update, OUT candidate, OUT recurrent, OUT out) {
    for (N j = 0; j < size; j++) {
        float r = sigmoid(in_reset[j] + inner_reset[j]), u = sigmoid(in_update[j] + inner_update[j]);
        float n = tanh_of(in_new[j] + r * inner_new[j]);
        reset[j] = r, update[j] = u, candidate[j] = n, recurrent[j] = inner_new[j];
        out[j] = n + u * (before[j] - n);
    }
}

FAST static void lstm_row(N size, IN in_into, IN in_forget, IN in_emit, IN in_new, IN cell_before, OUT into, OUT forget, OUT emit,
                          OUT candidate, OUT squashed, OUT cell, OUT out) {
    for (N j = 0; j < size; j++) {
        float i = sigmoid(in_into[j]), f = sigmoid(in_forget[j]), o = sigmoid(in_emit[j]), n = tanh_of(in_new[j]);
        float c = f * cell_before[j] + i * n, s = tanh_of(c);
        into[j] = i, forget[j] = f, emit[j] = o, candidate[j] = n, squashed[j] = s, cell[j] = c;
        out[j] = o * s;
    }
}

FAST static void gru_row_back(N size, IN given, IN reset, IN update, IN candidate, IN recurrent, IN before, OUT by_reset,
                              OUT by_update, OUT by_inner, OUT by_new, OUT grad) {
    for (N j = 0; j < size; j++) {
        float g = grad[j] + given[j], r = reset[j], u = update[j], c = candidate[j];
        float n = g * (1.0f - u) * (1.0f - c * c);
        by_new[j] = n;
        by_inner[j] = n * r;
        by_reset[j] = n * recurrent[j] * r * (1.0f - r);
        by_update[j] = g * (before[j] - c) * u * (1.0f - u);
        grad[j] = g * u;
    }
}

FAST static void lstm_row_back(N size, IN given, IN into, IN forget, IN emit, IN candidate, IN squashed, IN cell_before, OUT by_into,
                               OUT by_forget, OUT by_emit, OUT by_new, OUT grad, OUT grad_cell) {
    for (N j = 0; j < size; j++) {
        float i = into[j], f = forget[j], o = emit[j], n = candidate[j], s = squashed[j], g = grad[j] + given[j];
        float c = grad_cell[j] + g * o * (1.0f - s * s);
        by_into[j] = c * n * i * (1.0f - i);
        by_forget[j] = c * cell_before[j] * f * (1.0f - f);
        by_emit[j] = g * s * o * (1.0f - o);
        by_new[j] = c * i * (1.0f - n * n);
        grad_cell[j] = c * f;
        grad[j] = 0.0f;
    }
}

// The cell that a step began with.
static const float *entering(const Scan *s, N t, N row) {
    if (s->fresh[t * s->rows + row]) return s->zeros;
    return t ? s->cells + ((t - 1) * s->rows + row) * s->size : s->state + (2 * row + 1) * s->size;
}

static void row_forward(const Scan *s, const float *in, const float *inner, N t, N row) {
    N n = s->size, at = t * s->rows + row;
    float *act = s->act + at * s->gates * n, *extra = s->extra + at * n, *out = s->out + at * n;
    if (s->gates == 3)
        gru_row(n, in, in + n, in + 2 * n, inner, inner + n, inner + 2 * n, s->before + at * n, act, act + n, act + 2 * n, extra, out);
    else
        lstm_row(n, in, in + n, in + 2 * n, in + 3 * n, entering(s, t, row), act, act + n, act + 2 * n, act + 3 * n, extra,
                 s->cells + at * n, out);
}

static void row_back(const Scan *s, float *grad, float *grad_cell, N t, N row) {
    N n = s->size, at = t * s->rows + row;
    const float *act = s->act + at * s->gates * n, *extra = s->extra + at * n, *given = s->grad_out + at * n;
    float *to = s->grad + at * s->gates * n;
    if (s->gates == 3)
        gru_row_back(n, given, act, act + n, act + 2 * n, extra, s->before + at * n, to, to + n, to + 2 * n, s->grad_new + at * n, grad);
    else
        lstm_row_back(n, given, act, act + n, act + 2 * n, act + 3 * n, extra, entering(s, t, row), to, to + n, to + 2 * n,
                      to + 3 * n, grad, grad_cell);
}

static void forward_core(const Scan *s, const float *packed_in, const float *packed_state, float *in, float *inner) {
    N size = s->size, rows = s->rows, width = s->gates * size, stride = padded(width), lstm = s->gates == 4;
    for (N t = 0; t < s->steps; t++) {
        float *before = s->before + t * rows * size;
        for (N row = 0; row < rows; row++) {
            const float *last = t ? s->out + ((t - 1) * rows + row) * size : s->state + row * size * (lstm ? 2 : 1);
            if (s->fresh[t * rows + row]) memset(before + row * size, 0, size * sizeof(float));
            else memcpy(before + row * size, last, size * sizeof(float));
            memcpy(in + row * stride, s->bias, width * sizeof(float));
        }
        multiply(s->x + t * rows * s->inputs, rows, s->inputs, packed_in, in, stride, 1);
        multiply(before, rows, size, packed_state, lstm ? in : inner, stride, lstm);
        for (N row = 0; row < rows; row++) row_forward(s, in + row * stride, inner + row * stride, t, row);
    }
}

// `grad` [row, padded(size)] and `grad_cell` [row, size] come as zeros.
static void backward_core(const Scan *s, const float *packed_back, float *grad, float *grad_cell) {
    N size = s->size, rows = s->rows, width = s->gates * size, stride = padded(size);
    for (N t = s->steps - 1; t >= 0; t--) {
        for (N row = 0; row < rows; row++) row_back(s, grad + row * stride, grad_cell + row * size, t, row);
        multiply(s->grad + t * rows * width, rows, width, packed_back, grad, stride, 1);
        for (N row = 0; row < rows; row++) {
            if (!s->fresh[t * rows + row]) continue;
            memset(grad + row * stride, 0, stride * sizeof(float));
            if (s->gates == 4) memset(grad_cell + row * size, 0, size * sizeof(float));
        }
    }
}

// -- Python ---------------------------------------------------------------------------------------------------------------

// The scan of core `c`: every array of [core, …] moved on to its part.
static Scan of_core(const Scan *all, N c) {
    Scan s = *all;
    N rows = s.steps * s.rows, wide = s.size * s.gates, flat = rows * s.size;
    N shift[] = {rows * s.inputs, s.inputs * wide, wide, s.size * wide, s.rows * s.size * (s.gates == 4 ? 2 : 1)};
    const float **given[] = {&s.x, &s.w_in, &s.bias, &s.w_state, &s.state};
    for (int i = 0; i < 5; i++)
        if (*given[i]) *given[i] += c * shift[i];
    float **flats[] = {&s.before, &s.extra, &s.out, &s.cells, &s.grad_new, (float **)&s.grad_out};
    for (int i = 0; i < 6; i++)
        if (*flats[i]) *flats[i] += c * flat;
    s.act += c * rows * wide;
    if (s.grad) s.grad += c * rows * wide;
    return s;
}

static int run(const Scan *all, int back) {
    N rows = all->rows, width = all->gates * all->size, stride = padded(width), size = padded(all->size);
    N packed = back ? width * size : (all->inputs + all->size) * stride;
    N scratch = back ? rows * (size + all->size) : 2 * rows * stride;
    float *room = malloc((packed + scratch + all->size) * sizeof(float));
    if (!room) return -1;
    for (N c = 0; c < all->cores; c++) {
        Scan s = of_core(all, c);
        s.zeros = room + packed + scratch;
        memset(room + packed, 0, (scratch + s.size) * sizeof(float));
        if (back) {
            pack(s.w_state, 1, width, width, s.size, room);
            backward_core(&s, room, room + packed, room + packed + rows * size);
        } else {
            pack(s.w_in, width, 1, s.inputs, width, room);
            pack(s.w_state, width, 1, s.size, width, room + s.inputs * stride);
            forward_core(&s, room, room + s.inputs * stride, room + packed, room + packed + rows * stride);
        }
    }
    free(room);
    return 0;
}

// Arrays come as (name, floats wanted); all are C-contiguous float32 but `fresh`, which is bool.
static PyObject *scan(PyObject *args, int back) {
    Scan s = {0};
    PyObject *arrays;
    if (!PyArg_ParseTuple(args, "nnnnnnO!", &s.gates, &s.cores, &s.steps, &s.rows, &s.inputs, &s.size, &PyTuple_Type, &arrays))
        return NULL;
    N flat = s.steps * s.rows, all = s.cores * flat * s.size, wide = s.gates * s.size, lstm = s.gates == 4;
    struct { const void **to; N count; int size, write; } fields[] = {
        {(const void **)&s.fresh, flat, 1, 0},
        {(const void **)&s.state, s.cores * s.rows * s.size * (lstm ? 2 : 1), 4, 0},
        {(const void **)&s.w_state, s.cores * s.size * wide, 4, 0},
        {(const void **)&s.before, all, 4, !back},
        {(const void **)&s.act, all * s.gates, 4, !back},
        {(const void **)&s.extra, all, 4, !back},
        {(const void **)&s.cells, lstm ? all : 0, 4, !back},
        {back ? (const void **)&s.grad_out : (const void **)&s.x, back ? all : s.cores * flat * s.inputs, 4, 0},
        {back ? (const void **)&s.grad : (const void **)&s.w_in, back ? all * s.gates : s.cores * s.inputs * wide, 4, back},
        {back ? (const void **)&s.grad_new : (const void **)&s.bias, back ? (lstm ? 0 : all) : s.cores * wide, 4, back},
        {(const void **)&s.out, back ? 0 : all, 4, !back},
    };
    enum { COUNT = sizeof fields / sizeof *fields };
    Py_buffer views[COUNT];
    int held = 0;
    PyObject *result = NULL;
    if ((s.gates != 3 && s.gates != 4) || PyTuple_GET_SIZE(arrays) != COUNT) {
        PyErr_SetString(PyExc_ValueError, "3 or 4 gates and eleven arrays are needed");
        return NULL;
    }
    for (; held < COUNT; held++) {
        int flags = fields[held].write ? PyBUF_CONTIG : PyBUF_CONTIG_RO;
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(arrays, held), &views[held], flags) < 0) goto end;
        if (views[held].itemsize != fields[held].size || views[held].len != fields[held].count * fields[held].size) {
            PyErr_Format(PyExc_ValueError, "array %d has %zd bytes, not %zd", held, views[held].len,
                         fields[held].count * fields[held].size);
            held++;
            goto end;
        }
        *fields[held].to = views[held].buf;
    }
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = run(&s, back);
    Py_END_ALLOW_THREADS
    result = failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
end:
    while (held > 0) PyBuffer_Release(&views[--held]);
    return result;
}

static PyObject *scan_forward(PyObject *self, PyObject *args) { return scan(args, 0); }
static PyObject *scan_backward(PyObject *self, PyObject *args) { return scan(args, 1); }

// Arrays of `size` float32 a row: `wide` of them of so many rows, then one single row.
static PyObject *rows_of(PyObject *args, int wide) {
    PyObject *arrays[4] = {0};
    if (!PyArg_UnpackTuple(args, "rows", wide + 1, wide + 1, arrays, arrays + 1, arrays + 2, arrays + 3)) return NULL;
    Py_buffer views[4];
    int held = 0, good = 1;
    for (; held <= wide; held++)
        if (PyObject_GetBuffer(arrays[held], &views[held], held == wide - 1 || held == 3 ? PyBUF_CONTIG : PyBUF_CONTIG_RO) < 0) break;
    if (held > wide) {
        N size = views[wide].len / 4, rows = size ? views[0].len / 4 / size : 0;
        for (int i = 0; i <= wide; i++) good &= views[i].itemsize == 4 && views[i].len == (i < wide ? rows : 1) * size * 4;
        if (!good) PyErr_SetString(PyExc_ValueError, "contiguous float32 arrays [rows, size] and one [size] are needed");
        else if (wide == 1) bias_tanh(rows, size, views[0].buf, views[1].buf);
        else tanh_back(rows, size, views[0].buf, views[1].buf, views[2].buf, views[3].buf);
    }
    while (held > 0) PyBuffer_Release(&views[--held]);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *scan_bias_tanh(PyObject *self, PyObject *args) { return rows_of(args, 1); }
static PyObject *scan_tanh_back(PyObject *self, PyObject *args) { return rows_of(args, 3); }

static PyMethodDef methods[] = {
    {"forward", scan_forward, METH_VARARGS, "forward(gates, cores, steps, rows, inputs, size, arrays)"},
    {"backward", scan_backward, METH_VARARGS, "backward(gates, cores, steps, rows, inputs, size, arrays)"},
    {"bias_tanh", scan_bias_tanh, METH_VARARGS, "bias_tanh(y, bias): y becomes tanh(y + bias)"},
    {"tanh_back", scan_tanh_back, METH_VARARGS, "tanh_back(grad, y, out, sum): out = grad (1 - y y), and its sum over rows"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "envfleet._scan", "Recurrent layers over sequences with restarts.", -1, methods,
    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__scan(void) { return PyModule_Create(&module); }
