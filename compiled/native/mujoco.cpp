// Ant-v5, HalfCheetah-v5 and the families of tasks over them, with the arithmetic of the classes in Python: the same numbers in the same
// order, single precision where they have it. MuJoCo's own library does the physics (mujoco_engine.h).
#include "envs.h"
#include "mujoco_engine.h"

namespace {

using mujoco::Claim;
using mujoco::Engine;
using mujoco::Lane;

// As in src/envfleet/native/mujoco_engine.py.
enum Kind { ANT, HALF_CHEETAH, ANT_DIR, ANT_GOAL, HALF_CHEETAH_VEL, HALF_CHEETAH_DIR };

// np.sum of contiguous numbers: NumPy adds in eight columns, and in halves where there are many.
template <typename T> T numpy_sum(const T *values, int64_t count) {
    if (count < 8) {
        T sum = 0;
        for (int64_t i = 0; i < count; i++) sum += values[i];
        return sum;
    }
    if (count > 128) {
        int64_t half = count / 2 - count / 2 % 8;
        return numpy_sum(values, half) + numpy_sum(values + half, count - half);
    }
    T part[8];
    for (int i = 0; i < 8; i++) part[i] = values[i];
    int64_t at = 8;
    for (; at < count - count % 8; at += 8)
        for (int i = 0; i < 8; i++) part[i] += values[at + i];
    T sum = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    for (; at < count; at++) sum += values[at];
    return sum;
}

// np.clip: what is not a number stays so.
double clipped(double value, double low, double high) {
    double least = std::isnan(value) || value > low ? value : low;
    return std::isnan(least) || least < high ? least : high;
}

struct Mujoco {
    static constexpr int64_t room = 1000, most_forces = 1000, most_actions = 100;

    double main_x, main_y; // of the main body, as MuJoCo computed it last: before the positions of the last frame were known
    double task[2];
    int64_t elapsed;
    double row[room];      // MuJoCo's integration state

    static constexpr const char *name = "MuJoCo";
    static constexpr envfleet::Option options[] = {{"obs_size", 1}, {"action_size", 1}, {"task_size", 0}};

    static void spaces(const double *option, envfleet::Spaces &space) {
        space.obs.box<double>({(int64_t)option[0]});
        space.action.box<float>({(int64_t)option[1]}, -1, 1);
        space.task_size = (int64_t)option[2];
    }
    void init(const double *, const void *shared) {
        if (!shared) throw std::invalid_argument("it is made by the classes of envfleet.envs.native_mujoco");
    }

    void reset(envfleet::Call &call) {
        const Engine &engine = *(const Engine *)call.shared;
        Claim claim(engine, call.thread);
        const Lane &lane = *claim.lane;
        EnvBitgen bits = call.rng().bitgen();
        run(engine, lane, [&] {
            engine.reset_data(engine.model, lane.data);
            for (int64_t i = 0; i < engine.nq; i++)
                lane.qpos[i] = engine.start_qpos[i] + call.rng().uniform(-engine.noise, engine.noise);
            for (int64_t i = 0; i < engine.nv; i++)
                lane.qvel[i] = engine.start_qvel[i] + engine.noise * engine.standard_normal(&bits);
            engine.forward(engine.model, lane.data);
            engine.get_state(engine.model, lane.data, row, (int)engine.state_bits);
        });
        main_x = lane.main_xpos[0];
        main_y = lane.main_xpos[1];
        elapsed = 0;
        if (call.task) memcpy(task, call.task, (engine.kind == ANT_GOAL ? 2 : 1) * sizeof *task);
        else draw_task(engine, call.rng());
        write(engine, lane, call.obs<double>());
    }

    void step(envfleet::Call &call) {
        const Engine &engine = *(const Engine *)call.shared;
        Claim claim(engine, call.thread);
        const Lane &lane = *claim.lane;
        const float *action = call.action<float>();
        double x_before = 0;
        run(engine, lane, [&] {
            engine.set_state(engine.model, lane.data, row, (int)engine.state_bits);
            x_before = lane.qpos[0];
            for (int64_t i = 0; i < engine.nu; i++) lane.ctrl[i] = action[i];
            for (int64_t i = 0; i < engine.frame_skip; i++) engine.step(engine.model, lane.data);
            if (engine.needs_forces) engine.rne_post_constraint(engine.model, lane.data);
            engine.get_state(engine.model, lane.data, row, (int)engine.state_bits);
        });
        double x_speed = (lane.main_xpos[0] - main_x) / engine.dt, y_speed = (lane.main_xpos[1] - main_y) / engine.dt;
        main_x = lane.main_xpos[0];
        main_y = lane.main_xpos[1];
        if (!is_ant(engine)) x_speed = (lane.qpos[0] - x_before) / engine.dt;
        bool healthy = is_ant(engine) && is_healthy(engine, lane);
        call.reward = reward(engine, lane, action, x_speed, y_speed, healthy);
        call.terminated = is_ant(engine) && !healthy && engine.ends_unhealthy;
        call.truncated = engine.horizon && ++elapsed >= engine.horizon;
        write(engine, lane, call.obs<double>());
    }

