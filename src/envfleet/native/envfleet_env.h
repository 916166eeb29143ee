// How to write an environment in C++ for envfleet: include this one header, write a struct, name it with ENVFLEET_ENV.
//
//     #include "envfleet_env.h"
//
//     struct Walk {                      // its bytes are the whole state: no pointers, no containers
//         int64_t at, length;
//         static constexpr const char *name = "Walk";
//         static constexpr envfleet::Option options[] = {{"length", 10}};
//         static void spaces(const double *option, envfleet::Spaces &space) {
//             space.obs.box<float>({1}, 0, option[0]);
//             space.action.discrete(2);
//         }
//         void init(const double *option) { length = (int64_t)option[0]; }
//         void reset(envfleet::Call &call) { at = 0; call.obs<float>()[0] = 0; }
//         void step(envfleet::Call &call) {
//             at += call.action<int64_t>()[0] ? 1 : -1;
//             call.obs<float>()[0] = (float)at;
//             call.reward = at > 0;
//             call.terminated = at == length;
//         }
//     };
//     ENVFLEET_ENV(Walk)
//
// Build it: `envfleet native build walk.cpp`. Use it: `ef.make("native:walk.so", num_envs=1024)`. An exception (std::exception, or
// anything else that is thrown) becomes a fault of its slot. A segfault ends the process: there is nothing between the two.
//
// The interface between the library and envfleet is plain C (EnvTable, EnvCall, EnvSpace below), so that a library does not depend on
// the Python version or on NumPy. Every struct begins the same in later versions: fields are added at the end.
#ifndef ENVFLEET_ENV_H
#define ENVFLEET_ENV_H

#include <stddef.h>
#include <stdint.h>

#define ENVFLEET_ABI 1
#define ENVFLEET_MAX_DIMS 4
#define ENVFLEET_ERROR_BYTES 256

#ifdef __cplusplus
extern "C" {
#endif

// NumPy's PCG64, bit for bit: a generator that was seeded by NumPy goes on here. 64 bytes, so that the state behind it is aligned.
typedef struct {
    uint64_t state_high, state_low, inc_high, inc_low;
    uint32_t has_uint32, uinteger; // the half of a 64-bit number that the last next_uint32 left
    uint64_t unused[3];
} EnvRandom;

// NumPy's bitgen_t, for code that draws through it.
typedef struct {
    void *state;
    uint64_t (*next_uint64)(void *);
    uint32_t (*next_uint32)(void *);
    double (*next_double)(void *);
    uint64_t (*next_raw)(void *);
} EnvBitgen;

enum { ENV_BOX = 0, ENV_DISCRETE = 1, ENV_MULTI_DISCRETE = 2 };
enum { ENV_UINT8 = 0, ENV_INT32 = 1, ENV_INT64 = 2, ENV_FLOAT32 = 3, ENV_FLOAT64 = 4, ENV_INT8 = 5 };

typedef struct {
    int32_t kind, dtype, ndim, unused;
    int64_t shape[ENVFLEET_MAX_DIMS];
    double low, high;        // of a box, for every element
    int64_t count, start;    // of a discrete space; of a multi-discrete one: count in every dimension
} EnvSpace;

typedef struct {
    EnvSpace obs, action;
    int64_t task_size;       // numbers in a task, 0: the environment has no tasks
} EnvSpaces;

// One call of reset or step.
typedef struct {
    EnvRandom *random;
    const double *task;      // NULL: none was given, so the environment draws its own (only reset reads it)
    const void *action;
    void *obs;               // where to write the observation
    double reward;           // 0 before every step
    uint8_t terminated, truncated; // 0 before every step
    int32_t thread;          // which of the stepping threads this is, 0 to num_threads - 1
    const void *shared;      // what the Python class handed over for all its environments, or NULL
    char *error;             // where a fault is described, ENVFLEET_ERROR_BYTES
} EnvCall;

typedef struct {
    uint32_t abi, table_bytes;
    const char *name;
    int64_t num_options;
    const char *const *option_names;
    const double *option_defaults;
    uint64_t state_bytes;
    // Each returns 0, or 1 with a description in `error`.
    int (*spaces)(const double *options, EnvSpaces *out, char *error);
    int (*init)(void *state, const double *options, const void *shared, char *error);
    int (*reset)(void *state, EnvCall *call);
    // Steps several environments, each with its own call. Returns how many were stepped; fewer than `count`: the next one failed, with a
    // description in its `error`. One call for many, so that the processor works on the next step while results of this one are not there yet.
    int64_t (*step)(int64_t count, void *const *states, EnvCall *calls);
    int64_t (*render)(const void *state, char *out, int64_t room); // NULL, or: writes text, returns how many bytes it needs; -1: an error, described there
} EnvTable;

#ifdef __cplusplus
} // extern "C"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <type_traits>

