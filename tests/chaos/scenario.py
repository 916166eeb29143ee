"""One scenario: a fleet of a random kind, random operations and mischief of one theme, checked, then closed."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from typing import Any

import envfleet as ef
from envfleet.errors import FaultError, FleetError
from envfleet.testing import Held

from . import inside
from .alarm import INTERRUPTS, Interrupter
from .mischief import NUMBERS, STEP_TIMEOUT_S, codes_of
from .pilot import Pilot, Tally
from .slots import _FOREVER, Wrong
from .world import SHAPES, AsyncWorld, World

#: Way -> (backend, whether its envs are in processes of their own, whether they are coroutines).
WAYS: dict[str, tuple[str, bool, bool]] = {
    "serial": ("serial", False, False),
    "thread": ("thread", False, False),
    "aio": ("aio", False, False),
    "aio async": ("aio", False, True),
    "pipe": ("pipe", True, False),
    "shm": ("shm", True, False),
    "shm parent": ("shm", True, False),
    "joined": ("joined", True, False),
}
#: The parts of a joined fleet: backends, and whether their envs are in processes of their own.
PARTS = (("pipe", True), ("serial", False), ("shm", True))
LOCAL_THEMES = ("calm", "hostile", "interrupts")
THEMES = (*LOCAL_THEMES, "kills", "stops", "forks", "keeper", "all")
KINDS = [
    (way, theme) for way in WAYS for theme in (THEMES if WAYS[way][1] else LOCAL_THEMES) if (way, theme) != ("joined", "keeper")
]
_CLOSE_S = 4.0
_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGTERM)


@dataclasses.dataclass
class Setup:
    """What is drawn for one scenario."""

    way: str
    theme: str
    rng: random.Random
    num_envs: int
    num_workers: int
    shape: str
    on_end: str
    on_fault: str
    max_restarts: int
    start_method: str | None
    pace_s: float
    timeout_s: float = STEP_TIMEOUT_S

    @classmethod
    def draw(cls, way: str, theme: str, seed: int) -> Setup:
        """Everything from the seed."""
        rng = random.Random(f"{way}/{theme}/{seed}")
        workers = rng.randint(1, 3) + (way == "shm parent")
        method = rng.choice(["fork", "fork", "forkserver", "spawn"]) if WAYS[way][1] else None
        return cls(
            way, theme, rng, rng.randint(max(2, workers), 8), workers, rng.choice(SHAPES), rng.choice(["reset", "wait"]),
            rng.choice(["restart", "restart", "raise"]), rng.choice([10**6, 10**6, 10**6, 3]), method,
            rng.choice([0.0, 0.0, 0.0002, 0.001]),
        )  # fmt: skip

    def make(self, traps: str) -> Any:
        """The fleet."""
        backend, processes, coroutines = WAYS[self.way]
        env = AsyncWorld if coroutines else World
        options: dict[str, Any] = {} if backend == "serial" else {"num_workers": self.num_workers}
        if processes:
            options.update(start_method=self.start_method, isolate=self.way != "shm parent")
        makes = [(lambda i=i: env(i, self.shape, traps, self.pace_s)) for i in range(self.num_envs)]
        common = {
            "on_end": self.on_end, "on_fault": self.on_fault, "max_restarts": self.max_restarts,
            "init_timeout_s": 10.0, "reset_timeout_s": self.timeout_s, "step_timeout_s": self.timeout_s,
        }  # fmt: skip
        if backend != "joined":
            return ef.make(makes, backend=backend, **common, **options)
        return ef.join(
            [
                ef.make(makes[mine], backend=name, **common, **({"start_method": self.start_method} if processes else {}))
                for (name, processes), mine in self.shares()
            ]
        )

    def shares(self) -> list[tuple[tuple[str, bool], slice]]:
        """The parts of a joined fleet, and the slots of each."""
        bounds = [self.num_envs * i // len(PARTS) for i in range(len(PARTS) + 1)]
        return [(part, slice(a, b)) for part, a, b in zip(PARTS, bounds, bounds[1:]) if a < b]

    def local_slots(self, fleet: Any) -> set[int]:
        """Slots whose envs are in this very process."""
        if not WAYS[self.way][1]:
            return set(range(self.num_envs))
        if self.way == "joined":
            return {slot for (_, processes), mine in self.shares() if not processes for slot in range(self.num_envs)[mine]}
        if self.way != "shm parent" or os.environ.get("ENVFLEET_COMPILED") == "0":
            return set()
        return {slot for slot, worker in enumerate(inside.worker_of(fleet)) if worker == self.num_workers - 1}


def scenario(way: str, theme: str, seed: int, ops: int = 150, budget_s: float = 8.0) -> dict[str, Any]:
    """Run it; gives the tally. Problems are in it, not raised."""
    warnings.simplefilter("ignore")
    setup, tally = Setup.draw(way, theme, seed), Tally()
    before = Held.now()
    with tempfile.TemporaryDirectory() as traps:
        fleet = setup.make(traps)
        local = setup.local_slots(fleet)
        pilot = Pilot(fleet, setup.rng, setup.shape, local, tally)
        if theme in ("interrupts", "all"):
            pilot.interrupter = Interrupter(setup.rng)
        imp = Imp(pilot, theme, local)
        try:
            pilot.recover()
            fly(pilot, imp, theme, traps, ops, time.monotonic() + budget_s)
        except Wrong as wrong:
            tally.problems.append(f"wrong: {wrong}\nafter: " + "\n       ".join(pilot.log))
        except FleetError as error:
            tally.problems.append(f"unexpected: {type(error).__name__}: {error!s:.300}\nafter: " + "\n       ".join(pilot.log))
        imp.end()
        _close(pilot, tally)
        if pilot.interrupter is not None:
            tally.interrupts = pilot.interrupter.count
        del fleet, pilot, imp
    _look_for_leaks(before, tally, stuck=theme == "hostile")
    return {**dataclasses.asdict(tally), "setup": f"{setup}"[:300]}


def _close(pilot: Pilot, tally: Tally) -> None:
    """Close in the middle of whatever is going on: bounded, also when it is interrupted."""
    started = time.monotonic()
    try:
        if pilot.interrupter is not None and pilot.rng.random() < 0.3:
            try:
                pilot.interrupter.call(lambda: pilot.fleet.close(_CLOSE_S), 0.02)
            except INTERRUPTS:
                pass
        pilot.fleet.close(_CLOSE_S)
    except BaseException as error:
        tally.problems.append(f"close raised {type(error).__name__}: {error!s:.300}")
    tally.worst_close_s = time.monotonic() - started
    if tally.worst_close_s > _CLOSE_S + 12:
        tally.problems.append(f"late: close took {tally.worst_close_s:.1f} s")


def _look_for_leaks(before: Held, tally: Tally, stuck: bool) -> None:
    found = own_leaks(before, 10.0 if stuck else 6.0)
    if found:
        tally.problems.append(f"left: {found!s:.400}")


def own_leaks(before: Held, within_s: float) -> dict[str, list[Any]]:
    """What is left; /dev/shm is everybody's, so only names of ours count there."""
    deadline = time.monotonic() + within_s
    while True:
        found = Held.now().beyond(before)
        found["shm"] = [name for name in found.get("shm", ()) if "envfleet" in name]
        found = {name: extra for name, extra in found.items() if extra}
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


