// The life of a slot whose environment is native: steps it, writes its row, notices the end, resets, without the interpreter lock. The
// rows are written by the same functions as those of Python environments (envfleet.h). What only Python can do (a task whose value has to
// be read, a fault, an explicit reset) is left to it: native_advance says so, and native_finish does it with the lock.
#include "envfleet.h"

#include <stddef.h>
#include <stdlib.h>

#define ALIGNED(bytes) (((bytes) + 63) & ~(Py_ssize_t)63)

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
    Native *native = &runner->slots[slot].native;
    EnvCall *call = &runner->calls[slot];
    Py_XSETREF(native->owner, Py_NewRef(memory));
    call->random = (EnvRandom *)data;
    call->obs = runner->obs + slot * runner->obs_bytes;
    call->shared = (const void *)(uintptr_t)shared;
    call->error = runner->left[slot].error;
    runner->states[slot] = data + sizeof(EnvRandom);
    native->task = task_size ? (double *)(data + task_at) : NULL;
    native->count = count;
    native->start = start;
    native->numbers = count ? numbers : 0;
    native->task_id = -2;
    native->table = functions;
    return 0;
}

// What the slots of native environments need beside their rows, once; -1 with an exception.
int native_make_room(Runner *runner) {
    if (runner->left) return 0;
    size_t slots = runner->num_slots + 1;
    runner->states = PyMem_RawCalloc(slots, sizeof(void *));
    runner->calls = aligned_alloc(64, slots * sizeof(EnvCall)); // a cache line each
    Left *left = PyMem_RawCalloc(slots, sizeof(Left));
    if (!runner->states || !runner->calls || !left) {
        PyMem_RawFree(left);
        native_free_room(runner);
        PyErr_NoMemory();
        return -1;
    }
    memset(runner->calls, 0, slots * sizeof(EnvCall));
    runner->left = left;
    return 0;
}

void native_free_room(Runner *runner) {
    PyMem_RawFree(runner->left);
    PyMem_RawFree(runner->states);
    free(runner->calls);
    runner->left = NULL;
    runner->states = NULL;
    runner->calls = NULL;
}

