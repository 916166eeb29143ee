// CAGE Challenge 2: the rules of src/envfleet/envs/cage2/ once more, over a state of 84 bytes.
//
// The Python files say what each rule means; here it is only written densely. A set of hosts is a uint16_t whose bit h
// stands for host h, a set of ports one whose bit i stands for PORTS[i] of scenario.py. Chance is asked in the same order
// as there, so that the same seed gives the same episode.

#include "envs.h"

namespace {

using Hosts = uint16_t;
using Ports = uint16_t;

constexpr int NUM_HOSTS = 13, NUM_ACTIONS = 145, NUM_BITS = 52;
constexpr int DEFENDER = 0, ENTERPRISE0 = 1, ENTERPRISE1 = 2, ENTERPRISE2 = 3, OP_SERVER0 = 7, USER0 = 8, USER1 = 9, USER2 = 10;
constexpr Hosts ENTERPRISE_HOSTS = 0x000f, ENTERPRISE_SERVERS = 0x000e, OPERATIONAL_HOSTS = 0x00f0, USER_HOSTS = 0x1f00;
constexpr Hosts LINUX_HOSTS = 0x18f3, WORTH_TEN = 0x008e, WORTH_ONE = 0x1e71;
constexpr int ENTERPRISE = 0, OPERATIONAL = 1, USER = 2;
constexpr Hosts SUBNET_HOSTS[3] = {ENTERPRISE_HOSTS, OPERATIONAL_HOSTS, USER_HOSTS};

enum Port : Ports {
    P21 = 1, P22 = 2, P25 = 4, P53 = 8, P68 = 16, P80 = 32, P135 = 64, P139 = 128, P443 = 256, P445 = 512, P3389 = 1024, P3390 = 2048
};
constexpr Ports WINDOWS_SERVER = P22 | P135 | P3389 | P445 | P139 | P80 | P443;
constexpr Ports REAL_PORTS[NUM_HOSTS] = {
    P22 | P53 | P68, P22, WINDOWS_SERVER, WINDOWS_SERVER, P22, P22, P22, P22, P22 | P21, P22 | P21,
    P445 | P139 | P135 | P3389, P80 | P3389 | P443 | P25, P22 | P80 | P3390 | P443 | P25};

// Decoys: Apache, Femitter, HarakaSMPT, Smss, SSHD, Svchost, Tomcat, Vsftpd.
constexpr Ports DECOY_NEEDS[8] = {P80, P21, P25, P139, P22, P3389, P443, P21};
constexpr Ports DECOY_OPENS[8] = {P80, P21, P25, P139, P22, P3389, P443, P80};
constexpr Hosts ALL_HOSTS = 0x1fff, WINDOWS_HOSTS = ALL_HOSTS & ~LINUX_HOSTS;
constexpr Hosts DECOY_RUNS_ON[8] = {ALL_HOSTS, WINDOWS_HOSTS, LINUX_HOSTS, WINDOWS_HOSTS, ALL_HOSTS, WINDOWS_HOSTS, ALL_HOSTS, LINUX_HOSTS};

// Exploits by their number in recorded episodes: EternalBlue, BlueKeep, HTTPRFI, HTTPSRFI, SSHBruteForce, SQLInjection,
// HarakaRCE, FTPDirectoryTraversal.
constexpr int SSH_BRUTE_FORCE = 4;
constexpr Ports EXPLOIT_PORT[8] = {P139, P3389, P80, P443, P22, P3390, P25, P21};
constexpr Hosts WEB = 0x180c;
constexpr Hosts GIVES_PRIVILEGED[8] = {0x0400, 0x000c, 0, 0, 0, 0x1000, 0x1800, 0x0300};
constexpr Hosts GIVES_USER[8] = {0, 0x0400, WEB, WEB, 0x13fe, 0, 0, 0};
constexpr uint8_t CAUGHT_BY[8] = {1 << 3, 1 << 5, 1 << 0 | 1 << 7, 1 << 6, 1 << 4, 0, 1 << 2, 1 << 1};
// Ranks, the best is 7: the weights of the exploits only order them.
constexpr int EXPLOIT_OF_RANK[8] = {4, 1, 0, 2, 3, 5, 6, 7};

constexpr int SWEEP = 0, SCAN = 1, EXPLOIT = 2, ESCALATE = 3, IMPACT = 4, IDLE = 5;
constexpr int FAILED = 0, SUCCEEDED = 1, NO_RESULT = 2;
constexpr int B_LINE = 0, MEANDER = 1;
constexpr int ANALYSE = 0, REMOVE = 1, FIRST_DECOY = 2, RESTORE = 10;
constexpr double BEST_EXPLOIT = 0.75, NOTICED = 0.95;

// Byte for byte the dtype STATE of true_state.py.
struct State {
    uint32_t steps;
    Hosts privileged, lasting, removable, malware, suspected, levels, known_addresses, known_names;
    Hosts scanned, exploited, escalated, once_exploited, active, alarmed;
    Ports scanned_ports[NUM_HOSTS];
    uint8_t decoys[NUM_HOSTS];
    uint8_t known_subnets, swept, ot_up, ot_bound, ot_known, position;
    int8_t victim, red_kind, red_target, red_success, exploit, noticed, green_host;
};
static_assert(sizeof(State) == 84, "the dtype STATE has this layout");

struct Options {
    uint8_t red;    // 0 B_line, 1 Meander, 2 Sleep
    uint8_t green;  // whether green scans hosts
    uint8_t source; // the observation rule "source"
};

// What chance gave in one step of a recorded episode; -1 where nothing was drawn.
struct Outcomes {
    int8_t target, exploit, noticed, green;
};

Hosts bit(int host) { return static_cast<Hosts>(1u << host); }
int lowest(unsigned set) { return __builtin_ctz(set); }
int highest(unsigned set) { return 31 - __builtin_clz(set); }
int count(unsigned set) { return __builtin_popcount(set); }

// Everything random in a step: drawn, or read from a recording.
struct Draws {
    envfleet::Random &random;
    const Outcomes *recorded;

