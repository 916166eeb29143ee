// MuJoCo's library without its headers: Python (src/envfleet/native/mujoco_engine.py) hands over functions, the model and, for as many
// callers as may step at once, an mjData with the addresses of its fields. So one build serves every version of MuJoCo.
#ifndef ENVFLEET_MUJOCO_ENGINE_H
#define ENVFLEET_MUJOCO_ENGINE_H

#include "envfleet_env.h"
#include <sched.h>
#include <string>

namespace mujoco {

// An mjData. Whoever sets `busy` may use it: nothing in it outlives a call, the state of an environment is in its own memory.
struct Lane {
    void *data;
    double *qpos, *qvel, *ctrl, *main_xpos, *forces;
    int64_t busy;
};

// `Engine` of mujoco_engine.py: the same fields in the same order.
struct Engine {
    void (*step)(const void *model, void *data);
    void (*forward)(const void *model, void *data);
    void (*reset_data)(const void *model, void *data);
    void (*rne_post_constraint)(const void *model, void *data);
    void (*get_state)(const void *model, const void *data, double *state, int bits);
    void (*set_state)(const void *model, void *data, const double *state, int bits);
    double (*standard_normal)(EnvBitgen *bits);
    const void *model;
    Lane *lanes;
    const double *start_qpos, *start_qvel, *tasks;
    int64_t num_lanes, nq, nv, nu, num_forces, state_bits, frame_skip, kind, num_skipped, shows_forces, needs_forces, ends_unhealthy,
        horizon, num_tasks, single_costs;
    double dt, noise, forward_weight, ctrl_weight, contact_weight, healthy_reward, low_z, high_z, low_force, high_force, max_speed;
};

// Holds a lane during a call; each thread begins at its own, so that its caches stay warm.
class Claim {
  public:
    Claim(const Engine &engine, int thread) {
        for (int64_t i = thread;; i++) {
            lane = &engine.lanes[i % engine.num_lanes];
            if (!__atomic_exchange_n(&lane->busy, 1, __ATOMIC_ACQUIRE)) return;
            if ((i + 1 - thread) % engine.num_lanes == 0) sched_yield(); // more callers than lanes
        }
    }
    ~Claim() { __atomic_store_n(&lane->busy, 0, __ATOMIC_RELEASE); }
    Claim(const Claim &) = delete;
    Lane *lane;
};

// Calls `work(argument)`, which may call MuJoCo. True, or false with the text of MuJoCo's error. No object with a destructor may live in
// `work`: an error jumps out of it.
bool guarded(void (*work)(void *), void *argument, std::string &error);

template <typename Work> bool guarded(Work work, std::string &error) {
    return guarded([](void *argument) { (*(Work *)argument)(); }, &work, error);
}

} // namespace mujoco
#endif