// 0, or -1 with an exception: there is no such slot.
int native_check(Runner *runner, const int64_t *slots, Py_ssize_t count) {
    uint64_t most = 0; // negative numbers are the largest
    for (Py_ssize_t i = 0; i < count; i++) most = (uint64_t)slots[i] > most ? (uint64_t)slots[i] : most;
    if (!count || most < (uint64_t)runner->num_slots) return 0;
    PyErr_Format(PyExc_IndexError, "slot %lld does not exist", (long long)most);
    return -1;
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
    if (runner->slots[slot].native.numbers != 1 || number > 8) return NULL; // floats, 64 unsigned bits, arrays: rare
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

// The reset of the next episode, with its seed. SIDE_NONE, or SIDE_LEFT.
static int reset_here(Runner *runner, Py_ssize_t slot, Head *head) {
    Native *native = &runner->slots[slot].native;
    EnvCall *call = &runner->calls[slot];
    int64_t task = head->next_task, seed = head->next_seed;
    if (task >= 0 && task != native->task_id) return leave(&runner->left[slot], LEFT_RESET);
    head->next_seed = -1;
    if (seed >= 0) seed_stream(call->random, (uint64_t)seed);
    call->task = native->task && native->task[0] ? native->task + 1 : NULL;
    if (native->table->reset(runner->states[slot], call)) {
        head->now_task = task; // the fault names them
        head->now_seed = seed;
        return leave(&runner->left[slot], LEFT_RESET_FAULT);
    }
    write_beginning(head, task, seed);
    return SIDE_NONE;
}

// A slot that waits at the end of its episode: the send begins the next one, and ignores the action.
static int begin_here(Runner *runner, Py_ssize_t slot, Head *head) {
    keep_obs(runner, slot);
    int side = reset_here(runner, slot, head);
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
static inline int is_action(const Native *native, const int64_t *action) {
    for (int64_t i = 0; i < native->numbers; i++)
        if ((uint64_t)action[i] - (uint64_t)native->start >= (uint64_t)native->count) return 0;
    return 1;
}

// What is read for every slot of a batch. A copy in registers: the compiler has to assume that a write to a row changes the runner, and
// would read all of it again.
typedef struct {
    Runner *runner;
    char *head, *action;
    Py_ssize_t stride, action_bytes;
    const Slot *slots;
    EnvCall *calls;
    int64_t spent_ns; // of the batch before: reading the clock for every step would cost as much as a step
    EnvCall fresh;    // reward, flags and thread of a call that was not made yet
    int keeps;
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

// Makes a slot ready to be stepped: STEP_READY. SIDE_LEFT: Python has to do it. SIDE_NONE: it was no step, and is done.
enum { STEP_READY = -1 };
static int prepare_other(const Batch *batch, Py_ssize_t slot) {
    Head *head = row_of(batch, slot);
    if (head->command != COMMAND_STEP) return leave(&batch->runner->left[slot], LEFT_SLOW);
    if (head->waiting) return begin_here(batch->runner, slot, head);
    const void *action = head->action_type ? wide_action_of(batch->runner, slot, head->action_type) : NULL;
    batch->calls[slot].action = action;
    return action && is_action(&batch->slots[slot].native, action) ? STEP_READY : leave(&batch->runner->left[slot], LEFT_SLOW);
}

static inline int prepare(const Batch *batch, Py_ssize_t slot) {
    const Native *native = &batch->slots[slot].native;
    EnvCall *call = &batch->calls[slot];
    const void *action = batch->action + slot * batch->action_bytes;
    call->action = action;
    memcpy(&call->reward, &batch->fresh.reward, offsetof(EnvCall, shared) - offsetof(EnvCall, reward)); // one store instead of four
    if (!is_plain_step(row_of(batch, slot)) || !is_action(native, action)) {
        int side = prepare_other(batch, slot);
        if (side != STEP_READY) return side;
    }
    if (batch->keeps) keep_obs(batch->runner, slot);
    return STEP_READY;
}

// write_transition of a step that is not the last of its episode. Flags that are so already, as they mostly are, are not written: the number
// of writes is what a row costs.
static inline void write_middle(Head *head, double reward) {
    _Static_assert(offsetof(Head, status) == offsetof(Head, terminated) + 7, "read together");
    static const Head middle = {.active = 1, .scored = 1, .status = STATUS_READY};
    if (memcmp(&head->terminated, &middle.terminated, 8)) {
        Plain plain = {reward, 0, 0};
        Moment moment = moment_of(head, reward);
        write_transition(head, &plain, &moment, 0);
        return;
    }
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
static int end_here(Runner *runner, Py_ssize_t slot, const Plain *plain) {
    Head *head = head_of(runner, slot);
    Moment moment = moment_of(head, plain->reward);
    memcpy(runner->final_obs + slot * runner->obs_bytes, runner->calls[slot].obs, runner->obs_bytes);
    if (runner->on_end_reset && reset_here(runner, slot, head) != SIDE_NONE) {
        runner->left[slot].plain = *plain;
        runner->left[slot].moment = moment;
        return SIDE_LEFT;
    }
    write_transition(head, plain, &moment, runner->on_end_reset);
    return SIDE_NONE;
}

// Writes the row of a step that was made.
static inline int finish(const Batch *batch, Py_ssize_t slot) {
    Head *head = row_of(batch, slot);
    const EnvCall *call = &batch->calls[slot];
    int64_t limit = batch->slots[slot].limit;
    head->step_ns = batch->spent_ns;
    head->busy_ns += batch->spent_ns;
    int is_cut = limit && head->now_length + 1 >= limit;
    if (call->terminated | call->truncated | is_cut)
        return end_here(batch->runner, slot, &(Plain){call->reward, call->terminated != 0, call->truncated || is_cut});
    write_middle(head, call->reward);
    return SIDE_NONE;
}

// Steps neighbouring slots that are ready, in one call of their library, and writes their rows.
static inline void step_run(const Batch *batch, const EnvTable *table, Py_ssize_t first, Py_ssize_t count, char *is_left) {
    Runner *runner = batch->runner;
    for (Py_ssize_t next = 0; next < count; next++) {
        Py_ssize_t begin = next;
        next += table->step(count - begin, runner->states + first + begin, batch->calls + first + begin);
        for (Py_ssize_t i = begin; i < next; i++) is_left[i] = (char)(finish(batch, first + i) == SIDE_LEFT);
        if (next < count) is_left[next] = leave(&runner->left[first + next], LEFT_STEP_FAULT) == SIDE_LEFT;
    }
}

// How many of the slots are neighbours with environments of one kind, from the first on.
static Py_ssize_t neighbours(const Runner *runner, const int64_t *slots, Py_ssize_t count) {
    const Slot *first = &runner->slots[slots[0]];
    Py_ssize_t i = 1;
    while (i < count && slots[i] == slots[0] + i && first[i].native.table == first->native.table) i++;
    return i;
}

// Advances slots, none of them in Python; `is_left` says which ones it has to finish. Neighbours are prepared, stepped and finished
// together: while the floating point results of one step are awaited, the processor works on the next. The most at a time is what stays
// in the first cache between the three.
enum { RUN = 64 };
void native_advance_all(Runner *runner, const int64_t *slots, Py_ssize_t count, int thread, char *is_left) {
    const Batch batch = {runner, runner->head, runner->action, runner->stride, runner->action_bytes, runner->slots, runner->calls,
                         (int64_t)runner->native_ns, {.thread = thread}, runner->num_keeping > 1};
    for (Py_ssize_t at = 0; at < count;) {
        Py_ssize_t first = slots[at], most = neighbours(runner, slots + at, count - at < RUN ? count - at : RUN), ready = 0;
        const EnvTable *table = batch.slots[first].native.table;
        int side = STEP_READY;
        if (!table) side = leave(&runner->left[first], LEFT_SLOW);
        while (side == STEP_READY && ready < most) ready += (side = prepare(&batch, first + ready)) == STEP_READY;
        if (ready) step_run(&batch, table, first, ready, is_left + at);
        at += ready;
        if (side != STEP_READY) is_left[at++] = side == SIDE_LEFT;
    }
}

int native_advance(Runner *runner, Py_ssize_t slot, int thread) {
    int64_t number = slot;
    char is_left;
    native_advance_all(runner, &number, 1, thread, &is_left);
    return is_left ? SIDE_LEFT : SIDE_NONE;
}

// Finishes a slot that native_advance has left, with the interpreter lock. As runner_advance.
int native_finish(Runner *runner, Py_ssize_t slot, uint32_t turn) {
    Left *left = &runner->left[slot];
    int side = SIDE_NONE, why = left->why;
    if (!runner->slots[slot].native.table) { // an environment in Python, in the same fleet
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
    for (Py_ssize_t i = 0; i < count; i++) given[slots[i]]++;
    native_advance_all(runner, slots, count, 0, is_left);
    for (Py_ssize_t i = 0; i < count; i++) done[slots[i]] = given[slots[i]] - is_left[i]; // one turn behind: it is out
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
