// The doorbell: rings of slot numbers in shared memory between the parent and its workers, and the waiting on both sides.
//
// Each ring has one writer and one reader. A waiter spins with sched_yield while the gaps it has lately seen are short, and
// sleeps on a futex when they are long, so that cheap envs pay no wake-up and a learner that computes keeps the cores.
// Workers wake the parent once, when as many slots are done as it waits for.
#ifdef __linux__
#include "envfleet.h"
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LINE 64
#define SIDE_SHIFT 28
#define SLOT_MASK ((1u << SIDE_SHIFT) - 1)
// Gaps shorter than this are worth spinning for; longer ones are counted as this long (one long pause for learning between
// rollouts must not make the next rollout sleep).
#define SPIN_NS 2000000
#define LONG_NS 4000000
// Nobody sleeps longer than this without looking around: signals, the deaths of others.
#define SLICE_NS 20000000

typedef struct {
    _Alignas(LINE) uint32_t request_tail; // parent
    uint32_t control;                     // parent: messages sent over the socket
    _Alignas(LINE) uint32_t bell;         // both: the word the worker sleeps on
    uint32_t sleeping;                    // worker
    _Alignas(LINE) uint32_t done_tail;    // worker
} Worker;

typedef struct {
    _Alignas(LINE) uint32_t bell; // workers: the word the parent sleeps on
    uint32_t sleeping, target;    // parent: wake me when the sum of done_tail reaches target
} Parent;

typedef struct {
    PyObject_HEAD
    PyObject *buffer;
    Parent *parent;
    Worker *workers;
    uint32_t *rings; // per worker: requests[capacity], done[capacity]
    Py_ssize_t num_workers, me;
    uint32_t capacity, mask;
    uint32_t *request_head, *done_head; // what this process has read, per worker
    uint32_t control_seen;
    int64_t mean_gap_ns;
    int64_t spin_ns; // most time to spin; 0: never
} Exchange;

