"""backend="auto": build one env in a worker, time it, and choose what should be fastest here; say why in one line."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import gymnasium as gym

from envfleet.errors import FaultError, FleetError, NotPicklable
from envfleet.recipe import Recipe
from envfleet.seat import Seat
from envfleet.supervise.faults import Failure
from envfleet.supervise.machine import usable_cpus

#: Seconds a batch costs beyond the steps themselves: a wake-up on each side when workers are isolated, next to nothing
#: when the parent steps a share (bench/scaling.md; wake-ups while spinning, on the 2-core machine of docs/performance.md).
ISOLATED_S, SHARED_S = 30e-6, 8e-6
#: What a slot costs the parent beyond its step, per batch.
PER_SLOT_S = 0.15e-6
#: Workers are only worth their memory and start-up when they save at least this share of the time.
WORTH = 0.8
#: Copying a byte of an observation: 10 GB/s.
COPY_S = 1e-10
#: A batch shorter than this is never worth a process.
HANDFUL_S = 40e-6
#: How long the probe steps an env.
PROBE_S = 0.25


@dataclasses.dataclass(frozen=True)
class Probe:
    """What one env costs: seconds of wall clock and of CPU per step (resets included), bytes per observation."""

    step_s: float
    cpu_s: float
    obs_bytes: int
    is_async: bool = False
    pauses: float = 1.0  # how often a step gave the core away of its own accord, on average

    @property
    def waits(self) -> bool:
        """Whether a step mostly waits (I/O, a server, a sleep) rather than computes.

        A step that takes long because others have the core is not one that waits: it does not give the core away itself.
        """
        return self.step_s > 200e-6 and self.cpu_s < 0.5 * self.step_s and self.pauses > 0.02


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend and its size, with the reason in words."""

    backend: str
    num_workers: int | None
    isolate: bool
    reason: str


def measure_env(env: Any, seconds: float = PROBE_S) -> dict[str, Any]:
    """Step an env with random actions for a while, in its worker. Resets are part of what a step costs."""
    if inspect.iscoroutinefunction(env.step) or inspect.iscoroutinefunction(env.reset):
        return {"step_s": 0.0, "cpu_s": 0.0, "obs_bytes": 0, "is_async": True}
    if isinstance(env, Seat):
        return _measure_seat(env, seconds)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(64)]
    obs, _ = env.reset(seed=0)
    for action in actions[:3]:  # the first steps run checks and fill caches
        if any(env.step(action)[2:4]):
            env.reset()
    steps, start, cpu, given = 0, time.perf_counter(), time.process_time(), _pauses()
    while steps < 4 or time.perf_counter() - start < seconds:
        _, _, terminated, truncated, _ = env.step(actions[steps % 64])
        if terminated or truncated:
            env.reset()
        steps += 1
    wall_s, cpu_s, pauses = time.perf_counter() - start, time.process_time() - cpu, _pauses() - given
    size = sum(getattr(leaf, "nbytes", 8) for leaf in _leaves(obs))
    return {
        "step_s": wall_s / steps,
        "cpu_s": cpu_s / steps,
        "obs_bytes": int(size),
        "is_async": False,
        "pauses": pauses / steps,
    }


def _pauses() -> float:
    """How often this thread has given its core away by itself; where nobody counts that, as if at every look."""
    try:
        import resource

        return float(resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw)
    except (ImportError, AttributeError):  # not on this system
        return time.perf_counter() * 1e6


def _measure_seat(seat: Seat, seconds: float) -> dict[str, Any]:
    """`measure_env` for many agents; choosing legal actions is not counted."""
    seat.begin(seat.reset(seed=0))
    steps, wall_s, cpu_s, begun = 0, 0.0, 0.0, time.perf_counter()
    while steps < 4 or time.perf_counter() - begun < seconds:
        action = seat.actions(seat.sample())
        start, cpu = time.perf_counter(), time.process_time()
        seat.take(seat.step(action))
        if seat.over:
            seat.begin(seat.reset())
        wall_s, cpu_s = wall_s + time.perf_counter() - start, cpu_s + time.process_time() - cpu
        steps += 1
    size = sum(array.nbytes for array in seat.obs)
    return {"step_s": wall_s / steps, "cpu_s": cpu_s / steps, "obs_bytes": size, "is_async": False}


