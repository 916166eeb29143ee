"""The review's attacks on the core, one function each, and their families. Each runs in a child: see `child`."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

from envfleet.errors import FaultError, FleetError, RecvTimeout
from envfleet.slots.layout import FAULT
from envfleet.testing import Held, descendants, wait_until

from . import inside
from .alarm import Interrupter
from .mischief import NUMBERS
from .pilot import Pilot, Tally
from .scenario import Imp, Setup, keeper_trouble, operate, own_leaks
from .slots import _FOREVER, Op, Wrong


@contextlib.contextmanager
def flying(way: str, shape: str = "plain", on_fault: str = "restart", **change: Any) -> Iterator[tuple[Pilot, str]]:
    """(a pilot whose slots are all reset, the folder of traps) of a fleet of 4 slots over 2 workers; then nothing is left."""
    warnings.simplefilter("ignore")
    before = Held.now()
    setup = Setup(way, "", random.Random(1), 4, 2, shape, "reset", on_fault, 10**6, None, 0.0)
    if way in ("pipe", "shm", "shm parent", "joined"):
        setup.start_method = "fork"
    for name, value in change.items():
        setattr(setup, name, value)
    with tempfile.TemporaryDirectory() as traps:
        fleet = setup.make(traps)
        pilot = Pilot(fleet, setup.rng, shape, setup.local_slots(fleet), Tally())
        try:
            pilot.recover()
            yield pilot, traps
        finally:
            started = time.monotonic()
            fleet.close()
            spent_s = time.monotonic() - started
    assert spent_s < 16, f"close took {spent_s:.1f} s"
    assert not (left := own_leaks(before, 6.0)), f"left: {left}"
    assert not pilot.tally.problems, pilot.tally.problems


def rounds(pilot: Pilot, count: int) -> None:
    """Step all slots so often, every row checked."""
    for _ in range(count):
        unknown = [model.slot for model in pilot.slots if not model.seen and not model.dead]
        if unknown:
            pilot.reset(unknown, seeded=True)
        pilot.send(list(range(len(pilot.slots))), [])
        pilot.drain()


def plant(pilot: Pilot, name: str, slot: int = 0) -> None:
    """Step all slots, one of them with a mischief, and receive."""
    ops = {i: Op("step", i + 1, NUMBERS[name] if i == slot else 0) for i in range(len(pilot.slots))}
    pilot.send_ops(ops)
    pilot.drain()


# -- interrupts ----------------------------------------------------------------------------------------------------


def interrupts(way: str, shape: str, on_fault: str, count: int, seed: int, kinds: list[str]) -> dict[str, Any]:
    """So many interrupts at random moments inside send, recv, step, reset, call, ready and assign, against the model."""
    with flying(way, shape, on_fault, rng=random.Random(seed), pace_s=0.0003) as (pilot, _):
        pilot.interrupter = interrupter = Interrupter(pilot.rng, tuple(kinds))
        imp = Imp(pilot, "calm", set())
        started = time.monotonic()
        try:
            while interrupter.count < count:
                operate(pilot, imp, 0.0, interrupt=True)
                assert time.monotonic() - started < 60 + count / 2, f"only {interrupter.count} interrupts"
            pilot.recover()
            pilot.interrupter = None
            rounds(pilot, 5)
        except (Wrong, FleetError) as error:
            text = "\n       ".join(pilot.log)
            raise AssertionError(f"after {interrupter.count} interrupts: {error}\nafter: {text}") from error
        return {"interrupts": interrupter.count, "rows": pilot.tally.rows}


def planted_interrupt(way: str, on_fault: str, kind: str) -> None:
    """An interrupt in the middle of handing over, caught; the next send, and a reset."""
    error = {"int": KeyboardInterrupt, "foreign": ZeroDivisionError}[kind]
    with flying(way, on_fault=on_fault) as (pilot, _):
        inside.interrupt_once(pilot.fleet, "submit", error)
        with contextlib.suppress(error):
            pilot.fleet.send([0] * 4)
        for model in pilot.slots:
            model.murky, model.out = True, Op("step", 0) if model.slot in inside.out_slots(pilot.fleet) else None
        for _ in range(3):
            pilot.drain()
            rounds(pilot, 1)  # on_fault="raise": a send of lost slots says so, and the pilot resets
        rounds(pilot, 3)


# -- forks ---------------------------------------------------------------------------------------------------------


def fork_back(way: str, how: str, where: str) -> None:
    """A child forked by an env comes back out of step, reset or the constructor: it is not the worker and ends at once."""
    with flying(way) as (pilot, traps):
        before = set(descendants(os.getpid()))
        if where == "step":
            plant(pilot, how)
        elif where == "reset":
            pilot.reset([0], seeded=True, mischief=NUMBERS[how])
        else:
            with open(os.path.join(traps, "init-0"), "w") as file:
                file.write(str(NUMBERS[how]))
            plant(pilot, "four_values")  # rebuilt, and the new env's constructor forks
            before |= {pid for pid in inside.worker_pids(pilot.fleet).values()}
        deadline = time.monotonic() + 0.4
        while time.monotonic() < deadline:  # the second worker answers whenever it likes: give it something to answer
            rounds(pilot, 10)
        assert wait_until(lambda: set(descendants(os.getpid())) <= before), "the forked child lives on as a worker"


# -- silence -------------------------------------------------------------------------------------------------------


def idle_trouble(way: str, what: str) -> dict[str, Any]:
    """A worker in trouble while it has nothing to do: the next recv gives fault rows within the deadline."""
    with flying(way, timeout_s=1.0) as (pilot, traps):
        rounds(pilot, 3)
        pid = inside.worker_pids(pilot.fleet)[0]
        if what in ("hold_gil", "stuck_handler"):
            plant(pilot, what)
            assert wait_until(lambda: os.path.exists(os.path.join(traps, "begun"))), "the trouble did not begin"
        if what == "daemon":
            plant(pilot, "fork_holds")
            inside.send_signal(pid, signal.SIGKILL)
            assert wait_until(lambda: pid not in descendants(os.getpid()))
        if what == "stop":
            inside.send_signal(pid, signal.SIGSTOP)
        pilot.excuse_worker(0, _FOREVER, what)
        started = time.monotonic()
        pilot.send_ops({slot: Op("step", slot) for slot in range(4)})
        batch = _received(pilot)
        spent_s = time.monotonic() - started
        assert (batch.status[:2] == FAULT).all(), batch.status
        assert (batch.status[2:] == 0).all(), batch.status
        pilot.check(batch)
        for model in pilot.slots:
            model.excuse = 0
        rounds(pilot, 3)
    return {"recv_s": spent_s}


def _received(pilot: Pilot) -> Any:
    try:
        return pilot.guard("recv", lambda: pilot.fleet.recv(timeout_s=15.0))
    except RecvTimeout as error:
        raise AssertionError(f"silence: step_timeout_s=1, and {error}") from error


# -- what does not come back ---------------------------------------------------------------------------------------


def bad_mail(way: str, what: str, on_fault: str) -> None:
    """An observation, info or call result that cannot be unpickled here: a fault of that slot alone, then all is well."""
    with flying(way, "mail", on_fault) as (pilot, _):
        rounds(pilot, 2)
        if what.startswith("call"):
            code = NUMBERS[what.removeprefix("call_")]
            with contextlib.suppress(FaultError):
                pilot.fleet.call("ask_badly", code, slots=[0])
            pilot.slots[0].murky = True  # whether the env may go on after it is not laid down
            for slots in ([1, 2, 3], [3, 1]):
                assert [answer[::2] for answer in pilot.fleet.call("ask", 17, slots=slots)] == [(s, 17) for s in slots]
        else:
            plant(pilot, what)
        rounds(pilot, 6)


# -- fault rows ----------------------------------------------------------------------------------------------------


def dies_writing(way: str, how: str, shape: str) -> None:
    """The worker dies while its result is read: the fault row tells the last delivered transition."""
    with flying(way, shape) as (pilot, _):
        for _ in range(2):
            rounds(pilot, 1 + pilot.rng.randrange(3))
            plant(pilot, how)
        assert pilot.tally.fault_rows >= 2


def dies_sending(way: str) -> None:
    """The worker is killed while it sends an info too big for the socket: its row was written, but never delivered."""
    with flying(way) as (pilot, _):
        for _ in range(2):
            rounds(pilot, 2)
            step = int(pilot.fleet.slab.head["step"][0])
            pilot.send_ops({0: Op("step", 5, NUMBERS["info_big"])})
            wait_until(lambda step=step: int(pilot.fleet.slab.head["step"][0]) != step, within_s=0.3)
            pilot.excuse_worker(0, 3, "killed")
            inside.send_signal(inside.worker_pids(pilot.fleet)[0], signal.SIGKILL)
            pilot.drain()
        assert pilot.tally.fault_rows >= 2


def torn(way: str, kills: int) -> dict[str, Any]:
    """The worker is killed at a random moment of a step with a 16 MB observation."""
    with flying(way, "huge", num_envs=1, num_workers=1) as (pilot, _):
        rounds(pilot, 1)
        for _ in range(kills):
            started = time.monotonic()
            rounds(pilot, 1)
            pilot.send_ops({0: Op("step", 1)})
            pilot.excuse_worker(0, 3, "killed")
            time.sleep(pilot.rng.uniform(0, time.monotonic() - started))
            inside.send_signal(inside.worker_pids(pilot.fleet)[0], signal.SIGKILL)
            pilot.drain()
    return {"fault_rows": pilot.tally.fault_rows}


# -- the keeper and the surroundings -------------------------------------------------------------------------------


def dead_and_spoken_to(way: str, by: str, on_fault: str) -> None:
    """A worker dies while idle and something else than a step is the first to meet it: its slots are lost all the same."""
    with flying(way, on_fault=on_fault) as (pilot, _):
        for _ in range(3):
            rounds(pilot, 2)
            pid = inside.worker_pids(pilot.fleet)[0]
            inside.send_signal(pid, signal.SIGKILL)
            assert wait_until(lambda pid=pid: pid not in descendants(os.getpid()))
            pilot.excuse_worker(0, 3, "killed")
            if by == "assign":
                pilot.assign(interrupt=False)
            elif by == "call":
                pilot.ask(interrupt=False)
            elif by == "attribute":
                pilot.attributes()
            else:
                pilot.ready(interrupt=False)
            pilot.send_ops({slot: Op("step", 9) for slot in range(4)})
            pilot.drain()
            for model in pilot.slots:
                model.excuse = 0
            if on_fault == "raise":
                pilot.recover()


def keeper_killed(way: str, on_fault: str) -> None:
    """Every call says so at once, and `close` works."""
    with flying(way, on_fault=on_fault) as (pilot, _):
        rounds(pilot, 2)
        keeper_trouble(pilot)


def keeper_killed_waiting(way: str) -> None:
    """The same while slots are out: recv does not wait for workers that died with their keeper."""
    with flying(way) as (pilot, _):
        pilot.fleet.send([256 * NUMBERS["hang"]] + [0] * 3)
        inside.send_signal(inside.keeper_pid(pilot.fleet), signal.SIGKILL)
        started = time.monotonic()
        try:
            pilot.guard("recv", lambda: pilot.fleet.recv(timeout_s=25.0))
        except RecvTimeout as error:
            raise AssertionError("recv waits for workers of a dead keeper") from error
        except FleetError:
            pass
        assert time.monotonic() - started < 12


def keeper_stopped(way: str) -> None:
    """A stopped keeper: healthy workers go on; a recv keeps to its time; when it goes on, all is well."""
    with flying(way) as (pilot, _):
        keeper = inside.keeper_pid(pilot.fleet)
        inside.send_signal(keeper, signal.SIGSTOP)
        try:
            rounds(pilot, 3)
            pilot.excuse_worker(0, _FOREVER, "killed")
            inside.send_signal(inside.worker_pids(pilot.fleet)[0], signal.SIGKILL)
            pilot.send_ops({slot: Op("step", 3) for slot in range(4)})
            started = time.monotonic()
            with contextlib.suppress(RecvTimeout):
                pilot.check(pilot.guard("recv", lambda: pilot.fleet.recv(timeout_s=2.0)))
            spent_s = time.monotonic() - started
            assert spent_s < 2.0 + 15.0, f"recv(timeout_s=2) took {spent_s:.1f} s"
        finally:
            inside.cont(keeper)
        pilot.drain()
        rounds(pilot, 3)


def deleted_cwd(way: str) -> None:
    """The folder is gone: the fleet works, or says so in an error of ours."""
    old, folder = os.getcwd(), tempfile.mkdtemp()
    os.chdir(folder)
    shutil.rmtree(folder)
    try:
        with flying(way) as (pilot, _):
            rounds(pilot, 2)
    except FleetError:
        pass
    finally:
        os.chdir(old)


def small_files(way: str) -> None:
    """`ulimit -f 8`: the fleet works, or says so in an error of ours."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 1024, limit[1]))
    try:
        with flying(way, "wide") as (pilot, _):
            rounds(pilot, 2)
    except FleetError:
        pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def copied(way: str) -> None:
    """A fleet cannot be copied, and says so; the attempt harms nothing."""
    with flying(way) as (pilot, _):
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            try:
                attempt(pilot.fleet)
            except (TypeError, FleetError) as error:
                assert "fleet" in str(error).lower(), f"{attempt.__name__}: {error}"
            else:
                raise AssertionError(f"{attempt.__name__} of a fleet is accepted")
        rounds(pilot, 2)


def assigned_order(way: str) -> None:
    """What was assigned last counts, also when something older was assigned while the slot was out."""
    with flying(way) as (pilot, _):
        fleet = pilot.fleet
        fleet.send([1] * 4)
        fleet.assign([0], tasks=[5], seeds=[77])
        fleet.recv()
        batch = fleet.reset(seed=[100, 200, 300, 400], tasks=[8] * 4)
        assert batch.seed.tolist() == [100, 200, 300, 400]
        assert [fleet.task_value(task) for task in batch.task] == [8] * 4
