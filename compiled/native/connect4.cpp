// Connect Four against an opponent, as src/envfleet/envs/connect4.py: the same rules, scores and random numbers.
#include "envs.h"

#include <algorithm>
#include <string>

namespace {

constexpr int rows = 6, columns = 7;
constexpr int directions[4][2] = {{0, 1}, {1, 0}, {1, 1}, {1, -1}};

struct Board {
    int8_t cell[rows][columns]; // from the top: 1 the agent's, -1 the opponent's, 0 empty

    bool has(int row, int column) const { return row >= 0 && row < rows && column >= 0 && column < columns; }
    bool is_open(int column) const { return !cell[0][column]; }
    bool is_full() const {
        for (int column = 0; column < columns; column++)
            if (is_open(column)) return false;
        return true;
    }
    int drop(int column, int side) {
        int row = rows - 1;
        while (cell[row][column]) row--;
        cell[row][column] = (int8_t)side;
        return row;
    }
    bool wins(int row, int column) const {
        for (const auto &to : directions) {
            int run = 1;
            for (int sign : {1, -1})
                for (int r = row + sign * to[0], c = column + sign * to[1]; has(r, c) && cell[r][c] == cell[row][column];
                     r += sign * to[0], c += sign * to[1])
                    run++;
            if (run >= 4) return true;
        }
        return false;
    }
    // Lines that only this side holds, minus lines that only the other holds.
    int worth(int side) const {
        static const int value[5] = {0, 1, 4, 16, 10000};
        int sum = 0;
        for (int row = 0; row < rows; row++)
            for (int column = 0; column < columns; column++)
                for (const auto &to : directions) {
                    if (!has(row + 3 * to[0], column + 3 * to[1])) continue;
                    int mine = 0, other = 0;
                    for (int i = 0; i < 4; i++) {
                        int there = cell[row + i * to[0]][column + i * to[1]];
                        mine += there == side;
                        other += there == -side;
                    }
                    if (!other) sum += value[mine];
                    if (!mine) sum -= value[other];
                }
        return sum;
    }
    // What each open column is worth for a side that looks `depth` moves ahead; the best of them.
    int look_ahead(int side, int depth, int *scores) {
        int best = INT32_MIN;
        for (int column = 0; column < columns; column++) {
            if (!is_open(column)) continue;
            int row = drop(column, side), unused[columns], score;
            if (wins(row, column)) score = 1000000 + depth;
            else if (depth <= 1 || is_full()) score = worth(side);
            else score = -look_ahead(-side, depth - 1, unused);
            cell[row][column] = 0;
            scores[column] = score;
            if (score > best) best = score;
        }
        return best;
    }
};

enum { LOSE, SKIP, RAISE };
enum { AGENT, OPPONENT, EITHER };
enum { NOBODY_YET = 2 };

struct Connect4 {
    int32_t depth, winner, illegal, first;
    Board board;

    static constexpr const char *name = "Connect4";
    static constexpr envfleet::Option options[] = {{"depth", 0}, {"illegal", LOSE}, {"first", AGENT}};

    static void spaces(const double *option, envfleet::Spaces &space) {
        if (!(option[0] >= 0 && option[0] <= 8 && option[1] >= LOSE && option[1] <= RAISE && option[2] >= AGENT && option[2] <= EITHER))
            throw std::invalid_argument("depth is 0 to 8, illegal and first are 0 to 2");
        space.obs.box<int8_t>({rows, columns}, -1, 1);
        space.action.discrete(columns);
    }
    void init(const double *option) {
        depth = (int32_t)option[0];
        illegal = (int32_t)option[1];
        first = (int32_t)option[2];
        winner = NOBODY_YET;
    }
    void reset(envfleet::Call &call) {
        memset(&board, 0, sizeof board);
        winner = NOBODY_YET;
        bool waits = first == EITHER ? call.rng().next_double() >= 0.5 : first == OPPONENT;
        if (waits) board.drop(reply(call.rng()), -1);
        write(call);
    }
    int reply(envfleet::Random &random) {
        int open[columns], scores[columns], count = 0, best = depth ? board.look_ahead(-1, depth, scores) : 0;
        for (int column = 0; column < columns; column++)
            if (board.is_open(column) && (!depth || scores[column] == best)) open[count++] = column;
        return open[random.below((uint32_t)count)];
    }
    void step(envfleet::Call &call) {
        int column = (int)call.action<int64_t>()[0];
        if (winner != NOBODY_YET) throw std::runtime_error("the game is over: reset() first");
        if (board.is_open(column)) call.reward = play(column, call.rng());
        else call.reward = refuse(column);
        call.terminated = winner != NOBODY_YET;
        write(call);
    }
    double refuse(int column) {
        if (illegal == RAISE) throw std::runtime_error("column " + std::to_string(column) + " is full");
        if (illegal == SKIP) return -0.1;
        winner = -1;
        return -1;
    }
    double play(int column, envfleet::Random &random) {
        if (board.wins(board.drop(column, 1), column)) return winner = 1;
        if (board.is_full()) return winner = 0;
        int answer = reply(random);
        if (board.wins(board.drop(answer, -1), answer)) return winner = -1;
        if (board.is_full()) winner = 0;
        return 0;
    }
    void write(envfleet::Call &call) const { memcpy(call.obs<int8_t>(), board.cell, sizeof board.cell); }
    int64_t render(char *out, int64_t room) const {
        std::string text;
        for (const auto &row : board.cell) {
            for (int8_t side : row) text += side == 1 ? 'X' : side == -1 ? 'O' : '.';
            text += '\n';
        }
        for (int column = 0; column < columns; column++) text += (char)('0' + column);
        memcpy(out, text.data(), std::min((size_t)room, text.size()));
        return (int64_t)text.size();
    }
};

} // namespace

const EnvTable *connect4_table() { return envfleet::Table<Connect4>::table(); }