def choose(probe: Probe, num_slots: int, cpus: int, isolate: bool | None, num_workers: int | None) -> Choice:
    """The backend that should be fastest, by arithmetic on what was measured.

    Example:
        >>> choose(Probe(7e-6, 7e-6, 16), num_slots=2, cpus=2, isolate=None, num_workers=None).backend
        'serial'
        >>> choose(Probe(5e-3, 5e-3, 16), num_slots=64, cpus=8, isolate=None, num_workers=None).backend
        'shm'
        >>> choose(Probe(50e-3, 1e-4, 16), num_slots=64, cpus=2, isolate=None, num_workers=None).backend
        'thread'
    """
    step = _time(probe.step_s)
    if probe.is_async:
        return Choice("aio", num_workers, True, "its step is async")
    if probe.waits:
        workers = num_workers or min(num_slots, 256)
        return Choice(
            "thread", workers, True, f"a step waits {step} for {_time(probe.cpu_s)} of CPU: a thread per slot"
        )
    workers = min(num_workers or cpus, num_slots)
    # CPU time, not wall clock: what others did to the machine during the probe is no property of the env.
    # The observation is copied into its row besides.
    step_s = min(probe.step_s, probe.cpu_s) + probe.obs_bytes * COPY_S
    step, serial_s = _time(step_s), num_slots * step_s
    if workers < 2 or num_slots < 2:
        return Choice("serial", None, True, f"one {'slot' if num_slots < 2 else 'worker'}, {step} a step")
    if serial_s < HANDFUL_S:
        return Choice("serial", None, True, f"{step} a step, {_time(serial_s)} a batch: a handful of cheap envs")
    share_s = -(-num_slots // workers) * step_s + num_slots * PER_SLOT_S
    # A parent that steps leaves one process fewer to compete for few cores; with many, isolation is nearly free.
    shared = isolate is not True and workers >= cpus and cpus <= 4
    batch_s = share_s + (SHARED_S if shared else ISOLATED_S)
    if batch_s > WORTH * serial_s:
        return Choice("serial", None, True, f"{step} a step, {_time(serial_s)} a batch: too little to share out")
    who = "the parent is one of them" if shared else "isolated"
    why = f"{step} a step: {_time(batch_s)} a batch instead of {_time(serial_s)} in one process; {who}"
    return Choice("shm", workers, not shared, why)


def decide(recipe: Recipe, num_workers: int | None, isolate: bool | None) -> Choice:
    """Probe (or remember) and choose. Where an env cannot be probed, serial: it will show the error itself."""
    if recipe.num_slots == 1:
        return Choice("serial", None, True, "one slot")
    if not hasattr(os, "fork"):
        return Choice("serial", None, True, "no worker processes on this system")
    try:
        probe = remembered(recipe) or _probe(recipe)
    except NotPicklable as why:
        return Choice("serial", None, True, f"it cannot travel to workers ({str(why).split(':')[0]})")
    except FaultError:
        raise
    except FleetError as why:
        return Choice("serial", None, True, f"the probe failed ({why})")
    return choose(probe, recipe.num_slots, usable_cpus(), isolate, num_workers)


def _probe(recipe: Recipe) -> Probe:
    """Build one env in a worker of its own and measure it there: nothing of it ever runs in the parent."""
    from envfleet.backends.pipe import PipeBackend
    from envfleet.making import init_fault

    backend = PipeBackend(num_workers=1)
    try:
        built = backend.start(dataclasses.replace(recipe, factories=recipe.factories[:1]))[0]
        if not isinstance(built, dict):
            raise init_fault(0, built, backend).error()
        backend.call([0], "call", "__apply__", (measure_env,), {})
        deadline = time.monotonic() + recipe.init_timeout_s + PROBE_S
        while not (replies := backend.replies(0.05)):
            backend.wait(0, 0.0)
            if backend.has_trouble or time.monotonic() > deadline:
                raise FleetError("its worker ended or took too long while being measured")
    finally:
        backend.close(2.0)
    if isinstance(replies[0], Failure):
        raise FleetError(replies[0].summary)
    probe = Probe(**replies[0])
    _remember(recipe, probe)
    return probe


# -- memory between runs --------------------------------------------------------------------------------------------------


def cache_path() -> Path:
    """Where probes are remembered: ENVFLEET_CACHE_DIR, else the user's cache folder."""
    base = os.environ.get("ENVFLEET_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "envfleet"
    )
    return Path(base) / "probes.json"


def _key(recipe: Recipe) -> str | None:
    """Env id, its arguments, versions and machine; None where there is no id to remember by."""
    if recipe.spec is None:
        return None
    arguments = [repr(recipe.spec.kwargs), repr(getattr(recipe.factories[0], "kwargs", recipe.factories[0]))]
    machine = [platform.node(), platform.machine(), platform.python_version(), gym.__version__, str(usable_cpus())]
    digest = hashlib.sha256("\n".join(arguments + machine).encode()).hexdigest()[:16]
    return f"{recipe.spec.id} {digest}"


def remembered(recipe: Recipe) -> Probe | None:
    """The probe of an earlier run on this machine."""
    key = _key(recipe)
    try:
        known = json.loads(cache_path().read_text()) if key else {}
        return Probe(**known[key]) if key in known else None
    except (OSError, ValueError, TypeError):
        return None  # no cache, or not ours: probe again


def _remember(recipe: Recipe, probe: Probe) -> None:
    key, path = _key(recipe), cache_path()
    if key is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            known = json.loads(path.read_text())
        except (OSError, ValueError):
            known = {}
        known[key] = dataclasses.asdict(probe)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(known, indent=1))
        scratch.replace(path)  # whole or not at all: two runs may write at once
    except OSError:
        return  # a read-only home costs a probe per run, no more


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
