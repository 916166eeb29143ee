// Shared by the parts of the compiled core. The Python life (src/envfleet/slots/slot_life.py) is the specification of all of it.
#ifndef ENVFLEET_H
#define ENVFLEET_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "envfleet_env.h"

// What a slot left beside its row: nothing, an info in the arena, or something for Python.
// GONE: the call was given up, nothing was written. LEFT: nothing was written either, the Python life must take the result.
// BROKEN (with PYTHON): an exception interrupted the advance itself; the row is not valid.
enum { SIDE_NONE = 0, SIDE_ARENA = 1, SIDE_PYTHON = 2, SIDE_GONE = 4, SIDE_LEFT = 8, SIDE_BROKEN = 8 };

// The turns of all slots, in the parent: board.c.
typedef struct {
    PyObject *parts; // keeps all below alive
    uint32_t *given, *done;
    PyObject *info, *final_info, *sided;
} Board;
int board_set(Board *board, PyObject *parts);
int board_finish(Board *board, Py_ssize_t slot, uint32_t turn, int side, const char *row, Py_ssize_t row_bytes);
// Phases as src/envfleet/slots/slot_life.py numbers them.
enum { PHASE_IDLE = 0, PHASE_RESET = 2, PHASE_STEP = 3 };
// What a step gave, if it is plain.
typedef struct {
    double reward;
    int terminated, truncated;
} Plain;

// The episode a transition belongs to, read before a reset replaces it.
typedef struct {
    int64_t step, episode, task, seed;
    double ep_return;
} Moment;

// What many native environments have in common. Slots have a pointer to it: what is read for every step should be in few cache lines.
typedef struct NativeKind {
    const EnvTable *table;
    int64_t count, start, numbers; // of a discrete action: values of each number, the first, how many numbers; 0: not checked
    int64_t limit;                 // of an absorbed TimeLimit, 0 for none
    const void *shared;            // EnvCall.shared
    struct NativeKind *next;
} NativeKind;

// A native environment in a slot: compiled/native_life.c. Its memory is the random stream, the state, and the task. Runner.kinds and
// Runner.states have the rest.
typedef struct {
    double *task;          // NULL: it has none; else task[0] says whether one was given, and it follows
    int64_t task_id;       // whose value is in `task`; -2: not known
    PyObject *owner;       // keeps the memory alive
} Native;

// A slot that native code could not finish, because Python has to.
typedef struct {
    Plain plain;
    Moment moment;
    int why;
    int64_t action;         // converted from another dtype
    char error[ENVFLEET_ERROR_BYTES];
} Left;
// SLOW: nothing was done. RESET: the episode ended, and the next has another task. STEP_FAULT, RESET_FAULT: see `error`.
enum { LEFT_SLOW = 1, LEFT_RESET, LEFT_STEP_FAULT, LEFT_RESET_FAULT };

// Commands as src/envfleet/slots/layout.py numbers them.
enum { COMMAND_STEP = 0 };
// Status as src/envfleet/slots/layout.py numbers it.
enum { STATUS_READY = 0, STATUS_FAULT = 2 };

typedef struct {
    PyObject *life;         // the Python life of this slot (borrowed from Runner.lives)
    PyObject *step, *reset; // bound methods of the env below the absorbed wrappers, NULL until armed
    PyObject *env;          // of many agents: its `agents` says who is alive
    int64_t limit;          // of an absorbed TimeLimit, 0 for none
    char explicit_reset;    // wrappers were absorbed: they always pass seed and options on
    char has_info;          // the Python life holds an info of an earlier step
    Native native;
} Slot;

