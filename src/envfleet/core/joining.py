"""`join`: one fleet out of several, each with its own backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from envfleet.backends.joined_backend import JoinedBackend, Part
from envfleet.core.fleet import Fleet
from envfleet.core.plan import Plan
from envfleet.errors import BadArgument, SlotBusy, SpacesDiffer
from envfleet.slots.layout import same_rows


def join(fleets: Sequence[Fleet] | Fleet) -> Fleet:
    """One fleet over the backends of several idle ones, which must have equal spaces.

    The slots are numbered through: with 4 slots in the first fleet, slot 0 of the second is slot 4. The joined fleet begins anew: reset it
    first. It owns the backends, and closing it closes them all; the given fleets cannot be used any more (FleetClosed). If joining
    fails, they stay as they are.

    A part whose keeper dies, or whose Ray is shut down, does not end the fleet: its slots are faults, and then quarantined. Timeouts
    are those that each fleet was made with; `on_end`, `on_fault` and `max_restarts` must be the same. Fleets over a batch engine cannot be joined.

    Example:
        >>> import envfleet as ef
        >>> here = ef.make("CartPole-v1", num_envs=2, backend="serial")
        >>> beside = ef.make("CartPole-v1", num_envs=4, backend="pipe", num_workers=2)
        >>> with ef.join([here, beside]) as fleet:
        ...     print(fleet.plan)
        ...     fleet.reset(seed=1).obs.shape
        joined, 3 workers, 6 slots: serial (slots 0 to 1, 1 worker), pipe (slots 2 to 5, 2 workers)
        (6, 4)
    """
    fleets = [fleets] if isinstance(fleets, Fleet) else list(fleets)
    _check(fleets)
    for fleet in fleets:
        if fleet._optioned:  # of a reset that was interrupted
            fleet._backend.give_options(dict.fromkeys(fleet._optioned))
    backend = JoinedBackend([fleet._backend for fleet in fleets], [len(fleet._table._task_blobs) for fleet in fleets])
    first = fleets[0]
    about: dict[str, Any] = {
        "metadata": first.metadata,
        "render_mode": first.render_mode,
        "observation_spaces": [space for fleet in fleets for space in _spaces_of(fleet)],
    }
    names = [_told(part) for part in backend.parts]
    plan = Plan(backend.name, backend.num_workers, backend.recipe.num_slots, None, ", ".join(names), backend.notes)
    joined = Fleet(backend, first.layout, about, first._supervisor.policy, plan, any(fleet._debug for fleet in fleets))
    for fleet, part in zip(fleets, backend.parts):
        _carry_faults(fleet, joined, part)
    try:
        for fleet in fleets:
            fleet._hand_over()
        backend.owns_parts = True
    except BaseException:  # Ctrl-C: the given fleets are whole again
        backend.owns_parts = False
        for fleet in fleets:
            fleet._take_back()
        raise
    return joined


def _told(part: Part) -> str:
    workers = f"{part.backend.num_workers} worker{'s' if part.backend.num_workers != 1 else ''}"
    return f"{part.backend.name} (slots {part.first} to {part.first + part.count - 1}, {workers})"


def _spaces_of(fleet: Fleet) -> list[Any]:
    return list(fleet._observation_spaces or [fleet.single_observation_space] * fleet.num_envs)


def _check(fleets: list[Any]) -> None:
    if not fleets:
        raise BadArgument("join needs at least one fleet")
    for i, fleet in enumerate(fleets):
        if not isinstance(fleet, Fleet):
            raise BadArgument(f"fleets[{i}] is {type(fleet).__name__}, not a Fleet: give fleets that envfleet.make gave")
        if any(fleet is other for other in fleets[:i]):
            raise BadArgument(f"fleets[{i}] was given twice")
        fleet._do(_nothing)  # refuses a closed one, and completes what was interrupted
        busy = np.flatnonzero(fleet.is_out).tolist()
        if busy:
            raise SlotBusy(busy, f"recv() or drop() them before fleets[{i}] is joined")
        if fleet._backend.is_one_engine:
            raise BadArgument(
                f"fleets[{i}] is run by a batch engine ({fleet.plan.backend}), which cannot be joined: its slots fail as one"
            )
        _check_alike(fleets[0], fleet, f"fleets[{i}] ({fleet.plan.backend})")


def _nothing() -> None:
    """What `join` asks of a fleet that is to be joined."""


def _check_alike(first: Fleet, fleet: Fleet, name: str) -> None:
    one, other = first.layout, fleet.layout
    for what in ("agents", "observation_space", "action_space", "columns", "groups"):
        a, b = getattr(one, what), getattr(other, what)
        loose = what == "observation_space" and first._backend.recipe.bounds_differ and fleet._backend.recipe.bounds_differ
        if not (a == b or (loose and same_rows(a, b))):
            raise SpacesDiffer(
                f"{name} has {what} {b}, but fleets[0] ({first.plan.backend}) has {a}: joined fleets need equal spaces, agents and columns",
                what,
            )
    mine, theirs = first._supervisor.policy, fleet._supervisor.policy
    for what, a, b in (
        ("on_end", first.on_end, fleet.on_end),
        ("on_fault", mine.on_fault, theirs.on_fault),
        ("max_restarts", mine.max_restarts, theirs.max_restarts),
    ):
        if a != b:
            raise BadArgument(
                f"{name} has {what}={b!r}, but fleets[0] ({first.plan.backend}) has {what}={a!r}: make all of them with the same"
            )


def _carry_faults(fleet: Fleet, joined: Fleet, part: Part) -> None:
    """What went wrong before: slots that are lost are rebuilt at their reset, quarantined ones stay so."""
    old, new, where = fleet._supervisor, joined._supervisor, part.where
    for name in ("lost", "quarantined", "parked", "restarts"):
        getattr(new, name)[where] = getattr(old, name)
    new.troubled |= bool(old.lost.any() or old.quarantined.any())
    new.has_restarts |= old.has_restarts
    for fault in old.faults:
        worker = None if fault.worker is None else fault.worker + part.first_worker
        shared = None if fault.shared_with is None else fault.shared_with + part.first
        told = dataclasses.replace(fault, slot=fault.slot + part.first, worker=worker, shared_with=shared)
        new.faults.append(told)
        new._newest[told.slot] = [told]
