// The compiled slot life: steps an env, writes its row, notices the end, resets. It handles the ordinary case and hands
// everything else (odd types, seeds, tasks, options, declared columns, nested spaces, errors) to the Python life, so that
// there is one meaning. src/envfleet/slots/slot_life.py is the specification, and the conformance suite compares the two.
#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL envfleet_array_api
#include "envfleet.h"
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>

#include <pthread.h>
#include <unistd.h>

static PyObject *str_finish_step, *str_reset_now, *str_write_obs, *str_keep_info, *str_fail_in, *str_info,
    *str_final_info, *str_read_action, *str_step, *str_reset, *str_take_reset, *str_obs, *str_final_obs, *empty_tuple, *seed_options,
    *str_abandoned, *str_only_infos;

unsigned fork_count;

static void count_fork(void) { fork_count++; }

// An env may fork, and the child may return from the call (an exception in a helper, a forgotten exit). It has the
// worker's rings and sockets: if it continued, two processes would answer for one slot.
void end_if_forked(Runner *runner) {
    if (fork_count != runner->born) _exit(1);
}

int runner_setup_numpy(void) {
    import_array1(-1);
    pthread_atfork(NULL, NULL, count_fork);
    str_finish_step = PyUnicode_InternFromString("finish_step");
    str_reset_now = PyUnicode_InternFromString("reset_now");
    str_write_obs = PyUnicode_InternFromString("write_obs");
    str_keep_info = PyUnicode_InternFromString("keep_info");
    str_fail_in = PyUnicode_InternFromString("fail_in");
    str_info = PyUnicode_InternFromString("info");
    str_final_info = PyUnicode_InternFromString("final_info");
    str_read_action = PyUnicode_InternFromString("read_action");
    str_step = PyUnicode_InternFromString("step");
    str_take_reset = PyUnicode_InternFromString("take_reset");
    str_reset = PyUnicode_InternFromString("reset");
    str_obs = PyUnicode_InternFromString("obs");
    str_final_obs = PyUnicode_InternFromString("final_obs");
    str_abandoned = PyUnicode_InternFromString("abandoned");
    str_only_infos = PyUnicode_InternFromString("only_infos");
    empty_tuple = PyTuple_New(0);
    seed_options = Py_BuildValue("(ss)", "seed", "options");
    return seed_options && empty_tuple && str_final_obs ? 0 : -1;
}

// One pulse for the thread that drives all slots, or one per slot where they wait side by side.
static int64_t *pulse_of(Runner *runner, Py_ssize_t slot) { return runner->pulse + slot * runner->pulse_words; }

static void pulse(Runner *runner, Py_ssize_t slot, int phase, int64_t now) {
    if (runner->pulse) {
        int64_t *words = pulse_of(runner, slot);
        words[2] = now ? now : now_ns();
        words[1] = phase;
        words[0] = phase == PHASE_IDLE ? -1 : slot;
    }
}

void runner_idle(Runner *runner, int64_t now) { pulse(runner, 0, PHASE_IDLE, now); }

// An action as the env gets it: a NumPy scalar, or an array of its own (envs keep what they are given).
static PyObject *make_action(Runner *runner, Py_ssize_t slot) {
    if (!runner->action) return PyObject_CallMethodNoArgs(runner->slots[slot].life, str_read_action);
    if (runner->agents) return agents_action(runner, slot);
    PyArrayObject *like = (PyArrayObject *)runner->action_like;
    PyArray_Descr *type = PyArray_DESCR(like);
    char *data = runner->action + slot * runner->action_bytes;
    Py_ssize_t number = FIELD(runner, slot, uint8_t, action_type);
    if (number) {  // given in another dtype than the space's: src/envfleet/slots/action_types.py
        if (number > PyTuple_GET_SIZE(runner->action_types)) {
            PyErr_SetString(PyExc_ValueError, "the row names an action type that does not exist");
            return NULL;
        }
        type = (PyArray_Descr *)PyTuple_GET_ITEM(runner->action_types, number - 1);
        data = runner->wide_action + slot * runner->wide_action_bytes;
    }
    if (PyArray_NDIM(like) == 2) return PyArray_Scalar(data, type, NULL);
    Py_INCREF(type);
    PyObject *row = PyArray_NewFromDescr(&PyArray_Type, type, PyArray_NDIM(like) - 2, PyArray_DIMS(like) + 2, NULL, NULL, 0, NULL);
    if (row) memcpy(PyArray_DATA((PyArrayObject *)row), data, PyArray_NBYTES((PyArrayObject *)row));
    return row;
}