typedef struct {
    PyObject_HEAD
    PyObject *keep_alive;   // tuple of the arrays below
    PyObject *slow;         // slow(slot) -> bool: one advance by the Python life; whether it left something beside the row
    PyObject *pickle;       // dumps, or NULL where infos stay in this process
    Slot *slots;
    Py_ssize_t num_slots;
    char *head;
    Py_ssize_t stride;
    struct {
        Py_ssize_t reward, ep_return, episode, step, length, task, seed, started, now_seed, now_task, now_length,
            now_return, next_seed, next_task, step_ns, busy_ns, terminated, truncated, active, scored, pending, over, waiting, status, command,
            action_type;
    } at;
    char *obs, *final_obs;       // NULL: observations are written by Python
    Py_ssize_t obs_bytes;
    PyObject *obs_like;          // the obs array: its dtype and row shape are what memcpy needs
    char obs_is_int64_scalar;
    char *action;                // NULL: actions are read by Python
    Py_ssize_t action_bytes;
    PyObject *action_like;
    char *wide_action;           // actions in another dtype than the space's, named by the head's action_type
    Py_ssize_t wide_action_bytes;
    PyObject *action_types;      // tuple of dtypes
    PyObject *agents;            // tuple of names, NULL for one agent; then obs and action rows hold all agents' parts
    Py_ssize_t num_agents;
    PyObject **seen;             // per agent, within one step: its observation
    double *rewards;             // and its reward
    char on_end_reset, has_columns;
    int64_t *pulse;              // slot, phase, since: NULL where no deadline is watched
    Py_ssize_t pulse_words;      // from one slot's pulse to the next; 0: there is one for all
    struct {
        char *rows, *kept;
        Py_ssize_t bytes;        // of one row
    } *keeping;                  // what is copied before an advance writes into a row: Slab.keep
    Py_ssize_t num_keeping;
    uint32_t *kept_turn;
    PyObject *keep;              // Slab.keep, where objects have to be kept too
    Board board;                 // of a parent that steps by itself
    char interruptible;          // runs in a main thread: a KeyboardInterrupt comes from the user, not from the env
    unsigned born;               // how often this process had been forked when the runner was made
    Left *left;                  // [slot], NULL until a native environment is armed; likewise
    void **states;               // [slot]
    const NativeKind **kinds;    // [slot], NULL: the slot's environment is not native
    NativeKind *all_kinds;       // freed with the runner: threads may be reading them
    struct Pool *pool;           // threads that step native environments, NULL for none: compiled/native_pool.c
    double native_ns;            // how long a native step took, lately
    char *arena;                 // per slot: u32 info bytes, u32 final info bytes, then both; NULL for none
    Py_ssize_t arena_bytes;
} Runner;

#define FIELD(runner, slot, type, name) (*(type *)((runner)->head + (slot) * (runner)->stride + (runner)->at.name))

// The head of a row of one agent, as Layout.head lays it out (checked when a runner is made). A struct, because offsets that are known to
// the compiler are not read again after every write: that halves the cost of a native step.
typedef struct {
    double reward, ep_return;
    int64_t episode, step, length, task, seed, started, now_seed, now_task, now_length;
    double now_return;
    int64_t next_seed, next_task, step_ns, busy_ns;
    char terminated, truncated, active, scored, pending, over, waiting;
    uint8_t status, command, action_type;
} Head;

static inline int is_native(const Runner *runner, Py_ssize_t slot) { return runner->kinds && runner->kinds[slot]; }

static inline Head *head_of(const Runner *runner, Py_ssize_t slot) { return (Head *)(runner->head + slot * runner->stride); }

static inline Moment moment_of(const Head *head, double reward) {
    return (Moment){head->now_length, head->started - 1, head->now_task, head->now_seed, head->now_return + reward};
}

// The head of a row whose observations are written. `next`: another episode has begun in the same step.
static inline void write_transition(Head *head, const Plain *plain, const Moment *moment, int next) {
    if (!next) {
        head->now_length = moment->step + 1;
        head->now_return = moment->ep_return;
        if (plain->terminated || plain->truncated) {
            head->active = 0;
            head->waiting = 1;
        }
    }
    head->episode = moment->episode;
    head->step = moment->step;
    head->length = moment->step + 1;
    head->reward = plain->reward;
    head->ep_return = moment->ep_return;
    head->terminated = (char)plain->terminated;
    head->truncated = (char)plain->truncated;
    head->task = moment->task;
    head->seed = moment->seed;
    head->scored = 1;
    head->status = STATUS_READY;
}

