// Pendulum-v1, with the arithmetic of Gymnasium's class: what the torque alone decides is float32, the rest float64.
#include "envs.h"

namespace {

struct Pendulum {
    double theta, theta_dot, gravity;

    static constexpr const char *name = "Pendulum-v1";
    static constexpr envfleet::Option options[] = {{"g", 10}};
    static constexpr double pi = 3.141592653589793, max_speed = 8, time_step = 0.05;
    static constexpr float max_torque = 2.0f;

    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.box<float>({3});
        space.action.box<float>({1}, -2, 2);
    }
    void init(const double *option) { gravity = option[0]; }
    void reset(envfleet::Call &call) {
        theta = call.rng().uniform(-pi, pi);
        theta_dot = call.rng().uniform(-1, 1);
        write(call.obs<float>());
    }
    // The angle between -pi and pi, with NumPy's remainder: it has the sign of the divisor.
    static double normal(double angle) {
        double rest = fmod(angle + pi, 2 * pi);
        if (rest < 0) rest += 2 * pi;
        return rest - pi;
    }
    void step(envfleet::Call &call) {
        float torque = clip(call.action<float>()[0], -max_torque, max_torque);
        double cost = pow(normal(theta), 2.0) + 0.1 * pow(theta_dot, 2.0) + (double)(0.001f * powf(torque, 2.0f));
        double speed = theta_dot + (3 * gravity / 2.0 * sin(theta) + (double)(3.0f * torque)) * time_step;
        theta_dot = clip(speed, -max_speed, max_speed);
        theta = theta + theta_dot * time_step;
        call.reward = -cost;
        write(call.obs<float>());
    }
    void write(float *obs) const {
        obs[0] = (float)cos(theta);
        obs[1] = (float)sin(theta);
        obs[2] = (float)theta_dot;
    }
};

} // namespace

const EnvTable *pendulum_table() { return envfleet::Table<Pendulum>::table(); }
