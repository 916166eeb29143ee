// One minibatch of PPO for dense tanh networks: forward, loss and backward in one pass over blocks of rows. And forward alone.
//
// The equations in PyTorch (`ppo_gradients` in src/envfleet/train/objective.py, `Actions.score`) are the specification, and what
// runs without this file. A block of 64 rows and all it needs stays in the cache, where a layer at a time over the whole
// minibatch does not. CPU time of an update per sample (two 64 x 64 networks, 4 epochs of 4 minibatches, one thread, measured
// on a busy machine): 5.3 instead of 10.6 us with 256 x 32 samples, 4.7 instead of 8.0 with 1,024 x 32, 6.8 instead of 25 with 8 x 128.
//
// The order of sums is fixed by the number of rows alone. A minibatch is cut into lanes; a lane adds up its blocks in order
// into a gradient of its own, and the lanes are added up in order. Threads take whole lanes, so their number changes no bit.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdlib.h>

#include "arrays.h"
#include "helpers.h"
#include "panels.h"

enum { BLOCK = 64, LANES = 8, LAYERS = 16, SUMS = 5 };
static const float FORBIDDEN = -1e9f; // the logit of a masked action, as in action_heads.py

typedef struct {
    N in, out, weight, bias; // where weight [out, in] and bias [out] begin in the parameters
    N forward, backward;     // where the packed weights begin: transposed, and as they are
    N by_weight, by_bias;    // where the gradients begin in a lane; [in, out] if `turned`, padded in the second axis
    int turned, squash;      // squash: a tanh follows
} Layer;

typedef struct { Layer layer[LAYERS]; int count; } Net;

typedef struct {
    Net actor, critic;
    N rows, all_rows, outputs, parts, log_std, lane_size, work_size, num_lanes, num_threads; // parts 0: a Gaussian
    const int64_t *counts, *index, *choice; // choices per part; the rows of the minibatch; what was drawn [row, parts]
    const float *flat, *x, *drawn, *old_log_prob, *old_value, *advantage, *target;
    const uint8_t *mask;
    float *grad, *packed, *lanes, *work; // gradient; packed weights; gradients of lanes; room of threads
    double *sums;                        // [lane, SUMS] policy loss, value loss, entropy, KL, clipped
    double *report;                      // gradient norm, then the means of the sums
    float clip, entropy, value, value_clip, shift, scale;
    int normalise;
    N next; // the lane that is taken next
} Step;

// c [rows, columns] (+)= a b, with the strides of `tile`; columns are padded.
INLINE void product_of(const int wide, const float *a, N a_row, N a_k, N rows, N depth, const float *b, N b_k, N b_panel, float *c, N columns, int add) {
    for (N panel = 0; panel < columns / PANEL; panel++)
        rows_by_panel(wide, a, a_row, a_k, rows, depth, b + panel * b_panel, b_k, c + panel * PANEL, columns, add);
}
FAST static void narrow_product(const float *a, N a_row, N a_k, N rows, N depth, const float *b, N b_k, N b_panel, float *c, N columns, int add) {
    product_of(0, a, a_row, a_k, rows, depth, b, b_k, b_panel, c, columns, add);
}
WIDE static void wide_product(const float *a, N a_row, N a_k, N rows, N depth, const float *b, N b_k, N b_panel, float *c, N columns, int add) {
    product_of(1, a, a_row, a_k, rows, depth, b, b_k, b_panel, c, columns, add);
}
static void product(const float *a, N a_row, N a_k, N rows, N depth, const float *b, N b_k, N b_panel, float *c, N columns, int add) {
    (use_wide ? wide_product : narrow_product)(a, a_row, a_k, rows, depth, b, b_k, b_panel, c, columns, add);
}

FAST static void add_bias(N rows, N size, N stride, float *restrict y, const float *restrict bias, int squash) {
    for (N row = 0; row < rows; row++, y += stride) {
        if (squash) for (N j = 0; j < size; j++) y[j] = tanh_of(y[j] + bias[j]);
        else for (N j = 0; j < size; j++) y[j] += bias[j];
    }
}

