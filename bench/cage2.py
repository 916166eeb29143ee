"""CAGE 2 at 20, 50, 200 and 1,000 environments: pipes, shared memory, one process, native; with and without true states.

python -m bench.cage2            writes docs/images/cage2-throughput.png and its part of docs/performance.md
python -m bench.cage2 --no-docs  only prints

Every ratio is the median over pairs of slices of one run (`bench.stats`).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import envfleet as ef
from bench.stats import Run, Slice, estimate, ratio, short, take_turns
from envfleet.envs.cage2 import Cage2Env

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "images" / "cage2-throughput.png"
#: What the source reports at 200 environments: shared memory, steps only; pipes, with two true states per step.
SOURCE_STEPS, SOURCE_STATES = 3052.0, 180.0
STEP, STATES, ASYNC = "step only", "step + 2 true states", "asynchronous, half at a time"
_BARE = """
#include "cage2.cpp"
#include <vector>
extern "C" void bare(int64_t count, const int64_t *actions, uint8_t *obs, double *rewards) {
    static std::vector<Cage2> envs;
    static envfleet::Random random;
    envfleet::Call call{};
    call.random = &random;
    if ((int64_t)envs.size() != count) {
        random.state_low = 12345;
        random.inc_low = 1;
        envs.assign(count, Cage2{});
        double option[5] = {0, 0, 0, 100, 0};
        for (auto &env : envs) env.init(option);
    }
    for (int64_t i = 0; i < count; i++) {
        call.EnvCall::obs = obs + 52 * i;
        call.EnvCall::action = actions + i;
        call.truncated = 0;
        envs[i].step(call);
        rewards[i] = call.reward;
        if (call.truncated) envs[i].reset(call);
    }
}
"""


def timed(step: Callable[[], Any], per_call: int) -> Run:
    """A contestant from a function that steps `per_call` environments."""

    def run(seconds: float) -> tuple[int, float]:
        calls, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds or not calls:
            step()
            calls += 1
        return calls * per_call, took

    return run


def bare_loop(count: int, folder: str) -> Run:
    """The same struct in a loop of C++, compiled with the flags of the package."""
    source, library = Path(folder) / "bare.cpp", Path(folder) / f"bare{count}.so"
    source.write_text(_BARE)
    flags = ["-O3", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off", "-fno-builtin-pow", "-fno-builtin-powf"]
    include = [f"-I{ROOT / 'compiled/native'}", f"-I{ROOT / 'src/envfleet/native'}"]
    subprocess.run(["c++", *flags, *include, str(source), "-o", str(library)], check=True)
    bare, actions = ctypes.CDLL(str(library)).bare, _actions(count)
    obs, rewards = np.zeros((count, 52), np.uint8), np.zeros(count)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (actions, obs, rewards)]
    held = (actions, obs, rewards)
    return timed(lambda: bare(ctypes.c_int64(count), *pointers) and held, count)


def _actions(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 145, count)


def views(count: int) -> dict[str, Callable[[bool], ef.VectorizedEnvs]]:
    """The implementations; the first three run the environment in plain Python, as the source does."""

    def python(backend: str) -> Callable[[bool], ef.VectorizedEnvs]:
        return lambda states: ef.VectorizedEnvs(Cage2Env, count, backend=backend, state_in_obs=states and backend != "serial")

    return {
        "pipes": python("pipe"),
        "shared memory": python("shm"),
        "one process": python("serial"),
        "C++ in shared memory": lambda states: ef.ParallelEnvSharedMemory(n_envs=count),
        "native": lambda states: ef.VectorizedCAGE2Envs(count, num_workers=1),
    }


def contestants(count: int, stack: contextlib.ExitStack) -> dict[str, Run]:
    """Every implementation in every mode at one number of environments."""
    runs: dict[str, Run] = {}
    actions = _actions(count)
    for name, build in views(count).items():
        for mode in (STEP, STATES):
            envs = stack.enter_context(build(mode == STATES))
            envs.reset(seed=0)

            def with_states(envs: Any = envs) -> None:
                envs.get_true_states()
                envs.step(actions)
                envs.get_true_states()

            if mode == STATES:
                with_states()  # the first call looks up where the states are
            # `fleet.step`: the same rows, without a list of infos.
            step = with_states if mode == STATES else lambda fleet=envs.fleet: fleet.step(actions)
            runs[f"{name} | {mode}"] = timed(step, count)
        if name in ("shared memory", "native"):
            runs[f"{name} | {ASYNC}"] = asynchronous(stack.enter_context(build(False)).fleet, actions)
    return runs


def asynchronous(fleet: ef.Fleet, actions: Any) -> Run:
    """Receive at least half of the slots, and send those again at once."""
    fleet.reset(seed=0)
    fleet.send(actions)

    def run(seconds: float) -> tuple[int, float]:
        rows, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds or not rows:
            slots = fleet.recv(at_least=fleet.num_envs // 2).slots
            fleet.send(actions[slots], slots)
            rows += len(slots)
        return rows, took

    return run


def split(count: int, rates: dict[str, float]) -> list[str]:
    """Where a step of all environments goes, in microseconds: rows of a table."""
    env = Cage2Env(max_steps=None)
    env.reset(seed=0)
    actions = _actions(1000).tolist()
    began = time.perf_counter()
    for action in actions:
        env.step(action)
    env_us = (time.perf_counter() - began) * 1e6 / len(actions)
    rows = []
    for name, backend in (("pipes", "pipe"), ("shared memory", "shm"), ("one process", "serial")):
        workers = 1 if backend == "serial" else 2
        with ef.make(Cage2Env, workers, backend=backend) as fleet:
            fleet.reset(seed=0)
            steps, took = timed(lambda fleet=fleet: fleet.step(np.zeros(len(fleet), np.int64)), 1)(0.3)
        barrier = max(0.0, took / steps * 1e6 - env_us)
        whole, inside = count / rates[f"{name} | {STEP}"] * 1e6, env_us * count / workers
        states = count / rates[f"{name} | {STATES}"] * 1e6 - whole
        rest = max(0.0, whole - inside - barrier)
        rows.append(f"| {name} | {whole:,.0f} | {inside:,.0f} | {barrier:,.0f} | {rest:,.0f} | {states:,.0f} |")
    whole = count / rates[f"native | {STEP}"] * 1e6
    inside = count / rates["bare C++ loop"] * 1e6
    states = count / rates[f"native | {STATES}"] * 1e6 - whole
    rows.append(f"| native | {whole:,.0f} | {inside:,.0f} | 0 | {max(0.0, whole - inside):,.0f} | {states:,.0f} |")
    return rows


def report(found: dict[int, dict[str, dict[int, Slice]]], splits: list[str]) -> str:
    """The tables as Markdown."""
    counts = list(found)
    lines = ["| transitions/s | " + " | ".join(f"{count:,} envs" for count in counts) + " |", "|---|" + "---:|" * len(counts)]
    for name in next(iter(found.values())):
        rates = [estimate([one.rate for one in found[count][name].values()]).median for count in counts]
        lines.append(f"| {name.replace(' | ', ', ')} | " + " | ".join(short(rate) for rate in rates) + " |")
    if 200 in found:
        at = found[200]
        lines += [
            "",
            f"At 200 environments `native` makes {ratio(at[f'native | {STEP}'], SOURCE_STEPS)} times the source's "
            f"{SOURCE_STEPS:,.0f} transitions/s (steps only, target 1,000), and {ratio(at[f'native | {STATES}'], SOURCE_STATES)} times its "
            f"{SOURCE_STATES:,.0f} with two true states per step.",
        ]
    if 1000 in found:
        share = ratio(found[1000][f"native | {STEP}"], found[1000]["bare C++ loop"])
        lines.append(f"At 1,000 environments it has {share} of the speed of the bare C++ loop (target 0.50).")
    head = "| 200 envs, µs per step of all | whole | environment | barrier | transfer | two true states |"
    return "\n".join([*lines, "", head, "|---|---:|---:|---:|---:|---:|", *splits])


def draw(found: dict[int, dict[str, dict[int, Slice]]]) -> None:
    """Transitions per second over the number of environments."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(10, 4.2), dpi=110, sharey=True)
    for axes, mode, source in zip(both, (STEP, STATES), (SOURCE_STEPS, SOURCE_STATES)):
        for name in [*views(1), "bare C++ loop"]:
            key = name if name == "bare C++ loop" else f"{name} | {mode}"
            if name == "bare C++ loop" and mode == STATES:
                continue
            rates = [np.median([one.rate for one in slices[key].values()]) for slices in found.values()]
            axes.plot(list(found), rates, marker="o", label=name, linestyle=":" if name == "bare C++ loop" else "-")
        axes.plot([200], [source], marker="*", markersize=11, color="black", linestyle="", label="the source, its machine")
        axes.set(xscale="log", yscale="log", title=mode, xlabel="environments")
        axes.set_xticks(list(found), [str(count) for count in found])
        axes.grid(alpha=0.3)
    both[0].set_ylabel("transitions/s")
    both[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE)


def main() -> None:
    """Measure, print, and fill the part of docs/performance.md between its markers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.15)
    parser.add_argument("--envs", type=int, nargs="+", default=[20, 50, 200, 1000])
    parser.add_argument("--no-docs", action="store_true", help="print only")
    args = parser.parse_args()
    found: dict[int, dict[str, dict[int, Slice]]] = {}
    splits: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for count in args.envs:
            with contextlib.ExitStack() as stack:
                runs = {**contestants(count, stack), "bare C++ loop": bare_loop(count, folder)}
                found[count], thrown = take_turns(runs, args.rounds, args.seconds)
                print(f"{count} environments: {thrown} slices measured again", flush=True)
            if count == 200:
                splits = split(count, {k: float(np.median([one.rate for one in v.values()])) for k, v in found[count].items()})
    text = report(found, splits)
    print(text)
    if not args.no_docs:
        draw(found)
        page = PAGE.read_text()
        begin, end = "<!-- cage2 -->\n", "\n<!-- /cage2 -->"
        before, after = page.partition(begin)[0], page.partition(end)[2]
        PAGE.write_text(before + begin + text + end + after)


if __name__ == "__main__":
    main()
