// The Python type around the compiled life: construction from arrays, arming of slots, and a plain run for one process.
#include "envfleet.h"
#include <stddef.h>

static int buffer_of(PyObject *object, char **data, Py_ssize_t *row_bytes, Py_ssize_t rows) {
    Py_buffer view;
    if (object == Py_None) {
        *data = NULL;
        return 0;
    }
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) < 0) return -1;
    *data = view.buf;
    *row_bytes = rows ? view.len / rows : 0;
    PyBuffer_Release(&view); // the array itself is kept alive in keep_alive, and slabs are never resized
    return 0;
}

static int read_offsets(Runner *self, PyObject *offsets) {
    static const struct { const char *name; size_t at; } fields[] = {
#define F(name) {#name, offsetof(Runner, at.name)}
        F(reward), F(ep_return), F(episode), F(step), F(length), F(task), F(seed), F(started), F(now_seed), F(now_task),
        F(now_length), F(now_return), F(next_seed), F(next_task), F(step_ns), F(busy_ns), F(terminated), F(truncated),
        F(active), F(scored), F(pending), F(over), F(waiting), F(status), F(command), F(action_type),
#undef F
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        PyObject *value = PyDict_GetItemString(offsets, fields[i].name);
        if (!value) {
            PyErr_Format(PyExc_KeyError, "the head has no field %s", fields[i].name);
            return -1;
        }
        *(Py_ssize_t *)((char *)self + fields[i].at) = PyLong_AsSsize_t(value);
    }
    return PyErr_Occurred() ? -1 : 0;
}

// Whether the head of one agent is the struct of envfleet.h.
static int check_head(Runner *self) {
#define AT(name) self->at.name != (Py_ssize_t)offsetof(Head, name)
    if (AT(reward) || AT(ep_return) || AT(episode) || AT(step) || AT(length) || AT(task) || AT(seed) || AT(started) || AT(now_seed) ||
        AT(now_task) || AT(now_length) || AT(now_return) || AT(next_seed) || AT(next_task) || AT(step_ns) || AT(busy_ns) ||
        AT(terminated) || AT(truncated) || AT(active) || AT(scored) || AT(pending) || AT(over) || AT(waiting) || AT(status) ||
        AT(command) || AT(action_type)) {
#undef AT
        PyErr_SetString(PyExc_ValueError, "the head of a row is not laid out as compiled/envfleet.h has it: build envfleet again");
        return -1;
    }
    return 0;
}

static int read_keeping(Runner *self, PyObject *pairs, Py_ssize_t rows) {
    self->num_keeping = PyList_GET_SIZE(pairs);
    self->keeping = PyMem_Calloc(self->num_keeping + 1, sizeof *self->keeping);
    if (!self->keeping) return -1;
    for (Py_ssize_t i = 0; i < self->num_keeping; i++) {
        PyObject *array, *kept;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(pairs, i), "OO", &array, &kept) ||
            buffer_of(array, &self->keeping[i].rows, &self->keeping[i].bytes, rows) < 0 ||
            buffer_of(kept, &self->keeping[i].kept, &self->keeping[i].bytes, rows) < 0)
            return -1;
    }
    return 0;
}

