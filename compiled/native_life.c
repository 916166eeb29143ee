// The life of a slot whose environment is native: steps it, writes its row, notices the end, resets, without the interpreter lock. The
// rows are written by the same functions as those of Python environments (envfleet.h). What only Python can do (a task whose value has to
// be read, a fault, an explicit reset) is left to it: native_advance says so, and native_finish does it with the lock.
#include "envfleet.h"

#include <stddef.h>
#include <stdlib.h>

#define ALIGNED(bytes) (((bytes) + 63) & ~(Py_ssize_t)63)

#define MOST_COMPARED 64 // of kinds: where every environment has one of its own, looking for an equal one is not worth it

// The kind with these fields: one that is there, or a new one. NULL with an exception.
static const NativeKind *kind_of(Runner *runner, const NativeKind *wanted) {
    NativeKind *kind = runner->all_kinds;
    for (int i = 0; kind && i < MOST_COMPARED; i++, kind = kind->next)
        if (!memcmp(kind, wanted, offsetof(NativeKind, next))) return kind;
    kind = PyMem_RawMalloc(sizeof *kind);
    if (!kind) return PyErr_NoMemory(), NULL;
    *kind = *wanted;
    kind->next = runner->all_kinds;
    return runner->all_kinds = kind;
}

// parts: (address of the table, memory, numbers in a task, count and start of each number of a discrete action, how many numbers it
// has, address of what is shared)
int native_arm(Runner *runner, Py_ssize_t slot, PyObject *parts) {
    unsigned long long table, shared;
    long long task_size, count, start, numbers;
    PyObject *memory;
    Py_buffer view;
    if (!PyArg_ParseTuple(parts, "KOLLLLK", &table, &memory, &task_size, &count, &start, &numbers, &shared)) return -1;
    const EnvTable *functions = (const EnvTable *)(uintptr_t)table;
    if (PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE) < 0) return -1;
    char *data = view.buf;
    Py_ssize_t task_at = (Py_ssize_t)sizeof(EnvRandom) + ALIGNED((Py_ssize_t)functions->state_bytes), room = view.len;
    PyBuffer_Release(&view); // `owner` keeps it alive, and it is never resized
    if (room < task_at + (task_size ? 8 * (1 + task_size) : 0)) {
        PyErr_SetString(PyExc_ValueError, "the memory of a native environment is too small for its state");
        return -1;
    }
    if (native_make_room(runner) < 0) return -1;
    const NativeKind *kind = kind_of(runner, &(NativeKind){functions, count, start, count ? numbers : 0, runner->slots[slot].limit,
                                                           (const void *)(uintptr_t)shared, NULL});
    if (!kind) return -1;
    Native *native = &runner->slots[slot].native;
    Py_XSETREF(native->owner, Py_NewRef(memory));
    runner->states[slot] = data + sizeof(EnvRandom);
    native->task = task_size ? (double *)(data + task_at) : NULL;
    native->task_id = -2;
    runner->kinds[slot] = kind;
    return 0;
}

void native_disarm(Runner *runner, Py_ssize_t slot) {
    if (runner->kinds) runner->kinds[slot] = NULL;
    Py_CLEAR(runner->slots[slot].native.owner);
}

// What the slots of native environments need beside their rows, once; -1 with an exception.
int native_make_room(Runner *runner) {
    if (runner->left) return 0;
    size_t slots = runner->num_slots + 1;
    runner->states = PyMem_RawCalloc(slots, sizeof *runner->states);
    runner->kinds = PyMem_RawCalloc(slots, sizeof *runner->kinds);
    Left *left = PyMem_RawCalloc(slots, sizeof(Left));
    if (!runner->states || !runner->kinds || !left) {
        PyMem_RawFree(left);
        native_free_room(runner);
        PyErr_NoMemory();
        return -1;
    }
    runner->left = left;
    return 0;
}