// The gradient before a tanh with output y, in place.
FAST static void before_tanh(N count, float *restrict grad, const float *restrict y) {
    for (N i = 0; i < count; i++) grad[i] *= 1.0f - y[i] * y[i];
}

FAST static void add_rows(N rows, N size, N stride, const float *restrict grad, float *restrict sum) {
    for (N row = 0; row < rows; row++, grad += stride)
        for (N j = 0; j < size; j++) sum[j] += grad[j];
}

// -- one network over one block -------------------------------------------------------------------------------------------

// values[0] is the input, values[i + 1] what layer i gives.
static void forward(const Step *s, const Net *net, N rows, float *const *values) {
    for (int i = 0; i < net->count; i++) {
        const Layer *l = &net->layer[i];
        N wide = padded(l->out);
        product(values[i], padded(l->in), 1, rows, l->in, s->packed + l->forward, PANEL, l->in * PANEL, values[i + 1], wide, 0);
        add_bias(rows, l->out, wide, values[i + 1], s->flat + l->bias, l->squash);
    }
}

// `grad` is by the last layer's output, padded with zeros; `other` is room for the gradient of the layer before.
static void backward(const Step *s, const Net *net, N rows, float *const *values, float *grad, float *other, float *lane) {
    for (int i = net->count - 1; i >= 0; i--) {
        const Layer *l = &net->layer[i];
        N in = padded(l->in), out = padded(l->out);
        add_rows(rows, l->out, out, grad, lane + l->by_bias);
        // The longer axis is the one of the vector registers.
        if (l->turned) product(values[i], 1, in, l->in, rows, grad, out, PANEL, lane + l->by_weight, out, 1);
        else product(grad, 1, out, l->out, rows, values[i], in, PANEL, lane + l->by_weight, in, 1);
        if (!i) return;
        product(grad, out, 1, rows, l->out, s->packed + l->backward, PANEL, l->out * PANEL, other, in, 0);
        before_tanh(rows * in, other, values[i]);
        float *swap = grad;
        grad = other, other = swap;
    }
}

// -- the objective --------------------------------------------------------------------------------------------------------

// Log-probabilities of one categorical part: logits become log p, `p` the probabilities; returns the entropy.
FAST static float categorical(N count, float *restrict z, float *restrict p) {
    float most = z[0], sum = 0.0f, entropy = 0.0f;
    for (N j = 1; j < count; j++) most = z[j] > most ? z[j] : most;
    for (N j = 0; j < count; j++) {
        z[j] -= most;
        p[j] = z[j] < -87.0f ? 0.0f : exp_of(z[j]);
    }
    for (N j = 0; j < count; j++) sum += p[j];
    float log_sum = logf(sum), share = 1.0f / sum;
    for (N j = 0; j < count; j++) z[j] -= log_sum, p[j] *= share;
    for (N j = 0; j < count; j++) entropy -= p[j] * z[j];
    return entropy;
}

// The derivative of the clipped objective by the log-probability of row `at`; its parts are added to `sums`.
static float by_log_prob(const Step *s, N at, float log_prob, float entropy, double *sums) {
    float log_ratio = log_prob - s->old_log_prob[at], ratio = expf(log_ratio);
    float advantage = (s->advantage[at] - s->shift) * s->scale;
    float near = ratio < 1.0f - s->clip ? 1.0f - s->clip : ratio > 1.0f + s->clip ? 1.0f + s->clip : ratio;
    float plain = ratio * advantage, clipped = near * advantage;
    sums[0] -= plain > clipped ? clipped : plain;
    sums[2] += entropy;
    sums[3] += ratio - 1.0f - log_ratio;
    sums[4] += fabsf(ratio - 1.0f) > s->clip;
    return plain > clipped ? 0.0f : -plain / (float)s->rows; // in this order NaN stays NaN
}