class Imp:
    """Does things to worker processes from outside, now or in the middle of the next call."""

    def __init__(self, pilot: Pilot, theme: str, local: set[int]) -> None:
        self.pilot, self.theme, self.rng = pilot, theme, pilot.rng
        self.local_workers = {pilot.worker_of[slot] for slot in local}
        self._timers: list[threading.Timer] = []
        self.codes = codes_of(*(["kills", "stops", "forks", "hostile"] if theme == "all" else [theme]), local=False)
        self.local_codes = codes_of("hostile", local=True) if theme in ("all", "hostile") else []
        # In the caller's own thread this one is the caller's, by design.
        self.local_codes = [code for code in self.local_codes if code != NUMBERS["keyboard_interrupt"]]

    def strike(self) -> None:
        """Kill or stop a worker."""
        pids = {w: pid for w, pid in inside.worker_pids(self.pilot.fleet).items() if w not in self.local_workers}
        if not pids:
            return
        worker = self.rng.choice(sorted(pids))
        delay_s = self.rng.choice([0.0, self.rng.uniform(0, 0.005)])
        stop = self.theme == "stops" or (self.theme == "all" and self.rng.random() < 0.3)
        number = signal.SIGSTOP if stop else self.rng.choice(_SIGNALS)
        self.pilot.excuse_worker(worker, 30, f"{number.name} from outside")  # on a busy machine it may come late
        self.pilot.log.append(f"{number.name} to worker {worker} in {delay_s:.4f} s")
        self.pilot.tally.stops += stop
        self.pilot.tally.kills += not stop
        self._later(delay_s, inside.send_signal, pids[worker], number)
        if stop and self.rng.random() < 0.5:
            self._later(delay_s + self.rng.choice([0.001, 0.05, 1.0]), inside.cont, pids[worker])

    def _later(self, delay_s: float, function: Any, *args: Any) -> None:
        if not delay_s:
            function(*args)
            return
        timer = threading.Timer(delay_s, function, args)
        timer.start()
        self._timers.append(timer)

    def end(self) -> None:
        """Nothing happens after this."""
        for timer in self._timers:
            timer.cancel()
            timer.join()


def fly(pilot: Pilot, imp: Imp, theme: str, traps: str, ops: int, until: float) -> None:
    """Random operations until the count or the time is over; the last are those that end a fleet."""
    rng = pilot.rng
    wicked = 0.0 if theme in ("calm", "interrupts", "keeper") else 0.08
    for _ in range(ops):
        if time.monotonic() > until:
            break
        if theme in ("kills", "stops", "all") and rng.random() < 0.06:
            imp.strike()
        if theme in ("kills", "all", "hostile") and rng.random() < 0.02:
            _trap(pilot, traps, imp)
        operate(pilot, imp, wicked, pilot.interrupter is not None and rng.random() < 0.4)
    if theme == "keeper":
        keeper_trouble(pilot)
        return
    pilot.drain()
    if rng.random() < 0.5:
        pilot.recover()