    int below(int n) { return static_cast<int>(random.next_double() * n); }

    int host(Hosts candidates) {
        if (recorded)
            return recorded->target >= 0 && recorded->target < NUM_HOSTS && (candidates & bit(recorded->target))
                       ? recorded->target : lowest(candidates);
        int size = count(candidates);
        unsigned left = candidates;
        for (int skip = size > 1 ? below(size) : 0; skip > 0; skip--) left &= left - 1;
        return lowest(left);
    }

    // `ranks` has a bit for each exploit on offer, the best one highest.
    int exploit(unsigned ranks) {
        if (recorded) {
            for (int rank = 0; rank < 8; rank++)
                if ((ranks >> rank & 1) && EXPLOIT_OF_RANK[rank] == recorded->exploit) return recorded->exploit;
            return EXPLOIT_OF_RANK[highest(ranks)];
        }
        int size = count(ranks);
        if (size > 1 && !(random.next_double() < BEST_EXPLOIT)) {
            ranks &= ~(1u << highest(ranks));
            for (int skip = size > 2 ? below(size - 1) : 0; skip > 0; skip--) ranks &= ~(1u << highest(ranks));
        }
        return EXPLOIT_OF_RANK[highest(ranks)];
    }

    bool noticed() { return recorded ? recorded->noticed == 1 : random.next_double() < NOTICED; }

