"""Seven faults, two columns: what happens in Gymnasium's AsyncVectorEnv and in a fleet when the same thing goes wrong.

    python bench/side_by_side.py                     both columns as a Markdown table
    python bench/side_by_side.py --only envfleet     one column

Every cell is a fresh process, and every word of it was seen there. Nothing is timed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

import envfleet as ef
from envfleet.envs.probe import Counting, Faulty, Tasked

FAULTS = {
    "kill_worker": "SIGKILL one worker",
    "raise_in_step": "an env raises in `step`",
    "raise_in_init": "a constructor raises, in the worker only",
    "hang_in_step": "an env sleeps forever in `step`",
    "kill_parent": "SIGKILL the parent while an env is stuck",
    "leak": "5 × create and close 4 envs, still referenced",
    "task": "`reset` with task 7, then an automatic reset",
}
LIBRARIES = ("gymnasium", "envfleet")


class Worker(Counting):
    """Tells the process it runs in."""

    def pid(self) -> int:
        return os.getpid()


def make_vector(env_fns: list[Callable[[], Any]]) -> Any:
    return gym.vector.AsyncVectorEnv(env_fns, context="fork")


def make_fleet(env_fns: list[Callable[[], Any]], **options: Any) -> ef.Fleet:
    return ef.make(env_fns, backend="shm", num_workers=len(env_fns), **options)


def attempt(call: Callable[[], Any]) -> str:
    """The name of what a call raises and the first line of its message."""
    try:
        call()
    except Exception as error:
        words = (str(error) or "no message").splitlines()[0]
        return f"{type(error).__name__}: {words}"
    return "no error"


# -- Gymnasium -----------------------------------------------------------------------------------------------------


def gymnasium_kill_worker() -> str:
    envs = make_vector([Worker] * 4)
    envs.reset(seed=0)
    os.kill(envs.call("pid")[1], signal.SIGKILL)
    first = attempt(lambda: envs.step([0] * 4))
    return f"`{first}`; next step `{attempt(lambda: envs.step([0] * 4))}`"


def gymnasium_raise_in_step() -> str:
    envs = make_vector([Counting, lambda: Faulty("step", "raise", at=1), Counting, Counting])
    envs.reset(seed=0)
    first = attempt(lambda: envs.step([0] * 4))
    return f"`{first}`; next step `{attempt(lambda: envs.step([0] * 4))}`"


def gymnasium_raise_in_init() -> str:
    return f"`{attempt(lambda: make_vector([Counting, lambda: Faulty('init', 'raise')]).reset(seed=0))}`"


def gymnasium_hang_in_step() -> str:
    envs = make_vector([Counting, lambda: Faulty("step", "hang", at=1)])
    envs.reset(seed=0)
    say("`step` still blocked when it was stopped after 5 s")
    envs.step([0, 0])
    return "returned"


def gymnasium_kill_parent() -> None:
    envs = make_vector([Worker, Worker, lambda: Faulty("step", "hang", at=1)])
    envs.reset(seed=0)
    envs.step_async([0] * 3)
    wait_to_be_killed([process.pid for process in envs.processes])


def gymnasium_leak() -> str:
    def once() -> Any:
        envs = make_vector([Counting] * 4)
        envs.reset(seed=0)
        envs.close()
        return envs

    return leaked(once)


def gymnasium_task() -> str:
    envs = gym.vector.AsyncVectorEnv([Tasked] * 2, context="fork", autoreset_mode="SameStep")
    first, _ = envs.reset(seed=0, options={"task": 7})
    ended, later = False, first
    while not ended:
        later, _, terminated, truncated, _ = envs.step([0, 0])
        ended = bool((terminated | truncated)[0])
    return tasks_seen(first[0, 0], later[0, 0])


# -- envfleet ------------------------------------------------------------------------------------------------------


def envfleet_kill_worker() -> str:
    with make_fleet([Worker] * 4, on_fault="restart") as fleet:
        fleet.reset(seed=0)
        os.kill(fleet.call("pid")[1], signal.SIGKILL)
        return goes_on(fleet)


def envfleet_raise_in_step() -> str:
    envs = [Counting, lambda: Faulty("step", "raise", at=1), Counting, Counting]
    with make_fleet(envs, on_fault="restart", max_restarts=1) as fleet:
        fleet.reset(seed=0)
        return goes_on(fleet)


def envfleet_raise_in_init() -> str:
    return f"`{attempt(lambda: make_fleet([Counting, lambda: Faulty('init', 'raise')]))}`"


def envfleet_hang_in_step() -> str:
    with make_fleet([Counting, lambda: Faulty("step", "hang", at=1)], step_timeout_s=1.0) as fleet:
        fleet.reset(seed=0)
        try:
            fleet.step([0, 0])
        except ef.EnvTimeout as error:
            where = "with" if "threading.py" in error.fault.stack else "without"
            return f"`EnvTimeout: {str(error).splitlines()[0]}` {where} the Python stack it was stuck in"
    return "returned"


def envfleet_kill_parent() -> None:
    fleet = make_fleet([Worker, Worker, lambda: Faulty("step", "hang", at=1)])
    fleet.reset(seed=0)
    fleet.send([0] * 3)
    wait_to_be_killed(children(os.getpid()))


def envfleet_leak() -> str:
    def once() -> Any:
        fleet = make_fleet([Counting] * 4)
        fleet.reset(seed=0)
        fleet.close()
        return fleet

    return leaked(once)


def envfleet_task() -> str:
    with make_fleet([Tasked] * 2) as fleet:
        batch = first = fleet.reset(seed=0, tasks=7)
        while not batch.ended[0]:
            batch = fleet.step([0, 0])
        return tasks_seen(first.obs[0, 0], batch.obs[0, 0])


# -- what is common ------------------------------------------------------------------------------------------------


def goes_on(fleet: ef.Fleet, steps: int = 100) -> str:
    """Step on, and tell what the fault row and the other slots were."""
    batch = fleet.step([0] * len(fleet))
    fault = str(fleet.faults[0]).splitlines()[0]
    bad = batch.slots[batch.faulted].tolist()
    good = 0
    for _ in range(steps):
        batch = fleet.step([0] * len(fleet))
        good += int(batch.scored[~np.isin(batch.slots, bad)].all())
    return f"slots {bad} marked FAULT and rebuilt, `{fault}`; the other slots made all {good} further steps"


def leaked(once: Callable[[], Any]) -> str:
    kept = [once()]
    before = len(os.listdir("/proc/self/fd"))
    kept += [once() for _ in range(5)]
    return f"open file descriptors {before} → {len(os.listdir('/proc/self/fd'))}"


def wait_to_be_killed(pids: list[int]) -> None:
    time.sleep(0.5)  # by now one env is stuck and the others are done
    print(*pids, flush=True)
    signal.pause()


def tasks_seen(first: float, later: float) -> str:
    return f"first episode ran task {first:g}, the next " + (f"task {later:g}" if later >= 0 else "none")


def children(pid: int) -> list[int]:
    """All processes below one, from /proc."""
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            for child in map(int, file.read().split()):
                found += [child, *children(child)]
    return found


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def say(line: str) -> None:
    print(line, flush=True)


def cell(library: str, fault: str) -> str:
    """Run one cell in a process of its own and read what it saw."""
    command = [sys.executable, __file__, "--cell", f"{library}_{fault}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        if fault == "kill_parent":
            pids = [int(word) for word in process.stdout.readline().split()]
            process.kill()
            process.wait()
            deadline = time.monotonic() + 2.0
            while any(map(alive, pids)) and time.monotonic() < deadline:
                time.sleep(0.02)
            left = [pid for pid in pids if alive(pid)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            return f"{len(left)} of {len(pids)} processes alive 2 s later"
        said, _ = process.communicate(timeout=5.0 if fault == "hang_in_step" and library == "gymnasium" else 60.0)
        return said.strip().splitlines()[-1]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return said.strip() or "hung for 60 s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=LIBRARIES, help="one column only")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cell:
        say(globals()[args.cell]())
        os._exit(0)  # a pool that cannot be closed must not keep its cell alive
    columns = [args.only] if args.only else list(LIBRARIES)
    print(f"| fault | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for fault, words in FAULTS.items():
        print(f"| {words} | {' | '.join(cell(library, fault) for library in columns)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
