"""The envs' own interface, called through a fleet: methods, attributes, rendering."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from envfleet.backends.base import Backend
from envfleet.core.slot_table import OUT, Book, per_slot
from envfleet.core.supervisor import Supervisor
from envfleet.errors import EnvFailed, SlotBusy
from envfleet.faults.failure import Failure
from envfleet.slots.slab import Slots

T = TypeVar("T")


class EnvInterface:
    """What a fleet can ask of its envs beside step and reset. Only of slots that are the caller's."""

    _backend: Backend
    _book: Book
    _supervisor: Supervisor

    def _do(self, call: Callable[..., T], *args: Any) -> T:
        raise AssertionError("given by Fleet")

    def _slots(self, slots: Any) -> tuple[Slots, Slots | None]:
        raise AssertionError("given by Fleet")

    def call(self, name: str, *args: Any, slots: Sequence[int] | Slots | None = None, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of each env (or read an attribute) through its wrappers; one result per slot."""
        return self._call("call", name, args, kwargs, slots)

    def get_attr(self, name: str, slots: Sequence[int] | Slots | None = None) -> tuple[Any, ...]:
        """An attribute of each env."""
        return self.call(name, slots=slots)

    def set_attr(self, name: str, values: Any, slots: Sequence[int] | Slots | None = None) -> None:
        """Set an attribute of each env: a list or tuple has one value per slot, anything else goes to all."""
        each = per_slot("values", values, len(self._slots(slots)[0]))
        self._call("call", "__set__", [(name, value) for value in each], {}, slots, each=True)

    def render(self, slot: int = 0) -> Any:
        """What `env.render()` of one slot gives."""
        return self._call("render", "render", (), {}, [slot])[0]

    def _call(self, phase: str, name: str, args: Any, kwargs: Any, slots: Any, each: bool = False) -> tuple[Any, ...]:
        return self._do(self._call_all, phase, name, args, kwargs, slots, each)

    def _call_all(self, phase: str, name: str, args: Any, kwargs: Any, slots: Any, each: bool) -> tuple[Any, ...]:
        chosen, order = self._slots(slots)
        out = chosen[self._book.state[chosen] == OUT]
        if len(out):
            raise SlotBusy(out.tolist(), f"recv() them before calling {name!r}")
        if each and order is not None:
            args = [args[i] for i in order]
        self._backend.call(chosen.tolist(), phase, name, args, kwargs, each)
        results: dict[int, Any] = {}
        wanted = set(chosen.tolist())  # an answer of another slot belongs to a call that was interrupted
        supervisor, lost = self._supervisor, None
        begun_s, num_losses = supervisor.watched_s, supervisor.num_losses.copy()
        # To the last answer, also when one slot's worker is lost: an answer left behind would pass for the next call's.
        while len(results) < len(chosen):
            answers = self._backend.replies(supervisor.next_look_s())
            results.update((slot, answer) for slot, answer in answers.items() if slot in wanted)
            before = len(supervisor.faults)
            self._backend.wait(1, 0.0)
            supervisor.take()
            supervisor.look(force=True)
            supervisor.look_for_silent_calls(wanted.difference(results), begun_s)
            for fault in supervisor.faults[before:]:
                if fault.slot in chosen and fault.slot not in results:
                    results[fault.slot] = None
                    lost = fault if lost is None or lost.shared_with is not None else lost
            for slot in np.flatnonzero(supervisor.num_losses != num_losses).tolist():
                if (
                    slot in wanted and slot not in results
                ):  # its env was lost before, and now the worker that would say so
                    results[slot] = None
                    lost = lost or supervisor.last_fault(slot)
        if lost is not None:
            raise lost.error()
        for slot in chosen.tolist():
            if isinstance(results[slot], Failure):
                failure = results[slot]
                record = supervisor._record(
                    slot, "failed", phase, failure.summary, failure=failure, traceback=failure.traceback
                )
                error = record.error()
                assert isinstance(error, EnvFailed)
                raise error
        ordered = chosen if order is None else chosen[np.argsort(order)]
        return tuple(results[slot] for slot in ordered.tolist())