void native_free_room(Runner *runner) {
    PyMem_RawFree(runner->left);
    PyMem_RawFree(runner->states);
    PyMem_RawFree((void *)runner->kinds);
    while (runner->all_kinds) {
        NativeKind *kind = runner->all_kinds;
        runner->all_kinds = kind->next;
        PyMem_RawFree(kind);
    }
    runner->left = NULL;
    runner->states = NULL;
    runner->kinds = NULL;
}

// 0, or -1 with an exception: there is no such slot.
int native_check(Runner *runner, const int64_t *slots, Py_ssize_t count) {
    for (Py_ssize_t at = 0, some; at < count; at += some) {
        some = native_neighbours(slots + at, count - at);
        if (slots[at] >= 0 && slots[at] <= runner->num_slots - some) continue;
        return PyErr_Format(PyExc_IndexError, "slot %lld does not exist", (long long)(slots[at] < 0 ? slots[at] : slots[at] + some - 1)), -1;
    }
    return 0;
}

static int leave(Left *left, int why) {
    left->why = why;
    return SIDE_LEFT;
}

// An action in another dtype than the space's, as NumPy would convert it: src/envfleet/slots/action_types.py has the numbers.
static double wide_number(const char *data, int number, Py_ssize_t i, int64_t *whole) {
    switch (number) {
    case 1: case 3: return (double)(*whole = ((const uint8_t *)data)[i]);
    case 2: return (double)(*whole = ((const int8_t *)data)[i]);
    case 4: return (double)(*whole = ((const int16_t *)data)[i]);
    case 5: return (double)(*whole = ((const uint16_t *)data)[i]);
    case 6: return (double)(*whole = ((const int32_t *)data)[i]);
    case 7: return (double)(*whole = ((const uint32_t *)data)[i]);
    case 8: return (double)(*whole = ((const int64_t *)data)[i]);
    case 11: return (double)((const float *)data)[i];
    case 12: return ((const double *)data)[i];
    default: return 0;
    }
}

// Where an action in another dtype is, converted; NULL when Python has to convert it.
static const void *wide_action_of(Runner *runner, Py_ssize_t slot, int number) {
    int64_t *converted = &runner->left[slot].action;
    if (runner->kinds[slot]->numbers != 1 || number > 8) return NULL; // floats, 64 unsigned bits, arrays: rare
    wide_number(runner->wide_action + slot * runner->wide_action_bytes, number, 0, converted);
    return converted;
}

// The kept copy of the observation (Slab.keep): native code writes the new one in place. The head is copied when something fails, because
// until then nothing writes to it.
static void keep_obs(Runner *runner, Py_ssize_t slot) {
    for (Py_ssize_t i = 1; i < runner->num_keeping; i++) {
        Py_ssize_t bytes = runner->keeping[i].bytes;
        memcpy(runner->keeping[i].kept + slot * bytes, runner->keeping[i].rows + slot * bytes, bytes);
    }
}

static void keep_head(Runner *runner, Py_ssize_t slot, uint32_t turn) {
    if (!runner->kept_turn || !runner->num_keeping) return;
    Py_ssize_t bytes = runner->keeping[0].bytes;
    memcpy(runner->keeping[0].kept + slot * bytes, runner->keeping[0].rows + slot * bytes, bytes);
    __atomic_store_n(&runner->kept_turn[slot], turn, __ATOMIC_RELEASE);
}