  private:
    static bool is_ant(const Engine &engine) { return engine.kind == ANT || engine.kind == ANT_DIR || engine.kind == ANT_GOAL; }

    // After an error the mjData is in the middle of something: it is emptied for the next caller.
    template <typename Work> static void run(const Engine &engine, const Lane &lane, Work work) {
        std::string error, ignored;
        if (mujoco::guarded(work, error)) return;
        mujoco::guarded([&] { engine.reset_data(engine.model, lane.data); }, ignored);
        throw std::runtime_error(error);
    }

    // As the `sample` of the families' task spaces (src/envfleet/envs/mujoco_tasks.py).
    void draw_task(const Engine &engine, envfleet::Random &random) {
        const double turn = 2.0 * 3.141592653589793;
        if (engine.num_tasks) {
            task[0] = engine.tasks[random.below((uint32_t)engine.num_tasks)];
        } else if (engine.kind == ANT_DIR) {
            task[0] = random.uniform(0.0, turn);
        } else if (engine.kind == ANT_GOAL) {
            double angle = random.uniform(0.0, turn), far = 3.0 * sqrt(random.uniform(0.0, 1.0));
            task[0] = far * cos(angle);
            task[1] = far * sin(angle);
        } else if (engine.kind == HALF_CHEETAH_VEL) {
            task[0] = random.uniform(0.0, engine.max_speed);
        }
    }

    static bool is_healthy(const Engine &engine, const Lane &lane) {
        for (int64_t i = 0; i < engine.nq; i++)
            if (!std::isfinite(lane.qpos[i])) return false;
        for (int64_t i = 0; i < engine.nv; i++)
            if (!std::isfinite(lane.qvel[i])) return false;
        return engine.low_z <= lane.qpos[2] && lane.qpos[2] <= engine.high_z;
    }

    // A weight times a number in single precision: NumPy 2 stays in single precision.
    static double weighed(const Engine &engine, double weight, double value) {
        return engine.single_costs ? (double)((float)weight * (float)value) : weight * value;
    }

    static double ctrl_cost(const Engine &engine, const float *action) {
        float squares[most_actions];
        for (int64_t i = 0; i < engine.nu; i++) squares[i] = action[i] * action[i];
        return weighed(engine, engine.ctrl_weight, (double)numpy_sum(squares, engine.nu));
    }

    static double contact_cost(const Engine &engine, const Lane &lane) {
        double squares[most_forces];
        for (int64_t i = 0; i < engine.num_forces; i++) {
            double force = clipped(lane.forces[i], engine.low_force, engine.high_force);
            squares[i] = force * force;
        }
        return engine.contact_weight * numpy_sum(squares, engine.num_forces);
    }

    double reward(const Engine &engine, const Lane &lane, const float *action, double x_speed, double y_speed, bool healthy) const {
        double cost = ctrl_cost(engine, action), survive = (healthy ? 1.0 : 0.0) * engine.healthy_reward;
        switch (engine.kind) {
        case ANT: return (x_speed * engine.forward_weight + survive) - (cost + contact_cost(engine, lane));
        case HALF_CHEETAH: return engine.forward_weight * x_speed - cost;
        case ANT_DIR: return ((cos(task[0]) * x_speed + sin(task[0]) * y_speed) + -cost) + survive;
        case ANT_GOAL:
            return -(fabs(lane.qpos[0] - task[0]) + fabs(lane.qpos[1] - task[1])) + weighed(engine, 0.2, -cost);
        case HALF_CHEETAH_VEL: return -fabs(x_speed - task[0]) + weighed(engine, 0.5, -cost);
        default: return task[0] * x_speed + -cost;
        }
    }

    static void write(const Engine &engine, const Lane &lane, double *obs) {
        for (int64_t i = engine.num_skipped; i < engine.nq; i++) *obs++ = lane.qpos[i];
        for (int64_t i = 0; i < engine.nv; i++) *obs++ = lane.qvel[i];
        if (!engine.shows_forces) return;
        for (int64_t i = 6; i < engine.num_forces; i++) // without those of the world
            *obs++ = clipped(lane.forces[i], engine.low_force, engine.high_force);
    }
};

} // namespace

const EnvTable *mujoco_table() { return envfleet::Table<Mujoco>::table(); }