    int green_host() {
        constexpr Hosts green_hosts = ENTERPRISE_SERVERS | USER_HOSTS;
        if (recorded)
            return recorded->green >= 0 && recorded->green < NUM_HOSTS && (green_hosts & bit(recorded->green)) ? recorded->green : -1;
        return random.next_double() < 0.5 ? -1 : host(green_hosts);
    }
};

// The network events of one host in one step.
struct Events {
    Ports ports = 0;
    int records = 0;
    bool shell = false;
};

Ports decoy_ports(uint8_t decoys) {
    return static_cast<Ports>((decoys & 0x81 ? P80 : 0) | (decoys >> 1 & 1 ? P21 : 0) | (decoys >> 2 & 1 ? P25 : 0) |
                              (decoys >> 3 & 1 ? P139 : 0) | (decoys >> 4 & 1 ? P22 : 0) | (decoys >> 5 & 1 ? P3389 : 0) |
                              (decoys >> 6 & 1 ? P443 : 0));
}

Ports listening(const State &s, int host) { return static_cast<Ports>(REAL_PORTS[host] | decoy_ports(s.decoys[host])); }

// Ports as bits of ranks; SQLInjection (rank 5) also needs a web port.
unsigned ranks_of(Ports ports) {
    return (ports & P22 ? 1u : 0) | (ports & P3389 ? 2u : 0) | (ports & P139 ? 4u : 0) | (ports & P80 ? 8u : 0) | (ports & P443 ? 16u : 0) |
           ((ports & P3390) && (ports & (P80 | P443)) ? 32u : 0) | (ports & P25 ? 64u : 0) | (ports & P21 ? 128u : 0);
}

Hosts sessions(const State &s) { return s.privileged | s.lasting | s.removable; }

bool reachable(const State &s, int host) { return !(OPERATIONAL_HOSTS & bit(host)) || (sessions(s) & ENTERPRISE_SERVERS); }

void port_scan(const State &s, int host, Events &events) {
    events.ports |= listening(s, host);
    events.records += count(listening(s, host));
}

int sweep(State &s, int subnet) {
    if (!reachable(s, lowest(SUBNET_HOSTS[subnet]))) return FAILED;
    s.known_addresses |= SUBNET_HOSTS[subnet];
    return SUCCEEDED;
}

int scan(State &s, int host, Events &events) {
    if (reachable(s, host)) {
        s.scanned_ports[host] = listening(s, host);
        port_scan(s, host, events);
    }
    return SUCCEEDED;
}

int exploit(State &s, int host, Draws &draws, Events &events) {
    unsigned ranks = ranks_of(s.scanned_ports[host]);
    if (!ranks) return FAILED;
    int kind = draws.exploit(ranks);
    s.exploit = static_cast<int8_t>(kind);
    if (!reachable(s, host)) return FAILED;
    Hosts h = bit(host);
    bool brute_force = kind == SSH_BRUTE_FORCE;
    if (!((GIVES_PRIVILEGED[kind] | GIVES_USER[kind]) & h)) {
        if ((brute_force && host == DEFENDER) || (s.decoys[host] & CAUGHT_BY[kind])) {
            events.ports |= EXPLOIT_PORT[kind];
            events.records += brute_force ? 10 : 2;
        }
        return FAILED;
    }
    events.ports |= EXPLOIT_PORT[kind];
    s.known_names |= h;
    if (brute_force) {
        events.records += 11;
        s.lasting |= h;
        return SUCCEEDED;
    }
    s.malware |= h;
    bool noticed = draws.noticed();
    s.noticed = noticed;
    events.records += 1 + noticed;
    events.shell = noticed;
    Hosts &level = GIVES_PRIVILEGED[kind] & h ? s.privileged : noticed ? s.removable : s.lasting;
    level |= h;
    return SUCCEEDED;
}

int escalate(State &s, int host) {
    Hosts h = bit(host);
    if (!(sessions(s) & h)) return FAILED;
    s.malware |= h & ~s.privileged;
    s.privileged |= h;
    s.known_addresses |= h;
    s.known_subnets |= h & ENTERPRISE_HOSTS ? 1 << ENTERPRISE : h & OPERATIONAL_HOSTS ? 1 << OPERATIONAL : 1 << USER;
    if (host == USER1 || host == USER2) s.known_addresses |= bit(ENTERPRISE1);
    if (host > USER2) s.known_addresses |= bit(ENTERPRISE0);
    if (host == ENTERPRISE2) s.known_addresses |= bit(OP_SERVER0);
    if (host == OP_SERVER0) s.ot_known = 1;
    return SUCCEEDED;
}

int impact(State &s) {
    if (!(sessions(s) & bit(OP_SERVER0)) || !s.ot_known) return FAILED;
    if (s.ot_bound) s.ot_up = s.ot_bound = 0;
    return SUCCEEDED;
}

struct Choice {
    int kind, target;
};

Choice choose_b_line(State &s, Draws &draws) {
    constexpr int8_t after_failure[15] = {0, 1, 2, 2, 2, 2, 5, 5, 5, 5, 9, 9, 9, 12, 13};
    constexpr int8_t kinds[15] = {SWEEP, SCAN, EXPLOIT, ESCALATE, SCAN, EXPLOIT, ESCALATE, SWEEP,
                                  SCAN, EXPLOIT, ESCALATE, SCAN, EXPLOIT, ESCALATE, IMPACT};
    constexpr int first_scan = 1, exploit_server = 12;
    int position = s.position;
    position = s.red_success != SUCCEEDED ? after_failure[position] : position < 14 ? position + 1 : 14;
    if (position == exploit_server && !s.scanned_ports[OP_SERVER0]) position = first_scan;
    if (position == first_scan && s.victim < 0) s.victim = static_cast<int8_t>(draws.host(USER_HOSTS & ~bit(USER0)));
    s.position = static_cast<uint8_t>(position);
    int target = position > 10 ? OP_SERVER0 : position > 7 ? ENTERPRISE2 : position == 7 ? ENTERPRISE
                 : position > 3 ? (s.victim <= USER2 ? ENTERPRISE1 : ENTERPRISE0) : position > 0 ? s.victim : USER;
    return {kinds[position], target};
}

void learn_meander(State &s) {
    Hosts target = s.red_target >= 0 ? bit(s.red_target) : 0;
    if (s.red_kind == EXPLOIT && s.red_success == SUCCEEDED) {
        s.once_exploited |= target;
    } else if (s.red_kind == EXPLOIT) {
        s.exploited &= ~target;
        Hosts lost = s.escalated & OPERATIONAL_HOSTS ? OPERATIONAL_HOSTS : ENTERPRISE_HOSTS;
        lost &= s.escalated;
        s.escalated &= ~lost;
        s.exploited &= ~lost;
    } else if ((s.red_kind == ESCALATE || s.red_kind == IMPACT) && s.red_success == FAILED) {
        s.escalated &= ~target;
        s.exploited &= ~(target & s.once_exploited);
    }
}

Choice choose_meander(State &s, Draws &draws) {
    learn_meander(s);
    if (s.escalated & bit(OP_SERVER0)) return {IMPACT, OP_SERVER0};
    if (unsigned subnets = s.known_subnets & ~s.swept) {
        s.swept |= subnets & -subnets;
        return {SWEEP, lowest(subnets)};
    }
    int host;
    if (Hosts candidates = s.known_addresses & ~s.scanned) {
        s.scanned |= bit(host = draws.host(candidates));
        return {SCAN, host};
    }
    if (Hosts candidates = s.known_names & ~s.escalated & ~(s.once_exploited & ~s.exploited)) {
        s.escalated |= bit(host = draws.host(candidates));
        return {ESCALATE, host};
    }
    if (Hosts candidates = s.known_addresses & ~s.exploited) {
        s.exploited |= bit(host = draws.host(candidates));
        return {EXPLOIT, host};
    }
    return {IDLE, -1};
}

void act_red(State &s, const Options &options, Draws &draws, Events &events) {
    Choice choice = options.red == B_LINE ? choose_b_line(s, draws) : options.red == MEANDER ? choose_meander(s, draws) : Choice{IDLE, -1};
    int success = NO_RESULT;
    switch (choice.kind) {
        case SWEEP: success = sweep(s, choice.target); break;
        case SCAN: success = scan(s, choice.target, events); break;
        case EXPLOIT: success = exploit(s, choice.target, draws, events); break;
        case ESCALATE: success = escalate(s, choice.target); break;
        case IMPACT: success = impact(s); break;
    }
    s.red_kind = static_cast<int8_t>(choice.kind);
    s.red_target = static_cast<int8_t>(choice.target);
    s.red_success = static_cast<int8_t>(success);
}

// Blue's action. Returns the host where a decoy was placed, or -1.
int act_blue(State &s, int kind, int host) {
    Hosts h = bit(host);
    if (kind == REMOVE) {
        s.removable &= ~h;
        s.suspected |= s.levels & h;
        s.levels &= ~h;
    } else if (kind == RESTORE) {
        s.privileged &= ~(h & ~bit(USER0));
        s.lasting &= ~h;
        s.removable &= ~h;
        s.malware &= ~h;
        s.suspected &= ~h;
        s.levels &= ~h;
        s.decoys[host] = 0;
        if (host == OP_SERVER0) s.ot_up = 1, s.ot_bound = 0;
    } else if (kind >= FIRST_DECOY) {
        int decoy = kind - FIRST_DECOY;
        if ((DECOY_RUNS_ON[decoy] & h) && !(listening(s, host) & DECOY_NEEDS[decoy])) {
            s.decoys[host] |= 1 << decoy;
            return host;
        }
    }
    return -1;
}

// The activity of one host: 0 quiet, 1 scanned, 3 exploited.
unsigned activity(const Events &events, bool placed, bool source) {
    if (!events.records) return 0;
    int records = events.records + placed, ports = count(events.ports) + events.shell;
    if (ports >= 3) return 1;
    if (events.shell || (records >= 3 && ports == 1)) return 3;
    return placed && !source ? 0 : 1;
}

double reward_of(const State &s, bool restored) {
    int tenths = 10 * count(s.privileged & WORTH_TEN) + count(s.privileged & WORTH_ONE) + (s.ot_up ? 0 : 100) + (restored ? 10 : 0);
    return -tenths / 10.0;
}

// Four bytes per host: scanned or exploited, exploited, suspected, level.
void write_bits(const State &s, uint8_t *bits) {
    for (int host = 0; host < NUM_HOSTS; host++) {
        uint32_t four = (s.active >> host & 1u) | (s.alarmed >> host & 1u) << 8 | (s.suspected >> host & 1u) << 16 | (s.levels >> host & 1u) << 24;
        std::memcpy(bits + 4 * host, &four, 4);
    }
}

void reset(State &s) {
    std::memset(&s, 0, sizeof s);
    s.privileged = s.known_addresses = s.known_names = bit(USER0);
    s.known_subnets = 1 << USER;
    s.ot_up = s.ot_bound = 1;
    s.victim = s.red_target = s.exploit = s.noticed = s.green_host = -1;
    s.red_kind = IDLE;
}

double step(State &s, envfleet::Random &random, const Options &options, const Outcomes *recorded, int action, uint8_t *bits) {
    Draws draws{random, recorded};
    int kind = action > 1 ? (action - 2) / NUM_HOSTS : -1, host = action > 1 ? (action - 2) % NUM_HOSTS : 0;
    Hosts analysed = kind == ANALYSE ? s.malware & bit(host) : 0;
    int placed_on = act_blue(s, kind, host);
    s.exploit = s.noticed = s.green_host = -1;
    Events of_green, of_red;
    if (options.green) {
        s.green_host = static_cast<int8_t>(draws.green_host());
        if (s.green_host >= 0) port_scan(s, s.green_host, of_green);
    }
    act_red(s, options, draws, of_red);
    s.steps++;
    if (s.green_host >= 0 && of_red.records && s.red_target == s.green_host) {
        of_red.ports |= of_green.ports;
        of_red.records += of_green.records;
        of_green = Events();
    }
    s.active = s.alarmed = 0;
    auto see = [&](const Events &events, int where) {
        if (!events.records) return;
        unsigned seen = activity(events, placed_on == where, options.source);
        s.active |= static_cast<Hosts>((seen & 1u) << where);
        s.alarmed |= static_cast<Hosts>((seen >> 1) << where);
    };
    see(of_green, s.green_host);
    see(of_red, s.red_target);
    s.levels |= s.alarmed | analysed;
    s.suspected = static_cast<Hosts>((s.suspected & ~s.alarmed) | analysed);
    write_bits(s, bits);
    return reward_of(s, kind == RESTORE);
}

// Byte for byte the dtype NATIVE of native_cage2.py.
struct Cage2 {
    State state;
    uint32_t max_steps; // 0: no limit
    Options rules;
    uint8_t is_recorded; // Python writes here the outcomes of the next step when it replays a recording
    Outcomes recorded;
    uint8_t state_in_obs; // the observation is the bits and the state
    uint8_t unused[3];

