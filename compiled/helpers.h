// Threads that help with one piece of work at a time. The caller does what they leave, so that a thread that is late, or could not be
// started, costs time and nothing else.
//
// To start a thread takes some tens of microseconds, as long as some hundred rows of a network. So helpers stay: after a piece of work they look for the
// next one for a moment (it comes at once while a policy acts and learns), then sleep, and end when nothing came for a second.
#ifndef ENVFLEET_HELPERS_H
#define ENVFLEET_HELPERS_H
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#define HELPERS_SPIN_NS 100000
#define HELPERS_IDLE_S 1

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
    void *(*function)(void *);
    void *argument;
    fenv_t rounding;         // of the caller, and whether numbers near zero become zero: each thread has its own, and helpers would give other bits
    int seats;               // how many may still join
    int in_use, num_working; // in_use: one caller at a time has the helpers; num_working: read without the lock by a caller that spins
    int num_alive, num_asleep;
    unsigned changes; // counts pieces of work, read without the lock by helpers that spin
} crew = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER};

static int64_t helpers_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// In a forked child there is no helper, whatever the parent's were doing.
static void helpers_forget(void) {
    memset(&crew, 0, sizeof crew);
    pthread_mutex_init(&crew.lock, NULL);
    pthread_cond_init(&crew.work, NULL);
    pthread_cond_init(&crew.finished, NULL);
}

static void helpers_begin(void) {
    pthread_atfork(NULL, NULL, helpers_forget);
}

// Waits for another piece of work; 0 if none came for long. Called with the lock.
static int helpers_await(unsigned seen) {
    pthread_mutex_unlock(&crew.lock);
    int64_t until = helpers_now_ns() + HELPERS_SPIN_NS;
    while (__atomic_load_n(&crew.changes, __ATOMIC_ACQUIRE) == seen && helpers_now_ns() < until) sched_yield();
    pthread_mutex_lock(&crew.lock);
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end); // if the date is changed meanwhile it sleeps longer or shorter, which does no harm
    end.tv_sec += HELPERS_IDLE_S;
    int late = 0;
    crew.num_asleep++;
    while (crew.changes == seen && !late) late = pthread_cond_timedwait(&crew.work, &crew.lock, &end) != 0;
    crew.num_asleep--;
    return crew.changes != seen;
}

static void *helpers_main(void *nothing) {
    (void)nothing;
    pthread_mutex_lock(&crew.lock);
    for (unsigned seen = crew.changes - 1; seen != crew.changes || helpers_await(seen);) {
        seen = crew.changes;
        if (!crew.seats) continue; // too late for this piece
        crew.seats--;
        __atomic_add_fetch(&crew.num_working, 1, __ATOMIC_RELAXED);
        void *(*function)(void *) = crew.function;
        void *argument = crew.argument;
        fesetenv(&crew.rounding);
        pthread_mutex_unlock(&crew.lock);
        function(argument);
        pthread_mutex_lock(&crew.lock);
        if (!__atomic_sub_fetch(&crew.num_working, 1, __ATOMIC_RELAXED)) pthread_cond_signal(&crew.finished);
    }
    crew.num_alive--;
    pthread_mutex_unlock(&crew.lock);
    return NULL;
}

// Called with the lock.
static void helpers_start(int count) {
    if (crew.num_alive >= count) return;
    sigset_t all, before; // signals belong to threads that know Python
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (crew.num_alive < count && !pthread_create(&thread, NULL, helpers_main, NULL)) {
        pthread_detach(thread);
        crew.num_alive++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// Runs function(argument) in this thread and, at the same time, in up to `count` others; returns when all of them have returned. It must give each of them
// another part of the work. `wake`: also those that sleep, which takes some microseconds.
static void with_helpers(int count, int wake, void *(*function)(void *), void *argument) {
    if (count > 0) pthread_mutex_lock(&crew.lock);
    if (count < 1 || crew.in_use) { // another thread of Python has them
        if (count > 0) pthread_mutex_unlock(&crew.lock);
        function(argument);
        return;
    }
    if (wake) helpers_start(count);
    crew.in_use = 1, crew.function = function, crew.argument = argument, crew.seats = count;
    fegetenv(&crew.rounding);
    __atomic_add_fetch(&crew.changes, 1, __ATOMIC_RELEASE);
    if (wake && crew.num_asleep) pthread_cond_broadcast(&crew.work);
    pthread_mutex_unlock(&crew.lock);
    function(argument);
    pthread_mutex_lock(&crew.lock);
    crew.seats = 0; // who comes now finds nothing
    while (crew.num_working) {
        pthread_mutex_unlock(&crew.lock); // they are at their last part: look for a moment, then sleep
        int64_t until = helpers_now_ns() + HELPERS_SPIN_NS;
        while (__atomic_load_n(&crew.num_working, __ATOMIC_ACQUIRE) && helpers_now_ns() < until) sched_yield();
        pthread_mutex_lock(&crew.lock);
        if (crew.num_working) pthread_cond_wait(&crew.finished, &crew.lock);
    }
    crew.in_use = 0;
    pthread_mutex_unlock(&crew.lock);
}

#endif