static int runner_init(Runner *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"head", "offsets", "obs", "final_obs", "obs_is_int64_scalar", "action", "lives", "slow",
                            "on_end_reset", "has_columns", "pulse", "arena", "pickle", "agents", "pulse_per_slot", "kept",
                            "kept_turn", "keep", "interruptible", "wide_action", "action_types", NULL};
    PyObject *head, *offsets, *obs, *final_obs, *action, *lives, *slow, *pulse, *arena, *pickle, *agents, *kept, *kept_turn,
        *keep_call, *wide, *types;
    int is_int, on_end_reset, has_columns, pulse_per_slot, interruptible;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!OOpOO!OppOOOO!pO!OOpOO!", names, &head, &PyDict_Type, &offsets, &obs,
                                     &final_obs, &is_int, &action, &PyDict_Type, &lives, &slow, &on_end_reset,
                                     &has_columns, &pulse, &arena, &pickle, &PyTuple_Type, &agents, &pulse_per_slot,
                                     &PyList_Type, &kept, &kept_turn, &keep_call, &interruptible, &wide, &PyTuple_Type,
                                     &types))
        return -1;
    Py_ssize_t rows = PyObject_Size(head), pulse_bytes = 0, turn_bytes = 0;
    char *pulse_data, *turn_data;
    if (rows < 0 || self->slots || buffer_of(head, &self->head, &self->stride, rows) < 0 ||
        buffer_of(obs, &self->obs, &self->obs_bytes, rows) < 0 ||
        buffer_of(final_obs, &self->final_obs, &self->obs_bytes, rows) < 0 ||
        buffer_of(action, &self->action, &self->action_bytes, rows) < 0 ||
        buffer_of(wide, &self->wide_action, &self->wide_action_bytes, rows) < 0 ||
        buffer_of(arena, &self->arena, &self->arena_bytes, rows) < 0 ||
        buffer_of(pulse, &pulse_data, &pulse_bytes, 1) < 0 || read_offsets(self, offsets) < 0 ||
        buffer_of(kept_turn, &turn_data, &turn_bytes, rows) < 0 || read_keeping(self, kept, rows) < 0)
        return -1;
    self->kept_turn = (uint32_t *)turn_data;
    self->keep = keep_call == Py_None ? NULL : Py_NewRef(keep_call);
    self->interruptible = (char)interruptible;
    self->born = fork_count;
    self->pulse = (int64_t *)pulse_data;
    self->pulse_words = pulse_per_slot && rows ? pulse_bytes / rows / (Py_ssize_t)sizeof(int64_t) : 0;
    self->num_slots = rows;
    self->obs_like = obs;
    self->action_like = action;
    self->action_types = types;
    self->obs_is_int64_scalar = (char)is_int;
    self->on_end_reset = (char)on_end_reset;
    self->has_columns = (char)has_columns;
    self->slow = Py_NewRef(slow);
    self->pickle = pickle == Py_None ? NULL : Py_NewRef(pickle);
    self->keep_alive = PyTuple_Pack(13, head, obs, final_obs, action, lives, pulse, arena, offsets, agents, kept,
                                     kept_turn, wide, types);
    self->slots = PyMem_Calloc(rows ? rows : 1, sizeof(Slot));
    self->num_agents = PyTuple_GET_SIZE(agents);
    self->agents = self->num_agents ? agents : NULL;
    if (!self->agents && check_head(self) < 0) return -1;
    self->seen = PyMem_Calloc(self->num_agents + 1, sizeof(PyObject *));
    self->rewards = PyMem_Calloc(self->num_agents + 1, sizeof(double));
    if (!self->keep_alive || !self->slots || !self->seen || !self->rewards) return -1;
    PyObject *key, *life;
    Py_ssize_t position = 0;
    while (PyDict_Next(lives, &position, &key, &life)) {
        Py_ssize_t slot = PyLong_AsSsize_t(key);
        if (slot < 0 || slot >= rows) {
            PyErr_SetString(PyExc_IndexError, "a life's slot is outside the slab");
            return -1;
        }
        self->slots[slot].life = life;
    }
    return 0;
}

static int runner_traverse(Runner *self, visitproc visit, void *arg) {
    Py_VISIT(self->keep_alive);
    Py_VISIT(self->slow);
    Py_VISIT(self->pickle);
    Py_VISIT(self->keep);
    Py_VISIT(self->board.parts);
    for (Py_ssize_t i = 0; self->slots && i < self->num_slots; i++) {
        Py_VISIT(self->slots[i].step);
        Py_VISIT(self->slots[i].reset);
        Py_VISIT(self->slots[i].env);
        Py_VISIT(self->slots[i].native.owner);
    }
    return 0;
}

static int runner_clear(Runner *self) {
    for (Py_ssize_t i = 0; self->slots && i < self->num_slots; i++) {
        Py_CLEAR(self->slots[i].step);
        Py_CLEAR(self->slots[i].reset);
        Py_CLEAR(self->slots[i].env);
        native_disarm(self, i);
    }
    Py_CLEAR(self->slow);
    Py_CLEAR(self->pickle);
    Py_CLEAR(self->keep);
    Py_CLEAR(self->board.parts);
    return 0;
}

