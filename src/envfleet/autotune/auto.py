"""backend="auto": time one env in a worker, check the load of the machine, choose the fastest way, and say why in a line.

Safety comes first: envs run in the caller's process only where `trust` allows it, even if that is slower. An env that
dies, hangs or raises in its probe gets worker processes with deadlines.
"""

from __future__ import annotations

import dataclasses
import os

from envfleet.autotune.probe_cache import cache_path, code_of, key_of, remember, remembered
from envfleet.autotune.probing import Probe, ProbeFailed, measure_env, run_probe
from envfleet.autotune.trust import is_native, may_run_here, trust_of
from envfleet.errors import NotPicklable
from envfleet.slots.factories import Recipe
from envfleet.util.machine import Load, current_load, usable_cpus
from envfleet.util.text import duration, first_line

__all__ = ["Choice", "Probe", "cache_path", "choose", "decide", "measure_env"]

#: Seconds a batch costs beyond the steps themselves: a wake-up on each side when workers are isolated, next to nothing
#: when the parent steps a share (bench/scaling.md; wake-ups while spinning, on the 2-core machine of docs/performance.md).
ISOLATED_S, SHARED_S = 30e-6, 8e-6
#: The same with one isolated worker: there is a core for the parent too, which spins (8 CartPoles: 0.97 of serial).
ALONE_S = 8e-6
#: What a slot costs the parent beyond its step, per batch.
PER_SLOT_S = 0.15e-6
#: Workers are only worth their memory and start-up when they save at least this share of the time.
WORTH = 0.8
#: Copying a byte of an observation: 10 GB/s.
COPY_S = 1e-10
#: A batch shorter than this is never worth a process.
HANDFUL_S = 40e-6
#: Where others have the cores, a worker waits for its turn once a batch, some milliseconds. Shares longer than this outlast
#: that (Ant, 8 slots, 1.4 ms: 1.0, 1.3 and 1.8 of serial beside 1, 2 and 4 busy loops), shorter ones do not (CartPole,
#: 64 slots, 0.25 ms: 0.65, 0.39 and 0.57 while waiters did not stop spinning, now 0.8 to 1.7).
OUTLASTS_S = 1e-3


@dataclasses.dataclass(frozen=True)
class Choice:
    """A backend and its size, with the reason in words."""

    backend: str
    num_workers: int | None
    isolate: bool
    reason: str
    threads: bool = False  # pipe: a thread for every slot in its worker
    moves_below: int = 0  # with fewer free CPUs than this, one process would have been chosen: slots are moved into it


