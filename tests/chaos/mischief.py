"""What an env can do wrong, by number: the number travels in the action, the reset's options or a trap."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from .zoo import ZOO

STEP_TIMEOUT_S = 3.0
BIG = 10_000_000

#: What the row must be: right; FAULT of this slot alone; FAULT of every slot of the worker; right, but the worker may be
#: found dead or stuck later; FAULT or a row whose observation and info are not looked at.
RIGHT, FAULTS, DIES, LATER, WILD = "right", "faults", "dies", "later", "wild"


@dataclasses.dataclass(frozen=True)
class Mischief:
    """One kind: what the env does, and what it leads to where envs have processes, and where they have not."""

    name: str
    act: Callable[[Any], Any]
    process: str  # outcome on pipe and shm
    local: str | None  # outcome on serial, thread, aio; None: not to be tried there
    theme: str


CODES: dict[int, Mischief] = {}
NUMBERS: dict[str, int] = {}


def _enter(name: str, act: Callable[[Any], Any], process: str, local: str | None, theme: str) -> None:
    code = len(CODES) + 1
    CODES[code] = Mischief(name, act, process, local, theme)
    NUMBERS[name] = code


def _result(change: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """A mischief that does nothing but return something odd."""
    return lambda env: change


# -- exceptions ----------------------------------------------------------------------------------------------------

for _name, _act in ZOO.items():
    _enter(_name, _act, FAULTS, FAULTS, "hostile")


# -- results -------------------------------------------------------------------------------------------------------


class Bomb:
    """Pickles well, and does not come back."""

    def __reduce__(self) -> Any:
        return _explode, ()


def _explode() -> None:
    raise RuntimeError("cannot be unpickled here")


class ExitBomb:
    """Ends a process that unpickles it with a BaseException."""

    def __reduce__(self) -> Any:
        return sys.exit, (4,)


class NoTruth:
    """An object that cannot be asked whether it is true."""

    def __bool__(self) -> bool:
        raise ValueError("neither true nor false")


def _with(**change: Any) -> Callable[[Any, Any], Any]:
    """A result with some parts replaced."""
    names = ("obs", "reward", "terminated", "truncated", "info")

    def replace(env: Any, result: Any) -> Any:
        return tuple(change.get(name, value) for name, value in zip(names, result))

    return replace


def _in_mail(make: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    """A result whose text is replaced, where the observation has one; elsewhere as it was."""

    def replace(env: Any, result: Any) -> Any:
        if env.shape != "mail":
            return result
        return ({**result[0], "story": make()}, *result[1:])

    return replace


_enter("bad_shape", _result(lambda env, result: ([1, 2, 3], *result[1:])), FAULTS, FAULTS, "hostile")
_enter("bad_type", _result(lambda env, result: ("text", *result[1:])), FAULTS, FAULTS, "hostile")
_enter("four_values", _result(lambda env, result: result[:4]), FAULTS, FAULTS, "hostile")
_enter("nothing", _result(lambda env, result: 5), FAULTS, FAULTS, "hostile")
_enter("info_no_dict", _result(_with(info=[1])), FAULTS, FAULTS, "hostile")
_enter("reward_text", _result(_with(reward="much")), FAULTS, FAULTS, "hostile")
_enter("reward_none", _result(_with(reward=None)), FAULTS, FAULTS, "hostile")
_enter("end_unknown", _result(_with(terminated=NoTruth())), FAULTS, FAULTS, "hostile")
_enter("reward_nan", _result(_with(reward=float("nan"))), RIGHT, RIGHT, "hostile")
_enter("info_lock", _result(lambda env, result: (*result[:4], {"lock": threading.Lock()})), FAULTS, WILD, "hostile")
_enter("info_bomb", _result(lambda env, result: (*result[:4], {"bomb": Bomb()})), WILD, WILD, "hostile")
_enter("info_big", _result(lambda env, result: (*result[:4], {"big": b"i" * BIG})), RIGHT, RIGHT, "hostile")
_enter("mail_bomb", _result(_in_mail(Bomb)), "mail", WILD, "hostile")
_enter("mail_exit", _result(_in_mail(ExitBomb)), "mail", WILD, "hostile")
_enter("mail_lock", _result(_in_mail(threading.Lock)), "mail", WILD, "hostile")


# -- deaths --------------------------------------------------------------------------------------------------------


def _signal(number: int) -> Callable[[Any], Any]:
    def act(env: Any) -> None:
        signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), number)
        time.sleep(60)

    return act


for _number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGTERM):
    _enter(_number.name.lower(), _signal(_number), DIES, None, "kills")
_enter("exit", lambda env: os._exit(7), DIES, None, "kills")
_enter("exit_zero", lambda env: os._exit(0), DIES, None, "kills")


def _exit_later(env: Any) -> None:
    threading.Timer(0.02, os._exit, (5,)).start()


def _close_all(env: Any) -> None:
    os.closerange(3, 256)


_enter("exit_later", _exit_later, LATER, None, "kills")
_enter("close_all", _close_all, "dies or right", None, "kills")


class Deadly:
    """Ends the process when somebody looks at it: as a number, a truth, an array, or to pickle it."""

    def _die(self, *args: Any) -> Any:
        os._exit(11)

    __float__ = __bool__ = __array__ = __reduce__ = __len__ = __iter__ = _die


_enter("dies_in_info", _result(lambda env, result: (*result[:4], {"x": Deadly()})), DIES, None, "kills")
_enter("dies_in_reward", _result(lambda env, result: (result[0], Deadly(), *result[2:])), DIES, None, "kills")
_enter("dies_in_end", _result(lambda env, result: (*result[:3], Deadly(), result[4])), DIES, None, "kills")
_enter("dies_in_obs", _result(lambda env, result: (Deadly(), *result[1:])), DIES, None, "kills")
_enter("dies_in_mail", _result(_in_mail(Deadly)), "mail dies", None, "kills")


# -- silences ------------------------------------------------------------------------------------------------------


def _late(env: Any) -> None:
    time.sleep(STEP_TIMEOUT_S + 1.5)


def _mark(env: Any) -> None:
    """Say that it has begun, for a test that waits for it."""
    if env.traps:
        with open(os.path.join(env.traps, "begun"), "w"):
            pass


def _hold_gil(env: Any) -> None:
    def hold() -> None:
        _mark(env)
        ctypes.PyDLL(None).sleep(1000)

    threading.Timer(0.05, hold).start()


def _stuck_handler(env: Any) -> None:
    def stay(*args: Any) -> None:
        _mark(env)
        while True:
            time.sleep(1000)

    signal.signal(signal.SIGALRM, stay)
    signal.setitimer(signal.ITIMER_REAL, 0.05)


_enter("stop_itself", _signal(signal.SIGSTOP), DIES, None, "stops")
_enter("hang", lambda env: time.sleep(1000), DIES, None, "stops")
_enter("late", _late, DIES, FAULTS, "stops")
_enter("hold_gil", _hold_gil, LATER, None, "stops")
_enter("stuck_handler", _stuck_handler, LATER, None, "stops")


# -- forks ---------------------------------------------------------------------------------------------------------


def _fork(child: Callable[[], Any], wait: bool = False) -> Callable[[Any], Any]:
    """Fork, and let the child do something and come back; in the parent nothing is odd."""

    def act(env: Any) -> None:
        pid = os.fork()
        if pid == 0:
            child()
        elif wait:
            os.waitpid(pid, 0)

    return act


def _fail_a_moment_later() -> None:
    time.sleep(0.05)
    raise RuntimeError("the helper failed")


def _daemon() -> None:
    os.setsid()
    if os.fork() == 0:
        time.sleep(300)
    os._exit(0)


_enter("fork_returns", _fork(lambda: None), RIGHT, None, "forks")
_enter("fork_returns_later", _fork(lambda: time.sleep(0.05)), RIGHT, None, "forks")
_enter("fork_raises", _fork(_fail_a_moment_later), RIGHT, None, "forks")
_enter("fork_exits", _fork(lambda: os._exit(0), wait=True), RIGHT, None, "forks")
_enter("fork_sys_exits", _fork(lambda: sys.exit(3)), RIGHT, None, "forks")
_enter("fork_holds", _fork(_daemon, wait=True), RIGHT, None, "forks")


def codes_of(*themes: str, local: bool) -> list[int]:
    """The codes of some themes that may be tried."""
    return [code for code, it in CODES.items() if it.theme in themes and not (local and it.local is None)]


def outcome_of(code: int, local: bool, shape: str) -> str:
    """What an action with this code leads to."""
    if not code:
        return RIGHT
    found = CODES[code].local if local else CODES[code].process
    assert found is not None
    if "mail_" in CODES[code].name + "_" and shape != "mail":
        return RIGHT
    return {"mail": FAULTS, "mail dies": DIES}.get(found, found)