// Copies an observation into its row; 0 when done, -1 with an exception. Anything but an exact match goes to Python,
// which accepts what Gymnasium accepts and refuses the rest with a message.
static int write_obs(Runner *runner, Py_ssize_t slot, PyObject *obs, int final) {
    char *base = final ? runner->final_obs : runner->obs;
    if (base) {
        char *row = base + slot * runner->obs_bytes;
        PyArrayObject *like = (PyArrayObject *)runner->obs_like;
        if (runner->obs_is_int64_scalar) {
            if (PyLong_CheckExact(obs)) {
                int overflow = 0;
                long long value = PyLong_AsLongLongAndOverflow(obs, &overflow);
                if (!overflow) {
                    *(int64_t *)row = value;
                    return 0;
                }
            }
        } else if (PyArray_CheckExact(obs)) {
            PyArrayObject *array = (PyArrayObject *)obs;
            int ndim = PyArray_NDIM(like) - 2;
            if (PyArray_NDIM(array) == ndim && PyArray_IS_C_CONTIGUOUS(array) &&
                PyArray_EquivTypes(PyArray_DESCR(array), PyArray_DESCR(like)) &&
                PyArray_CompareLists(PyArray_DIMS(array), PyArray_DIMS(like) + 2, ndim)) {
                memcpy(row, PyArray_DATA(array), runner->obs_bytes);
                return 0;
            }
        }
    }
    PyObject *done = PyObject_CallMethodObjArgs(runner->slots[slot].life, str_write_obs, obs,
                                                final ? str_final_obs : str_obs, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

// Puts an info into the arena (as bytes) or leaves it with the Python life. Returns SIDE_…, -1 with an exception.
static int keep_info(Runner *runner, Py_ssize_t slot, PyObject *info, int final) {
    if (PyDict_GET_SIZE(info) == 0) return SIDE_NONE;
    Slot *s = &runner->slots[slot];
    if (runner->arena) {
        uint32_t *lengths = (uint32_t *)(runner->arena + slot * runner->arena_bytes);
        Py_ssize_t offset = 8 + (final ? 0 : lengths[1]);
        Py_ssize_t plain = info_encode(info, (char *)lengths + offset, runner->arena_bytes - offset);
        if (plain >= 0) {
            lengths[final ? 1 : 0] = (uint32_t)plain;
            return SIDE_ARENA;
        }
        PyObject *data = PyObject_CallOneArg(runner->pickle, info);
        end_if_forked(runner);
        if (data && PyBytes_CheckExact(data)) {
            Py_ssize_t size = PyBytes_GET_SIZE(data);
            if (offset + size <= runner->arena_bytes) {
                memcpy((char *)lengths + offset, PyBytes_AS_STRING(data), size);
                lengths[final ? 1 : 0] = (uint32_t)size;
                Py_DECREF(data);
                return SIDE_ARENA;
            }
        }
        Py_XDECREF(data);
        PyErr_Clear(); // too big, or a class that only cloudpickle can take: the Python life tries, and explains
    }
    PyObject *done = PyObject_CallMethodObjArgs(s->life, str_keep_info, info, final ? Py_True : Py_False, NULL);
    if (!done) return -1;
    Py_DECREF(done);
    s->has_info = 1;
    return SIDE_PYTHON;
}

// What a Python life left is put into the arena, if it is only infos (as bytes: workers pickle them) and fits. A worker's socket takes the
// parent several times as long. Returns SIDE_…, -1 with an exception.
static int move_to_arena(Runner *runner, Py_ssize_t slot) {
    uint32_t *lengths = (uint32_t *)(runner->arena + slot * runner->arena_bytes);
    if (lengths[0] || lengths[1]) return SIDE_PYTHON; // one info is there already
    PyObject *infos = PyObject_CallMethodNoArgs(runner->slots[slot].life, str_only_infos);
    if (!infos) return -1;
    Py_ssize_t offset = 8;
    int side = PyTuple_CheckExact(infos) && PyTuple_GET_SIZE(infos) == 2 ? SIDE_ARENA : SIDE_PYTHON;
    for (int final = 1; final >= 0 && side == SIDE_ARENA; final--) {
        PyObject *info = PyTuple_GET_ITEM(infos, final);
        if (info == Py_None) continue;
        if (!PyBytes_CheckExact(info) || offset + PyBytes_GET_SIZE(info) > runner->arena_bytes) {
            side = SIDE_PYTHON;
            lengths[0] = lengths[1] = 0;
            break;
        }
        memcpy((char *)lengths + offset, PyBytes_AS_STRING(info), PyBytes_GET_SIZE(info));
        lengths[final ? 1 : 0] = (uint32_t)PyBytes_GET_SIZE(info);
        offset += PyBytes_GET_SIZE(info);
    }
    Py_DECREF(infos);
    return side;
}

int is_bool(PyObject *value, int *out) {
    if (value == Py_True || value == Py_False) {
        *out = value == Py_True;
        return 1;
    }
    if (PyArray_IsScalar(value, Bool)) {
        *out = PyArrayScalar_VAL(value, Bool) != 0;
        return 1;
    }
    return 0;
}

int is_number(PyObject *value, double *out) {
    if (PyFloat_Check(value)) { // np.float64 too
        *out = PyFloat_AS_DOUBLE(value);
        return 1;
    }
    // For classes in Python, whose __float__ is code of the env, the Python life does it.
    if (!PyType_HasFeature(Py_TYPE(value), Py_TPFLAGS_HEAPTYPE) && (PyLong_Check(value) || PyArray_IsScalar(value, Number))) {
        *out = PyFloat_AsDouble(value);
        if (*out == -1.0 && PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
        return 1;
    }
    return 0;
}

// Something failed with an exception set: the Python life makes it a FAULT row. -1 when it must be raised.
static int failed(Runner *runner, Py_ssize_t slot, PyObject *phase) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *abandoned = PyObject_GetAttr(runner->slots[slot].life, str_abandoned);
    if (abandoned == Py_True) { // given up while its result was being read: another life owns the row
        Py_DECREF(abandoned);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return SIDE_GONE;
    }
    Py_XDECREF(abandoned);
    FIELD(runner, slot, uint8_t, status) = STATUS_FAULT; // before the exception is described, which runs its own methods
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace) PyException_SetTraceback(value, trace);
    int fatal = runner->interruptible && PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt);
    PyObject *done = PyObject_CallMethodObjArgs(runner->slots[slot].life, str_fail_in, value, phase, NULL);
    Py_XDECREF(done);
    runner->slots[slot].has_info = 0;
    if (done && fatal) {
        PyErr_Restore(type, value, trace);
        return -1;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return done ? SIDE_PYTHON : -1;
}

// Copies the row as it was delivered, before this advance writes into it.
static int keep_row(Runner *runner, Py_ssize_t slot, uint32_t turn) {
    if (runner->keep) {
        PyObject *kept = PyObject_CallFunction(runner->keep, "nI", slot, turn);
        Py_XDECREF(kept);
        return kept ? 0 : -1;
    }
    if (!runner->kept_turn) return 0;
    for (Py_ssize_t i = 0; i < runner->num_keeping; i++) {
        Py_ssize_t bytes = runner->keeping[i].bytes;
        memcpy(runner->keeping[i].kept + slot * bytes, runner->keeping[i].rows + slot * bytes, bytes);
    }
    // A reader that sees the turn sees the whole copy (release), and nothing of the new row is written before the turn is (fence).
    // On x86 neither costs an instruction.
    __atomic_store_n(&runner->kept_turn[slot], turn, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    return 0;
}

// The next episode, in the same step. The Python life handles seeds, tasks and options; the plain reset is done here.
static int begin_episode(Runner *runner, Py_ssize_t slot, int *side) {
    Slot *s = &runner->slots[slot];
    if (FIELD(runner, slot, int64_t, next_seed) >= 0 || FIELD(runner, slot, int64_t, next_task) >= 0) {
        PyObject *done = PyObject_CallMethodNoArgs(s->life, str_reset_now);
        if (!done) return -1;
        if (done == Py_True) {
            s->has_info = 1;
            *side |= SIDE_PYTHON;
        }
        Py_DECREF(done);
        return 0;
    }
    pulse(runner, slot, PHASE_RESET, 0);
    PyObject *none[3] = {NULL, Py_None, Py_None}, *called = Py_NewRef(s->reset);
    PyObject *result = s->explicit_reset ? PyObject_Vectorcall(called, none + 1, PY_VECTORCALL_ARGUMENTS_OFFSET, seed_options)
                                         : PyObject_CallNoArgs(called);
    end_if_forked(runner);
    Py_DECREF(called); // the slot's own reference, or a comparison of addresses, is all that follows
    if (!result) return -1;
    if (s->reset != called) { // as in runner_advance: abandoned
        Py_DECREF(result);
        *side = SIDE_GONE;
        return 0;
    }
    if (runner->has_columns || !PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != 2 ||
        !PyDict_CheckExact(PyTuple_GET_ITEM(result, 1))) {
        PyObject *done = PyObject_CallMethodOneArg(s->life, str_take_reset, result);
        Py_DECREF(result);
        if (!done) return -1;
        s->has_info = 1;
        *side |= SIDE_PYTHON;
        Py_DECREF(done);
        return 0;
    }
    // The observation last: if the info is bad, the row still holds the last good one.
    int kept = keep_info(runner, slot, PyTuple_GET_ITEM(result, 1), 0);
    if (kept >= 0 && write_obs(runner, slot, PyTuple_GET_ITEM(result, 0), 0) < 0) kept = -1;
    Py_DECREF(result);
    if (kept < 0) return -1;
    *side |= kept;
    write_beginning(head_of(runner, slot), -1, -1);
    return 0;
}

int runner_begin_episode(Runner *runner, Py_ssize_t slot, int *side) { return begin_episode(runner, slot, side); }

int runner_failed(Runner *runner, Py_ssize_t slot, int in_reset) {
    return failed(runner, slot, in_reset ? str_reset : str_step);
}

// A result that is not plain: the Python life continues. An absorbed TimeLimit is applied first.
static int irregular(Runner *runner, Py_ssize_t slot, PyObject *result) {
    Slot *s = &runner->slots[slot];
    if (s->limit && FIELD(runner, slot, int64_t, now_length) + 1 >= s->limit && PyTuple_Check(result) &&
        PyTuple_GET_SIZE(result) == 5) {
        PyObject *cut = PyTuple_Pack(5, PyTuple_GET_ITEM(result, 0), PyTuple_GET_ITEM(result, 1),
                                     PyTuple_GET_ITEM(result, 2), Py_True, PyTuple_GET_ITEM(result, 4));
        Py_DECREF(result);
        if (!cut) return failed(runner, slot, str_step);
        result = cut;
    }
    PyObject *sided = PyObject_CallMethodOneArg(s->life, str_finish_step, result);
    Py_DECREF(result);
    if (!sided) return -1;
    int side = sided == Py_True ? SIDE_PYTHON : SIDE_NONE;
    s->has_info = side == SIDE_PYTHON;
    Py_DECREF(sided);
    return side;
}

void runner_forget_info(Slot *s) {
    if (!s->has_info) return;
    PyObject_SetAttr(s->life, str_info, Py_None);
    PyObject_SetAttr(s->life, str_final_info, Py_None);
    s->has_info = 0;
}

// Begins a step of an armed slot: what `env.step` returned (for an async env: what is to be awaited), or NULL.
PyObject *runner_begin(Runner *runner, Py_ssize_t slot, uint32_t turn, int64_t now) {
    Slot *s = &runner->slots[slot];
    if (keep_row(runner, slot, turn) < 0) return NULL;
    runner_forget_info(s);
    PyObject *action = make_action(runner, slot);
    if (!action) return NULL;
    pulse(runner, slot, PHASE_STEP, now);
    PyObject *called = Py_NewRef(s->step), *result = PyObject_CallOneArg(called, action);
    end_if_forked(runner);
    Py_DECREF(called);
    Py_DECREF(action);
    return result;
}

static int is_plain(Runner *runner, Py_ssize_t slot, PyObject *result, Plain *plain) {
    if (!PyTuple_CheckExact(result) || PyTuple_GET_SIZE(result) != 5 || runner->has_columns ||
        !is_number(PyTuple_GET_ITEM(result, 1), &plain->reward) ||
        !is_bool(PyTuple_GET_ITEM(result, 2), &plain->terminated) ||
        !is_bool(PyTuple_GET_ITEM(result, 3), &plain->truncated) || !PyDict_CheckExact(PyTuple_GET_ITEM(result, 4)))
        return 0;
    int64_t limit = runner->slots[slot].limit;
    if (limit && FIELD(runner, slot, int64_t, now_length) + 1 >= limit) plain->truncated = 1;
    return 1;
}

// Writes the row of a plain step, and resets at its end. Takes over `result`.
static int take_plain(Runner *runner, Py_ssize_t slot, PyObject *result, const Plain *plain) {
    int side = SIDE_NONE;
    Moment moment = moment_of(head_of(runner, slot), plain->reward);
    int ended = plain->terminated || plain->truncated, next = ended && runner->on_end_reset;
    PyObject *obs = PyTuple_GET_ITEM(result, 0), *phase = str_step;
    int bad = ended && write_obs(runner, slot, obs, 1) < 0;
    if (!bad) {
        side = keep_info(runner, slot, PyTuple_GET_ITEM(result, 4), next);
        bad = side < 0;
    }
    if (!bad && !next) bad = write_obs(runner, slot, obs, 0) < 0;
    if (!bad && next) {
        phase = str_reset;
        bad = begin_episode(runner, slot, &side) < 0;
    }
    Py_DECREF(result);
    end_if_forked(runner); // what was read just now may have run code of the env's
    if (bad) return failed(runner, slot, phase);
    if (side & SIDE_GONE) return SIDE_GONE;
    write_transition(head_of(runner, slot), plain, &moment, next);
    // Mixed sides (one info in the arena, one in Python) are reported as Python's; the arena is read in any case.
    return side & SIDE_PYTHON ? SIDE_PYTHON : side;
}

// One step of an armed slot, begun at `now`.
static int advance_armed(Runner *runner, Py_ssize_t slot, uint32_t turn, int64_t now) {
    PyObject *called = Py_NewRef(runner->slots[slot].step), *result = runner_begin(runner, slot, turn, now);
    int gone = runner->slots[slot].step != called;
    Py_DECREF(called);
    if (gone) { // disarmed: a call that hangs was abandoned, another thread owns the row
        Py_XDECREF(result);
        PyErr_Clear();
        return SIDE_GONE;
    }
    if (!result) return failed(runner, slot, str_step);
    if (runner->agents) {
        if (!agents_take(runner, slot, result)) return irregular(runner, slot, result);
        Py_DECREF(result);
        return SIDE_NONE;
    }
    Plain plain;
    return is_plain(runner, slot, result, &plain) ? take_plain(runner, slot, result, &plain) : irregular(runner, slot, result);
}

static int is_steppable(Runner *runner, Py_ssize_t slot) {
    return runner->slots[slot].step && FIELD(runner, slot, uint8_t, command) == COMMAND_STEP && !FIELD(runner, slot, char, waiting);
}

int runner_can_begin(Runner *runner, Py_ssize_t slot) { return !runner->agents && is_steppable(runner, slot); }

int runner_take(Runner *runner, Py_ssize_t slot, PyObject *result) {
    Plain plain;
    if (!is_plain(runner, slot, result, &plain)) return SIDE_LEFT;
    if ((plain.terminated || plain.truncated) && runner->on_end_reset) return SIDE_LEFT; // its reset has to be awaited
    int64_t begin = runner->pulse ? pulse_of(runner, slot)[2] : 0, now = now_ns();
    int side = take_plain(runner, slot, Py_NewRef(result), &plain);
    FIELD(runner, slot, int64_t, step_ns) = begin ? now - begin : 0;
    FIELD(runner, slot, int64_t, busy_ns) += begin ? now - begin : 0;
    pulse(runner, slot, PHASE_IDLE, now);
    return side;
}

int runner_advance(Runner *runner, Py_ssize_t slot, uint32_t turn, int64_t *now) {
    Slot *s = &runner->slots[slot];
    if (runner->arena) memset(runner->arena + slot * runner->arena_bytes, 0, 8);
    int native = is_native(runner, slot) && FIELD(runner, slot, uint8_t, command) == COMMAND_STEP;
    if (!native && !is_steppable(runner, slot)) {
        PyObject *sided = PyObject_CallFunction(runner->slow, "nI", slot, turn);
        *now = 0;
        if (!sided) return -1;
        s->has_info = sided == Py_True;
        Py_DECREF(sided);
        end_if_forked(runner);
        return !s->has_info ? SIDE_NONE : runner->arena ? move_to_arena(runner, slot) : SIDE_PYTHON;
    }
    int64_t begin = *now ? *now : now_ns(), busy = FIELD(runner, slot, int64_t, busy_ns);
    int side;
    if (native) {
        runner_forget_info(s);
        pulse(runner, slot, PHASE_STEP, begin);
        side = native_advance(runner, slot, 0);
        if (side == SIDE_LEFT) side = native_finish(runner, slot, turn);
    } else {
        side = advance_armed(runner, slot, turn, begin);
    }
    end_if_forked(runner);
    *now = now_ns();
    if (side >= 0 && !(side & SIDE_GONE)) { // also where the Python life took over and has counted its part
        FIELD(runner, slot, int64_t, step_ns) = *now - begin;
        FIELD(runner, slot, int64_t, busy_ns) = busy + *now - begin;
    }
    return side == SIDE_PYTHON && runner->arena ? move_to_arena(runner, slot) : side;
}
