// The doorbell's memory, and what its Python type (exchange_type.c) needs of it (exchange.c).
#ifndef ENVFLEET_EXCHANGE_H
#define ENVFLEET_EXCHANGE_H

#include "envfleet.h"

#define LINE 64

// An entry of a ring: the slot (28 bits), what it left beside its row (4), and the turn it belongs to (32).
typedef uint64_t Entry;
#define SIDE_SHIFT 28
#define SLOT_MASK ((1u << SIDE_SHIFT) - 1)
static inline Entry entry_of(uint32_t slot, int side, uint32_t turn) {
    return (Entry)turn << 32 | (Entry)side << SIDE_SHIFT | slot;
}
static inline uint32_t slot_of(Entry entry) { return (uint32_t)entry & SLOT_MASK; }
static inline int side_of(Entry entry) { return (int)((uint32_t)entry >> SIDE_SHIFT); }
static inline uint32_t turn_of(Entry entry) { return (uint32_t)(entry >> 32); }

typedef struct {
    _Alignas(LINE) uint32_t request_tail; // parent
    uint32_t control;                     // parent: messages sent over the socket
    _Alignas(LINE) uint32_t bell;         // both: the word the worker sleeps on
    uint32_t sleeping;                    // worker
    _Alignas(LINE) uint32_t done_tail;    // worker
    uint32_t place;                       // worker: 1 + the CPU it steps on, 0 while it does not
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
    Entry *rings; // per worker: requests[capacity], done[capacity]
    Board board;  // of the parent
    unsigned long long num_stale; // entries dropped because they belonged to an earlier turn
    Py_ssize_t num_workers, num_slots, me;
    char is_parent; // `me` is then the parent's own share, or -1
    char in_thread; // workers are threads of the parent's process
    char busy;      // a thread: it is in an env
    char detached;  // a thread: given up in an env, another thread replaces it
    uint32_t capacity, mask;
    uint32_t *request_head, *done_head; // what this process has read, per worker
    uint32_t control_seen;
    int64_t mean_gap_ns;
    int64_t spin_ns; // most time to spin; 0: never
    int64_t quiet_ns, rest_ns, lost_ns; // no spinning before, how long the next rest is, when the core was last lost
    int64_t switches;                   // how often the kernel had taken the core away by then
    int64_t rests;                      // how often this waiter has stopped spinning since it began
    int64_t moved_ns; // when this worker last left a core it shared
} Exchange;

static inline uint32_t load(uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline void store(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static inline void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline Entry *requests(Exchange *x, Py_ssize_t w) { return x->rings + 2 * w * x->capacity; }
static inline Entry *dones(Exchange *x, Py_ssize_t w) { return x->rings + (2 * w + 1) * x->capacity; }

static inline int has_request(Exchange *x) {
    return load(&x->workers[x->me].request_tail) != x->request_head[x->me] ||
           load(&x->workers[x->me].control) != x->control_seen;
}

void ring_worker(Exchange *x, Py_ssize_t w);
void publish(Exchange *x, Py_ssize_t w, uint32_t slot, int side, uint32_t turn);
void wake_parent(Exchange *x);
void await_request(Exchange *x);
void take_place(Exchange *x);
void leave_place(Exchange *x);
void hand_over(Exchange *x, const int64_t *slots, Py_ssize_t count, const int64_t *owner);
uint32_t available(Exchange *x);
void await_done(Exchange *x, uint32_t need, int64_t deadline);

#endif