def _trap(pilot: Pilot, traps: str, imp: Imp) -> None:
    """A constructor or a close that will fail once, when a slot is next built or closed."""
    slot = pilot.rng.randrange(len(pilot.slots))
    codes = imp.local_codes if pilot.slots[slot].local else imp.codes
    if codes:
        with open(os.path.join(traps, f"{pilot.rng.choice(['init', 'close'])}-{slot}"), "w") as file:
            file.write(str(pilot.rng.choice(codes)))
        pilot.log.append(f"a trap for slot {slot}")
        pilot.excuse_worker(pilot.worker_of[slot], _FOREVER, "a trap")


def operate(pilot: Pilot, imp: Imp, wicked: float, interrupt: bool) -> None:
    """One random operation that makes sense now."""
    rng, idle, out = pilot.rng, pilot.idle(), pilot.out()
    unknown = [slot for slot in idle if not pilot.slots[slot].seen and not pilot.slots[slot].dead]
    if unknown and rng.random() < 0.7:
        pilot.reset(unknown, seeded=True)
        return
    draw = rng.random()
    if draw < 0.4 and (able := pilot.live(idle)):
        if len(able) == len(pilot.slots) and rng.random() < 0.5:
            _send(pilot, imp, able, wicked, interrupt, whole=True)
        else:
            _send(pilot, imp, sorted(rng.sample(able, rng.randint(1, len(able)))), wicked, interrupt)
    elif draw < 0.7 and out:
        some = sorted(rng.sample(out, rng.randint(1, len(out)))) if rng.random() < 0.3 else None
        most = len(some or out)
        at_least = rng.randint(1, most) if rng.random() < 0.5 else None
        pilot.recv(some, at_least, rng.choice([None, None, 0.0, 0.002, 0.1]), interrupt)
    elif draw < 0.76 and idle:
        slots = sorted(rng.sample(idle, rng.randint(1, len(idle))))
        known = all(pilot.slots[slot].seen for slot in slots)
        pilot.reset(slots, not known or rng.random() < 0.5, interrupt, by_send=rng.random() < 0.3)
    elif draw < 0.82:
        pilot.assign(interrupt)
    elif draw < 0.9:
        _ask(pilot, imp, wicked, interrupt)
    elif draw < 0.93:
        pilot.attributes()
    elif draw < 0.96 and out and pilot.fleet._backend.can_kill:
        pilot.abandon(interrupt)
    else:
        pilot.ready(interrupt)


def _send(pilot: Pilot, imp: Imp, slots: list[int], wicked: float, interrupt: bool, whole: bool = False) -> None:
    codes: list[int] = []
    if wicked and pilot.rng.random() < wicked * len(slots):
        codes = imp.local_codes if any(pilot.slots[slot].local for slot in slots) else imp.codes
        codes = codes and [pilot.rng.choice(codes), 0, 0]
    pilot.send(slots, codes, interrupt, whole)


def _ask(pilot: Pilot, imp: Imp, wicked: float, interrupt: bool) -> None:
    local = any(model.local for model in pilot.slots)
    codes = imp.local_codes if local else imp.codes
    code = pilot.rng.choice(codes) if wicked and codes and pilot.rng.random() < 3 * wicked else 0
    pilot.ask(interrupt, code)


def keeper_trouble(pilot: Pilot) -> None:
    """The keeper is killed: from then on every call says so at once, and `close` works."""
    pid = inside.keeper_pid(pilot.fleet)
    inside.send_signal(pid, signal.SIGKILL)
    pilot.tally.kills += 1
    if not _await(lambda: not inside.worker_pids_alive(pilot.fleet)):
        raise Wrong("workers outlive their keeper")
    fleet = pilot.fleet
    calls = {
        "recv": lambda: fleet.recv(timeout_s=20.0),
        "send": lambda: fleet.send([0] * fleet.num_envs) if pilot.shape != "bulky" else fleet.reset(),
        "reset": lambda: fleet.reset(seed=1),
        "call": lambda: fleet.call("ask", 1),
        "step": lambda: fleet.reset(seed=2),
    }
    said = []
    for name, call in calls.items():
        started = time.monotonic()
        try:
            pilot.guard(name, call)
            said.append(f"{name}: went well")
        except FaultError as error:
            said.append(f"{name}: {type(error).__name__}")
        except FleetError as error:
            said.append(f"{name}: {error}")
        if time.monotonic() - started > 10.0:
            raise Wrong(f"{name} after the keeper's death took {time.monotonic() - started:.1f} s")
    if not all("process that starts workers ended" in words for words in said[-3:]):
        raise Wrong(f"after the keeper's death: {said}")


def _await(condition: Any, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