// NumPy's SeedSequence(seed) and PCG64(it), bit for bit. The constants are those of its hash.
static void seed_stream(EnvRandom *random, uint64_t seed) {
    uint32_t pool[4], hash = 0x43b0d7e5u, words[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    int count = words[1] ? 2 : 1;
#define HASHED(value, next, times)                                                                                     \
    ((value) ^= hash, hash *= (times), (value) *= hash, (value) ^= (value) >> 16, (next) = (value))
    for (int i = 0; i < 4; i++) {
        uint32_t value = i < count ? words[i] : 0;
        HASHED(value, pool[i], 0x931e8875u);
    }
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++) {
            if (from == to) continue;
            uint32_t value = pool[from], mixed;
            HASHED(value, mixed, 0x931e8875u);
            mixed = pool[to] * 0xca01f9ddu - mixed * 0x4973f715u;
            pool[to] = mixed ^ (mixed >> 16);
        }
    uint32_t out[8];
    hash = 0x8b51f9ddu;
    for (int i = 0; i < 8; i++) {
        uint32_t value = pool[i % 4];
        HASHED(value, out[i], 0x58f38dedu);
    }
#undef HASHED
    uint64_t halves[4];
    for (int i = 0; i < 4; i++) halves[i] = out[2 * i] | ((uint64_t)out[2 * i + 1] << 32);
    unsigned __int128 start = ((unsigned __int128)halves[0] << 64) | halves[1],
                      inc = (((unsigned __int128)halves[2] << 64 | halves[3]) << 1) | 1,
                      times = ((unsigned __int128)0x2360ED051FC65DA4ULL << 64) | 0x4385DF649FCCF645ULL,
                      state = (inc + start) * times + inc;
    *random = (EnvRandom){(uint64_t)(state >> 64), (uint64_t)state, (uint64_t)(inc >> 64), (uint64_t)inc, 0, 0, {0, 0, 0}};
}

// A call for a slot, but for its action and task.
static inline EnvCall call_of(const Runner *runner, Py_ssize_t slot, int thread) {
    char *state = runner->states[slot];
    return (EnvCall){.random = (EnvRandom *)(state - sizeof(EnvRandom)),
                     .obs = runner->obs + slot * runner->obs_bytes,
                     .thread = thread,
                     .shared = runner->kinds[slot]->shared,
                     .error = runner->left[slot].error};
}

// The reset of the next episode, with its seed. SIDE_NONE, or SIDE_LEFT.
static int reset_here(Runner *runner, Py_ssize_t slot, Head *head, int thread) {
    Native *native = &runner->slots[slot].native;
    EnvCall call = call_of(runner, slot, thread);
    int64_t task = head->next_task, seed = head->next_seed;
    if (task >= 0 && task != native->task_id) return leave(&runner->left[slot], LEFT_RESET);
    head->next_seed = -1;
    if (seed >= 0) seed_stream(call.random, (uint64_t)seed);
    call.task = native->task && native->task[0] ? native->task + 1 : NULL;
    if (runner->kinds[slot]->table->reset(runner->states[slot], &call)) {
        head->now_task = task; // the fault names them
        head->now_seed = seed;
        return leave(&runner->left[slot], LEFT_RESET_FAULT);
    }
    write_beginning(head, task, seed);
    return SIDE_NONE;
}

// A slot that waits at the end of its episode: the send begins the next one, and ignores the action.
static int begin_here(Runner *runner, Py_ssize_t slot, Head *head, int thread) {
    keep_obs(runner, slot);
    int side = reset_here(runner, slot, head, thread);
    if (side != SIDE_NONE) {
        if (runner->left[slot].why == LEFT_RESET) runner->left[slot].why = LEFT_SLOW; // nothing was done yet
        return side;
    }
    Plain plain = {0, 0, 0};
    Moment moment = {-1, head->started - 1, head->now_task, head->now_seed, 0.0};
    write_transition(head, &plain, &moment, 1);
    head->scored = head->over = 0;
    return SIDE_NONE;
}

// Actions of which there is a fixed number are checked here, so that native code may use them as indices. Python says what is wrong with one.
static inline int is_action(const NativeKind *kind, const int64_t *action) {
    if (kind->numbers == 1) return (uint64_t)action[0] - (uint64_t)kind->start < (uint64_t)kind->count; // most environments
    for (int64_t i = 0; i < kind->numbers; i++)
        if ((uint64_t)action[i] - (uint64_t)kind->start >= (uint64_t)kind->count) return 0;
    return 1;
}

