"""aio: one event loop in a thread of its own; a coroutine per slot.

Envs with `async def reset/step` are awaited, so thousands may wait at once; ordinary envs run in the loop's own thread
pool. A stuck coroutine is cancelled, a stuck thread abandoned; either way the slot is quarantined.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time
import traceback
import weakref
from queue import SimpleQueue
from typing import Any

import numpy as np

from envfleet.backends.base import Finished, Loss
from envfleet.backends.done import DoneList, drain
from envfleet.backends.local import Described, LocalBackend
from envfleet.backends.pool import DaemonPool, outcome
from envfleet.recipe import Recipe
from envfleet.slab import Slots
from envfleet.slot import Calls, SlotLife, drive
from envfleet.supervise.faults import Failure
from envfleet.supervise.memory import Pulse


class AioBackend(LocalBackend):
    """Every slot is its own worker on the loop; `num_workers` bounds the threads for ordinary envs."""

    name = "aio"

    def __init__(self, num_workers: int | None = None) -> None:
        super().__init__()
        self._wanted = num_workers
        self._done = DoneList()
        self._answers: SimpleQueue[tuple[int, int, Any]] = SimpleQueue()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._stuck: list[tuple[int, str]] = []

    def start(self, recipe: Recipe) -> dict[int, Described]:
        """Start the loop and build the envs side by side."""
        self._make_lives(recipe)
        self._done.on_add = self.on_done
        self.num_workers = min(self._wanted or min(recipe.num_slots, 64), recipe.num_slots)
        self.worker_of = np.arange(recipe.num_slots)
        self.pulses = Pulse.local(recipe.num_slots)
        self._pool = DaemonPool(self.num_workers, "envfleet-aio")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="envfleet-loop", daemon=True)
        self._thread.start()
        self._spawn([(life.slot, self._build(life)) for life in self.lives])
        built: dict[int, Described] = {}
        deadline = time.monotonic() + recipe.init_timeout_s * -(-recipe.num_slots // self.num_workers)
        while len(built) < len(self.lives):
            for slot in self._done.take(1, max(0.01, deadline - time.monotonic())):
                built[slot] = self._described(self.lives[slot])
            for life in self.lives if time.monotonic() > deadline else ():
                if life.slot not in built:
                    text = f"__init__ took longer than init_timeout_s={recipe.init_timeout_s:g}"
                    built[life.slot] = Failure("init", text, self.kill(life.slot))
        return built

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _spawn(self, jobs: list[tuple[int, Any]]) -> None:
        def start() -> None:
            for slot, coroutine in jobs:
                self._running[slot] = self._loop.create_task(coroutine)

        self._loop.call_soon_threadsafe(start)

    async def _build(self, life: SlotLife) -> None:
        await self._drive(life, life.build())
        self._report(life)

    async def _advance(self, life: SlotLife) -> None:
        await self._drive(life, life.advance())
        self._report(life)

    def _report(self, life: SlotLife) -> None:
        if not life.abandoned:
            self._done.add(life.slot)

    async def _drive(self, life: SlotLife, calls: Calls) -> None:
        """The asyncio twin of `slot.drive`: the same calls, awaited where they can be."""
        enter = self.pulses[life.slot].enter
        result: Any = None
        begin_ns = time.monotonic_ns()
        try:
            while not life.abandoned:
                try:
                    phase, function, args, kwargs = calls.send(result)
                except StopIteration:
                    return
                life.phase = phase
                enter(life.slot, phase)
                if _is_coroutine(function):
                    result = await function(*args, **kwargs)
                else:
                    result, error = await self._loop.run_in_executor(self._pool, outcome, function, args, kwargs)
                    if error is not None:
                        life.fail(error)
                        return
                    if inspect.isawaitable(result):
                        result = await result
        except BaseException as error:
            life.fail(error)
            if life.abandoned:
                raise  # cancelled because it was stuck
        finally:
            life.worked_since(begin_ns)
            life.phase = "idle"
            enter(-1, "idle")

    def submit(self, slots: Slots) -> None:
        """Start a coroutine per slot; ordinary envs go straight to the pool, the loop has nothing to add for them."""
        awaited = []
        for slot in slots.tolist():
            life = self.lives[slot]
            if life.env is None or _is_async(life.env):
                awaited.append((slot, self._advance(life)))
            else:
                self._pool.run(self._advance_ordinary, life)
        if awaited:
            self._spawn(awaited)

    def _advance_ordinary(self, life: SlotLife) -> None:
        # No Ctrl-C ever arrives in these threads: a KeyboardInterrupt is the env's own, and is in the row already.
        with contextlib.suppress(KeyboardInterrupt):
            drive(life, life.advance(), self.pulses[life.slot].enter)
        self._report(life)

    def wait(self, at_least: int, timeout_s: float) -> Finished:
        """Collect what has finished."""
        return self._finish(self._done.take(at_least, timeout_s))

    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """Call on the loop (async methods) or in its pool (ordinary ones)."""
        jobs = [
            (slot, self._call(slot, self._ticket(slot), phase, name, args[i] if each else args, kwargs))
            for i, slot in enumerate(slots)
        ]
        self._spawn(jobs)

    async def _call(self, slot: int, ticket: int, phase: str, name: str, args: Any, kwargs: Any) -> None:
        life = self.lives[slot]
        pulse = self.pulses[slot]
        try:
            pulse.enter(slot, phase)
            answer = await self._loop.run_in_executor(self._pool, self._call_now, slot, phase, name, args, kwargs)
            if inspect.isawaitable(answer):
                answer = await answer
        except BaseException as error:
            if life.abandoned:
                raise
            answer = Failure.of(error, phase)
        pulse.enter(-1, "idle")
        if not life.abandoned:
            self._answers.put((slot, ticket, answer))

    def replies(self, timeout_s: float) -> dict[int, Any]:
        """Answers so far; waits for one at most `timeout_s`."""
        return drain(self._answers, self._tickets, timeout_s)

    def kill(self, worker: int) -> str:
        """Cancel the slot's coroutine, or abandon its thread."""
        life, task = self.lives[worker], self._running.get(worker)
        _, phase, _ = self.pulses[worker].read()
        stack = "".join(
            "".join(traceback.format_stack(frame)) for frame in (task.get_stack() if task is not None else [])
        )
        life.abandoned = True
        self.pulses[worker] = Pulse.local(1)[0]
        if task is not None:
            self._loop.call_soon_threadsafe(task.cancel)
        if life.env is None or not _is_async(life.env):
            self._stuck.append((worker, phase))
            self._pool.grow()
        return stack

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Close the envs, end the loop and its threads; name those that do not end."""
        problems: list[tuple[int, Failure | Loss]] = []
        future = asyncio.run_coroutine_threadsafe(self._close_all(problems, timeout_s), self._loop)
        try:
            future.result(timeout_s)
        except TimeoutError:
            future.cancel()
        for slot, (_slot, phase, _since) in enumerate(pulse.read() for pulse in self.pulses):
            if _slot >= 0:
                self._stuck.append((slot, phase))
        for slot, phase in self._stuck:
            problems.append((slot, Failure(phase, f"its call is still stuck in {phase} and cannot be ended", "")))
        self._pool.shutdown(wait=not self._stuck, timeout_s=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.close()
        return problems

    async def _close_all(self, problems: list[tuple[int, Failure | Loss]], timeout_s: float) -> None:
        waiting = [task for task in self._running.values() if not task.done()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=timeout_s / 2)
            for task in late:
                task.cancel()
        for life in self.lives:
            env, life.env = life.env, None
            if env is None or life.abandoned or not hasattr(env, "close"):
                continue
            try:
                self.pulses[life.slot].enter(life.slot, "close")
                if inspect.iscoroutinefunction(env.close):
                    await env.close()
                else:
                    await self._loop.run_in_executor(self._pool, env.close)
            except (Exception, SystemExit) as error:
                problems.append((life.slot, Failure.of(error, "close")))
            self.pulses[life.slot].enter(-1, "idle")


def _is_async(env: Any) -> bool:
    return _is_coroutine(env.step) or _is_coroutine(env.reset)


def _is_coroutine(function: Any) -> bool:
    """`inspect.iscoroutinefunction`, which costs more than a cheap step does, asked once per function."""
    plain = getattr(function, "__func__", function)
    try:
        return _KNOWN[plain]
    except KeyError:
        _KNOWN[plain] = found = inspect.iscoroutinefunction(function)
        return found
    except TypeError:  # cannot be held weakly
        return inspect.iscoroutinefunction(function)


_KNOWN: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