// The part of the head that says that an episode has begun; its first observation is written.
static inline void write_beginning(Head *head, int64_t task, int64_t seed) {
    head->now_task = task;
    head->now_seed = seed;
    head->now_length = 0;
    head->now_return = 0.0;
    head->started += 1;
    head->active = 1;
    head->waiting = 0;
}

extern PyTypeObject RunnerType;
int runner_setup_numpy(void);
// One advance of a slot. Returns SIDE_…, or -1 with an exception that must not be caught (KeyboardInterrupt).
// `*now`: the time if the caller knows it, else 0; likewise on return. So a row of advances reads the clock once each.
int runner_advance(Runner *runner, Py_ssize_t slot, uint32_t turn, int64_t *now);
// How often a fork has made this process from another; and the end of a child that returns from a call of an env.
extern unsigned fork_count;
void end_if_forked(Runner *runner);
void runner_idle(Runner *runner, int64_t now);
// An advance in two halves, for envs whose step is awaited in between: call it, and take what it gave.
int runner_can_begin(Runner *runner, Py_ssize_t slot);
PyObject *runner_begin(Runner *runner, Py_ssize_t slot, uint32_t turn, int64_t now);
int runner_take(Runner *runner, Py_ssize_t slot, PyObject *result);
// A plain info as bytes: how many, or -1 when it is for pickle.
Py_ssize_t info_encode(PyObject *info, char *out, Py_ssize_t room_bytes);
int is_bool(PyObject *value, int *out);
int is_number(PyObject *value, double *out);
// Python's part of an episode's end: the reset of the next one. 0, or -1 with an exception; `*side` as in runner_advance.
int runner_begin_episode(Runner *runner, Py_ssize_t slot, int *side);
int runner_failed(Runner *runner, Py_ssize_t slot, int in_reset);
void runner_forget_info(Slot *slot);
// Native environments: native_life.c. One advance without the interpreter lock, and what Python has to do after it.
int native_arm(Runner *runner, Py_ssize_t slot, PyObject *parts);
int runner_check(Runner *runner, Py_ssize_t slot); // 0, or -1 with an exception: the slot is not driven here
int native_check(Runner *runner, const int64_t *slots, Py_ssize_t count);
int native_make_room(Runner *runner);
void native_free_room(Runner *runner);
void native_disarm(Runner *runner, Py_ssize_t slot);
int native_advance(Runner *runner, Py_ssize_t slot, int thread);
void native_advance_run(Runner *runner, Py_ssize_t first, Py_ssize_t count, int thread, char *is_left);
int native_finish(Runner *runner, Py_ssize_t slot, uint32_t turn);
int native_run(Runner *runner, const int64_t *slots, Py_ssize_t count);
int finish_left(Runner *runner, Py_ssize_t slot, uint32_t turn, PyObject **type, PyObject **value, PyObject **trace);
void native_forget_infos(Runner *runner, const int64_t *slots, Py_ssize_t count);
// How many of the slots are neighbours, from the first on.
static inline Py_ssize_t native_neighbours(const int64_t *slots, Py_ssize_t count) {
    Py_ssize_t i = 1;
    while (i < count && slots[i] == slots[0] + i) i++;
    return i;
}
// Threads that step them: native_pool.c.
PyObject *runner_start_threads(Runner *runner, PyObject *count);
PyObject *runner_submit(Runner *runner, PyObject *slots);
PyObject *runner_wait(Runner *runner, PyObject *args);
PyObject *runner_stop_threads(Runner *runner, PyObject *timeout_s);
PyObject *agents_action(Runner *runner, Py_ssize_t slot);
int agents_take(Runner *runner, Py_ssize_t slot, PyObject *result);

#ifdef __linux__
extern PyTypeObject ExchangeType;
#endif

static inline int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#endif