// What is read for every slot of a batch. A copy in registers: the compiler has to assume that a write to a row changes the runner, and
// would read all of it again.
typedef struct {
    Runner *runner;
    char *head, *action, *obs;
    Py_ssize_t stride, action_bytes, obs_bytes;
    Left *left;
    void *const *states;
    int64_t spent_ns; // of the batch before: reading the clock for every step would cost as much as a step
    int thread, keeps;
} Batch;

static inline Head *row_of(const Batch *batch, Py_ssize_t slot) { return (Head *)(batch->head + slot * batch->stride); }

// Whether a row asks for a step (COMMAND_STEP, not waiting) with an action in the space's own dtype: in one comparison.
static inline int is_plain_step(const Head *head) {
    _Static_assert(offsetof(Head, status) == offsetof(Head, waiting) + 1 && offsetof(Head, action_type) == offsetof(Head, waiting) + 3 &&
                       COMMAND_STEP == 0, "read together");
    const uint8_t but_status[4] = {255, 0, 255, 255};
    uint32_t flags, mask;
    memcpy(&flags, &head->waiting, 4);
    memcpy(&mask, but_status, 4);
    return !(flags & mask);
}

// Makes a slot and its call ready to be stepped: STEP_READY. SIDE_LEFT: Python has to do it. SIDE_NONE: it was no step, and is done.
enum { STEP_READY = -1 };
static int prepare_other(const Batch *batch, const NativeKind *kind, Py_ssize_t slot, EnvCall *call) {
    Head *head = row_of(batch, slot);
    if (head->command != COMMAND_STEP) return leave(&batch->left[slot], LEFT_SLOW);
    if (head->waiting) return begin_here(batch->runner, slot, head, batch->thread);
    const void *action = head->action_type ? wide_action_of(batch->runner, slot, head->action_type) : NULL;
    call->action = action;
    return action && is_action(kind, action) ? STEP_READY : leave(&batch->left[slot], LEFT_SLOW);
}

static inline int prepare(const Batch *batch, const NativeKind *kind, Py_ssize_t slot, EnvCall *call) {
    const void *action = batch->action + slot * batch->action_bytes;
    *call = (EnvCall){.random = (EnvRandom *)((char *)batch->states[slot] - sizeof(EnvRandom)),
                      .action = action,
                      .obs = batch->obs + slot * batch->obs_bytes,
                      .thread = batch->thread,
                      .shared = kind->shared,
                      .error = batch->left[slot].error};
    if (!is_plain_step(row_of(batch, slot)) || !is_action(kind, action)) {
        int side = prepare_other(batch, kind, slot, call);
        if (side != STEP_READY) return side;
    }
    if (batch->keeps) keep_obs(batch->runner, slot);
    return STEP_READY;
}

// write_transition of a step that is not the last of its episode: its flags are always the same, and written in one store.
static inline void write_middle(Head *head, double reward) {
    _Static_assert(offsetof(Head, status) == offsetof(Head, terminated) + 7, "written together");
    static const Head middle = {.active = 1, .scored = 1, .status = STATUS_READY};
    memcpy(&head->terminated, &middle.terminated, 8);
    int64_t step = head->now_length;
    head->reward = reward;
    head->ep_return = head->now_return += reward;
    head->episode = head->started - 1;
    head->step = step;
    head->length = head->now_length = step + 1;
    head->task = head->now_task;
    head->seed = head->now_seed;
}

// An episode ended: the last observation is kept, and the next episode begins.
static int end_here(Runner *runner, Py_ssize_t slot, const Plain *plain, int thread) {
    Head *head = head_of(runner, slot);
    Moment moment = moment_of(head, plain->reward);
    memcpy(runner->final_obs + slot * runner->obs_bytes, runner->obs + slot * runner->obs_bytes, runner->obs_bytes);
    if (runner->on_end_reset && reset_here(runner, slot, head, thread) != SIDE_NONE) {
        runner->left[slot].plain = *plain;
        runner->left[slot].moment = moment;
        return SIDE_LEFT;
    }
    write_transition(head, plain, &moment, runner->on_end_reset);
    return SIDE_NONE;
}

