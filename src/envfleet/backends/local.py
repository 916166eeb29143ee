"""What the backends of this process share: the lives are here, rows are heap memory, values pass by reference."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from envfleet.backends.base import Backend, Finished, Loss
from envfleet.layout import Layout
from envfleet.recipe import Recipe
from envfleet.results import describe
from envfleet.slab import Slab
from envfleet.slot import SlotLife
from envfleet.supervise.faults import Failure
from envfleet.supervise.worker import call_life

Described = dict[str, Any] | Failure | Loss


class LocalBackend(Backend):
    """Lives in this process; subclasses decide which thread or loop drives them."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: list[SlotLife] = []
        self._tasks: dict[int, bytes] = {}
        self._replies: dict[int, Any] = {}

    def _make_lives(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.lives = [
            SlotLife(slot, factory, recipe.on_end, self._tasks) for slot, factory in enumerate(recipe.factories)
        ]

    @staticmethod
    def _described(life: SlotLife) -> Described:
        if life.failure is not None:
            return life.failure
        try:
            return describe(life.env)
        except Exception as error:
            return Failure.of(error, "init")

    def attach(self, layout: Layout) -> Slab:
        """Rows on the heap."""
        self.slab = Slab(layout, self.recipe.num_slots)
        for life in self.lives:
            life.attach(self.slab)
        return self.slab

    def _finish(self, slots: list[int], sided: list[int] | None = None) -> Finished:
        """Take over what the lives left beside the rows: of `sided` only, where that is known."""
        finished = Finished(done=slots)
        if sided is not None and (self.info or self.final_info):
            for slot in slots:
                self._keep_side(slot, None, None)
        for slot in slots if sided is None else sided:
            life = self.lives[slot]
            if life.failure is not None:
                finished.failures[slot] = life.failure
            self._keep_side(slot, life.info, life.final_info)
        return finished

    def give_tasks(self, tasks: Mapping[int, bytes]) -> None:
        """Tasks are seen by every life at once."""
        self._tasks.update(tasks)

    def give_options(self, options: Mapping[int, dict[str, Any]]) -> None:
        """Options go straight to the lives."""
        for slot, value in options.items():
            self.lives[slot].options = value

    def give_mail(self, mail: Mapping[int, Mapping[int, Any]]) -> None:
        """Objects go straight to the slab's mailbox."""
        for i, objects in mail.items():
            for slot, value in objects.items():
                self.slab.mail["action"][i][slot] = value

    def _call_now(self, slot: int, phase: str, name: str, args: Any, kwargs: Any) -> Any:
        try:
            return call_life(self.lives[slot], phase, name, args, kwargs)
        except KeyboardInterrupt as error:
            if threading.current_thread() is threading.main_thread():
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
            except (Exception, SystemExit) as error:
                problems.append((life.slot, Failure.of(error, "close")))
        return problems