namespace envfleet {

struct Random : EnvRandom {
    uint64_t next_uint64() {
        unsigned __int128 state = ((unsigned __int128)state_high << 64) | state_low, inc = ((unsigned __int128)inc_high << 64) | inc_low;
        state = state * (((unsigned __int128)0x2360ED051FC65DA4ULL << 64) | 0x4385DF649FCCF645ULL) + inc;
        state_high = (uint64_t)(state >> 64);
        state_low = (uint64_t)state;
        uint64_t mixed = state_high ^ state_low;
        unsigned turn = (unsigned)(state_high >> 58);
        return (mixed >> turn) | (mixed << ((64 - turn) & 63));
    }
    uint32_t next_uint32() {
        if (has_uint32) {
            has_uint32 = 0;
            return uinteger;
        }
        uint64_t both = next_uint64();
        has_uint32 = 1;
        uinteger = (uint32_t)(both >> 32);
        return (uint32_t)both;
    }
    // As Generator.random().
    double next_double() { return (double)(next_uint64() >> 11) * (1.0 / 9007199254740992.0); }
    // As Generator.uniform(low, high).
    double uniform(double low, double high) { return low + (high - low) * next_double(); }
    // As Generator.integers(count), count from 1 to 2^32 - 1.
    uint32_t below(uint32_t count) {
        if (count <= 1) return 0; // one value: nothing is drawn
        uint64_t product = (uint64_t)next_uint32() * count;
        if ((uint32_t)product < count) {
            uint32_t least = (0u - count) % count;
            while ((uint32_t)product < least) product = (uint64_t)next_uint32() * count;
        }
        return (uint32_t)(product >> 32);
    }
    // As Generator.permutation(count).
    template <typename Number> void permutation(Number *out, uint32_t count) {
        for (uint32_t i = 0; i < count; i++) out[i] = (Number)i;
        for (uint32_t last = count ? count - 1 : 0; last > 0; last--) {
            uint32_t mask = UINT32_MAX >> __builtin_clz(last), j;
            do j = next_uint32() & mask; // NumPy draws these with a mask, not as integers()
            while (j > last);
            Number kept = out[last];
            out[last] = out[j];
            out[j] = kept;
        }
    }
    // The same stream as NumPy's bitgen_t; valid while this object stays where it is.
    EnvBitgen bitgen() {
        return {this, [](void *r) { return ((Random *)r)->next_uint64(); }, [](void *r) { return ((Random *)r)->next_uint32(); },
                [](void *r) { return ((Random *)r)->next_double(); }, [](void *r) { return ((Random *)r)->next_uint64(); }};
    }
};

template <typename T> constexpr int32_t dtype_of() {
    if (std::is_same<T, uint8_t>::value) return ENV_UINT8;
    if (std::is_same<T, int32_t>::value) return ENV_INT32;
    if (std::is_same<T, int64_t>::value) return ENV_INT64;
    if (std::is_same<T, float>::value) return ENV_FLOAT32;
    if (std::is_same<T, int8_t>::value) return ENV_INT8;
    static_assert(std::is_arithmetic<T>::value && (sizeof(T) == 8 || sizeof(T) == 4 || sizeof(T) == 1) &&
                      (std::is_signed<T>::value || sizeof(T) == 1) && !std::is_same<T, bool>::value,
                  "a space holds uint8_t, int8_t, int32_t, int64_t, float or double");
    return ENV_FLOAT64;
}

struct Space : EnvSpace {
    template <typename T>
    void box(std::initializer_list<int64_t> dims, double lowest = -INFINITY, double highest = INFINITY) {
        set(ENV_BOX, dtype_of<T>(), dims);
        low = lowest;
        high = highest;
    }
    void discrete(int64_t values, int64_t first = 0) {
        set(ENV_DISCRETE, ENV_INT64, {});
        count = values;
        start = first;
    }
    void multi_discrete(int64_t values, std::initializer_list<int64_t> dims) {
        set(ENV_MULTI_DISCRETE, ENV_INT64, dims);
        count = values;
    }

