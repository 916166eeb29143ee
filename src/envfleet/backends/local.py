"""What the backends of this process share: the lives are here, rows are heap memory, values pass by reference."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from envfleet.backends.base import Backend, Turns
from envfleet.faults.failure import Failure, Loss
from envfleet.multiagent.agent_support import AGENTS
from envfleet.slots.env_contract import describe
from envfleet.slots.factories import Recipe
from envfleet.slots.layout import Layout
from envfleet.slots.slab import Slab
from envfleet.slots.slot_life import SlotLife
from envfleet.workers.worker import call_life

Described = dict[str, Any] | Failure | Loss


class LocalBackend(Backend):
    """Lives in this process; subclasses decide which thread or loop drives them."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: list[SlotLife] = []
        self._tasks: dict[int, bytes] = {}
        # For lives that other threads drive, [slot]: the last turn that was begun, and that was finished. Those threads write
        # them; no signal handler runs there, so that what they say has really happened.
        self._begun: Turns = np.zeros(0, np.uint32)
        self._ended: Turns = np.zeros(0, np.uint32)

    def _make_lives(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.lives = [
            SlotLife(slot, factory, recipe.on_end, self._tasks, AGENTS) for slot, factory in enumerate(recipe.factories)
        ]

    @staticmethod
    def _described(life: SlotLife) -> Described:
        if life.failure is not None:
            return life.failure
        try:
            return describe(life.env)
        except BaseException as error:
            if is_interrupt_here(error):
                raise
            return Failure.of(error, "init")

    def attach(self, layout: Layout) -> Slab:
        """Rows on the heap."""
        self._count_turns()
        self._begun, self._ended = np.zeros_like(self.given), np.zeros_like(self.given)
        self.slab = Slab(layout, self.recipe.num_slots, keep_obs=self.recipe.keep_obs)
        for life in self.lives:
            life.attach(self.slab)
        return self.slab

    def _finish(self, slot: int, turn: int, broken: bool = False) -> None:
        """Take over what a life left beside its row, then mark the row as done. May be interrupted, and is then repeated.

        `broken`: an exception interrupted the advance itself, so the row is not used.
        """
        life = self.lives[slot]
        failure = life.failure
        if failure is None and broken:
            failure = Failure("step", "it was interrupted in the middle of its step or reset", "")
        if failure is not None:
            self.failures[slot] = failure
        self._keep_side(slot, None if failure else life.info, None if failure else life.final_info)
        self.done[slot] = turn

    def _not_begun(self) -> list[int]:
        """Slots that are out and that no thread has begun with. Not those whose row the supervisor wrote itself."""
        waiting: list[int] = np.flatnonzero((self._begun != self.given) & (self.done != self.given)).tolist()
        return waiting

    def _collect(self) -> None:
        """Take over every slot that its thread has finished."""
        for slot in np.flatnonzero((self._ended == self.given) & (self.done != self.given)).tolist():
            self._finish(slot, int(self.given[slot]))

    def give_tasks(self, tasks: Mapping[int, bytes]) -> None:
        """Tasks are seen by every life at once."""
        self._tasks.update(tasks)

    def give_options(self, options: Mapping[int, dict[str, Any] | None]) -> None:
        """Options go straight to the lives."""
        for slot, value in options.items():
            self.lives[slot].options = value

    def give_mail(self, mail: Mapping[int, Mapping[int, Any]]) -> None:
        """Objects go straight to the slab's mailbox."""
        for i, objects in mail.items():
            for slot, value in objects.items():
                self.slab.mail["action"][i][slot] = value

    def _call_now(self, slot: int, phase: str, name: str, args: Any, kwargs: Any) -> Any:
        if self.lives[slot].abandoned:
            return _given_up(phase)
        try:
            return call_life(self.lives[slot], phase, name, args, kwargs)
        except KeyboardInterrupt as error:
            if threading.current_thread() is threading.main_thread():
                # Ctrl-C, in the middle of the env's own code: its state is unknown.
                self.failures[slot] = Failure.of(error, phase)
                raise
            return Failure.of(error, phase)  # no Ctrl-C ever arrives in another thread: the env raised it
        except BaseException as error:
            return Failure.of(error, phase)

    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """Call in this thread: the slots are not being stepped."""
        for i, slot in enumerate(slots):
            self._replies[slot] = self._call_now(slot, phase, name, args[i] if each else args, kwargs)

    def replies(self, timeout_s: float) -> dict[int, Any]:
        """What the calls gave."""
        replies, self._replies = self._replies, {}
        return replies

    def _close_lives(self) -> list[tuple[int, Failure | Loss]]:
        problems: list[tuple[int, Failure | Loss]] = []
        for life in self.lives:
            if life.abandoned:
                continue
            try:
                life.close()
            except BaseException as error:
                if is_interrupt_here(error):
                    raise
                problems.append((life.slot, Failure.of(error, "close")))
        return problems


def _given_up(phase: str) -> Failure:
    return Failure(phase, "the slot is quarantined: an earlier call in it was given up, and may still be running", "")


def is_interrupt_here(error: BaseException) -> bool:
    """Whether this is a KeyboardInterrupt in the caller's own thread, which must reach the caller.

    By the class: `isinstance` asks the exception for its `__class__`, which is code of the env.
    """
    return issubclass(type(error), KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
