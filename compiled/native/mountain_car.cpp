// MountainCar-v0 and MountainCarContinuous-v0, with the arithmetic of Gymnasium's classes: operations, their order and their precision.
#include "envs.h"

namespace {

constexpr double min_position = -1.2, max_position = 0.6, max_speed = 0.07;

struct MountainCar {
    double position, velocity, goal_velocity;

    static constexpr const char *name = "MountainCar-v0";
    static constexpr envfleet::Option options[] = {{"goal_velocity", 0}};

    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.box<float>({2});
        space.action.discrete(3);
    }
    void init(const double *option) { goal_velocity = option[0]; }
    void reset(envfleet::Call &call) {
        position = call.rng().uniform(-0.6, -0.4);
        velocity = 0;
        write(call.obs<float>());
    }
    void step(envfleet::Call &call) {
        velocity += (double)(call.action<int64_t>()[0] - 1) * 0.001 + cos(3 * position) * -0.0025;
        velocity = clip(velocity, -max_speed, max_speed);
        position += velocity;
        position = clip(position, min_position, max_position);
        if (position == min_position && velocity < 0) velocity = 0;
        call.terminated = position >= 0.5 && velocity >= goal_velocity;
        call.reward = -1.0;
        write(call.obs<float>());
    }
    void write(float *obs) const {
        obs[0] = (float)position;
        obs[1] = (float)velocity;
    }
};

// Gymnasium's class begins an episode with float64 numbers and goes on with float32 ones. Arithmetic between a float32 number of NumPy's
// and a float of Python's is float32; a number that was clipped is a float of Python's.
struct MountainCarContinuous {
    double position, velocity, goal_velocity;
    int64_t is_float32; // whether position and velocity are float32 numbers now

    static constexpr const char *name = "MountainCarContinuous-v0";
    static constexpr envfleet::Option options[] = {{"goal_velocity", 0}};

    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.box<float>({2});
        space.action.box<float>({1}, -1, 1);
    }
    void init(const double *option) { goal_velocity = option[0]; }
    void reset(envfleet::Call &call) {
        position = call.rng().uniform(-0.6, -0.4);
        velocity = 0;
        is_float32 = 0;
        write(call.obs<float>());
    }
    static double push(float action, double slope) {
        if (-1.0f > action) return -1.0 * 0.0015 - slope;
        if (1.0f < action) return 1.0 * 0.0015 - slope;
        return (double)(action * 0.0015f - (float)slope);
    }
    // Real: the precision of position and velocity.
    template <typename Real> void move(double added) {
        Real fast = (Real)velocity + (Real)added;
        bool fast_clipped = true, at_clipped = true;
        double speed, at;
        if (fast > (Real)max_speed) speed = max_speed;
        else if (fast < (Real)-max_speed) speed = -max_speed;
        else speed = (double)fast, fast_clipped = false;
        Real there = (Real)position + (Real)speed;
        if (there > (Real)max_position) at = max_position;
        else if (there < (Real)min_position) at = min_position;
        else at = (double)there, at_clipped = false;
        if (at == (at_clipped ? min_position : (double)(Real)min_position) && speed < 0) speed = 0, fast_clipped = true;
        position = at;
        velocity = speed;
        is_arrived = (at_clipped ? at >= 0.45 : (Real)at >= (Real)0.45) &&
                     (fast_clipped ? speed >= goal_velocity : (Real)speed >= (Real)goal_velocity);
    }
    bool is_arrived;

    void step(envfleet::Call &call) {
        float action = call.action<float>()[0];
        if (is_float32) move<float>(push(action, 0.0025 * cos((double)(3 * (float)position))));
        else move<double>(push(action, 0.0025 * cos(3 * position)));
        call.terminated = is_arrived;
        call.reward = (is_arrived ? 100.0 : 0.0) - pow((double)action, 2.0) * 0.1;
        position = (double)(float)position;
        velocity = (double)(float)velocity;
        is_float32 = 1;
        write(call.obs<float>());
    }
    void write(float *obs) const {
        obs[0] = (float)position;
        obs[1] = (float)velocity;
    }
};

} // namespace

const EnvTable *mountain_car_table() { return envfleet::Table<MountainCar>::table(); }
const EnvTable *mountain_car_continuous_table() { return envfleet::Table<MountainCarContinuous>::table(); }