    static constexpr const char *name = "Cage2";
    static constexpr envfleet::Option options[] = {{"red", 0}, {"green", 0}, {"source", 0}, {"max_steps", 100}, {"state_in_obs", 0}};

    static void spaces(const double *option, envfleet::Spaces &space) {
        if (option[4] != 0)
            space.obs.box<uint8_t>({NUM_BITS + (int64_t)sizeof(State)}, 0, 255);
        else
            space.obs.box<uint8_t>({NUM_BITS}, 0, 1);
        space.action.discrete(NUM_ACTIONS);
    }
    void init(const double *option) {
        rules = {(uint8_t)option[0], option[1] != 0, option[2] != 0};
        max_steps = (uint32_t)option[3];
        state_in_obs = option[4] != 0;
        ::reset(state);
    }
    void append_state(uint8_t *obs) const {
        if (state_in_obs) std::memcpy(obs + NUM_BITS, &state, sizeof state);
    }
    void reset(envfleet::Call &call) {
        ::reset(state);
        std::memset(call.obs<uint8_t>(), 0, NUM_BITS);
        append_state(call.obs<uint8_t>());
    }
    void step(envfleet::Call &call) {
        int action = (int)call.action<int64_t>()[0];
        call.reward = ::step(state, call.rng(), rules, is_recorded ? &recorded : nullptr, action, call.obs<uint8_t>());
        call.truncated = state.steps == max_steps;
        append_state(call.obs<uint8_t>());
    }
};
static_assert(sizeof(Cage2) == 100, "the dtype NATIVE has this layout");

} // namespace

const EnvTable *cage2_table() { return envfleet::Table<Cage2>::table(); }
