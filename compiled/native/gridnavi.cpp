// GridNavi, as src/envfleet/envs/gridnavi.py: walk a grid to a hidden goal.
#include "envs.h"

namespace {

struct GridNavi {
    int32_t goal_x, goal_y, x, y, time, size, horizon; // goal_x is -1 before the first episode

    static constexpr const char *name = "GridNavi";
    static constexpr envfleet::Option options[] = {{"size", 5}, {"horizon", 15}};

    static void spaces(const double *option, envfleet::Spaces &space) {
        if (!(option[0] >= 3 && option[0] <= 30000 && option[1] >= 1 && option[1] <= 2e9))
            throw std::invalid_argument("a size from 3 and a horizon from 1 up are needed");
        space.obs.box<float>({2 * (int64_t)option[0]}, 0, 1);
        space.action.discrete(5);
        space.task_size = 2;
    }
    void init(const double *option) {
        size = (int32_t)option[0];
        horizon = (int32_t)option[1];
        goal_x = goal_y = -1;
    }
    // A cell outside the 2 x 2 corner of the start, column by column.
    void draw_goal(envfleet::Random &random) {
        int32_t i = (int32_t)random.below((uint32_t)(size * size - 4)), short_columns = 2 * (size - 2);
        goal_x = i < short_columns ? i / (size - 2) : 2 + (i - short_columns) / size;
        goal_y = i < short_columns ? 2 + i % (size - 2) : (i - short_columns) % size;
    }
    void reset(envfleet::Call &call) {
        if (call.task) {
            goal_x = (int32_t)call.task[0];
            goal_y = (int32_t)call.task[1];
        } else {
            draw_goal(call.rng());
        }
        x = y = time = 0;
        write(call.obs<float>());
    }
    void step(envfleet::Call &call) {
        static const int32_t right[5] = {0, 0, 1, 0, -1}, up[5] = {0, 1, 0, -1, 0};
        int64_t action = call.action<int64_t>()[0];
        x = clip(x + right[action], 0, size - 1);
        y = clip(y + up[action], 0, size - 1);
        time++;
        call.reward = x == goal_x && y == goal_y ? 1.0 : -0.1;
        call.truncated = time >= horizon;
        write(call.obs<float>());
    }
    void write(float *obs) const {
        memset(obs, 0, 2 * (size_t)size * sizeof *obs);
        obs[x] = obs[size + y] = 1;
    }
};

} // namespace

const EnvTable *gridnavi_table() { return envfleet::Table<GridNavi>::table(); }
