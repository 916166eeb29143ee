// The Python type of the doorbell: a worker's loop, and the parent's calls.
#ifdef __linux__
#include "exchange.h"
#include <structmember.h>

// An advance raised an exception that is not the env's (those are in the row): make the row a fault row.
// -1 when even that fails.
static int broken(Runner *runner, uint32_t slot) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *done = PyObject_CallMethod(runner->slots[slot].life, "fail_in", "Os", value ? value : Py_None, "step");
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    Py_XDECREF(done);
    return done ? SIDE_PYTHON : -1;
}

// work(runner, on_side) -> number of messages waiting (0: nothing came for a while; -1: this thread was given up).
// on_side(slot, turn), or None, sends what is beside the row of the slot before the slot is reported as done.
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
        }
        if (self->detached) return PyLong_FromLong(-1); // also when this happened just as it came free
        if (!has_request(self)) return PyLong_FromLong(0);
        // The tail first: a message sent before a request is then seen before that request is worked on.
        uint32_t tail = load(&worker->request_tail), control = load(&worker->control) - self->control_seen;
        if (control) {
            self->control_seen += control;
            return PyLong_FromUnsignedLong(control);
        }
        take_place(self);
        while (self->request_head[self->me] != tail) {
            Entry request = requests(self, self->me)[self->request_head[self->me] & self->mask];
            uint32_t slot = slot_of(request), turn = turn_of(request);
            int64_t now = 0; // not the end of the slot before: reporting to the parent is not time of this env
            self->busy = 1;
            int side = runner_advance(runner, slot, turn, &now);
            self->busy = 0;
            if (self->detached) { // another thread owns the row and the rings now
                PyErr_Clear();
                return PyLong_FromLong(-1);
            }
            runner_idle(runner, now);
            if (side < 0 && (side = broken(runner, slot)) < 0) return NULL;
            if (side & SIDE_PYTHON && on_side != Py_None) {
                PyObject *done = PyObject_CallFunction(on_side, "II", slot, turn);
                if (!done) return NULL;
                Py_DECREF(done);
            }
            self->request_head[self->me]++;
            publish(self, self->me, slot, side, turn);
            wake_parent(self);
        }
    }
}

static int has_board(Exchange *self) {
    if (!self->board.parts) PyErr_SetString(PyExc_RuntimeError, "only an exchange with a board hands slots over");
    return self->board.parts != NULL;
}

static PyObject *exchange_submit(Exchange *self, PyObject *args) {
    Py_buffer slots, owners;
    if (!has_board(self)) return NULL;
    if (!PyArg_ParseTuple(args, "y*y*", &slots, &owners)) return NULL;
    if (self->in_thread) { // a thread that is woken needs the GIL at once: release it before
        Py_BEGIN_ALLOW_THREADS
        hand_over(self, slots.buf, slots.len / 8, owners.buf);
        Py_END_ALLOW_THREADS
    } else
        hand_over(self, slots.buf, slots.len / 8, owners.buf);
    PyBuffer_Release(&slots);
    PyBuffer_Release(&owners);
    Py_RETURN_NONE;
}

// The parent's own share, then the others' work, until `need` are done or the time is over. -1 with an exception.
static int wait_for(Exchange *self, uint32_t need, double timeout_s, PyObject *runner) {
    int64_t now = 0;
    if (runner != Py_None && self->me >= 0) {
        Worker *mine = &self->workers[self->me];
        take_place(self);
        while (self->request_head[self->me] != mine->request_tail && available(self) < need) {
            Entry request = requests(self, self->me)[self->request_head[self->me] & self->mask];
            int side = runner_advance((Runner *)runner, slot_of(request), turn_of(request), &now);
            self->request_head[self->me]++;
            // Interrupted in the env or in the slot life: the slot is returned as failed, and the interrupt is raised.
            publish(self, self->me, slot_of(request), side < 0 ? SIDE_PYTHON | SIDE_BROKEN : side, turn_of(request));
            if (side < 0) return -1;
        }
    }
    if (available(self) < need && timeout_s > 0) {
        int64_t deadline = now_ns() + (int64_t)(timeout_s * 1e9);
        Py_BEGIN_ALLOW_THREADS
        await_done(self, need, deadline);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() < 0) return -1;
    }
    return available(self) >= need;
}