// Logits [outputs] of a row become the gradient by them; `p` is room for the probabilities.
static void categorical_row(const Step *s, N at, float *z, float *p, double *sums) {
    float log_prob = 0.0f, entropy = 0.0f, part_entropy[LAYERS];
    const uint8_t *mask = s->mask ? s->mask + at * s->outputs : NULL;
    const int64_t *drawn = s->choice + at * s->parts;
    if (mask) for (N j = 0; j < s->outputs; j++) z[j] = mask[j] ? z[j] : FORBIDDEN;
    for (N part = 0, first = 0; part < s->parts; first += s->counts[part++]) {
        part_entropy[part] = categorical(s->counts[part], z + first, p + first);
        log_prob += z[first + drawn[part]];
        entropy += part_entropy[part];
    }
    float by = by_log_prob(s, at, log_prob, entropy, sums), by_entropy = -s->entropy / (float)s->rows;
    for (N part = 0, first = 0; part < s->parts; first += s->counts[part++])
        for (N j = first; j < first + s->counts[part]; j++) {
            float g = by * ((float)(j == first + drawn[part]) - p[j]) - by_entropy * p[j] * (z[j] + part_entropy[part]);
            z[j] = !mask || mask[j] ? g : 0.0f;
        }
}

// Means [outputs] of a row become the gradient by them; that by the log std is added to `by_std`.
static void gaussian_row(const Step *s, N at, float *mean, float *by_std, double *sums) {
    const float *drawn = s->drawn + at * s->outputs, *log_std = s->flat + s->log_std;
    float log_prob = -0.918938533f * (float)s->outputs, entropy = 1.418938533f * (float)s->outputs;
    for (N j = 0; j < s->outputs; j++) {
        float z = (drawn[j] - mean[j]) * expf(-log_std[j]);
        log_prob += -0.5f * z * z - log_std[j], entropy += log_std[j];
    }
    float by = by_log_prob(s, at, log_prob, entropy, sums), by_entropy = -s->entropy / (float)s->rows;
    for (N j = 0; j < s->outputs; j++) {
        float inverse = expf(-log_std[j]), z = (drawn[j] - mean[j]) * inverse;
        mean[j] = by * z * inverse;
        by_std[j] += by * (z * z - 1.0f) + by_entropy;
    }
}

// The gradient by the value of row `at`. Where the clipped error is the larger one, it counts.
static float by_value(const Step *s, N at, float value, double *sums) {
    float gap = value - s->target[at], error = gap * gap;
    if (s->value_clip > 0.0f) {
        float moved = value - s->old_value[at], limit = s->value_clip;
        float near = s->old_value[at] + (moved < -limit ? -limit : moved > limit ? limit : moved) - s->target[at];
        if (near * near > error) error = near * near, gap = fabsf(moved) <= limit ? near : 0.0f;
    }
    sums[1] += 0.5f * error;
    return gap * s->value / (float)s->rows;
}

// -- lanes ----------------------------------------------------------------------------------------------------------------

static void block(const Step *s, const int64_t *index, N rows, float *work, float *lane, double *sums) {
    float *values[LAYERS + 1];
    N inputs = s->actor.layer[0].in, stride = padded(inputs);
    for (int side = 0; side < 2; side++) {
        const Net *net = side ? &s->critic : &s->actor;
        float *room = work;
        values[0] = room, room += BLOCK * stride;
        N widest = 0;
        for (int i = 0; i < net->count; i++) {
            N wide = padded(net->layer[i].out);
            values[i + 1] = room, room += BLOCK * wide;
            widest = wide > widest ? wide : widest;
        }
        if (!side)
            for (N r = 0; r < rows; r++) memcpy(values[0] + r * stride, s->x + index[r] * inputs, inputs * sizeof(float));
        forward(s, net, rows, values);
        float *last = values[net->count];
        N out = padded(net->layer[net->count - 1].out);
        for (N r = 0; r < rows; r++) {
            if (side) last[r * out] = by_value(s, index[r], last[r * out], sums);
            else if (s->parts) categorical_row(s, index[r], last + r * out, room, sums);
            else gaussian_row(s, index[r], last + r * out, lane, sums);
        }
        // `room` was for the probabilities; a gradient is as wide as the widest layer.
        float *other = room, *third = room + BLOCK * widest;
        memcpy(third, last, rows * out * sizeof(float));
        backward(s, net, rows, values, third, other, lane);
    }
}