static inline uint32_t load(uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline void store(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static inline void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline uint32_t *requests(Exchange *x, Py_ssize_t w) { return x->rings + 2 * w * x->capacity; }
static inline uint32_t *dones(Exchange *x, Py_ssize_t w) { return x->rings + (2 * w + 1) * x->capacity; }

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static void sleep_on(uint32_t *word, uint32_t value, int64_t ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
}

static void wake(uint32_t *word) {
    __atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void ring_worker(Exchange *x, Py_ssize_t w) {
    fence(); // what was written to the ring is seen before we ask whether anyone sleeps
    if (load(&x->workers[w].sleeping)) wake(&x->workers[w].bell);
}

static uint32_t sum_done(Exchange *x) {
    uint32_t sum = 0;
    for (Py_ssize_t w = 0; w < x->num_workers; w++) sum += load(&x->workers[w].done_tail);
    return sum;
}

static void publish(Exchange *x, Py_ssize_t w, uint32_t slot, int side) {
    Worker *worker = &x->workers[w];
    uint32_t tail = worker->done_tail;
    dones(x, w)[tail & x->mask] = slot | (uint32_t)side << SIDE_SHIFT;
    store(&worker->done_tail, tail + 1);
}

static void tell_parent(Exchange *x) {
    fence();
    if (load(&x->parent->sleeping) && (int32_t)(sum_done(x) - load(&x->parent->target)) >= 0) wake(&x->parent->bell);
}

static void learn_gap(Exchange *x, int64_t gap) {
    if (gap > LONG_NS) gap = LONG_NS;
    x->mean_gap_ns += (gap - x->mean_gap_ns) / 8;
}

static int64_t spin_budget(Exchange *x) {
    if (x->mean_gap_ns >= SPIN_NS) return 0;
    int64_t budget = 4 * x->mean_gap_ns + 100000;
    return budget < x->spin_ns ? budget : x->spin_ns;
}

// ---- worker ---------------------------------------------------------------------------------------------------------

static int has_request(Exchange *x) {
    return load(&x->workers[x->me].request_tail) != x->request_head[x->me] ||
           load(&x->workers[x->me].control) != x->control_seen;
}

// Waits for a request or a message, at most about a second. Without the GIL.
static void await_request(Exchange *x) {
    Worker *worker = &x->workers[x->me];
    int64_t start = now_ns(), budget = spin_budget(x), give_up = start + 1000000000;
    for (int i = 0; !has_request(x); i++) {
        relax();
        if (i % 64 == 63) {
            sched_yield();
            if (now_ns() - start > budget) break;
        }
    }
    while (!has_request(x)) {
        uint32_t seen = load(&worker->bell);
        store(&worker->sleeping, 1);
        fence();
        if (!has_request(x)) sleep_on(&worker->bell, seen, SLICE_NS * 10);
        store(&worker->sleeping, 0);
        if (now_ns() > give_up) break;
    }
    learn_gap(x, now_ns() - start);
}

// work(runner, on_side) -> number of messages waiting on the socket (0: nothing came for a while).
// on_side(slot) sends what the slot left beside its row before the slot is told to be done.
static PyObject *exchange_work(Exchange *self, PyObject *args) {
    Runner *runner;
    PyObject *on_side;
    if (!PyArg_ParseTuple(args, "O!O", &RunnerType, &runner, &on_side)) return NULL;
    Worker *worker = &self->workers[self->me];
    for (;;) {
        if (!has_request(self)) {
            Py_BEGIN_ALLOW_THREADS
            await_request(self);
            Py_END_ALLOW_THREADS
            if (!has_request(self)) return PyLong_FromLong(0);
        }
        // The tail first: a message sent before a request is then seen before that request is worked on.
        uint32_t tail = load(&worker->request_tail), control = load(&worker->control) - self->control_seen;
        if (control) {
            self->control_seen += control;
            return PyLong_FromUnsignedLong(control);
        }
        while (self->request_head[self->me] != tail) {
            uint32_t slot = requests(self, self->me)[self->request_head[self->me] & self->mask];
            int side = runner_advance(runner, slot);
            runner_idle(runner);
            if (side < 0) return NULL;
            if (side == SIDE_PYTHON) {
                PyObject *done = PyObject_CallFunction(on_side, "I", slot);
                if (!done) return NULL;
                Py_DECREF(done);
            }
            self->request_head[self->me]++;
            publish(self, self->me, slot, side);
            tell_parent(self);
        }
    }
}

// ---- parent ---------------------------------------------------------------------------------------------------------

static PyObject *exchange_submit(Exchange *self, PyObject *args) {
    Py_buffer slots, owners;
    if (!PyArg_ParseTuple(args, "y*y*", &slots, &owners)) return NULL;
    const int64_t *number = slots.buf, *owner = owners.buf;
    Py_ssize_t count = slots.len / 8, last = -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t w = owner[number[i]];
        Worker *worker = &self->workers[w];
        uint32_t tail = worker->request_tail;
        requests(self, w)[tail & self->mask] = (uint32_t)number[i];
        store(&worker->request_tail, tail + 1);
        // Slots come in runs of one worker: ring once per run, as soon as the run is complete, so that it starts early.
        if (last >= 0 && last != w && last != self->me) ring_worker(self, last);
        last = w;
    }
    if (last >= 0 && last != self->me) ring_worker(self, last);
    PyBuffer_Release(&slots);
    PyBuffer_Release(&owners);
    Py_RETURN_NONE;
}

static uint32_t available(Exchange *x) {
    uint32_t read = 0;
    for (Py_ssize_t w = 0; w < x->num_workers; w++) read += x->done_head[w];
    return sum_done(x) - read;
}

// Waits without the GIL until `need` are done or the time is over.
static void await_done(Exchange *x, uint32_t need, int64_t deadline) {
    int64_t start = now_ns(), budget = spin_budget(x);
    for (int i = 0; available(x) < need; i++) {
        relax();
        if (i % 64 == 63) {
            sched_yield();
            int64_t now = now_ns();
            if (now - start > budget || now > deadline) break;
        }
    }
    if (available(x) < need && now_ns() < deadline) {
        uint32_t read = 0, seen = load(&x->parent->bell);
        for (Py_ssize_t w = 0; w < x->num_workers; w++) read += x->done_head[w];
        store(&x->parent->target, read + need);
        store(&x->parent->sleeping, 1);
        fence();
        int64_t left = deadline - now_ns();
        if (left > SLICE_NS) left = SLICE_NS;
        if (left > 0 && available(x) < need) sleep_on(&x->parent->bell, seen, left);
        store(&x->parent->sleeping, 0);
    }
    if (available(x) >= need) learn_gap(x, now_ns() - start);
}

// wait(need, timeout_s, runner or None) -> whether `need` slots are done. Returns early (False) every 20 ms, so that the
// caller can look after the workers. With a runner, the parent steps its own share first.
static PyObject *exchange_wait(Exchange *self, PyObject *args) {
    unsigned int need;
    double timeout_s;
    PyObject *runner;
    if (!PyArg_ParseTuple(args, "IdO", &need, &timeout_s, &runner)) return NULL;
    int64_t deadline = now_ns() + (int64_t)(timeout_s * 1e9);
    if (runner != Py_None && self->me >= 0) {
        Worker *mine = &self->workers[self->me];
        while (self->request_head[self->me] != mine->request_tail && available(self) < need) {
            uint32_t slot = requests(self, self->me)[self->request_head[self->me] & self->mask];
            int side = runner_advance((Runner *)runner, slot);
            self->request_head[self->me]++;
            // Interrupted in the env: the life has noted it, the slot comes back as failed, the interrupt goes on.
            publish(self, self->me, slot, side < 0 ? SIDE_PYTHON : side);
            if (side < 0) return NULL;
        }
    }
    if (available(self) < need && timeout_s > 0) {
        Py_BEGIN_ALLOW_THREADS
        await_done(self, need, deadline);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() < 0) return NULL;
    }
    return PyBool_FromLong(available(self) >= need);
}

static PyObject *arena_bytes(const char *row, int final, Py_ssize_t size) {
    const uint32_t *lengths = (const uint32_t *)row;
    Py_ssize_t offset = 8 + (final ? 0 : lengths[1]), length = lengths[final ? 1 : 0];
    return length && offset + length <= size ? PyBytes_FromStringAndSize(row + offset, length) : NULL;
}

static int keep(PyObject *dict, PyObject *slot, PyObject *data) {
    if (!data) {
        if (PyErr_Occurred()) return -1;
        if (PyDict_GET_SIZE(dict) && PyDict_Contains(dict, slot) == 1) return PyDict_DelItem(dict, slot);
        return 0;
    }
    int bad = PyDict_SetItem(dict, slot, data);
    Py_DECREF(data);
    return bad;
}

// collect(out: int64 buffer, arena, info, final_info) -> (count, [slots whose rest is with Python]).
static PyObject *exchange_collect(Exchange *self, PyObject *args) {
    Py_buffer out, arena;
    PyObject *info, *final_info;
    if (!PyArg_ParseTuple(args, "w*y*O!O!", &out, &arena, &PyDict_Type, &info, &PyDict_Type, &final_info)) return NULL;
    int64_t *slots = out.buf;
    Py_ssize_t count = 0, most = out.len / 8, row_bytes = most ? arena.len / most : 0;
    PyObject *python = PyList_New(0);
    int bad = !python;
    for (Py_ssize_t w = 0; !bad && w < self->num_workers; w++) {
        uint32_t tail = load(&self->workers[w].done_tail);
        for (; !bad && self->done_head[w] != tail && count < most; self->done_head[w]++) {
            uint32_t entry = dones(self, w)[self->done_head[w] & self->mask], side = entry >> SIDE_SHIFT;
            Py_ssize_t slot = entry & SLOT_MASK;
            slots[count++] = slot;
            if (side == SIDE_NONE && !PyDict_GET_SIZE(info) && !PyDict_GET_SIZE(final_info)) continue;
            const char *row = (const char *)arena.buf + slot * row_bytes;
            PyObject *number = PyLong_FromSsize_t(slot);
            bad = !number || keep(info, number, side && row_bytes ? arena_bytes(row, 0, row_bytes) : NULL) < 0 ||
                  keep(final_info, number, side && row_bytes ? arena_bytes(row, 1, row_bytes) : NULL) < 0 ||
                  (side == SIDE_PYTHON && PyList_Append(python, number) < 0);
            Py_XDECREF(number);
        }
    }
    PyBuffer_Release(&out);
    PyBuffer_Release(&arena);
    if (bad) {
        Py_XDECREF(python);
        return NULL;
    }
    return Py_BuildValue("nN", count, python);
}

static PyObject *exchange_control(Exchange *self, PyObject *number) {
    Py_ssize_t w = PyLong_AsSsize_t(number);
    if (PyErr_Occurred()) return NULL;
    if (w < 0 || w >= self->num_workers) return PyErr_Format(PyExc_IndexError, "no worker %zd", w);
    store(&self->workers[w].control, self->workers[w].control + 1);
    ring_worker(self, w);
    Py_RETURN_NONE;
}

// forget(worker): its process is gone; a new one starts with empty rings.
static PyObject *exchange_forget(Exchange *self, PyObject *number) {
    Py_ssize_t w = PyLong_AsSsize_t(number);
    if (PyErr_Occurred()) return NULL;
    if (w < 0 || w >= self->num_workers) return PyErr_Format(PyExc_IndexError, "no worker %zd", w);
    memset(&self->workers[w], 0, sizeof(Worker));
    self->request_head[w] = self->done_head[w] = 0;
    Py_RETURN_NONE;
}

// ---- type -----------------------------------------------------------------------------------------------------------

static uint32_t power_of_two(Py_ssize_t count) {
    uint32_t size = 16;
    while (size < count) size *= 2;
    return size;
}

static PyObject *exchange_size(PyObject *type, PyObject *args) {
    Py_ssize_t num_workers, num_slots;
    if (!PyArg_ParseTuple(args, "nn", &num_workers, &num_slots)) return NULL;
    size_t rings = (size_t)num_workers * 2 * power_of_two(num_slots) * sizeof(uint32_t);
    return PyLong_FromSize_t(sizeof(Parent) + num_workers * sizeof(Worker) + rings);
}

static int exchange_init(Exchange *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"memory", "num_workers", "num_slots", "me", "spin_s", NULL};
    Py_buffer memory;
    Py_ssize_t num_slots;
    double spin_s = 0.004;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "w*nnn|d", names, &memory, &self->num_workers, &num_slots, &self->me,
                                     &spin_s))
        return -1;
    self->capacity = power_of_two(num_slots);
    self->mask = self->capacity - 1;
    self->spin_ns = (int64_t)(spin_s * 1e9);
    self->parent = memory.buf;
    self->workers = (Worker *)(self->parent + 1);
    self->rings = (uint32_t *)(self->workers + self->num_workers);
    self->buffer = Py_NewRef(memory.obj);
    self->request_head = PyMem_Calloc(self->num_workers, sizeof(uint32_t));
    self->done_head = PyMem_Calloc(self->num_workers, sizeof(uint32_t));
    int fits = (char *)(self->rings + 2 * self->num_workers * self->capacity) <= (char *)memory.buf + memory.len;
    PyBuffer_Release(&memory); // kept by `buffer`; a mapping is never moved
    if (!fits || (uintptr_t)self->parent % LINE) {
        PyErr_SetString(PyExc_ValueError, "the memory of an exchange must be aligned and of exchange_size() bytes");
        return -1;
    }
    return self->request_head && self->done_head ? 0 : -1;
}

