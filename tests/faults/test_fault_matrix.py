"""{constructor, reset, step, render, close} x {raise, exit, SIGSEGV, SIGKILL, hang, unpicklable}: every message has
slot, phase and cause, and the fleet can still be closed, leaving nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import envfleet as ef
from envfleet.envs.probe import Counting, Faulty
from envfleet.errors import EnvFailed, EnvTimeout, FaultError, WorkerLost
from envfleet.testing import Held, leaks_since

PHASES = ("init", "reset", "step", "render", "close")
HOW = ("raise", "exit", "segv", "kill", "hang", "unpicklable")


def can_happen(backend: str, phase: str, how: str) -> bool:
    """Whether a fault can be had on a backend at all: no thread outlives its process, no pickle means no bad pickle."""
    if how == "unpicklable":
        return backend in ("pipe", "shm") and phase in ("reset", "step", "render")
    if backend in ("pipe", "shm"):
        return True
    return how == "raise" or (how == "hang" and backend in ("thread", "aio"))


KIND = {"raise": EnvFailed, "unpicklable": EnvFailed, "hang": EnvTimeout}
CAUSE = {
    "raise": "RuntimeError: planted fault in",
    "exit": "exited with code 7",
    "segv": "SIGSEGV",
    "kill": "SIGKILL",
    "unpicklable": "pickle",
}
ALL = [
    pytest.param(backend, phase, how, id=f"{backend}-{phase}-{how}")
    for backend in ("serial", "thread", "aio", "pipe", "shm")
    for phase in PHASES
    for how in HOW
    if can_happen(backend, phase, how)
]


def start(backend: str, phase: str, how: str) -> ef.Fleet:
    options: dict[str, Any] = {} if backend == "serial" else {"num_workers": 2}
    if backend in ("pipe", "shm"):
        options["start_method"] = "fork"
    # Only the phase under test is short of time.
    limits = {f"{name}_timeout_s": 0.25 if how == "hang" and phase in names else 30.0 for name, names in LIMITS.items()}
    envs = [Counting, lambda: Faulty(phase, how, at=2), Counting]
    return ef.make(envs, backend=backend, **limits, **options)


LIMITS = {"init": ("init",), "reset": ("reset",), "step": ("step", "render")}


@pytest.mark.parametrize(("backend", "phase", "how"), ALL)
def test_every_fault_says_where_and_why(backend: str, phase: str, how: str, no_leaks: Any) -> None:
    """Invariant 4 (a fault is never silence) and 7 (close is complete after it)."""
    if phase == "close":
        fault = fault_in_close(backend, how)
    else:
        with pytest.raises(KIND.get(how, WorkerLost)) as raised, warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a stuck thread is named again by close
            with start(backend, phase, how) as fleet:
                fleet.reset(seed=3)
                fleet.step([0, 0, 0])
                if phase == "render":
                    fleet.render(1)
                fleet.step([1, 1, 1])
        fault = raised.value.fault
        assert f"slot 1 {verb(raised.value)} in {phase}" in str(raised.value)
    assert (fault.slot, fault.phase) == (1, phase)
    if how == "hang":
        assert "fail_now" in fault.stack or backend == "aio", "the stack of the stuck call is not there"
        assert "_timeout_s=0.25" in fault.cause or phase == "close"
    else:
        assert CAUSE[how] in fault.cause
    if how == "raise":
        assert "planted fault" in fault.traceback and "fail_now" in fault.traceback


def fault_in_close(backend: str, how: str) -> Any:
    fleet = start(backend, "close", how)
    fleet.reset(seed=3)
    with pytest.warns(RuntimeWarning, match=r"(?s)while closing: slot 1 .* in close"):
        fleet.close(timeout_s=0.5)
    (fault,) = fleet.faults
    return fault


def verb(error: FaultError) -> str:
    return {EnvFailed: "failed", EnvTimeout: "timed out", WorkerLost: "lost its worker"}[type(error)]


@pytest.fixture
def no_leaks(request: Any) -> Any:
    """As everywhere, but for the one thing that cannot be ended: a stuck thread."""
    before = Held.now()
    yield
    params = request.node.callspec.params
    found = leaks_since(before, 0.0 if params["how"] == "hang" else 5.0)
    if params["how"] == "hang" and params["backend"] in ("thread", "aio"):
        found = {} if set(found) <= {"threads", "fds"} else found
    else:
        found = leaks_since(before)
    assert found == {}
