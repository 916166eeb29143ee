// A native environment: a walk on a line. Build it with `envfleet native build FILE`.
#include "envfleet_env.h"

struct Walk {
    // The state: numbers and arrays of fixed size. It is copied as bytes, so it has no pointers and no containers.
    int64_t position, length, time;

    static constexpr const char *name = "Walk";

    // Options are numbers, with their defaults: ef.make(..., env_kwargs={"length": 20}).
    static constexpr envfleet::Option options[] = {{"length", 10}};

    // What is observed and what is done. obs: box<type>(shape, low, high). action: discrete(n), or box<float>(shape, low, high).
    static void spaces(const double *option, envfleet::Spaces &space) {
        if (option[0] < 1) throw std::invalid_argument("length must be at least 1");
        space.obs.box<float>({1}, -1, 1);
        space.action.discrete(2);
    }

    // Once, when the environment is made.
    void init(const double *option) { length = (int64_t)option[0]; }

    // The beginning of an episode. call.rng() draws the numbers that NumPy's generator would draw after the same seed.
    void reset(envfleet::Call &call) {
        position = (int64_t)call.rng().below(3) - 1;
        time = 0;
        observe(call);
    }

    // One step. reward, terminated and truncated are 0 before it.
    void step(envfleet::Call &call) {
        position += call.action<int64_t>()[0] == 1 ? 1 : -1;
        time++;
        call.terminated = position >= length || position <= -length;
        call.truncated = time >= 100 * length;
        call.reward = position >= length ? 1.0 : 0.0;
        observe(call);
    }

    void observe(envfleet::Call &call) const { call.obs<float>()[0] = (float)position / (float)length; }
};

ENVFLEET_ENV(Walk)