static void *take_lanes(void *argument) {
    Step *s = argument;
    N thread_room = __atomic_fetch_add(&s->num_threads, 1, __ATOMIC_RELAXED); // which room is ours
    for (N lane; (lane = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED)) < s->num_lanes;) {
        N first = s->rows * lane / s->num_lanes, last = s->rows * (lane + 1) / s->num_lanes;
        for (; first < last; first += BLOCK)
            block(s, s->index + first, last - first < BLOCK ? last - first : BLOCK, s->work + thread_room * s->work_size,
                  s->lanes + lane * s->lane_size, s->sums + lane * SUMS);
    }
    return NULL;
}

// Adds up the lanes into the gradient, and the squares of that into the return value.
static double add_up(const Step *s) {
    double squares = 0.0;
    for (N lane = 1; lane < s->num_lanes; lane++)
        for (N i = 0; i < s->lane_size; i++) s->lanes[i] += s->lanes[lane * s->lane_size + i];
    for (int side = 0; side < 2; side++) {
        const Net *net = side ? &s->critic : &s->actor;
        for (int i = 0; i < net->count; i++) {
            const Layer *l = &net->layer[i];
            N by_out = l->turned ? 1 : padded(l->in), by_in = l->turned ? padded(l->out) : 1;
            for (N o = 0; o < l->out; o++) {
                for (N k = 0; k < l->in; k++) s->grad[l->weight + o * l->in + k] = s->lanes[l->by_weight + o * by_out + k * by_in];
                s->grad[l->bias + o] = s->lanes[l->by_bias + o];
                for (N k = 0; k < l->in; k++) squares += (double)s->grad[l->weight + o * l->in + k] * s->grad[l->weight + o * l->in + k];
                squares += (double)s->grad[l->bias + o] * s->grad[l->bias + o];
            }
        }
    }
    if (!s->parts)
        for (N j = 0; j < s->outputs; j++) {
            s->grad[s->log_std + j] = s->lanes[j];
            squares += (double)s->lanes[j] * s->lanes[j];
        }
    return squares;
}

// Mean 0 and standard deviation 1 over the minibatch, as `standardise` has it.
static void standardise(Step *s) {
    double sum = 0.0, squares = 0.0;
    s->shift = 0.0f, s->scale = 1.0f;
    if (!s->normalise || s->rows < 2) return;
    for (N r = 0; r < s->rows; r++) sum += s->advantage[s->index[r]];
    double mean = sum / (double)s->rows;
    for (N r = 0; r < s->rows; r++) {
        double gap = s->advantage[s->index[r]] - mean;
        squares += gap * gap;
    }
    s->shift = (float)mean, s->scale = (float)(1.0 / (sqrt(squares / (double)(s->rows - 1)) + 1e-8));
}

static void pack_all(const Step *s) {
    for (int side = 0; side < 2; side++) {
        const Net *net = side ? &s->critic : &s->actor;
        for (int i = 0; i < net->count; i++) {
            const Layer *l = &net->layer[i];
            pack(s->flat + l->weight, 1, l->in, l->in, l->out, s->packed + l->forward);
            pack(s->flat + l->weight, l->in, 1, l->out, l->in, s->packed + l->backward);
        }
    }
}

