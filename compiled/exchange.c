// The doorbell: rings of slot numbers in shared memory between the parent and its workers, and the waiting on both sides.
//
// Each ring has one writer and one reader. A waiter spins with sched_yield while the gaps it has lately seen are short, and
// sleeps on a futex when they are long, so that cheap envs pay no wake-up and a learner that computes keeps the cores.
// Workers wake the parent once, when as many slots are done as it waits for.
//
// Ownership. Every word of the shared memory has one writer:
//
//   request ring of worker w, request_tail, control    written by the parent, read by worker w
//   done ring of worker w, done_tail, sleeping, place  written by worker w, read by the parent
//   parent.sleeping, parent.target                     written by the parent, read by workers
//   the two bells                                      added to by the side that wakes, slept on by the side that waits
//   request_head, done_head                            not shared: what the reader of a ring has read so far
//   the rows (slab)                                    owned by the caller until their slot is in a request ring, then by the worker
//                                                      until it is in the done ring
//
// Tails only grow and wrap at 2^32; a ring has room for every slot, and a slot is in one ring at most, so a ring is never full.
//
// Memory order. A writer fills the entry (and before it the row) with plain stores, then stores the tail with RELEASE. The reader
// loads the tail with ACQUIRE, and then sees the entry and the row. That is all that the data needs.
//
// Sleeping needs more, because two sides each write one word and then read the other's: the waiter sets `sleeping` and checks
// the tails again; the other side moves its tail and looks at `sleeping`. With RELEASE and ACQUIRE alone both could
// read the old value, and the waiter would sleep forever. A SEQ_CST fence between the write and the read on BOTH sides
// excludes that: at least one of them sees the other's write. The bell closes the last gap: its value is read before
// `sleeping` is set, FUTEX_WAIT returns at once if it has changed since. In any case every sleep is bounded (SLICE_NS), so a
// process that dies between its two steps costs milliseconds, not the run.
#ifdef __linux__
#include "exchange.h"
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

// Gaps shorter than this are worth spinning for; longer ones are counted as this long (one long pause for learning between
// rollouts must not make the next rollout sleep).
#define SPIN_NS 2000000
#define LONG_NS 4000000
// No sleep is longer than this: signals and the end of other processes must be noticed.
#define SLICE_NS 20000000

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// Sleeps while *word == value, at most `ns`. May return early for any reason: callers check again.
static void sleep_on(uint32_t *word, uint32_t value, int64_t ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
}

// The bell changes before the waiter is woken: one that is about to sleep finds another value and does not.
static void wake(uint32_t *word) {
    __atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void ring_worker(Exchange *x, Py_ssize_t w) {
    fence(); // request_tail was stored before; pairs with the fence in await_request
    if (load(&x->workers[w].sleeping)) wake(&x->workers[w].bell);
}

// How many slots all workers have done since the beginning, modulo 2^32. Not an atomic sum: a worker may continue while the
// others are read, so the sum may be too small, never too large. A reader that finds too few checks again.
static uint32_t sum_done(Exchange *x) {
    uint32_t sum = 0;
    for (Py_ssize_t w = 0; w < x->num_workers; w++) sum += load(&x->workers[w].done_tail);
    return sum;
}

// The row is complete: hand it to the parent. Its owner is the parent from the store of done_tail on.
void publish(Exchange *x, Py_ssize_t w, uint32_t slot, int side, uint32_t turn) {
    Worker *worker = &x->workers[w];
    uint32_t tail = worker->done_tail; // plain: this worker is its only writer
    dones(x, w)[tail & x->mask] = entry_of(slot, side, turn);
    store(&worker->done_tail, tail + 1);
}

// Only the worker whose slot completes the target wakes the parent; if two do at once, the second wake has no effect.
void wake_parent(Exchange *x) {
    fence(); // done_tail was stored before; pairs with the fence in await_done
    if (load(&x->parent->sleeping) && (int32_t)(sum_done(x) - load(&x->parent->target)) >= 0) wake(&x->parent->bell);
}

static void learn_gap(Exchange *x, int64_t gap) {
    if (gap > LONG_NS) gap = LONG_NS;
    x->mean_gap_ns += (gap - x->mean_gap_ns) / 8;
}

// If another program needs the core, a waiter that spins loses it at every yield, gets it back a time slice later
// (milliseconds), and has lower priority after spinning; a waiter that sleeps is woken before that program. So a waiter
// that loses the core for longer than LOST_NS while it spins, twice within WINDOW_NS, stops spinning for a while, twice as
// long each time; after a long time without a loss this starts again. A single loss is ignored: interrupts, a kernel thread.
#define LOST_NS 400000
#define WINDOW_NS 50000000
#define REST_NS 20000000
#define LONG_REST_NS 640000000

static int64_t spin_budget(Exchange *x, int64_t now) {
    if (now < x->quiet_ns) return -1; // do not spin at all
    if (x->mean_gap_ns >= SPIN_NS || x->mean_gap_ns >= x->spin_ns) return 0;
    int64_t budget = 4 * x->mean_gap_ns + 100000;
    return budget < x->spin_ns ? budget : x->spin_ns;
}

// This thread lost its core between two readings of the clock. Returns 1 when it is time to stop spinning.
static int lost_core(Exchange *x, int64_t now) {
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage)) return 0;
    int64_t switches = usage.ru_nivcsw;
    int taken = switches != x->switches; // else the whole machine was paused by its host
    x->switches = switches;
    if (!taken) return 0;
    int again = now - x->lost_ns < WINDOW_NS + x->rest_ns;
    x->lost_ns = now;
    if (!again) {
        x->rest_ns = 0;
        return 0;
    }
    x->rest_ns = x->rest_ns ? 2 * x->rest_ns : REST_NS;
    if (x->rest_ns > LONG_REST_NS) x->rest_ns = LONG_REST_NS;
    x->quiet_ns = now + x->rest_ns;
    x->rests++;
    return 1;
}

