"""`auto` on a machine that is not ours alone: its share of `serial` beside busy loops, there from the start or coming later."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

from bench.contestants import Contestant, ours

ENVS = ("CartPole-v1", "Ant-v5")
SLOTS = (8, 64)
LOOPS = (0, 1, 2, 4)
#: A load that comes later is measured from so many seconds after it came.
SETTLE_S = 2.0

# Ends by itself when we are gone, however we went.
_LOOP = """
import os
parent = os.getppid()
print("on", flush=True)
while os.getppid() == parent:
    for _ in range(200_000):
        pass
"""


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute; all run when this begins, none when it ends."""
    loops: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            loops.append(subprocess.Popen([sys.executable, "-c", _LOOP], stdout=subprocess.PIPE, text=True))
        for loop in loops:
            assert loop.stdout is not None
            loop.stdout.readline()
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.communicate()


def busy(quick: bool) -> dict[str, Any]:
    """Shares of `serial` by env, slots, number of busy loops, and whether these were there first."""
    rounds, seconds, settle_s = (2, 0.05, 0.1) if quick else (12, 0.2, SETTLE_S)
    rows = []
    for env in ENVS[:1] if quick else ENVS:
        for slots in SLOTS[:1] if quick else SLOTS:
            for loops in LOOPS[:2] if quick else LOOPS:
                rows.append(_from_the_start(env, slots, loops, rounds, seconds))
                if loops:
                    rows.append(_later(env, slots, loops, rounds, seconds, settle_s))
    return {"rows": rows}


def _from_the_start(env: str, slots: int, loops: int, rounds: int, seconds: float) -> dict[str, Any]:
    with busy_loops(loops), _both(env, slots) as (auto, serial):
        shares = _shares(auto, serial, rounds, seconds)
        return _row(env, slots, loops, "start", auto, shares)


def _later(env: str, slots: int, loops: int, rounds: int, seconds: float, settle_s: float) -> dict[str, Any]:
    # Made as on a quiet machine, whoever else is there now: else what comes later would find its choice made already.
    with mock.patch("envfleet.autotune.auto.current_load", lambda: None), _both(env, slots) as (auto, serial):
        quiet = _shares(auto, serial, 3, seconds)
        with busy_loops(loops):
            came = time.perf_counter()
            while time.perf_counter() - came < settle_s:
                auto.run(seconds)  # the fleet lives on while it finds out
            shares = _shares(auto, serial, rounds, seconds)
        return {**_row(env, slots, loops, "later", auto, shares), "quiet": quiet}


@contextlib.contextmanager
def _both(env: str, slots: int) -> Iterator[tuple[Contestant, Contestant]]:
    with contextlib.ExitStack() as stack:
        found = []
        for kind in ("auto", "serial"):
            one = ours(kind)(env, slots)
            stack.callback(one.close)
            one.run(0.1)  # caches, the runners' arming
            found.append(one)
        yield found[0], found[1]


def _shares(auto: Contestant, serial: Contestant, rounds: int, seconds: float) -> list[float]:
    """Auto's rate over serial's, slice by slice; they take turns, and take turns in beginning."""
    shares = []
    for turn in range(rounds):
        rates = {}
        for one in (auto, serial) if turn % 2 else (serial, auto):
            steps, took = one.run(seconds)
            rates[one] = steps / took
        shares.append(rates[auto] / rates[serial])
    return shares


def _row(env: str, slots: int, loops: int, when: str, auto: Any, shares: list[float]) -> dict[str, Any]:
    return {"env": env, "slots": slots, "loops": loops, "when": when, "plan": str(auto.fleet.plan), "shares": shares}