// Places of everything that is packed or summed; returns how many numbers the packed weights take.
static N plan(Step *s) {
    N packed = 0, work = 0;
    s->lane_size = padded(s->outputs); // a lane begins with the gradient of the log std
    for (int side = 0; side < 2; side++) {
        Net *net = side ? &s->critic : &s->actor;
        N room = BLOCK * padded(net->layer[0].in), widest = 0;
        for (int i = 0; i < net->count; i++) {
            Layer *l = &net->layer[i];
            N in = padded(l->in), out = padded(l->out);
            l->forward = packed, packed += l->in * out;
            l->backward = packed, packed += l->out * in;
            l->turned = l->in < l->out;
            l->by_bias = s->lane_size, s->lane_size += out;
            l->by_weight = s->lane_size, s->lane_size += l->turned ? l->in * out : l->out * in;
            room += BLOCK * out;
            widest = out > widest ? out : widest;
        }
        room += 2 * BLOCK * widest;
        work = room > work ? room : work;
    }
    s->work_size = work;
    return packed;
}

static int check(const Step *s) {
    for (N r = 0; r < s->rows; r++) {
        if (s->index[r] < 0 || s->index[r] >= s->all_rows) return 0;
        for (N part = 0; part < s->parts; part++) {
            int64_t drawn = s->choice[s->index[r] * s->parts + part];
            if (drawn < 0 || drawn >= s->counts[part]) return 0;
        }
    }
    return 1;
}

static int step(void *argument) {
    Step *s = argument;
    N threads = s->num_threads, packed = plan(s);
    s->report[0] = -1.0;
    if (!check(s)) return 0;
    s->num_lanes = s->rows / 128 < 1 ? 1 : s->rows / 128 > LANES ? LANES : s->rows / 128;
    threads = threads > s->num_lanes ? s->num_lanes : threads;
    N count = packed + s->num_lanes * s->lane_size + threads * s->work_size;
    float *room = aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
    if (!room) return -1;
    double sums[LANES * SUMS] = {0};
    s->packed = room, s->lanes = room + packed, s->work = s->lanes + s->num_lanes * s->lane_size, s->sums = sums;
    memset(s->lanes, 0, (count - packed) * sizeof(float)); // the padding of the inputs too
    pack_all(s);
    standardise(s);
    s->next = 0, s->num_threads = 0;
    with_helpers((int)threads - 1, 1, take_lanes, s);
    s->report[0] = sqrt(add_up(s));
    for (int i = 0; i < SUMS; i++) {
        double sum = 0.0;
        for (N lane = 0; lane < s->num_lanes; lane++) sum += sums[lane * SUMS + i];
        s->report[1 + i] = sum / (double)s->rows;
    }
    free(room);
    return 0;
}

// -- forward only: acting, and the pass over a segment before it is learned from ------------------------------------------

// Rows do not mix, so that a row has the same bits in any company and on any number of threads.
typedef struct {
    Step s; // its actor is the network
    const float *x;
    float *y;
    uintptr_t weight[LAYERS], bias[LAYERS];
    N rows, next, rooms; // next: the block that is taken next; rooms: how many threads have taken theirs
} Pass;

static void *take_blocks(void *argument) {
    Pass *p = argument;
    const Net *net = &p->s.actor;
    N inputs = net->layer[0].in, outputs = net->layer[net->count - 1].out, stride = padded(inputs), last = padded(outputs);
    float *values[LAYERS + 1] = {p->s.work + __atomic_fetch_add(&p->rooms, 1, __ATOMIC_RELAXED) * p->s.work_size};
    for (int i = 0; i < net->count; i++) values[i + 1] = values[i] + BLOCK * padded(net->layer[i].in);
    for (N at; (at = BLOCK * __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED)) < p->rows;) {
        N rows = p->rows - at < BLOCK ? p->rows - at : BLOCK;
        for (N r = 0; r < rows; r++) memcpy(values[0] + r * stride, p->x + (at + r) * inputs, inputs * sizeof(float));
        forward(&p->s, net, rows, values);
        for (N r = 0; r < rows; r++) memcpy(p->y + (at + r) * outputs, values[net->count] + r * last, outputs * sizeof(float));
    }
    return NULL;
}

