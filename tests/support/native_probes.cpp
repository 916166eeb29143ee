// The probe environments of src/envfleet/envs/probe.py in C++, and some that misbehave as only native code can.
#include "envfleet_env.h"

#include <chrono>
#include <string>
#include <thread>

namespace {

// A step that takes its time: a batch of such steps is shared out to threads.
void work(int64_t busy_us) {
    auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(busy_us);
    while (busy_us && std::chrono::steady_clock::now() < until) {}
}

struct Counting {
    int64_t count, limit, busy_us, in_step; // in_step: until the reset after the last step
    static constexpr const char *name = "Counting";
    static constexpr envfleet::Option options[] = {{"limit", 5}, {"busy_us", 0}};
    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.box<double>({1}, 0, 1e6);
        space.action.discrete(2);
        space.task_size = 1;
    }
    void init(const double *option) {
        limit = (int64_t)option[0];
        busy_us = (int64_t)option[1];
    }
    void reset(envfleet::Call &call) {
        count = in_step = 0;
        call.obs<double>()[0] = 0;
    }
    void step(envfleet::Call &call) {
        in_step = 1;
        work(busy_us);
        call.obs<double>()[0] = (double)++count;
        call.reward = 1;
        call.truncated = count >= limit;
    }
};

struct Tasked {
    int64_t count, limit, busy_us;
    double task;
    static constexpr const char *name = "Tasked";
    static constexpr envfleet::Option options[] = {{"busy_us", 0}};
    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.box<double>({1}, 0, 1e6);
        space.action.discrete(2);
        space.task_size = 1;
    }
    void init(const double *option) { busy_us = (int64_t)option[0]; }
    void reset(envfleet::Call &call) {
        count = 0;
        task = call.task ? call.task[0] : -1;
        limit = 1 + call.rng().below(4);
        call.obs<double>()[0] = task;
    }
    void step(envfleet::Call &call) {
        work(busy_us);
        call.obs<double>()[0] = task;
        call.reward = 1;
        call.truncated = ++count >= limit;
    }
};

enum { IN_RESET, IN_STEP };
enum { THROW, THROW_NUMBER, CRASH, HANG, THROW_LONG };

struct Faulty {
    int64_t count, phase, how, at, limit, busy_us;
    static constexpr const char *name = "Faulty";
    static constexpr envfleet::Option options[] = {{"phase", IN_STEP}, {"how", THROW}, {"at", 3}, {"limit", 10}, {"busy_us", 0}};
    static void spaces(const double *option, envfleet::Spaces &space) {
        if (option[3] < 1) throw std::invalid_argument("limit must be at least 1");
        space.obs.box<double>({1}, 0, 1e6);
        space.action.discrete(2);
        space.task_size = 1;
    }
    void init(const double *option) {
        phase = (int64_t)option[0];
        how = (int64_t)option[1];
        at = (int64_t)option[2];
        limit = (int64_t)option[3];
        busy_us = (int64_t)option[4];
    }
    void fail(const char *where) const {
        if (how == THROW) throw std::runtime_error(std::string("planted fault in ") + where);
        if (how == THROW_NUMBER) throw 42;
        if (how == THROW_LONG) throw std::runtime_error(std::string(5000, 'x'));
        if (how == CRASH) *(volatile int *)nullptr = 1;
        for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    void reset(envfleet::Call &call) {
        count = 0;
        call.obs<double>()[0] = 0;
        if (phase == IN_RESET && call.rng().next_double() < 0.5) fail("reset");
    }
    void step(envfleet::Call &call) {
        work(busy_us);
        call.obs<double>()[0] = (double)++count;
        call.reward = 1;
        call.truncated = count >= limit;
        if (phase == IN_STEP && count == at) fail("step");
    }
};

// Counting with a state that is larger.
struct Big {
    int64_t count, unused[100];
    static constexpr const char *name = "Big";
    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.box<double>({1}, 0, 1e6);
        space.action.discrete(2);
    }
    void reset(envfleet::Call &call) { call.obs<double>()[0] = (double)(count = 0); }
    void step(envfleet::Call &call) { call.obs<double>()[0] = (double)++count; }
};

// Every kind of space: what arrives in `step` is what is observed.
template <typename T> struct Wide {
    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.box<T>({2, 3});
        space.action.box<T>({2, 3});
    }
    char unused;
    void reset(envfleet::Call &call) { memset(call.obs<T>(), 0, 6 * sizeof(T)); }
    void step(envfleet::Call &call) { memcpy(call.obs<T>(), call.action<T>(), 6 * sizeof(T)); }
};
struct Bytes : Wide<uint8_t> { static constexpr const char *name = "Bytes"; };
struct SignedBytes : Wide<int8_t> { static constexpr const char *name = "SignedBytes"; };
struct Ints : Wide<int32_t> { static constexpr const char *name = "Ints"; };
struct Longs : Wide<int64_t> { static constexpr const char *name = "Longs"; };
struct Floats : Wide<float> { static constexpr const char *name = "Floats"; };
struct Doubles : Wide<double> { static constexpr const char *name = "Doubles"; };

// Actions are indices: one outside would write where it must not.
struct Indexed {
    int64_t counts[6];
    static constexpr const char *name = "Indexed";
    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.box<int64_t>({6});
        space.action.multi_discrete(6, {2, 2});
    }
    void reset(envfleet::Call &call) {
        memset(counts, 0, sizeof counts);
        memcpy(call.obs<int64_t>(), counts, sizeof counts);
    }
    void step(envfleet::Call &call) {
        for (int i = 0; i < 4; i++) counts[call.action<int64_t>()[i]]++;
        memcpy(call.obs<int64_t>(), counts, sizeof counts);
    }
};

// Discrete observation, and actions that do not begin at 0.
struct Shifted {
    int64_t last;
    static constexpr const char *name = "Shifted";
    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.discrete(7, -3);
        space.action.discrete(7, -3);
    }
    void reset(envfleet::Call &call) { call.obs<int64_t>()[0] = -3; }
    void step(envfleet::Call &call) { call.obs<int64_t>()[0] = last = call.action<int64_t>()[0]; }
};

// Numbers near zero: zero where the thread that steps flushes them.
struct Tiny {
    int64_t busy_us;
    static constexpr const char *name = "Tiny";
    static constexpr envfleet::Option options[] = {{"busy_us", 0}};
    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.box<double>({1}, 0, 1);
        space.action.discrete(2);
    }
    void init(const double *option) { busy_us = (int64_t)option[0]; }
    void reset(envfleet::Call &call) { call.obs<double>()[0] = 0; }
    void step(envfleet::Call &call) {
        work(busy_us);
        volatile double least = 2.3e-308; // the smallest normal number, nearly
        call.obs<double>()[0] = least * 0.25;
    }
};

} // namespace

ENVFLEET_ENVS(envfleet::Table<Counting>::table, envfleet::Table<Tasked>::table, envfleet::Table<Faulty>::table,
              envfleet::Table<Big>::table, envfleet::Table<Bytes>::table, envfleet::Table<SignedBytes>::table, envfleet::Table<Ints>::table, envfleet::Table<Longs>::table,
              envfleet::Table<Floats>::table, envfleet::Table<Doubles>::table, envfleet::Table<Indexed>::table, envfleet::Table<Shifted>::table,
              envfleet::Table<Tiny>::table)
