// Acrobot-v1, with the arithmetic of Gymnasium's class: the same operations in the same order.
#include "envs.h"

namespace {

// The sine and cosine of a small float32 number, as NumPy computes them: polynomials in float32, each step rounded once. Only the first
// observation of an episode needs them, because its angles are float32 numbers between -0.1 and 0.1; later ones are float64.
float small_sine(float x) {
    float square = x * x, sum = 0x1.7d3bbcp-19f;
    for (float next : {-0x1.a06bbap-13f, 0x1.11119ap-07f, -0x1.555556p-03f, 0.0f}) sum = fmaf(sum, square, next);
    return fmaf(sum, x, x);
}

float small_cosine(float x) {
    float square = x * x, sum = 0x1.98e616p-16f;
    for (float next : {-0x1.6c06dcp-10f, 0x1.55553cp-05f, -0.5f, 1.0f}) sum = fmaf(sum, square, next);
    return sum;
}

struct Acrobot {
    double angle1, angle2, speed1, speed2;

    static constexpr const char *name = "Acrobot-v1";
    static constexpr double pi = 3.141592653589793, gravity = 9.8, time_step = 0.2;
    struct Rates {
        double of[4];
    };

    static void spaces(const double *, envfleet::Spaces &space) {
        space.obs.box<float>({6});
        space.action.discrete(3);
    }
    void reset(envfleet::Call &call) {
        float drawn[4];
        for (float &value : drawn) value = (float)call.rng().uniform(-0.1, 0.1);
        angle1 = drawn[0];
        angle2 = drawn[1];
        speed1 = drawn[2];
        speed2 = drawn[3];
        float *obs = call.obs<float>();
        obs[0] = small_cosine(drawn[0]);
        obs[1] = small_sine(drawn[0]);
        obs[2] = small_cosine(drawn[1]);
        obs[3] = small_sine(drawn[1]);
        obs[4] = drawn[2];
        obs[5] = drawn[3];
    }
    // Masses, lengths and moments of both links are 1, their centres of mass at 0.5.
    Rates rates(const double *y, double torque) const {
        double theta1 = y[0], theta2 = y[1], rate1 = y[2], rate2 = y[3], sine2 = sin(theta2), cosine2 = cos(theta2);
        double d1 = 0.25 + (1.25 + cosine2) + 1.0 + 1.0;
        double d2 = 0.25 + 0.5 * cosine2 + 1.0;
        double phi2 = 0.5 * gravity * cos(theta1 + theta2 - pi / 2.0);
        double phi1 = -0.5 * pow(rate2, 2.0) * sine2 - rate2 * rate1 * sine2 + 1.5 * gravity * cos(theta1 - pi / 2) + phi2;
        double force = torque + d2 / d1 * phi1 - 0.5 * pow(rate1, 2.0) * sine2 - phi2;
        double acceleration2 = force / (0.25 + 1.0 - pow(d2, 2.0) / d1);
        return {{rate1, rate2, -(d2 * acceleration2 + phi1) / d1, acceleration2}};
    }
    // One step of Runge and Kutta's fourth order.
    void integrate(double torque) {
        double begin[4] = {angle1, angle2, speed1, speed2}, at[4];
        Rates k1 = rates(begin, torque);
        for (int i = 0; i < 4; i++) at[i] = begin[i] + time_step / 2.0 * k1.of[i];
        Rates k2 = rates(at, torque);
        for (int i = 0; i < 4; i++) at[i] = begin[i] + time_step / 2.0 * k2.of[i];
        Rates k3 = rates(at, torque);
        for (int i = 0; i < 4; i++) at[i] = begin[i] + time_step * k3.of[i];
        Rates k4 = rates(at, torque);
        for (int i = 0; i < 4; i++)
            at[i] = begin[i] + time_step / 6.0 * (k1.of[i] + 2 * k2.of[i] + 2 * k3.of[i] + k4.of[i]);
        angle1 = wrap(at[0]);
        angle2 = wrap(at[1]);
        speed1 = clip(at[2], -4 * pi, 4 * pi);
        speed2 = clip(at[3], -9 * pi, 9 * pi);
    }
    static double wrap(double angle) {
        while (angle > pi) angle = angle - 2 * pi;
        while (angle < -pi) angle = angle + 2 * pi;
        return angle;
    }
    void step(envfleet::Call &call) {
        integrate((double)(call.action<int64_t>()[0] - 1));
        call.terminated = -cos(angle1) - cos(angle2 + angle1) > 1.0;
        call.reward = call.terminated ? 0.0 : -1.0;
        float *obs = call.obs<float>();
        obs[0] = (float)cos(angle1);
        obs[1] = (float)sin(angle1);
        obs[2] = (float)cos(angle2);
        obs[3] = (float)sin(angle2);
        obs[4] = (float)speed1;
        obs[5] = (float)speed2;
    }
};

} // namespace

const EnvTable *acrobot_table() { return envfleet::Table<Acrobot>::table(); }
