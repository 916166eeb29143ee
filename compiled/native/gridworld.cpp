// The grid of several agents as one environment, as src/envfleet/envs/gridworld_team.py over gridmodel.py: the same rules, numbers and draws.
#include "envs.h"

#include <algorithm>
#include <string>
#include <tuple>

namespace {

constexpr int most_cells = 16 * 16, most_agents = 8, num_moves = 5;
constexpr int down[num_moves] = {0, -1, 1, 0, 0}, right_by[num_moves] = {0, 0, 0, -1, 1};
constexpr double nearer = 0.1, each_cycle = -0.01;

struct GridWorld {
    double rewards[most_agents]; // of the last cycle; Python reads these and `inside`
    int32_t inside[most_agents];
    int32_t size, num_agents, num_obstacles, max_cycles, view, is_sparse, min_distance, has_compass, cycles;
    int16_t cell[most_agents], goal[most_agents]; // row * size + column
    uint8_t blocked[most_cells], occupied[most_cells];
    int16_t way[most_agents][most_cells]; // steps to the agent's goal from every cell, -1: no way

    static constexpr const char *name = "GridWorld";
    static constexpr envfleet::Option options[] = {{"size", 5}, {"num_agents", 2}, {"num_obstacles", 3}, {"max_cycles", 50}, {"view", 2},
                                                   {"sparse", 0}, {"min_distance", 5}, {"compass", 1}};

    static int64_t row_size(const double *option) {
        int64_t width = 2 * (int64_t)option[4] + 1;
        return 4 + 2 * width * width + (option[7] != 0 ? 4 : 0) + num_moves;
    }
    static void spaces(const double *option, envfleet::Spaces &space) {
        if (!(option[0] >= 2 && option[0] * option[0] <= most_cells && option[1] >= 1 && option[1] <= most_agents && option[4] >= 1 &&
              option[4] <= 16 && option[2] >= 0 && option[2] + 2 * option[1] <= (double)((int64_t)(option[0] * option[0]) / 2) &&
              option[3] >= 1 && option[3] <= 2e9))
            throw std::invalid_argument("there is room for 2 to 16 cells a side, 8 agents and a view of 16, and half of the grid stays free");
        space.obs.box<float>({(int64_t)option[1], row_size(option)}, -1, 1);
        space.action.multi_discrete(num_moves, {(int64_t)option[1]});
    }
    void init(const double *option) {
        size = (int32_t)option[0];
        num_agents = (int32_t)option[1];
        num_obstacles = (int32_t)option[2];
        max_cycles = (int32_t)option[3];
        view = (int32_t)option[4];
        is_sparse = option[5] != 0;
        min_distance = (int32_t)option[6];
        has_compass = option[7] != 0;
    }

    // -- a new world ----------------------------------------------------------------------------------------------

    void reset(envfleet::Call &call) {
        draw_obstacles(call.rng());
        memset(occupied, 0, sizeof occupied);
        for (int agent = 0; agent < num_agents; agent++) {
            draw_pair(agent, call.rng());
            inside[agent] = 1;
            rewards[agent] = 0;
            occupied[cell[agent]] = 1;
        }
        cycles = 0;
        write(call.obs<float>());
    }
    void draw_obstacles(envfleet::Random &random) {
        int16_t order[most_cells], steps[most_cells];
        int cells = size * size, left = num_obstacles, num_free = cells;
        memset(blocked, 0, sizeof blocked);
        random.permutation(order, cells);
        for (int i = 0; i < cells && left; i++) {
            blocked[order[i]] = 1;
            int first = (int)(std::find(blocked, blocked + cells, 0) - blocked);
            if (steps_to(first, steps) == num_free - 1) {
                left--;
                num_free--;
            } else {
                blocked[order[i]] = 0; // it would cut the grid in two
            }
        }
    }
    // A start and a goal that no other agent has, far enough apart; the farthest goal if none is.
    void draw_pair(int agent, envfleet::Random &random) {
        int16_t open[most_cells], order[most_cells], steps[most_cells], far_enough[most_cells];
        int num_open = 0;
        open[0] = 0;
        for (int at = 0; at < size * size; at++)
            if (!blocked[at] && std::find(goal, goal + agent, at) == goal + agent) open[num_open++] = (int16_t)at;
        std::tuple<int, int, int> best{0, open[0], open[0]};
        random.permutation(order, num_open);
        for (int i = 0; i < num_open; i++) {
            int start = open[order[i]], count = 0, farthest = -1;
            if (is_start(agent, start)) continue;
            steps_to(start, steps);
            for (int j = 0; j < num_open; j++) {
                if (is_start(agent, open[j])) continue;
                if (steps[open[j]] >= min_distance) far_enough[count++] = open[j];
                if (farthest < 0 || steps[open[j]] > steps[farthest]) farthest = open[j];
            }
            if (count) {
                best = {0, start, far_enough[random.below((uint32_t)count)]};
                break;
            }
            best = std::max(best, {steps[farthest], start, farthest});
        }
        cell[agent] = (int16_t)std::get<1>(best);
        goal[agent] = (int16_t)std::get<2>(best);
        steps_to(goal[agent], way[agent]);
    }
    bool is_start(int agents, int at) const { return std::find(cell, cell + agents, at) != cell + agents; }

