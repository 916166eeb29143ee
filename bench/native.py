"""Native CartPole against its limits and its peers, as ratios within one run.

    python -m bench.native [--rounds 7] [--seconds 0.4]

Contestants: our fleet with one and two threads (views), a bare C++ loop over the same state (one environment after the other, with its
reset, nothing else; ours makes the arithmetic of 32 at a time), Gymnasium's vectorised CartPole (NumPy), EnvPool if it is installed. All exist at once and take turns.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import envfleet as ef
from bench.stats import Run, ratio, short, take_turns

ROOT = Path(__file__).resolve().parents[1]
_BARE = """
#include "cartpole.cpp"
#include <vector>
// One environment at a time, as one writes it first.
struct Plain : CartPole {
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
};
extern "C" void bare(int64_t count, int64_t steps, const int64_t *actions, float *obs, double *rewards) {
    static std::vector<Plain> envs;
    static envfleet::Random random;
    envfleet::Call call{};
    random.state_low = 12345;
    random.inc_low = 1;
    call.random = &random;
    double option[1] = {0};
    if ((int64_t)envs.size() != count) {
        envs.resize(count);
        for (auto &env : envs) {
            env.init(option);
            call.EnvCall::obs = obs;
            env.reset(call);
        }
    }
    for (int64_t t = 0; t < steps; t++)
        for (int64_t i = 0; i < count; i++) {
            call.EnvCall::obs = obs + 4 * i;
            call.EnvCall::action = actions + i;
            call.terminated = 0;
            envs[i].step(call);
            rewards[i] = call.reward;
            if (call.terminated) envs[i].reset(call);
        }
}
"""


def timed(step: Any, per_call: int) -> Run:
    """A contestant from a function that makes one batch step."""

    def run(seconds: float) -> tuple[int, float]:
        calls, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds:
            for _ in range(8):
                step()
            calls += 8
        return calls * per_call, took

    return run


def bare_loop(count: int, folder: str) -> Run:
    """The same struct in a loop of C++, compiled with the flags of the package."""
    source, library = Path(folder) / "bare.cpp", Path(folder) / f"bare{count}.so"
    source.write_text(_BARE)
    flags = ["-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-builtin-pow", "-fno-builtin-powf"]
    include = [f"-I{ROOT / 'compiled/native'}", f"-I{ROOT / 'src/envfleet/native'}"]
    subprocess.run(["c++", *flags, *include, str(source), "-o", str(library)], check=True)
    bare = ctypes.CDLL(str(library)).bare
    actions = np.random.default_rng(0).integers(0, 2, count)
    obs, rewards = np.zeros((count, 4), np.float32), np.zeros(count)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (actions, obs, rewards)]
    held = (actions, obs, rewards)
    return timed(lambda: bare(ctypes.c_int64(count), ctypes.c_int64(1), *pointers) and held, count)


def ours(count: int, workers: int) -> Run:
    """Our fleet, whose rows are read as views."""
    fleet = ef.make("CartPole-v1", count, backend="native", num_workers=workers)
    fleet.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, count)
    for _ in range(3):
        fleet.step(actions, copy=False)
    return timed(lambda: fleet.step(actions, copy=False), count)


def gymnasium_vector(count: int) -> Run:
    """Gymnasium's CartPole in NumPy."""
    envs = gym.make_vec("CartPole-v1", count, vectorization_mode="vector_entry_point")
    envs.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, count)
    return timed(lambda: envs.step(actions), count)


def envpool_run(count: int, threads: int) -> Run | None:
    """EnvPool's CartPole; None where it is not installed."""
    try:
        import envpool
    except ImportError:
        return None
    envs = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=count, num_threads=threads, seed=0)
    envs.reset()
    actions = np.random.default_rng(0).integers(0, 2, count).astype(np.int32)
    return timed(lambda: envs.step(actions), count)


def main() -> None:
    """Measure and print one table per number of slots."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--slots", type=int, nargs="*", default=[64, 1024, 4096, 16384])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for count in args.slots:
            runs: dict[str, Run] = {"ours, 1 thread": ours(count, 1), "ours, 2 threads": ours(count, 2)}
            runs["bare C++ loop"] = bare_loop(count, folder)
            runs["Gymnasium vector"] = gymnasium_vector(count)
            for threads in (1, 2):
                if (pool := envpool_run(count, threads)) is not None:
                    runs[f"EnvPool, {threads} threads"] = pool
            slices, thrown = take_turns(runs, args.rounds, args.seconds)
            print(f"\n{count} slots ({thrown} slices measured again)")
            for name, found in slices.items():
                rate = float(np.median([one.rate for one in found.values()]))
                print(
                    f"  {name:<18} {short(rate):>7} steps/s   ours (1 thread) is {ratio(slices['ours, 1 thread'], found)} of it"
                )


if __name__ == "__main__":
    main()