static int pass(void *argument) {
    Pass *p = argument;
    Net *net = &p->s.actor;
    N packed = 0, biases = 0;
    p->s.work_size = BLOCK * padded(net->layer[0].in);
    for (int i = 0; i < net->count; i++) {
        Layer *l = &net->layer[i];
        l->forward = packed, packed += l->in * padded(l->out);
        l->bias = biases, biases += padded(l->out);
        p->s.work_size += BLOCK * padded(l->out);
    }
    N most = p->rows / (2 * BLOCK) < LANES ? p->rows / (2 * BLOCK) : LANES, threads = p->s.num_threads < most ? p->s.num_threads : most;
    threads = threads < 1 ? 1 : threads;
    float *room = aligned_alloc(64, ((packed + biases + threads * p->s.work_size) * sizeof(float) + 63) / 64 * 64);
    if (!room) return -1;
    p->s.packed = room, p->s.flat = room + packed, p->s.work = room + packed + biases;
    for (int i = 0; i < net->count; i++) {
        const Layer *l = &net->layer[i];
        pack((const float *)p->weight[i], 1, l->in, l->in, l->out, room + l->forward);
        memcpy(room + packed + l->bias, (const float *)p->bias[i], l->out * sizeof(float));
    }
    with_helpers((int)threads - 1, p->rows >= 1024, take_blocks, p); // to wake one takes as long as some 100 rows
    free(room);
    return 0;
}

// -- Python ---------------------------------------------------------------------------------------------------------------

// forward(layers, rows, threads, x=[rows, in], y=[rows, out]); a layer is (in, out, address of the weight [out, in], of the bias, tanh).
static PyObject *forward_rows(PyObject *self, PyObject *args, PyObject *given) {
    Pass p = {0};
    Net *net = &p.s.actor;
    PyObject *layers;
    if (!PyArg_ParseTuple(args, "O!nn", &PyTuple_Type, &layers, &p.rows, &p.s.num_threads)) return NULL;
    net->count = (int)PyTuple_GET_SIZE(layers);
    int fits = net->count >= 1 && net->count <= LAYERS && p.rows >= 0;
    for (int i = 0; fits && i < net->count; i++) {
        Layer *l = &net->layer[i];
        unsigned long long weight, bias;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(layers, i), "nnKKp", &l->in, &l->out, &weight, &bias, &l->squash)) return NULL;
        p.weight[i] = (uintptr_t)weight, p.bias[i] = (uintptr_t)bias;
        fits = l->in > 0 && l->out > 0 && l->in < 1 << 20 && l->out < 1 << 20 && (!i || l->in == net->layer[i - 1].out);
    }
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "1 to 16 layers are needed, each as wide as the next one reads");
        return NULL;
    }
    Array arrays[] = {{"x", &p.x, p.rows * net->layer[0].in, 4, READ}, {"y", &p.y, p.rows * net->layer[net->count - 1].out, 4, WRITE}};
    return with_arrays(pass, &p, given, arrays, 2);
}

// A tuple of (in, out, where the weight begins, where the bias begins) per layer.
static int read_net(PyObject *given, N size, Net *net) {
    net->count = PyTuple_Check(given) ? (int)PyTuple_GET_SIZE(given) : 0;
    int fits = net->count >= 1 && net->count <= LAYERS;
    for (int i = 0; fits && i < net->count; i++) {
        Layer *l = &net->layer[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(given, i), "nnnn", &l->in, &l->out, &l->weight, &l->bias)) return 0;
        fits = l->in > 0 && l->out > 0 && l->in < 1 << 20 && l->out < 1 << 20 && l->weight >= 0 && l->weight + l->in * l->out <= size &&
               l->bias >= 0 && l->bias + l->out <= size && (!i || l->in == net->layer[i - 1].out);
        l->squash = i + 1 < net->count;
    }
    if (!fits) PyErr_SetString(PyExc_ValueError, "1 to 16 layers are needed, each as wide as the next one reads, within the parameters");
    return fits;
}

