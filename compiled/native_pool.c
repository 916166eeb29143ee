// Threads that step native environments beside the caller. One queue of runs of neighbouring slots under one mutex; a thread takes some
// tens of microseconds of work at a time, so that the mutex costs nothing. The caller steps too whenever it waits, so a pool of n workers has n - 1 threads, and
// while the caller computes its next actions they go on alone.
//
// Threads never touch Python: they write rows, mark them as done, or leave the slot to the caller (native_life.c).
#define _GNU_SOURCE
#include "envfleet.h"
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#define SMALL_NS 30000.0 // a batch shorter than this is not shared out
#define LEAST_NS 3000.0  // work taken from the queue at a time, at least
#define SPIN_NS 60000    // how long a thread without work looks for more before it sleeps: a wake-up costs about as much

typedef struct {
    int64_t first, count;
} Run;

typedef struct Pool {
    Runner *runner;
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
    Run *queue;                   // what is to be stepped, a ring: a slot is in it once at the most
    Py_ssize_t first, num_runs;
    Py_ssize_t waiting;           // slots in all of them
    int64_t *left;                // slots that Python has to finish
    Py_ssize_t num_left, num_busy; // num_busy: taken and not yet finished
    fenv_t rounding;              // of the thread that submitted last: a row must not depend on who steps it
    unsigned changes;             // counts submits, read without the lock by threads that spin
    int stop, num_threads, num_alive, num_asleep;
    pthread_t *threads;
} Pool;

// A place in the ring. Not by division, which costs as much as a cheap step.
static Py_ssize_t wrapped(Py_ssize_t at, Py_ssize_t size) {
    at -= at >= size ? size : 0;
    return at - (at >= size ? size : 0);
}

enum { ROOM = 2048, RUNS = 64 };

// Takes some slots from the queue: the caller and every second thread from its beginning, the others from its end, so that a slot is mostly
// stepped by the thread whose cache has it. Called with the lock. How many runs it has taken.
static int take(Pool *pool, Run *taken, int thread) {
    double each_ns = pool->runner->native_ns > 20 ? pool->runner->native_ns : 20;
    // Half of a fair share, so that all end at about the same time, but not so few that the lock is what they wait for.
    Py_ssize_t count = pool->waiting / (2 * (pool->num_threads + 1)), least = (Py_ssize_t)(LEAST_NS / each_ns) + 1;
    if (count < least) count = least;
    if (count > ROOM) count = ROOM;
    int runs = 0, from_end = thread % 2;
    while (count && pool->num_runs && runs < RUNS) {
        Run *run = &pool->queue[wrapped(pool->first + (from_end ? pool->num_runs - 1 : 0), pool->runner->num_slots)];
        Py_ssize_t some = run->count < count ? run->count : count;
        taken[runs++] = (Run){from_end ? run->first + run->count - some : run->first, some};
        run->first += from_end ? 0 : some;
        run->count -= some;
        if (!run->count) {
            pool->num_runs--;
            if (!from_end) pool->first = wrapped(pool->first + 1, pool->runner->num_slots);
        }
        pool->waiting -= some;
        pool->num_busy += some;
        count -= some;
    }
    return runs;
}