static void runner_dealloc(Runner *self) {
    PyObject_GC_UnTrack(self);
    runner_clear(self);
    Py_CLEAR(self->keep_alive);
    PyMem_Free(self->slots);
    native_free_room(self);
    PyMem_Free(self->seen);
    PyMem_Free(self->rewards);
    PyMem_Free(self->keeping);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

int runner_check(Runner *self, Py_ssize_t slot) {
    if (slot < 0 || slot >= self->num_slots || !self->slots[slot].life) {
        PyErr_Format(PyExc_IndexError, "slot %zd is not driven here", slot);
        return -1;
    }
    return 0;
}

static PyObject *runner_arm(Runner *self, PyObject *args) {
    Py_ssize_t slot;
    PyObject *step, *reset, *env = Py_None, *native = Py_None;
    long long limit;
    int explicit_reset;
    if (!PyArg_ParseTuple(args, "nOOLp|OO", &slot, &step, &reset, &limit, &explicit_reset, &env, &native) || runner_check(self, slot) < 0)
        return NULL;
    Slot *s = &self->slots[slot];
    Py_XSETREF(s->step, Py_NewRef(step));
    Py_XSETREF(s->reset, Py_NewRef(reset));
    Py_XSETREF(s->env, Py_NewRef(env));
    s->limit = limit;
    s->explicit_reset = (char)explicit_reset;
    if (native != Py_None && native_arm(self, slot, native) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *runner_disarm(Runner *self, PyObject *number) {
    Py_ssize_t slot = PyLong_AsSsize_t(number);
    if (PyErr_Occurred() || runner_check(self, slot) < 0) return NULL;
    Py_CLEAR(self->slots[slot].step);
    Py_CLEAR(self->slots[slot].reset);
    Py_CLEAR(self->slots[slot].env);
    native_disarm(self, slot);
    Py_RETURN_NONE;
}

// advance(slot, turn) -> whether it left something beside its row; None when its call was given up meanwhile.
static PyObject *runner_one(Runner *self, PyObject *args) {
    Py_ssize_t slot;
    unsigned int turn;
    if (!PyArg_ParseTuple(args, "nI", &slot, &turn) || runner_check(self, slot) < 0) return NULL;
    int64_t now = 0;
    int side = runner_advance(self, slot, turn, &now);
    if (side < 0) return NULL;
    if (side == SIDE_GONE) Py_RETURN_NONE;
    runner_idle(self, now);
    return PyBool_FromLong(side != SIDE_NONE);
}

// begin(slot, turn) -> what env.step returned, to be awaited; None when this is not a plain step of an armed slot.
static PyObject *runner_begin_one(Runner *self, PyObject *args) {
    Py_ssize_t slot;
    unsigned int turn;
    if (!PyArg_ParseTuple(args, "nI", &slot, &turn) || runner_check(self, slot) < 0) return NULL;
    if (!runner_can_begin(self, slot)) Py_RETURN_NONE;
    return runner_begin(self, slot, turn, 0);
}

// take(slot, result) -> whether it left something beside its row; None when the Python life must take the result.
static PyObject *runner_take_one(Runner *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "take(slot, result)");
    Py_ssize_t slot = PyLong_AsSsize_t(args[0]);
    if (PyErr_Occurred() || runner_check(self, slot) < 0) return NULL;
    int side = runner_take(self, slot, args[1]);
    if (side < 0) return NULL;
    if (side == SIDE_LEFT) Py_RETURN_NONE;
    return PyBool_FromLong(side != SIDE_NONE);
}

// set_board((given, done, info, final_info, sided)): where run() reports turns.
static PyObject *runner_set_board(Runner *self, PyObject *parts) {
    if (!PyTuple_Check(parts) || board_set(&self->board, parts) < 0) return NULL;
    Py_RETURN_NONE;
}

// run(slots: int64 buffer): give each slot its next turn and advance it; False when one has something beside its row.
// When it raises, the slot it was in has been given a turn that is not done, and those behind it have not.
static PyObject *runner_run(Runner *self, PyObject *slots) {
    Py_buffer view;
    if (!self->board.parts) return PyErr_Format(PyExc_RuntimeError, "set_board() first");
    if (PyObject_GetBuffer(slots, &view, PyBUF_SIMPLE) < 0) return NULL;
    const int64_t *numbers = view.buf;
    int64_t now = 0;
    int plain = 1, bad = 0;
    if (self->left && !self->pulse) { // with a pulse, each slot says that it is being stepped
        Py_ssize_t count = (Py_ssize_t)(view.len / sizeof(int64_t));
        plain = native_check(self, numbers, count) < 0 ? -1 : native_run(self, numbers, count);
        PyBuffer_Release(&view);
        return plain < 0 ? NULL : PyBool_FromLong(plain);
    }
    for (Py_ssize_t i = 0; !bad && i < (Py_ssize_t)(view.len / sizeof(int64_t)); i++) {
        Py_ssize_t slot = numbers[i];
        if ((bad = runner_check(self, slot) < 0)) break;
        uint32_t turn = ++self->board.given[slot];
        int side = runner_advance(self, slot, turn, &now);
        plain &= side == SIDE_NONE;
        bad = side < 0 || board_finish(&self->board, slot, turn, side, NULL, 0) < 0;
    }
    runner_idle(self, bad ? 0 : now);
    PyBuffer_Release(&view);
    return bad ? NULL : PyBool_FromLong(plain);
}

static PyMethodDef runner_methods[] = {
    {"arm", (PyCFunction)runner_arm, METH_VARARGS, "arm(slot, step, reset, limit, explicit_reset): drive this slot here"},
    {"disarm", (PyCFunction)runner_disarm, METH_O, "disarm(slot): leave this slot to the Python life"},
    {"advance", (PyCFunction)runner_one, METH_VARARGS, "advance(slot, turn): one slot; whether it left something beside its row"},
    {"begin", (PyCFunction)runner_begin_one, METH_VARARGS, "begin(slot, turn): call its step; gives what is to be awaited, or None"},
    {"take", (PyCFunction)(void (*)(void))runner_take_one, METH_FASTCALL, "take(slot, result): write what was awaited; None: not plain"},
    {"run", (PyCFunction)runner_run, METH_O, "run(slots): advance slots; whether none has anything beside its row"},
    {"start_threads", (PyCFunction)runner_start_threads, METH_O, "start_threads(count): step native environments beside the caller"},
    {"submit", (PyCFunction)runner_submit, METH_O, "submit(slots): let the threads step; None while they are out, else as run()"},
    {"wait", (PyCFunction)runner_wait, METH_VARARGS, "wait(target, timeout_s): until at most that many are out; as run()"},
    {"stop_threads", (PyCFunction)runner_stop_threads, METH_O, "stop_threads(timeout_s): how many hang"},
    {"set_board", (PyCFunction)runner_set_board, METH_O, "set_board(parts): where run() reports turns"},
    {NULL, NULL, 0, NULL},
};

PyTypeObject RunnerType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "envfleet._compiled.Runner",
    .tp_basicsize = sizeof(Runner),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "The compiled slot life over the rows of one process.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)runner_init,
    .tp_dealloc = (destructor)runner_dealloc,
    .tp_traverse = (traverseproc)runner_traverse,
    .tp_clear = (inquiry)runner_clear,
    .tp_methods = runner_methods,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "envfleet._compiled", "The compiled core of envfleet: slot life and doorbell.", -1,
    NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__compiled(void) {
    if (runner_setup_numpy() < 0 || PyType_Ready(&RunnerType) < 0) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made || PyModule_AddObjectRef(made, "Runner", (PyObject *)&RunnerType) < 0) return NULL;
#ifdef __linux__
    if (PyType_Ready(&ExchangeType) < 0 || PyModule_AddObjectRef(made, "Exchange", (PyObject *)&ExchangeType) < 0)
        return NULL;
#endif
    return made;
}
