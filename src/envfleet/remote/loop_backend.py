"""The aio backend where every wait can be cancelled, and the same on a loop that is already running.

A server's slots for environments with coroutines are on the server's own loop: a second loop in a second thread would
hand every step back and forth under one interpreter lock.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import numpy as np

from envfleet.backends.aio import AioBackend
from envfleet.backends.local import Described
from envfleet.faults.failure import Failure, Loss
from envfleet.multiagent.agent_support import AGENTS
from envfleet.slots.factories import Recipe
from envfleet.slots.slot_life import SlotLife, drive
from envfleet.util.daemon_pool import DaemonPool
from envfleet.workers.shared_memory import Pulse


class RenewingBackend(AioBackend):
    """aio for envs whose every wait can be cancelled: an abandoned slot is rebuilt, not quarantined."""

    can_rebuild_abandoned = True

    def kill(self, worker: int) -> str:
        """Cancel the slot's call and put a fresh life in its place: the old one may never write its row again."""
        old = self.lives[worker]
        stack = super().kill(worker)
        env, old.env = old.env, None
        fresh = SlotLife(worker, old.make_env, old.on_end, self._tasks, AGENTS)
        if getattr(self, "slab", None) is not None:
            fresh.attach(self.slab)
        self.lives[worker] = fresh
        if env is not None:
            self._discard(env)
        return stack

    def _discard(self, env: Any) -> None:
        """Drop an env in the middle of a call, without waiting for it."""


class LoopBackend(RenewingBackend):
    """Slots as tasks of the current event loop. Building must be quick: slots are empty when they are built."""

    def start(self, recipe: Recipe) -> dict[int, Described]:
        """Build the envs here and now."""
        self._make_lives(recipe)
        self._done.on_add = self.on_done
        self.num_workers = recipe.num_slots
        self.worker_of = np.arange(recipe.num_slots)
        self.pulses = Pulse.local(recipe.num_slots)
        self._pool = DaemonPool(8, "envfleet-aio")
        self._loop = asyncio.get_running_loop()
        for life in self.lives:
            drive(life, life.build(), self.pulses[life.slot].enter)
        return {life.slot: self._described(life) for life in self.lives}

    def _spawn(self, tasks: dict[int, asyncio.Task[None]], jobs: list[tuple[int, Any]]) -> None:
        for slot, coroutine in jobs:
            tasks[slot] = self._loop.create_task(coroutine)

    def _discard(self, env: Any) -> None:
        closing = env.close()
        if inspect.iscoroutine(closing):
            self._loop.create_task(closing)

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Cancel what runs and close the envs; the loop is the server's and goes on."""
        problems: list[tuple[int, Failure | Loss]] = []
        for task in (*self._running.values(), *self._calling.values()):
            task.cancel()
        for life in self.lives:
            env, life.env = life.env, None
            if env is not None:
                try:
                    self._discard(env)
                except Exception as error:
                    problems.append((life.slot, Failure.of(error, "close")))
        self._pool.shutdown(wait=False)
        return problems