  private:
    void set(int32_t kind_, int32_t dtype_, std::initializer_list<int64_t> dims) {
        if (dims.size() > ENVFLEET_MAX_DIMS) throw std::invalid_argument("a space has at most 4 dimensions");
        kind = kind_;
        dtype = dtype_;
        ndim = 0;
        for (int64_t size : dims) shape[ndim++] = size;
    }
};

struct Spaces {
    Space obs, action;
    int64_t task_size;
};
static_assert(sizeof(Spaces) == sizeof(EnvSpaces) && sizeof(Random) == sizeof(EnvRandom), "the C++ types only add methods");

struct Call : EnvCall {
    Random &rng() { return *(Random *)random; }
    template <typename T> T *obs() { return (T *)EnvCall::obs; }
    template <typename T> const T *action() const { return (const T *)EnvCall::action; }
};

struct Option {
    const char *name;
    double value;
};

// The table of functions of one environment, with a try around each.
template <typename Env> struct Table {
    static_assert(std::is_trivially_copyable<Env>::value, "an environment is copied as bytes: no pointers to itself, no containers");

    // `options` and `init` may be left out.
    template <typename E> static constexpr auto count_options(int) -> decltype(sizeof(E::options)) {
        return sizeof(E::options) / sizeof(Option);
    }
    template <typename E> static constexpr size_t count_options(long) { return 0; }
    template <typename E> static auto option(size_t i, int) -> decltype(E::options[i], Option()) { return E::options[i]; }
    template <typename E> static Option option(size_t, long) { return {"", 0}; }
    static constexpr size_t num_options = count_options<Env>(0);

    template <typename Work> static int guarded(char *error, Work work) {
        try {
            work();
            return 0;
        } catch (const std::exception &problem) {
            std::snprintf(error, ENVFLEET_ERROR_BYTES, "%s", problem.what());
        } catch (...) {
            std::snprintf(error, ENVFLEET_ERROR_BYTES, "it threw something that is not a std::exception");
        }
        return 1;
    }
    static int spaces(const double *options, EnvSpaces *out, char *error) {
        return guarded(error, [&] { Env::spaces(options, *(Spaces *)out); });
    }
    template <typename E> static auto init_with(E *env, const double *options, const void *shared, int)
        -> decltype(env->init(options, shared), void()) {
        env->init(options, shared);
    }
    template <typename E> static auto init_with(E *env, const double *options, const void *, long) -> decltype(env->init(options), void()) {
        env->init(options);
    }
    template <typename E> static void init_with(E *, const double *, const void *, ...) {}
    static int init(void *state, const double *options, const void *shared, char *error) {
        return guarded(error, [&] { init_with((Env *)state, options, shared, 0); });
    }
    static int reset(void *state, EnvCall *call) {
        return guarded(call->error, [&] { ((Env *)state)->reset(*(Call *)call); });
    }
    template <typename E> static auto step_all(int64_t count, void *const *states, EnvCall *calls, int)
        -> decltype(E::step_many(count, (E *const *)states, (Call *)calls), int64_t()) {
        static_assert(noexcept(E::step_many(count, (E *const *)states, (Call *)calls)), "step_many is noexcept: nobody could tell whose fault it is");
        E::step_many(count, (E *const *)states, (Call *)calls);
        return count;
    }
    template <typename E> static int64_t step_all(int64_t count, void *const *states, EnvCall *calls, long) {
        int64_t i = 0;
        while (i < count && !guarded(calls[i].error, [&] { ((E *)states[i])->step(*(Call *)&calls[i]); })) i++;
        return i;
    }
    static int64_t step(int64_t count, void *const *states, EnvCall *calls) { return step_all<Env>(count, states, calls, 0); }
    template <typename E> static auto render_of(int) -> decltype(std::declval<const E>().render((char *)0, (int64_t)0), (int64_t(*)(const void *, char *, int64_t))0) {
        return [](const void *state, char *out, int64_t room) -> int64_t {
            int64_t size = 0;
            char error[ENVFLEET_ERROR_BYTES];
            if (!guarded(error, [&] { size = ((const E *)state)->render(out, room); })) return size;
            std::snprintf(out, (size_t)room, "%s", error);
            return -1;
        };
    }
    template <typename E> static int64_t (*render_of(long))(const void *, char *, int64_t) { return nullptr; }

    static const EnvTable *table() {
        static const char *names[num_options + 1];
        static double defaults[num_options + 1];
        for (size_t i = 0; i < num_options; i++) {
            names[i] = option<Env>(i, 0).name;
            defaults[i] = option<Env>(i, 0).value;
        }
        static const EnvTable made = {ENVFLEET_ABI, (uint32_t)sizeof(EnvTable), Env::name, (int64_t)num_options, names, defaults,
                                      sizeof(Env), spaces, init, reset, step, render_of<Env>(0)};
        return &made;
    }
};

} // namespace envfleet

#if defined(_WIN32)
#define ENVFLEET_EXPORT extern "C" __declspec(dllexport)
#else
#define ENVFLEET_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Environment number i of the library; NULL behind the last.
#define ENVFLEET_ENVS(...)                                                                                             \
    ENVFLEET_EXPORT const EnvTable *envfleet_env(int64_t i) {                                                          \
        static const EnvTable *(*const all[])() = {__VA_ARGS__};                                                       \
        return i >= 0 && i < (int64_t)(sizeof all / sizeof *all) ? all[i]() : nullptr;                                 \
    }
#define ENVFLEET_ENV(Env) ENVFLEET_ENVS(envfleet::Table<Env>::table)

#endif // __cplusplus
#endif
