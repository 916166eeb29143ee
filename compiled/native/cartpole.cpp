// CartPole-v1, with the arithmetic of Gymnasium's class: the same operations in the same order, so that the float64 state is equal to the bit.
#include "envs.h"

// A second version for processors with wider vectors, chosen when the library is loaded: 2 % of a step.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define WIDER __attribute__((target_clones("avx2", "default")))
#else
#define WIDER
#endif

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
    // Many at a time: a step is mostly waiting for the results of sines and divisions, and here each waits for others too. The loop
    // between gathering and scattering has no branch, so that the compiler makes vector instructions of it, which round as others do.
    static void step_many(int64_t count, CartPole *const *envs, envfleet::Call *calls) noexcept {
        for (int64_t first = 0; first < count; first += WIDTH)
            step_some(count - first < WIDTH ? count - first : WIDTH, envs + first, calls + first);
    }
    static constexpr int64_t WIDTH = 32;
    WIDER static void step_some(int64_t count, CartPole *const *envs, envfleet::Call *calls) noexcept {
        double force[WIDTH], x[WIDTH], x_dot[WIDTH], theta[WIDTH], theta_dot[WIDTH], sine[WIDTH], cosine[WIDTH];
        for (int64_t i = 0; i < count; i++) {
            const CartPole &env = *envs[i];
            force[i] = calls[i].action<int64_t>()[0] == 1 ? 10.0 : -10.0;
            x[i] = env.x;
            x_dot[i] = env.x_dot;
            theta[i] = env.theta;
            theta_dot[i] = env.theta_dot;
            sine[i] = sin(env.theta);
            cosine[i] = cos(env.theta);
        }
        for (int64_t i = 0; i < count; i++) {
            double temp = (force[i] + pole_mass_length * (theta_dot[i] * theta_dot[i]) * sine[i]) / total_mass;
            double theta_acc = (gravity * sine[i] - cosine[i] * temp) /
                               (length * (4.0 / 3.0 - mass_pole * (cosine[i] * cosine[i]) / total_mass));
            double x_acc = temp - pole_mass_length * theta_acc * cosine[i] / total_mass;
            x[i] = x[i] + tau * x_dot[i];
            x_dot[i] = x_dot[i] + tau * x_acc;
            theta[i] = theta[i] + tau * theta_dot[i];
            theta_dot[i] = theta_dot[i] + tau * theta_acc;
        }
        for (int64_t i = 0; i < count; i++) envs[i]->arrive({x[i], x_dot[i], theta[i], theta_dot[i]}, calls[i]);
    }
    struct State {
        double x, x_dot, theta, theta_dot;
    };
    // The new state, its reward and end.
    void arrive(const State &next, envfleet::Call &call) {
        x = next.x;
        x_dot = next.x_dot;
        theta = next.theta;
        theta_dot = next.theta_dot;
        static constexpr double rewards[2][2][2] = {{{1, 1}, {1, 0}}, {{0, 0}, {-1, -1}}}; // an end is hard to predict: no branches here
        int ended = (x < -x_limit) | (x > x_limit) | (theta < -theta_limit) | (theta > theta_limit);
        call.reward = rewards[sutton_barto_reward][ended][fallen];
        call.terminated = (uint8_t)ended;
        fallen |= ended;
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