// wait(need, timeout_s, runner or None) -> whether `need` slots are done. Returns early (False) every 20 ms, so that the
// caller can look after the workers. With a runner, the parent steps its own share first.
static PyObject *exchange_wait(Exchange *self, PyObject *args) {
    unsigned int need;
    double timeout_s;
    PyObject *runner;
    if (!PyArg_ParseTuple(args, "IdO", &need, &timeout_s, &runner)) return NULL;
    int enough = wait_for(self, need, timeout_s, runner);
    return enough < 0 ? NULL : PyBool_FromLong(enough);
}

static int is_current(Exchange *self, Entry entry) {
    uint32_t slot = slot_of(entry), turn = turn_of(entry);
    return turn == self->board.given[slot] && turn != self->board.done[slot];
}

// Takes what is done if that is `count` slots with nothing beside their rows; else leaves all of it to collect().
static int take_plain(Exchange *self, Py_ssize_t count) {
    for (Py_ssize_t w = 0; w < self->num_workers; w++) {
        uint32_t tail = load(&self->workers[w].done_tail);
        for (uint32_t at = self->done_head[w]; at != tail; at++, count--) {
            Entry entry = dones(self, w)[at & self->mask];
            if (side_of(entry) != SIDE_NONE || !is_current(self, entry)) return 0;
        }
    }
    if (count) return 0;
    for (Py_ssize_t w = 0; w < self->num_workers; w++) {
        uint32_t tail = load(&self->workers[w].done_tail);
        for (; self->done_head[w] != tail; self->done_head[w]++) {
            Entry entry = dones(self, w)[self->done_head[w] & self->mask];
            self->board.done[slot_of(entry)] = turn_of(entry);
        }
    }
    return 1;
}

// round(slots, worker_of, timeout_s, runner or None): submit, wait for all, and take them if they are plain, in one call:
// between two batches every microsecond of the parent is one in which workers wait. False leaves the rest to wait().
static PyObject *exchange_round(Exchange *self, PyObject *args) {
    Py_buffer slots, owners;
    double timeout_s;
    PyObject *runner;
    if (!has_board(self)) return NULL;
    if (!PyArg_ParseTuple(args, "y*y*dO", &slots, &owners, &timeout_s, &runner)) return NULL;
    Py_ssize_t count = slots.len / 8;
    hand_over(self, slots.buf, count, owners.buf);
    PyBuffer_Release(&slots);
    PyBuffer_Release(&owners);
    int enough = wait_for(self, (uint32_t)count, timeout_s, runner);
    if (enough < 0) return NULL;
    return PyBool_FromLong(enough && take_plain(self, count));
}

// collect(arena): take what is done onto the board. An entry of another turn than the slot's is dropped and counted.
static PyObject *exchange_collect(Exchange *self, PyObject *buffer) {
    Py_buffer arena;
    if (PyObject_GetBuffer(buffer, &arena, PyBUF_SIMPLE) < 0) return NULL;
    Py_ssize_t row_bytes = self->num_slots ? arena.len / self->num_slots : 0;
    int bad = !has_board(self);
    for (Py_ssize_t w = 0; !bad && w < self->num_workers; w++) {
        uint32_t tail = load(&self->workers[w].done_tail);
        for (; !bad && self->done_head[w] != tail; self->done_head[w] += !bad) {
            Entry entry = dones(self, w)[self->done_head[w] & self->mask];
            Py_ssize_t slot = slot_of(entry);
            if (slot >= self->num_slots || !is_current(self, entry)) {
                self->num_stale++;
                continue;
            }
            bad = board_finish(&self->board, slot, turn_of(entry), side_of(entry),
                               row_bytes ? (const char *)arena.buf + slot * row_bytes : NULL, row_bytes) < 0;
        }
    }
    PyBuffer_Release(&arena);
    if (bad) return NULL;
    return PyLong_FromUnsignedLongLong(self->num_stale);
}