static PyObject *ppo_step(PyObject *self, PyObject *args, PyObject *given) {
    Step s = {0};
    PyObject *actor, *critic, *counts;
    N size, num_counts, total = 0, masked; // size: of the parameters
    double report[1 + SUMS];
    int64_t choices[LAYERS];
    if (!PyArg_ParseTuple(args, "O!O!O!nnnnnnffffp", &PyTuple_Type, &actor, &PyTuple_Type, &critic, &PyTuple_Type, &counts, &size, &s.log_std,
                          &s.all_rows, &s.rows, &masked, &s.num_threads, &s.clip, &s.entropy, &s.value, &s.value_clip, &s.normalise))
        return NULL;
    if (!read_net(actor, size, &s.actor) || !read_net(critic, size, &s.critic)) return NULL;
    s.outputs = s.actor.layer[s.actor.count - 1].out;
    s.parts = num_counts = PyTuple_GET_SIZE(counts);
    for (N i = 0; i < num_counts && i < LAYERS; i++) {
        choices[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(counts, i));
        total += choices[i] > 0 && choices[i] < 1 << 20 ? choices[i] : 1 << 20;
    }
    if (PyErr_Occurred()) return NULL;
    int fits = num_counts ? num_counts <= LAYERS && total == s.outputs : s.log_std >= 0 && s.log_std + s.outputs <= size;
    if (!fits || s.rows < 1 || s.num_threads < 1 || s.critic.layer[s.critic.count - 1].out != 1 || s.critic.layer[0].in != s.actor.layer[0].in) {
        PyErr_SetString(PyExc_ValueError, "the layers, the choices and the log std do not belong together, or there is no row");
        return NULL;
    }
    s.counts = choices, s.report = report;
    N inputs = s.actor.layer[0].in, all = s.all_rows;
    Array arrays[] = {
        {"flat", &s.flat, size, 4, READ},           {"grad", &s.grad, size, 4, WRITE},
        {"index", &s.index, s.rows, 8, READ},       {"x", &s.x, all * inputs, 4, READ},
        {"log_prob", &s.old_log_prob, all, 4, READ}, {"value", &s.old_value, all, 4, READ},
        {"advantage", &s.advantage, all, 4, READ},  {"target", &s.target, all, 4, READ},
        {"raw", s.parts ? (void *)&s.choice : (void *)&s.drawn, all * (s.parts ? s.parts : s.outputs), s.parts ? 8 : 4, READ},
        {"mask", &s.mask, all * s.outputs, 1, READ},
    };
    PyObject *done = with_arrays(step, &s, given, arrays, (int)(sizeof arrays / sizeof *arrays) - !masked);
    if (!done) return NULL;
    Py_DECREF(done);
    if (report[0] < 0.0) {
        PyErr_SetString(PyExc_IndexError, "a row or an action of the minibatch is out of range");
        return NULL;
    }
    return Py_BuildValue("dddddd", report[0], report[1], report[2], report[3], report[4], report[5]);
}

// use_wide(on) -> whether it is on: the two ways to multiply, for tests that compare them.
static PyObject *set_wide(PyObject *self, PyObject *on) {
    use_wide = HAS_WIDE && on == Py_True;
    return PyBool_FromLong(use_wide);
}

static PyMethodDef methods[] = {
    {"use_wide", (PyCFunction)set_wide, METH_O, "use_wide(on): multiply with vectors of sixteen numbers, where the processor has them"},
    {"forward", (PyCFunction)forward_rows, METH_VARARGS | METH_KEYWORDS, "forward(...): see src/envfleet/networks/numpy_layers.py, its one caller"},
    {"ppo_step", (PyCFunction)ppo_step, METH_VARARGS | METH_KEYWORDS, "ppo_step(...): see src/envfleet/train/fused_step.py, its one caller"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "envfleet._dense", "Dense tanh networks: a minibatch of PPO, and forward only.", -1, methods,
    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__dense(void) {
    use_wide = HAS_WIDE;
    helpers_begin();
    return PyModule_Create(&module);
}