// Steps a run of slots. Rows are marked as done, after they were written, without the lock; slots that Python has to finish go on a list with it.
static void step_run(Pool *pool, Run run, int thread, char *is_left) {
    uint32_t *given = pool->runner->board.given + run.first, *done = pool->runner->board.done + run.first;
    native_advance_run(pool->runner, run.first, run.count, thread, is_left);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    if (!memchr(is_left, 1, (size_t)run.count)) { // nearly always: many at once
        memcpy(done, given, (size_t)run.count * sizeof *done);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    for (Py_ssize_t i = 0; i < run.count; i++) {
        if (is_left[i]) pool->left[pool->num_left++] = run.first + i;
        else done[i] = given[i];
    }
    pthread_mutex_unlock(&pool->lock);
}

// Steps some slots of the queue, if there are any. Called with the lock, which is free meanwhile; whether there were any.
static int work_some(Pool *pool, int thread) {
    Run taken[RUNS];
    char is_left[ROOM];
    Py_ssize_t count = 0;
    int runs = take(pool, taken, thread);
    if (!runs) return 0;
    if (thread) fesetenv(&pool->rounding);
    pthread_mutex_unlock(&pool->lock);
    int64_t begin = now_ns();
    for (int i = 0; i < runs; count += taken[i++].count) step_run(pool, taken[i], thread, is_left);
    double mean_ns = (double)(now_ns() - begin) / (double)count;
    pthread_mutex_lock(&pool->lock);
    pool->runner->native_ns = mean_ns;
    pool->num_busy -= count;
    pthread_cond_signal(&pool->finished);
    return 1;
}

static void *thread_main(void *argument) {
    Pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    int thread = ++pool->num_alive;
    while (!pool->stop) {
        if (work_some(pool, thread)) continue;
        unsigned seen = pool->changes;
        pthread_mutex_unlock(&pool->lock);
        int64_t until = now_ns() + SPIN_NS;
        while (__atomic_load_n(&pool->changes, __ATOMIC_ACQUIRE) == seen && now_ns() < until) sched_yield();
        pthread_mutex_lock(&pool->lock);
        pool->num_asleep++;
        while (pool->changes == seen && !pool->stop) pthread_cond_wait(&pool->work, &pool->lock);
        pool->num_asleep--;
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static void free_pool(Runner *runner) {
    Pool *pool = runner->pool;
    runner->pool = NULL;
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->finished);
    pthread_mutex_destroy(&pool->lock);
    PyMem_RawFree(pool->queue);
    PyMem_RawFree(pool->left);
    PyMem_RawFree(pool->threads);
    PyMem_RawFree(pool);
}

// start_threads(count): threads beside the caller. The runner lives as long as they do.
PyObject *runner_start_threads(Runner *runner, PyObject *number) {
    long count = PyLong_AsLong(number);
    if (PyErr_Occurred()) return NULL;
    if (runner->pool || !runner->board.parts) return PyErr_Format(PyExc_RuntimeError, "set_board() first, and start threads once");
    if (native_make_room(runner) < 0) return NULL;
    Pool *pool = PyMem_RawCalloc(1, sizeof *pool);
    if (!pool) return PyErr_NoMemory();
    pool->runner = runner;
    pool->queue = PyMem_RawCalloc(runner->num_slots + 1, sizeof *pool->queue);
    pool->left = PyMem_RawCalloc(runner->num_slots + 1, sizeof *pool->left);
    pool->threads = PyMem_RawCalloc(count + 1, sizeof *pool->threads);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_condattr_t clock; // monotonic, so that a change of the date does not end or prolong a wait
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->work, &clock);
    pthread_cond_init(&pool->finished, &clock);
    pthread_condattr_destroy(&clock);
    runner->pool = pool;
    if (!pool->queue || !pool->left || !pool->threads) {
        free_pool(runner);
        return PyErr_NoMemory();
    }
    Py_INCREF(runner);
    // Signals belong to the main thread: these threads block all of them.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    for (; pool->num_threads < count && !error; pool->num_threads += !error)
        error = pthread_create(&pool->threads[pool->num_threads], NULL, thread_main, pool);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        PyObject *stopped = runner_stop_threads(runner, Py_None);
        Py_XDECREF(stopped);
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

// submit(slots: int64 buffer): give the slots their next turn and let threads step them. A small batch is stepped at once, in this thread:
// waking another costs more. Returns what run() returns, or None when they are out.
PyObject *runner_submit(Runner *runner, PyObject *numbers) {
    Py_buffer view;
    Pool *pool = runner->pool;
    if (!pool) return PyErr_Format(PyExc_RuntimeError, "start_threads() first");
    if (PyObject_GetBuffer(numbers, &view, PyBUF_SIMPLE) < 0) return NULL;
    const int64_t *slots = view.buf;
    Py_ssize_t count = (Py_ssize_t)(view.len / sizeof(int64_t));
    int plain = -2;
    if (native_check(runner, slots, count) < 0) {
        PyBuffer_Release(&view);
        return NULL;
    }
    if ((double)count * runner->native_ns < SMALL_NS) {
        plain = native_run(runner, slots, count);
    } else {
        native_forget_infos(runner, slots, count);
        for (Py_ssize_t at = 0, some; at < count; at += some) { // slots that no thread has
            some = native_neighbours(slots + at, count - at);
            for (Py_ssize_t i = 0; i < some; i++) runner->board.given[slots[at] + i]++;
        }
        pthread_mutex_lock(&pool->lock); // threads hold it for moments only, and never need the interpreter
        for (Py_ssize_t at = 0, some; at < count; at += some) {
            some = native_neighbours(slots + at, count - at);
            pool->queue[wrapped(pool->first + pool->num_runs++, runner->num_slots)] = (Run){slots[at], some};
        }
        pool->waiting += count;
        fegetenv(&pool->rounding);
        __atomic_add_fetch(&pool->changes, 1, __ATOMIC_RELEASE);
        if (pool->num_asleep) pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
    }
    PyBuffer_Release(&view);
    if (plain == -1) return NULL;
    if (plain == -2) Py_RETURN_NONE;
    return PyBool_FromLong(plain);
}

// Waits, and steps meanwhile, until at most `target` slots are out or the time is over. Without the interpreter lock.
static void help(Pool *pool, Py_ssize_t target, int64_t deadline) {
    pthread_mutex_lock(&pool->lock);
    while (pool->waiting + pool->num_busy > target && now_ns() < deadline) {
        if (work_some(pool, 0)) continue;
        // The others are at their last few slots: look for a moment, then sleep.
        Py_ssize_t busy = pool->num_busy;
        pthread_mutex_unlock(&pool->lock);
        int64_t until_ns = now_ns() + SPIN_NS;
        while (__atomic_load_n(&pool->num_busy, __ATOMIC_ACQUIRE) == busy && now_ns() < until_ns) sched_yield();
        pthread_mutex_lock(&pool->lock);
        if (pool->num_busy != busy) continue;
        struct timespec until = {deadline / 1000000000, deadline % 1000000000};
        pthread_cond_timedwait(&pool->finished, &pool->lock, &until);
    }
    pthread_mutex_unlock(&pool->lock);
}

// wait(target, timeout_s) -> whether nothing is beside the rows: wait until at most `target` slots are out.
PyObject *runner_wait(Runner *runner, PyObject *args) {
    Py_ssize_t target;
    double timeout_s;
    Pool *pool = runner->pool;
    if (!PyArg_ParseTuple(args, "nd", &target, &timeout_s)) return NULL;
    if (!pool) return PyErr_Format(PyExc_RuntimeError, "start_threads() first");
    if (timeout_s > 1e6) timeout_s = 1e6;
    Py_BEGIN_ALLOW_THREADS;
    help(pool, target, now_ns() + (int64_t)(timeout_s * 1e9));
    Py_END_ALLOW_THREADS;
    int plain = 1;
    PyObject *type = NULL, *value = NULL, *trace = NULL;
    for (;;) {
        pthread_mutex_lock(&pool->lock);
        Py_ssize_t slot = pool->num_left ? pool->left[--pool->num_left] : -1;
        pthread_mutex_unlock(&pool->lock);
        if (slot < 0) break;
        uint32_t turn = runner->board.given[slot];
        plain &= finish_left(runner, slot, turn, &type, &value, &trace) == SIDE_NONE;
    }
    if (!type) return PyBool_FromLong(plain);
    PyErr_Restore(type, value, trace);
    return NULL;
}

// stop_threads(timeout_s or None) -> how many did not end: those hang in an environment, and keep their memory.
PyObject *runner_stop_threads(Runner *runner, PyObject *timeout) {
    double timeout_s = timeout == Py_None ? 1.0 : PyFloat_AsDouble(timeout);
    if (PyErr_Occurred()) return NULL;
    Pool *pool = runner->pool;
    if (!pool) return PyLong_FromLong(0);
    int late = 0;
    pthread_mutex_lock(&pool->lock);
    pool->stop = 1;
    pool->waiting = pool->num_runs = 0;
    __atomic_add_fetch(&pool->changes, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    Py_BEGIN_ALLOW_THREADS;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    int64_t at = (int64_t)until.tv_sec * 1000000000 + until.tv_nsec + (int64_t)(timeout_s * 1e9);
    until = (struct timespec){at / 1000000000, at % 1000000000};
    for (int i = 0; i < pool->num_threads; i++)
        if (pthread_timedjoin_np(pool->threads[i], NULL, &until)) {
            pthread_detach(pool->threads[i]);
            late++;
        }
    Py_END_ALLOW_THREADS;
    if (late) { // the pool and a reference to the runner stay with the thread that hangs
        runner->pool = NULL;
        return PyLong_FromLong(late);
    }
    free_pool(runner);
    Py_DECREF(runner);
    return PyLong_FromLong(0);
}