// Writes the row of a step that was made.
static inline int finish(const Batch *batch, int64_t limit, Py_ssize_t slot, const EnvCall *call) {
    Head *head = row_of(batch, slot);
    head->step_ns = batch->spent_ns;
    head->busy_ns += batch->spent_ns;
    int is_cut = limit && head->now_length + 1 >= limit;
    if (call->terminated | call->truncated | is_cut)
        return end_here(batch->runner, slot, &(Plain){call->reward, call->terminated != 0, call->truncated || is_cut}, batch->thread);
    write_middle(head, call->reward);
    return SIDE_NONE;
}

// Steps neighbouring slots that are ready, in one call of their library, and writes their rows.
static inline void step_run(const Batch *batch, const NativeKind *kind, Py_ssize_t first, Py_ssize_t count, EnvCall *calls, char *is_left) {
    for (Py_ssize_t next = 0; next < count; next++) {
        Py_ssize_t begin = next;
        next += kind->table->step(count - begin, batch->states + first + begin, calls + begin);
        for (Py_ssize_t i = begin; i < next; i++) is_left[i] = (char)(finish(batch, kind->limit, first + i, calls + i) == SIDE_LEFT);
        if (next < count) is_left[next] = leave(&batch->left[first + next], LEFT_STEP_FAULT) == SIDE_LEFT;
    }
}

// Advances neighbouring slots, none of them in Python; `is_left` says which ones it has to finish. Those of one kind are prepared, stepped
// and finished together: while the floating point results of one step are awaited, the processor works on the next. The most at a time
// is what stays in the first cache between the three, with the calls, which are made anew for each: kept per slot, they would be
// read from memory.
enum { TOGETHER = 64 };
void native_advance_run(Runner *runner, Py_ssize_t first, Py_ssize_t count, int thread, char *is_left) {
    const Batch batch = {runner, runner->head, runner->action, runner->obs, runner->stride, runner->action_bytes, runner->obs_bytes,
                         runner->left, runner->states, (int64_t)runner->native_ns, thread, runner->num_keeping > 1};
    EnvCall calls[TOGETHER];
    for (Py_ssize_t at = 0; at < count;) {
        const NativeKind *const *kinds = &runner->kinds[first + at], *kind = kinds[0];
        Py_ssize_t most = count - at < TOGETHER ? count - at : TOGETHER, ready = 0;
        int side = STEP_READY;
        if (!kind) side = leave(&runner->left[first + at], LEFT_SLOW);
        while (side == STEP_READY && ready < most && kinds[ready] == kind)
            ready += (side = prepare(&batch, kind, first + at + ready, calls + ready)) == STEP_READY;
        if (ready) step_run(&batch, kind, first + at, ready, calls, is_left + at);
        at += ready;
        if (side != STEP_READY) is_left[at++] = side == SIDE_LEFT;
    }
}

int native_advance(Runner *runner, Py_ssize_t slot, int thread) {
    char is_left;
    native_advance_run(runner, slot, 1, thread, &is_left);
    return is_left ? SIDE_LEFT : SIDE_NONE;
}