def choose(
    probe: Probe,
    num_slots: int,
    cpus: int,
    isolate: bool | None,
    num_workers: int | None,
    here: bool = True,
    load: Load | None = None,
) -> Choice:
    """The backend that should be fastest, computed from what was measured.

    `here`: the caller's process may step them. `isolate=True`: not even a share of `shm`. `load`: what other programs use.

    Example:
        >>> choose(Probe(7e-6, 7e-6, 16), num_slots=2, cpus=2, isolate=None, num_workers=None).backend
        'serial'
        >>> choose(Probe(5e-3, 5e-3, 16), num_slots=64, cpus=8, isolate=None, num_workers=None).backend
        'shm'
        >>> choose(Probe(50e-3, 1e-4, 16), num_slots=64, cpus=2, isolate=None, num_workers=None).backend
        'thread'
    """
    if probe.is_async:
        return Choice("aio", num_workers, True, "its step is async, which only aio can drive, in this process")
    if probe.waits:
        return _for_waiting(probe, num_slots, cpus, num_workers, here)
    # CPU time, not wall clock: the load during the probe is no property of the env.
    # The observation is copied into its row besides.
    step_s = min(probe.step_s, probe.cpu_s) + probe.obs_bytes * COPY_S
    workers = min(num_workers or cpus, num_slots)
    busy = ""
    if load is not None and load.whole < workers:
        busy = f"; others use the machine, {load.free:.1f} of {load.cpus} CPUs are free"
        if -(-num_slots // workers) * step_s >= OUTLASTS_S:
            isolate = True  # a parent that steps is one process fewer
        else:
            workers = min(num_workers or load.whole, workers)
    if not here:
        return _isolated(step_s, num_slots, workers, busy)
    step, serial_s = duration(step_s), num_slots * step_s
    if workers < 2:
        one = "one slot" if num_slots < 2 else "one core" if busy else "one worker"
        return Choice("serial", None, True, f"{one}, {step} a step{busy}")
    if serial_s < HANDFUL_S:
        return Choice("serial", None, True, f"{step} a step, {duration(serial_s)} a batch: a handful of cheap envs")
    # A parent that steps leaves one process fewer to compete for few cores; with many, isolation is nearly free.
    shared = isolate is not True and workers >= cpus and cpus <= 4
    batch_s = _batch_s(step_s, num_slots, workers, SHARED_S if shared else ISOLATED_S)
    if batch_s > WORTH * serial_s:
        return Choice("serial", None, True, f"{step} a step, {duration(serial_s)} a batch: too little to share out{busy}")
    who = "the parent is one of them" if shared else "isolated"
    why = f"{step} a step: {duration(batch_s)} a batch instead of {duration(serial_s)} in one process; {who}{busy}"
    return Choice("shm", workers, not shared, why)


def _batch_s(step_s: float, num_slots: int, workers: int, meeting_s: float) -> float:
    return -(-num_slots // workers) * step_s + num_slots * PER_SLOT_S + meeting_s


def _for_waiting(probe: Probe, num_slots: int, cpus: int, num_workers: int | None, here: bool) -> Choice:
    why = f"a step waits {duration(probe.step_s)} for {duration(probe.cpu_s)} of CPU: a thread per slot"
    if here:
        return Choice("thread", num_workers or min(num_slots, 256), True, why)
    return Choice("pipe", min(num_workers or cpus, num_slots), True, f"{why}, in worker processes", threads=True)


def _isolated(step_s: float, num_slots: int, workers: int, busy: str) -> Choice:
    """Worker processes only: one if a batch is so short that waking several costs more than it saves."""
    alone_s = _batch_s(step_s, num_slots, 1, ALONE_S)
    if workers > 1 and alone_s <= _batch_s(step_s, num_slots, workers, ISOLATED_S):
        workers = 1
    batch_s = _batch_s(step_s, num_slots, workers, ALONE_S if workers == 1 else ISOLATED_S)
    why = (
        f"{duration(step_s)} a step: {duration(batch_s)} a batch; isolated, so that its crash or hang cannot affect this process"
    )
    return Choice("shm", workers, True, why + busy)


def decide(recipe: Recipe, num_workers: int | None, isolate: bool | None, on_fault: str = "raise") -> Choice:
    """Probe (or use the cache), check the load of the machine, and choose.

    What cannot be pickled can run only in this process, one slot after the other: what cannot be pickled is most likely
    shared between the envs.
    """
    here = may_run_here(trust_of(recipe), isolate, on_fault)
    if here and is_native(recipe):
        return Choice("native", num_workers, False, "its environments are native")
    if recipe.num_slots == 1 and here:
        return Choice("serial", None, True, "one slot")
    unsafe = "stepped in this process, which a crash ends and a hang stops"
    if not hasattr(os, "fork"):
        return Choice("serial", None, True, f"no worker processes on this system: {unsafe}")
    try:
        probe = remembered(recipe) or _probe(recipe)
    except NotPicklable as why:
        return Choice("serial", None, True, f"it cannot be sent to workers ({str(why).split(':')[0]}): {unsafe}")
    except ProbeFailed as why:
        workers = min(num_workers or usable_cpus(), recipe.num_slots)
        return Choice("shm", workers, True, f"isolated, because the probe failed: {first_line(why)}")
    if on_fault == "restart" and isolate is None:
        isolate = True  # with restarts, an env that fails must not block the trainer
    quiet = choose(probe, recipe.num_slots, usable_cpus(), isolate, num_workers, here)
    if quiet.backend != "shm" or quiet.num_workers == 1:
        return quiet  # the load would not change the choice: no need to check it
    choice = choose(probe, recipe.num_slots, usable_cpus(), isolate, num_workers, here, current_load())
    if choice.backend != "shm" or not here or isolate is True:
        return choice
    return dataclasses.replace(choice, moves_below=_moves_below(probe, recipe.num_slots, usable_cpus(), num_workers))


def _moves_below(probe: Probe, num_slots: int, cpus: int, num_workers: int | None) -> int:
    """The number of free CPUs below which such envs are stepped in one process, 0 where they never are.

    Example:
        >>> _moves_below(Probe(7e-6, 7e-6, 16), 64, 2, None), _moves_below(Probe(1e-3, 1e-3, 16), 64, 2, None)
        (2, 0)
    """
    alone = [
        choose(probe, num_slots, cpus, None, num_workers, True, Load(cpus, float(free))).backend == "serial"
        for free in range(cpus)
    ]
    return max((free + 1 for free in range(cpus) if alone[free]), default=0)


def _probe(recipe: Recipe) -> Probe:
    lasting = key_of(recipe) is not None
    probe, code = run_probe(recipe, code_of if lasting else None)
    if lasting:
        remember(recipe, probe, code)
    return probe