// ---- places ---------------------------------------------------------------------------------------------------------

// Two processes that spin and yield alternately can stay on one core for long while the other core idles: the scheduler
// sees neither as starved. So every process that steps writes its CPU, and a worker that finds another one there moves away.
#define MOVE_PAUSE_NS 5000000

void leave_place(Exchange *x) {
    if (x->me >= 0 && !x->in_thread) store(&x->workers[x->me].place, 0);
}

// Only if there is a CPU for every process, and never the parent's thread, which belongs to the user.
void take_place(Exchange *x) {
    if (x->me < 0 || x->in_thread) return;
    uint32_t mine = 1 + (uint32_t)sched_getcpu();
    store(&x->workers[x->me].place, mine);
    if (x->is_parent) return;
    int shared = 0, stepping = 0; // an empty share, or one that rests, needs no CPU
    for (Py_ssize_t w = x->me + 1; w < x->num_workers; w++) shared |= load(&x->workers[w].place) == mine;
    for (Py_ssize_t w = 0; w < x->num_workers; w++) stepping += load(&x->workers[w].place) != 0;
    if (!shared || now_ns() - x->moved_ns < MOVE_PAUSE_NS) return;
    cpu_set_t allowed, free;
    if (sched_getaffinity(0, sizeof allowed, &allowed) || CPU_COUNT(&allowed) < stepping) return;
    free = allowed;
    for (Py_ssize_t w = 0; w < x->num_workers; w++) {
        uint32_t place = load(&x->workers[w].place);
        if (place) CPU_CLR(place - 1, &free);
    }
    x->moved_ns = now_ns();
    // Set and then cleared: the kernel moves us at once, and may move us again later.
    if (CPU_COUNT(&free) && !sched_setaffinity(0, sizeof free, &free)) sched_setaffinity(0, sizeof allowed, &allowed);
    store(&x->workers[x->me].place, 1 + (uint32_t)sched_getcpu());
}

// ---- worker ---------------------------------------------------------------------------------------------------------

// Waits for a request or a message, at most about a second. Without the GIL.
void await_request(Exchange *x) {
    Worker *worker = &x->workers[x->me];
    int64_t start = now_ns(), budget = spin_budget(x, start), give_up = start + 1000000000, last = start;
    for (int i = 0; budget >= 0 && !has_request(x); i++) {
        relax();
        if (i % 64 == 63) {
            sched_yield();
            int64_t now = now_ns();
            if (now - last > LOST_NS && lost_core(x, now)) break;
            if (now - start > budget) break;
            last = now;
        }
    }
    while (!has_request(x)) {
        leave_place(x);
        uint32_t seen = load(&worker->bell); // before `sleeping`: a wake after this line changes the bell
        store(&worker->sleeping, 1);
        fence(); // pairs with the fence in ring_worker: it sees `sleeping`, or we see its request
        // A process looks whether its parent still lives now and then; a thread only in case a ring was missed.
        if (!has_request(x)) sleep_on(&worker->bell, seen, SLICE_NS * (x->in_thread ? 50 : 10));
        store(&worker->sleeping, 0);
        if (now_ns() > give_up) break;
    }
    learn_gap(x, now_ns() - start);
}

// Puts slots into their workers' rings, each with its next turn.
void hand_over(Exchange *x, const int64_t *slots, Py_ssize_t count, const int64_t *owner) {
    Py_ssize_t last = -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t w = owner[slots[i]];
        Worker *worker = &x->workers[w];
        uint32_t tail = worker->request_tail;
        // The turn is counted in the parent's board in the same call: no signal handler can come between the two.
        requests(x, w)[tail & x->mask] = entry_of((uint32_t)slots[i], 0, ++x->board.given[slots[i]]);
        store(&worker->request_tail, tail + 1);
        // Slots come in runs of one worker: ring once per run, as soon as the run is complete, so that it starts early.
        if (last >= 0 && last != w && last != x->me) ring_worker(x, last);
        last = w;
    }
    if (last >= 0 && last != x->me) ring_worker(x, last);
}

// Slots that are done and not yet read by the parent.
uint32_t available(Exchange *x) {
    uint32_t read = 0;
    for (Py_ssize_t w = 0; w < x->num_workers; w++) read += x->done_head[w];
    return sum_done(x) - read;
}

// Waits without the GIL until `need` are done or the time is over.
void await_done(Exchange *x, uint32_t need, int64_t deadline) {
    int64_t start = now_ns(), budget = spin_budget(x, start), last = start;
    for (int i = 0; budget >= 0 && available(x) < need; i++) {
        relax();
        if (i % 64 == 63) {
            sched_yield();
            int64_t now = now_ns();
            if (now - last > LOST_NS && lost_core(x, now)) break;
            if (now - start > budget || now > deadline) break;
            last = now;
        }
    }
    if (available(x) < need && now_ns() < deadline) {
        uint32_t read = 0, seen = load(&x->parent->bell);
        for (Py_ssize_t w = 0; w < x->num_workers; w++) read += x->done_head[w];
        store(&x->parent->target, read + need); // before `sleeping`, after which workers read it
        store(&x->parent->sleeping, 1);
        fence(); // pairs with the fence in wake_parent: it sees `sleeping`, or we see its done_tail
        int64_t left = deadline - now_ns();
        if (left > SLICE_NS) left = SLICE_NS;
        if (left > 0 && available(x) < need) sleep_on(&x->parent->bell, seen, left);
        store(&x->parent->sleeping, 0);
    }
    if (available(x) >= need) learn_gap(x, now_ns() - start);
}
#endif
