"""Native threads that are interrupted, closed, dropped or forked in the middle of a batch."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.errors import FleetClosed, SlotBusy
from tests.support.native_probes import NativeCounting, library, probe
from tests.support.system import child_env

BUSY = functools.partial(NativeCounting, limit=50, busy_us=500)


def started(count: int = 32) -> ef.Fleet:
    """A fleet whose batches are shared out to threads."""
    fleet = ef.make(BUSY, count, backend="native", num_workers=3)
    fleet.reset(seed=0)
    for _ in range(4):
        fleet.step([0] * count)
    return fleet


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_busy_fleet_ends(how: str, no_leaks: None) -> None:
    fleet = started()
    fleet.send([0] * 32)
    if how == "close":
        fleet.close()
    del fleet
    gc.collect()


def test_an_interrupt_at_any_moment_leaves_a_fleet_that_works() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupts = 0
    try:
        with started() as fleet:
            for i in range(30):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0003 * (1 + i))
                    fleet.step([0] * 32)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupts += 1
                    assert (fleet.reset(seed=0).obs == 0).all()
                    assert (fleet.step([0] * 32).obs == 1).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 0


def test_a_forked_child_is_told_and_the_parent_goes_on() -> None:
    with started() as fleet:
        child = os.fork()
        if not child:
            try:
                fleet.step([0] * 32)
            except FleetClosed:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert fleet.step([0] * 32).scored.all()


def test_a_busy_slot_gives_no_snapshot() -> None:
    with started() as fleet:
        fleet.send([0] * 32)
        with pytest.raises(SlotBusy):
            fleet.snapshot()
        assert fleet.recv().scored.all()


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupts_while_python_finishes_slots_leave_none_out(workers: int) -> None:
    """After a call every slot's next step is Python's. An interrupt there must not leave a slot that nobody works on."""
    armed, raised = [False], [0]

    def interrupt(number: int, frame: Any) -> None:
        if armed[0]:
            armed[0] = False
            raised[0] += 1
            raise KeyboardInterrupt

    before, ended = signal.signal(signal.SIGUSR1, interrupt), threading.Event()

    def nag() -> None:
        while not ended.wait(0.003):
            os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=nag)
    surfaced = 0
    try:
        with ef.make("CartPole-v1", 600, backend="native", num_workers=workers) as fleet:
            fleet.reset(seed=0)
            thread.start()
            while surfaced < 15:
                fleet.call("render_mode")
                try:
                    armed[0] = True
                    fleet.step(np.ones(600, np.int64))
                except KeyboardInterrupt:
                    surfaced += 1
                    fleet.drop()
                armed[0] = False
                try:
                    fleet.reset(seed=0)
                except ef.EnvFailed:  # the slot that was interrupted in the middle of its step
                    fleet.drop()
                    fleet.reset(seed=0)
            assert surfaced == raised[0] and not fleet.is_out.any()
    finally:
        armed[0] = False
        ended.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_slots_that_threads_step_are_abandoned_when_they_are_done() -> None:
    with ef.make(functools.partial(NativeCounting, busy_us=10_000), 8, backend="native", num_workers=3) as fleet:
        fleet.reset(seed=0)
        fleet.step([0] * 8)
        for count in (8, 7, 5, 4, 8):  # the caller steps too: which threads are busy at its end depends on how many there are
            fleet.send([0] * count, slots=range(count))
            assert fleet.abandon() == []
            assert not fleet.reset(seed=0).scored.any() and not len(fleet.quarantined)


def test_what_is_not_to_block_does_no_work() -> None:
    with ef.make(functools.partial(NativeCounting, busy_us=2_000), 64, backend="native", num_workers=2) as fleet:
        fleet.reset(seed=0)
        fleet.step([0] * 64)
        fleet.send([0] * 64)
        assert len(fleet.ready()) < 40  # the other thread's share, not all
        with pytest.raises(ef.RecvTimeout):
            fleet.recv(timeout_s=0)
        assert fleet.recv().scored.all()


CLOSED_TOO_EARLY = """
import functools, gc, signal, sys, time, warnings
import envfleet as ef
from tests.support import native_probes

def interrupt(*_):
    raise KeyboardInterrupt

warnings.simplefilter("ignore")
native_probes.library = lambda: sys.argv[2]  # built already
fleet = ef.make(functools.partial(native_probes.NativeCounting, limit=1, busy_us=20_000), 3, backend="native", num_workers=3)
fleet.reset(seed=0)
envs = fleet.call("__apply__", lambda env: env)
for _ in range(2):  # until it is known how long a step takes, the caller steps; every step ends an episode
    fleet.step([0] * 3)
for env in envs:
    env.state_view[16:24].view("i8")[0] = 500_000  # from here on a step takes half a second
fleet.send([0] * 3)
while not any(env.in_step for env in envs):
    pass
if sys.argv[1] == "interrupted":
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        fleet.close(timeout_s=0.05)
    except KeyboardInterrupt:
        print("interrupted")
fleet.close(timeout_s=0.05)
del fleet
gc.collect()
print("busy" if any(env.in_step for env in envs) else "too late")
while any(env.in_step for env in envs):  # the episode ends, and the thread resets the environment
    time.sleep(0.01)
"""


@pytest.mark.parametrize(("how", "said"), [("once", ["busy"]), ("interrupted", ["interrupted", "busy"])])
def test_a_thread_that_is_left_behind_does_no_harm(how: str, said: list[str]) -> None:
    words = [sys.executable, "-c", CLOSED_TOO_EARLY, how, library()]
    child = subprocess.run(words, env=child_env(), capture_output=True, text=True, timeout=60)
    assert (child.returncode, child.stdout.split()) == (0, said), child.stderr


def test_threads_round_as_their_caller_does() -> None:
    """Whether numbers near zero become zero is a setting of each thread: a row must not depend on who stepped it."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush numbers near zero")
    try:
        torch.set_flush_denormal(False)
        with ef.make(probe("Tiny", busy_us=100), 32, backend="native", num_workers=3) as fleet:
            fleet.reset(seed=0)
            for flush in (False, True) * 5:
                torch.set_flush_denormal(flush)
                bits = fleet.step([0] * 32).obs.view(np.int64)  # numbers near zero are equal to zero while they are flushed
                assert (bits == 0).all() if flush else (bits == bits[0]).all() and bits[0] != 0
    finally:
        torch.set_flush_denormal(False)
