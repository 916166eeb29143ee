"""Hostile exceptions, one case for each kind: the row is a FAULT or the error names the slot, and it can be told."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import warnings
from typing import Any

from envfleet.errors import EnvFailed, FaultError
from envfleet.slots.layout import FAULT

from .attacks import flying, rounds
from .mischief import NUMBERS
from .pilot import Pilot
from .slots import Op

_TELLING_S = 8.0
_open: dict[tuple[str, str], tuple[Pilot, contextlib.ExitStack]] = {}


def _pilot(way: str, on_fault: str) -> Pilot:
    """The fleet of the last case if it is still good: a new one for every kind would take minutes."""
    if (way, on_fault) not in _open:
        stack = contextlib.ExitStack()
        pilot, _ = stack.enter_context(flying(way, on_fault=on_fault))
        _open[way, on_fault] = pilot, stack
    return _open[way, on_fault][0]


@atexit.register
def _close_all() -> None:
    for pilot, _ in _open.values():
        pilot.fleet.close()


def raised_in_step(way: str, on_fault: str, kind: str) -> dict[str, Any]:
    """Slot 0 raises in a step; the others do not notice, and the fault can be told."""
    pilot = _pilot(way, on_fault)
    try:
        rounds(pilot, 3)
        ops = {slot: Op("step", slot + 7, NUMBERS[kind] if slot == 0 else 0) for slot in range(4)}
        if kind == "keyboard_interrupt" and pilot.slots[0].local and way in ("serial", "shm parent"):
            return _propagates(pilot, ops)
        pilot.send_ops(ops)
        if on_fault == "restart":
            _restarted(pilot)
        else:
            _raised(pilot, way)
        fault = pilot.fleet.faults[-1]
        assert (fault.slot, fault.kind, fault.phase) == (0, "failed", "step"), fault.cause[:200]
        rounds(pilot, 3)
        return {"told_s": tell(fault)}
    except BaseException:
        _open.pop((way, on_fault))
        with contextlib.suppress(Exception):
            pilot.fleet.close(1.0)
        raise


def _propagates(pilot: Pilot, ops: dict[int, Op]) -> dict[str, Any]:
    """KeyboardInterrupt in the caller's own thread is the caller's, by design; the slot is lost, and a reset mends it."""
    try:
        pilot.fleet.send([256 * op.code + op.payload for op in ops.values()])
    except KeyboardInterrupt:
        pilot._after_interrupted_send(ops)
        for model in pilot.slots:
            model.murky, model.seen = True, []
        pilot.drain()
        pilot.recover()
        rounds(pilot, 3)
        return {}
    raise AssertionError("the interrupt was swallowed")


def _restarted(pilot: Pilot) -> None:
    batch = pilot.guard("recv", lambda: pilot.fleet.recv(timeout_s=12.0))
    assert batch.status.tolist() == [FAULT, 0, 0, 0], f"status {batch.status.tolist()}, faults {len(pilot.fleet.faults)}"
    pilot.check(batch)


def _raised(pilot: Pilot, way: str) -> None:
    others = pilot.guard("recv", lambda: pilot.fleet.recv([1, 2, 3], timeout_s=12.0))
    assert others.status.tolist() == [0, 0, 0]
    pilot.check(others)
    try:
        pilot.guard("recv", lambda: pilot.fleet.recv([0], timeout_s=12.0))
    except EnvFailed as error:
        assert error.fault.slot == 0
        pilot.check_error(error)
    else:
        raise AssertionError("recv gave a row for an env that raised")
    pilot.recover()


def tell(fault: Any) -> float:
    """Look at a fault in every way there is; gives how long that took."""
    started = time.monotonic()
    assert "slot 0" in str(fault)
    assert isinstance(repr(fault), str) and isinstance(fault.cause, str) and fault.cause
    error = fault.error()
    assert isinstance(error, FaultError) and "slot 0" in str(error)
    cause = error.__cause__
    assert cause is None or BaseException in type(cause).__mro__
    spent_s = time.monotonic() - started
    assert spent_s < _TELLING_S, f"telling took {spent_s:.1f} s"
    return spent_s


def raised_in(way: str, phase: str, kind: str) -> None:
    """A hostile exception in the constructor, in reset, close, call or render."""
    warnings.simplefilter("ignore")
    with contextlib.ExitStack() as stack:
        pilot, traps = stack.enter_context(flying(way, on_fault="raise"))
        rounds(pilot, 2)
        pilot.slots[0].excuse_for(3, "planted")
        if phase in ("init", "close"):
            with open(os.path.join(traps, f"{phase}-0"), "w") as file:
                file.write(str(NUMBERS[kind]))
        if phase == "close":
            pilot.fleet.close(2.0)
            fault = pilot.fleet.faults[-1]
        else:
            fault = _fault_in(pilot, phase, NUMBERS[kind])
            pilot.recover()
            rounds(pilot, 2)
        assert (fault.slot, fault.phase, fault.kind) == (0, phase, "failed"), str(fault)[:300]
        tell(fault)


def _fault_in(pilot: Pilot, phase: str, code: int) -> Any:
    fleet = pilot.fleet
    if phase == "init":  # the env fails, is rebuilt by the reset, and its constructor fails
        pilot.send_ops({slot: Op("step", 1, NUMBERS["four_values"] if slot == 0 else 0) for slot in range(4)})
        pilot.drain()
    calls = {
        "init": lambda: fleet.reset(seed=1, slots=[0]),
        "reset": lambda: fleet.reset(seed=1, slots=[0], options={"mischief": code}),
        "call": lambda: fleet.call("ask_badly", code, slots=[0]),
        "render": lambda: fleet.render(0),
    }
    if phase == "render":
        fleet.set_attr("tag", [code], slots=[0])
    try:
        pilot.guard(phase, calls[phase])
    except EnvFailed as error:
        return error.fault
    raise AssertionError(f"a hostile exception in {phase} gave no error")
