// CartPole-v1, with the arithmetic of Gymnasium's class: the same operations in the same order, so that the float64 state is equal to the bit.
#include "envs.h"

namespace {

struct CartPole {
    double x, x_dot, theta, theta_dot;
    int32_t sutton_barto_reward, fallen;

    static constexpr const char *name = "CartPole-v1";
    static constexpr envfleet::Option options[] = {{"sutton_barto_reward", 0}};
    static constexpr double gravity = 9.8, mass_pole = 0.1, total_mass = 0.1 + 1.0, length = 0.5, pole_mass_length = 0.1 * 0.5,
                            tau = 0.02, x_limit = 2.4, theta_limit = 12 * 2 * 3.141592653589793 / 360;

    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.box<float>({4});
        space.action.discrete(2);
    }
    void init(const double *option) { sutton_barto_reward = option[0] != 0; }
    void reset(envfleet::Call &call) {
        for (double *value : {&x, &x_dot, &theta, &theta_dot}) *value = call.rng().uniform(-0.05, 0.05);
        fallen = 0;
        write(call.obs<float>());
    }
    void step(envfleet::Call &call) {
        double force = call.action<int64_t>()[0] == 1 ? 10.0 : -10.0, cosine = cos(theta), sine = sin(theta);
        double temp = (force + pole_mass_length * (theta_dot * theta_dot) * sine) / total_mass;
        double theta_acc = (gravity * sine - cosine * temp) / (length * (4.0 / 3.0 - mass_pole * (cosine * cosine) / total_mass));
        double x_acc = temp - pole_mass_length * theta_acc * cosine / total_mass;
        x = x + tau * x_dot;
        x_dot = x_dot + tau * x_acc;
        theta = theta + tau * theta_dot;
        theta_dot = theta_dot + tau * theta_acc;
        call.terminated = x < -x_limit || x > x_limit || theta < -theta_limit || theta > theta_limit;
        if (!call.terminated) call.reward = sutton_barto_reward ? 0.0 : 1.0;
        else call.reward = sutton_barto_reward ? -1.0 : fallen ? 0.0 : 1.0;
        fallen |= call.terminated;
        write(call.obs<float>());
    }
    void write(float *obs) const {
        obs[0] = (float)x;
        obs[1] = (float)x_dot;
        obs[2] = (float)theta;
        obs[3] = (float)theta_dot;
    }
};

} // namespace

const EnvTable *cartpole_table() { return envfleet::Table<CartPole>::table(); }