static void exchange_dealloc(Exchange *self) {
    PyMem_Free(self->request_head);
    PyMem_Free(self->done_head);
    Py_CLEAR(self->buffer);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef exchange_methods[] = {
    {"size", (PyCFunction)exchange_size, METH_VARARGS | METH_STATIC, "size(num_workers, num_slots): bytes needed"},
    {"work", (PyCFunction)exchange_work, METH_VARARGS, "work(runner, on_side): a worker's loop; gives messages waiting"},
    {"submit", (PyCFunction)exchange_submit, METH_VARARGS, "submit(slots, worker_of): hand slots to their workers"},
    {"wait", (PyCFunction)exchange_wait, METH_VARARGS, "wait(need, timeout_s, runner): whether so many are done"},
    {"collect", (PyCFunction)exchange_collect, METH_VARARGS, "collect(out, arena, info, final_info): take what is done"},
    {"control", (PyCFunction)exchange_control, METH_O, "control(worker): a message was sent to it"},
    {"forget", (PyCFunction)exchange_forget, METH_O, "forget(worker): its process is gone"},
    {NULL, NULL, 0, NULL},
};

PyTypeObject ExchangeType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "envfleet._native.Exchange",
    .tp_basicsize = sizeof(Exchange),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Rings of slot numbers in shared memory, and the doorbell on both sides.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)exchange_init,
    .tp_dealloc = (destructor)exchange_dealloc,
    .tp_methods = exchange_methods,
};
#endif