static PyObject *exchange_control(Exchange *self, PyObject *number) {
    Py_ssize_t w = PyLong_AsSsize_t(number);
    if (PyErr_Occurred()) return NULL;
    if (w < 0 || w >= self->num_workers) return PyErr_Format(PyExc_IndexError, "no worker %zd", w);
    store(&self->workers[w].control, self->workers[w].control + 1);
    ring_worker(self, w);
    Py_RETURN_NONE;
}

// take_over(stuck): replaces a thread that was given up, and continues after the slot in which that thread hangs.
static PyObject *exchange_take_over(Exchange *self, PyObject *other) {
    if (!PyObject_TypeCheck(other, &ExchangeType)) return PyErr_Format(PyExc_TypeError, "take_over(Exchange)");
    Exchange *stuck = (Exchange *)other;
    stuck->detached = 1;
    self->request_head[self->me] = stuck->request_head[self->me] + (uint32_t)stuck->busy;
    self->control_seen = stuck->control_seen;
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
    size_t rings = (size_t)num_workers * 2 * power_of_two(num_slots) * sizeof(Entry);
    return PyLong_FromSize_t(sizeof(Parent) + num_workers * sizeof(Worker) + rings);
}

static int exchange_init(Exchange *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"memory", "num_workers", "num_slots", "me", "spin_s", "is_parent", "in_thread", "board", NULL};
    Py_buffer memory;
    Py_ssize_t num_slots;
    double spin_s = 0.004;
    int is_parent = 0, in_thread = 0;
    PyObject *board = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "w*nnn|dppO", names, &memory, &self->num_workers, &num_slots, &self->me,
                                     &spin_s, &is_parent, &in_thread, &board))
        return -1;
    if (board != Py_None && board_set(&self->board, board) < 0) {
        PyBuffer_Release(&memory);
        return -1;
    }
    self->num_slots = num_slots;
    self->in_thread = (char)in_thread;
    self->is_parent = (char)is_parent;
    self->capacity = power_of_two(num_slots);
    self->mask = self->capacity - 1;
    self->spin_ns = (int64_t)(spin_s * 1e9);
    self->parent = memory.buf;
    self->workers = (Worker *)(self->parent + 1);
    self->rings = (Entry *)(self->workers + self->num_workers);
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
    Py_CLEAR(self->board.parts);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef exchange_methods[] = {
    {"size", (PyCFunction)exchange_size, METH_VARARGS | METH_STATIC, "size(num_workers, num_slots): bytes needed"},
    {"work", (PyCFunction)exchange_work, METH_VARARGS, "work(runner, on_side): a worker's loop; gives messages waiting"},
    {"submit", (PyCFunction)exchange_submit, METH_VARARGS, "submit(slots, worker_of): hand slots to their workers"},
    {"round", (PyCFunction)exchange_round, METH_VARARGS, "round(slots, worker_of, timeout_s, runner): submit and take all"},
    {"wait", (PyCFunction)exchange_wait, METH_VARARGS, "wait(need, timeout_s, runner): whether so many are done"},
    {"collect", (PyCFunction)exchange_collect, METH_O, "collect(arena): take what is done; gives how many entries were stale"},
    {"control", (PyCFunction)exchange_control, METH_O, "control(worker): a message was sent to it"},
    {"take_over", (PyCFunction)exchange_take_over, METH_O, "take_over(stuck): be a thread's successor"},
    {"forget", (PyCFunction)exchange_forget, METH_O, "forget(worker): its process is gone"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef exchange_members[] = {
    {"rests", T_LONGLONG, offsetof(Exchange, rests), READONLY, "how often it lost its core and stopped spinning"},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject ExchangeType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "envfleet._compiled.Exchange",
    .tp_basicsize = sizeof(Exchange),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Rings of slot numbers in shared memory, and the doorbell on both sides.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)exchange_init,
    .tp_dealloc = (destructor)exchange_dealloc,
    .tp_methods = exchange_methods,
    .tp_members = exchange_members,
};
#endif