// Finishes a slot that native_advance has left, with the interpreter lock. As runner_advance.
int native_finish(Runner *runner, Py_ssize_t slot, uint32_t turn) {
    Left *left = &runner->left[slot];
    int side = SIDE_NONE, why = left->why;
    if (!is_native(runner, slot)) { // an environment in Python, in the same fleet
        int64_t now = 0;
        if (runner_check(runner, slot) < 0) return -1;
        return runner_advance(runner, slot, turn, &now);
    }
    runner_forget_info(&runner->slots[slot]);
    if (why == LEFT_SLOW) {
        PyObject *sided = PyObject_CallFunction(runner->slow, "nI", slot, turn);
        if (!sided) return -1;
        side = (runner->slots[slot].has_info = sided == Py_True) ? SIDE_PYTHON : SIDE_NONE;
        Py_DECREF(sided);
        return side;
    }
    keep_head(runner, slot, turn);
    if (why == LEFT_STEP_FAULT || why == LEFT_RESET_FAULT) {
        PyErr_SetString(PyExc_RuntimeError, left->error);
        return runner_failed(runner, slot, why == LEFT_RESET_FAULT);
    }
    if (runner_begin_episode(runner, slot, &side) < 0) return runner_failed(runner, slot, 1);
    if (side & SIDE_GONE) return SIDE_GONE;
    runner->slots[slot].native.task_id = FIELD(runner, slot, int64_t, now_task);
    write_transition(head_of(runner, slot), &left->plain, &left->moment, 1);
    return side;
}

// What is beside the rows of an earlier turn: most native slots have never had anything.
void native_forget_infos(Runner *runner, const int64_t *slots, Py_ssize_t count) {
    PyObject *dicts[2] = {runner->board.info, runner->board.final_info};
    for (int which = 0; which < 2; which++)
        for (Py_ssize_t i = 0; i < count && PyDict_GET_SIZE(dicts[which]); i++) {
            PyObject *number = PyLong_FromLongLong(slots[i]);
            if (number && PyDict_Contains(dicts[which], number) == 1) PyDict_DelItem(dicts[which], number);
            Py_XDECREF(number);
        }
}

static void keep_first(PyObject **type, PyObject **value, PyObject **trace) {
    if (*type) PyErr_Clear();
    else PyErr_Fetch(type, value, trace);
}

// Finishes a slot that was left to Python. An exception that must not be caught (KeyboardInterrupt) is kept, so that the other slots are
// finished before it is raised; the slot itself is then on the list of those with something beside their rows, as broken. Without that it
// would be out for ever: no thread has it any more.
int finish_left(Runner *runner, Py_ssize_t slot, uint32_t turn, PyObject **type, PyObject **value, PyObject **trace) {
    int side = native_finish(runner, slot, turn);
    if (side < 0) {
        keep_first(type, value, trace);
        side = SIDE_PYTHON | SIDE_BROKEN;
    }
    if (board_finish(&runner->board, slot, turn, side, NULL, 0) < 0) keep_first(type, value, trace);
    return side;
}

// Gives the slots their next turn and advances them, all in this thread. 1 when nothing is beside their rows, 0 when something is, -1 with
// an exception. Without the lock no signal handler runs, so that an interrupt meets only slots that Python has to finish.
int native_run(Runner *runner, const int64_t *slots, Py_ssize_t count) {
    uint32_t *given = runner->board.given, *done = runner->board.done;
    native_forget_infos(runner, slots, count);
    char *is_left = PyMem_Malloc(count + 1);
    if (!is_left) return PyErr_NoMemory(), -1;
    Py_BEGIN_ALLOW_THREADS;
    int64_t begin = now_ns();
    for (Py_ssize_t at = 0, some; at < count; at += some) {
        Py_ssize_t first = slots[at];
        some = native_neighbours(slots + at, count - at);
        for (Py_ssize_t i = 0; i < some; i++) given[first + i]++;
        native_advance_run(runner, first, some, 0, is_left + at);
        for (Py_ssize_t i = 0; i < some; i++) done[first + i] = given[first + i] - is_left[at + i]; // one turn behind: it is out
    }
    if (count) runner->native_ns = (double)(now_ns() - begin) / (double)count;
    Py_END_ALLOW_THREADS;
    int plain = 1;
    PyObject *type = NULL, *value = NULL, *trace = NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!is_left[i]) continue;
        Py_ssize_t slot = slots[i];
        plain &= finish_left(runner, slot, given[slot], &type, &value, &trace) == SIDE_NONE;
    }
    PyMem_Free(is_left);
    if (!type) return plain;
    PyErr_Restore(type, value, trace);
    return -1;
}