    // Steps from every cell to one, round the obstacles, -1 where there is no way; returns how many cells have one.
    int steps_to(int to, int16_t *steps) const {
        int16_t queue[most_cells];
        int first = 0, last = 0;
        std::fill(steps, steps + size * size, (int16_t)-1);
        steps[to] = 0;
        queue[last++] = (int16_t)to;
        while (first < last) {
            int at = queue[first++];
            for (int move = 1; move < num_moves; move++) {
                int next = moved(at, move);
                if (next < 0 || steps[next] >= 0 || blocked[next]) continue;
                steps[next] = (int16_t)(steps[at] + 1);
                queue[last++] = (int16_t)next;
            }
        }
        return last;
    }
    // The cell behind a move, -1 outside.
    int moved(int at, int move) const {
        int row = at / size + down[move], column = at % size + right_by[move];
        return row >= 0 && row < size && column >= 0 && column < size ? row * size + column : -1;
    }
    bool is_free(int at) const { return at >= 0 && !blocked[at] && !occupied[at]; }

    // -- a cycle --------------------------------------------------------------------------------------------------

    void step(envfleet::Call &call) {
        const int64_t *action = call.action<int64_t>();
        double sum = 0;
        for (int agent = 0; agent < num_agents; agent++) {
            rewards[agent] = inside[agent] ? move(agent, (int)action[agent]) : 0.0;
            sum += rewards[agent];
        }
        cycles++;
        bool everybody_left = std::find(inside, inside + num_agents, 1) == inside + num_agents;
        call.reward = sum;
        call.terminated = everybody_left;
        call.truncated = !everybody_left && cycles >= max_cycles;
        write(call.obs<float>());
    }
    double move(int agent, int action) {
        int before = cell[agent], after = moved(before, action);
        if (after != before && is_free(after)) {
            occupied[before] = 0;
            occupied[after] = 1;
            cell[agent] = (int16_t)after;
        }
        bool here = cell[agent] == goal[agent];
        if (here) {
            inside[agent] = 0;
            occupied[cell[agent]] = 0;
        }
        double shaped = is_sparse ? 0.0 : nearer * (way[agent][before] - way[agent][cell[agent]]) + each_cycle;
        return shaped + (here ? 1.0 : 0.0);
    }

    // -- what is seen ---------------------------------------------------------------------------------------------

    void write(float *out) const {
        double scale = 1.0 / (size - 1);
        for (int agent = 0; agent < num_agents; agent++) {
            int at = cell[agent], row = at / size, column = at % size;
            *out++ = (float)(row * scale);
            *out++ = (float)(column * scale);
            *out++ = (float)((goal[agent] / size - row) * scale);
            *out++ = (float)((goal[agent] % size - column) * scale);
            out = write_window(out, row, column);
            for (int to = 1; has_compass && to < num_moves; to++) {
                int next = moved(at, to);
                *out++ = next >= 0 && way[agent][next] >= 0 && way[agent][next] < way[agent][at] ? 1.0f : -1.0f;
            }
            *out++ = 1; // the mask: staying always can
            for (int to = 1; to < num_moves; to++) *out++ = inside[agent] && is_free(moved(at, to)) ? 1.0f : 0.0f;
        }
    }
    // What is blocked, then who stands there, but for the agent itself.
    float *write_window(float *out, int row, int column) const {
        for (int r = row - view; r <= row + view; r++)
            for (int c = column - view; c <= column + view; c++)
                *out++ = r < 0 || r >= size || c < 0 || c >= size || blocked[r * size + c] ? 1.0f : 0.0f;
        for (int r = row - view; r <= row + view; r++)
            for (int c = column - view; c <= column + view; c++) {
                bool seen = r >= 0 && r < size && c >= 0 && c < size && !(r == row && c == column) && occupied[r * size + c];
                *out++ = seen ? 1.0f : 0.0f;
            }
        return out;
    }
    int64_t render(char *out, int64_t room) const {
        std::string text;
        for (int at = 0; at < size * size; at++) {
            if (at && at % size == 0) text += '\n';
            char sign = blocked[at] ? '#' : '.';
            for (int agent = 0; agent < num_agents; agent++)
                if (goal[agent] == at) sign = (char)('a' + agent);
            for (int agent = 0; agent < num_agents; agent++)
                if (inside[agent] && cell[agent] == at) sign = (char)('A' + agent);
            text += sign;
        }
        memcpy(out, text.data(), std::min((size_t)room, text.size()));
        return (int64_t)text.size();
    }
};

} // namespace

const EnvTable *gridworld_table() { return envfleet::Table<GridWorld>::table(); }
