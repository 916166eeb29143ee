"""aio: one event loop in a thread of its own; a coroutine per slot.

Envs with `async def reset/step` are awaited, so thousands may wait at once; ordinary envs run in the loop's own thread
pool. A coroutine that hangs is cancelled, a thread that hangs is abandoned; in both cases the slot is quarantined.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import select
import selectors
import threading
import time
import traceback
import weakref
from queue import SimpleQueue
from typing import Any

import numpy as np

from envfleet.backends.done_list import DoneList, drain
from envfleet.backends.local import Described, LocalBackend
from envfleet.faults.failure import Failure, Loss
from envfleet.slots import compiled_core
from envfleet.slots.factories import Recipe
from envfleet.slots.layout import Layout
from envfleet.slots.slab import Slab, Slots
from envfleet.slots.slot_life import Calls, SlotLife, end_if_forked
from envfleet.util.daemon_pool import DaemonPool, outcome
from envfleet.workers.shared_memory import Pulse
from envfleet.workers.worker import drive_here


class AioBackend(LocalBackend):
    """Every slot is its own worker on the loop; `num_workers` bounds the threads for ordinary envs."""

    name = "aio"

    def __init__(self, num_workers: int | None = None) -> None:
        super().__init__()
        self._wanted = num_workers
        self._done = DoneList()
        self._answers: SimpleQueue[tuple[int, int, Any]] = SimpleQueue()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._calling: dict[int, asyncio.Task[None]] = {}  # calls of the env's interface
        self._turns: dict[int, asyncio.Future[None]] = {}  # what the coroutine of an idle slot waits for
        self._ending = False
        self._stuck: list[tuple[int, str]] = []
        self._runner: Any = None  # the compiled life, where there is one
        self._known: list[SlotLife] = []  # the lives it was made with

    def start(self, recipe: Recipe) -> dict[int, Described]:
        """Start the loop and build the envs side by side."""
        self._make_lives(recipe)
        self._done.on_add = self.on_done
        self.num_workers = min(self._wanted or min(recipe.num_slots, 64), recipe.num_slots)
        self.worker_of = np.arange(recipe.num_slots)
        self.pulses = Pulse.local(recipe.num_slots)
        self._pool = DaemonPool(self.num_workers, "envfleet-aio")
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run_loop, name="envfleet-loop", daemon=True)
        self._thread.start()
        self._spawn(self._running, [(life.slot, self._build(life)) for life in self.lives])
        built: dict[int, Described] = {}
        deadline = time.monotonic() + recipe.init_timeout_s * -(-recipe.num_slots // self.num_workers)
        while len(built) < len(self.lives):
            for slot in self._done.take(1, max(0.01, deadline - time.monotonic())):
                built[slot] = self._described(self.lives[slot])
            for life in self.lives if time.monotonic() > deadline else ():
                if life.slot not in built:
                    text = f"__init__ took longer than init_timeout_s={recipe.init_timeout_s:g}"
                    built[life.slot] = Failure("init", text, self.kill(life.slot), kind="timeout")
        return built

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()  # in this thread no signal handler can interrupt it: half closed, it would keep its descriptors

    def _spawn(self, tasks: dict[int, asyncio.Task[None]], jobs: list[tuple[int, Any]]) -> None:
        def start() -> None:
            for slot, coroutine in jobs:
                tasks[slot] = self._loop.create_task(coroutine)

        self._loop.call_soon_threadsafe(start)

    async def _build(self, life: SlotLife) -> None:
        await self._drive(life, life.build())
        self._report(life)

    def attach(self, layout: Layout) -> Slab:
        """Rows on the heap; the compiled life, where there is one, makes the plain steps of async envs."""
        slab = super().attach(layout)
        compiled = compiled_core.load()
        if compiled is not None and not layout.agents and not layout.columns and not slab.has_mail:
            lives, self._known = dict(enumerate(self.lives)), list(self.lives)
            pulses = self.pulses[0].words.base  # of all slots
            self._runner = compiled_core.make_runner(compiled, slab, lives, lambda slot, phase: None, pulses)
        return slab

    def _arm(self, life: SlotLife) -> None:
        # A life that took an abandoned one's place has a pulse of its own, which the runner does not know.
        if self._runner is not None and self._known[life.slot] is life and _is_coroutine(life.env.step):
            life.runner = self._runner
            self._runner.arm(life.slot, life.env.step, life.env.reset, 0, False)

    async def _serve(self, life: SlotLife) -> None:
        """The coroutine of a slot: one advance per turn. It is kept, because a new task costs more than a cheap step."""
        slot, runner = life.slot, self._runner
        while True:
            result: Any = None
            turn = life.turn
            try:
                step = runner.begin(slot, turn) if life.runner is not None else None
                if step is not None:
                    result = await step
                    end_if_forked(life.pid)
            except BaseException as error:
                end_if_forked(life.pid)
                if life.abandoned:
                    raise  # cancelled because it was stuck
                life.fail_in(error, "step")
                life.worked_since(int(self.pulses[slot].words[2]))
                self.pulses[slot].enter(-1, "idle")
            else:
                if step is None:
                    await self._advance(life)
                elif not life.abandoned:
                    await self._take_step(life, result)
            if life.abandoned:
                return
            self._ended[slot] = turn
            self._done.add(slot)
            if self._ending:
                return
            self._turns[slot] = waiting = self._loop.create_future()
            await waiting

    async def _advance(self, life: SlotLife) -> None:
        life.release()
        await self._drive(life, life.advance())
        if life.failure is None and not life.abandoned:
            self._arm(life)

    async def _take_step(self, life: SlotLife, result: Any) -> None:
        try:
            sided = self._runner.take(life.slot, result)
        except BaseException as error:  # not a failure of the env, which is in the row: an error in the slot life itself
            life.fail_in(error, "step")
        else:
            if sided is None:
                await self._finish_step(life, result)
            elif not sided:
                life.info = life.final_info = None  # those of an earlier step, which the Python life made

    async def _finish_step(self, life: SlotLife, result: Any) -> None:
        """A step whose result is not plain, or that needs a reset which must be awaited."""
        life.phase = "step"
        await self._drive(life, life.resume_step(result), int(self.pulses[life.slot].words[2]))
        if life.failure is not None:
            life.release()

    def _report(self, life: SlotLife) -> None:
        if not life.abandoned:
            if len(self._ended):  # not while the envs are being built
                self._ended[life.slot] = life.turn
            self._done.add(life.slot)

    async def _drive(self, life: SlotLife, calls: Calls, begin_ns: int | None = None) -> None:
        """The asyncio twin of `slot_life.drive`: the same calls, awaited where they can be."""
        enter = self.pulses[life.slot].enter
        result: Any = None
        begin_ns = begin_ns or time.monotonic_ns()
        try:
            while not life.abandoned:
                try:
                    phase, function, args, kwargs = calls.send(result)
                except StopIteration:
                    return
                life.phase = phase
                enter(life.slot, phase)
                if _is_coroutine(function):
                    try:
                        result = await function(*args, **kwargs)
                    finally:
                        end_if_forked(life.pid)
                else:
                    result, error = await self._loop.run_in_executor(self._pool, _outcome, life, function, args, kwargs)
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
        """Let the loop begin with the slots."""
        self.given[slots] += np.uint32(1)  # from here on they are out: see `settle`
        self._loop.call_soon_threadsafe(self._begin, slots.tolist(), self.given[slots].tolist())

    def _begin(self, slots: list[int], turns: list[int]) -> None:
        """Give the slots' coroutines a turn; ordinary envs go to the pool."""
        for slot, turn in zip(slots, turns):
            life = self.lives[slot]
            if self._begun[slot] == turn or self.given[slot] != turn or life.abandoned:
                continue  # asked for a second time, after an interrupt; or given up before the loop came to it
            self._begun[slot] = life.turn = turn
            if life.runner is None and life.env is not None and not _is_async(life.env):
                self._pool.run(self._advance_ordinary, life)
                continue
            waiting = self._turns.pop(slot, None)
            if waiting is not None:
                waiting.set_result(None)
            else:
                self._running[slot] = self._loop.create_task(self._serve(life))

    def _advance_ordinary(self, life: SlotLife) -> None:
        drive_here(life, life.advance(), self.pulses[life.slot].enter)
        self._report(life)

    def settle(self) -> None:
        """Ask the loop again for slots whose submission was interrupted."""
        missed = self._not_begun()
        if missed:
            self._loop.call_soon_threadsafe(self._begin, missed, self.given[missed].tolist())
        self._collect()

    def wait(self, at_least: int, timeout_s: float) -> None:
        """Collect what has finished."""
        target = self.num_out - at_least
        deadline = time.monotonic() + timeout_s
        while True:
            self._done.take(self.num_out - target, max(0.0, deadline - time.monotonic()))
            self._collect()
            if self.num_out <= target or time.monotonic() >= deadline:
                return

    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """Call on the loop (async methods) or in its pool (ordinary ones)."""
        jobs = [
            (slot, self._call(slot, self._next_call(slot), phase, name, args[i] if each else args, kwargs))
            for i, slot in enumerate(slots)
        ]
        self._spawn(self._calling, jobs)

    async def _call(self, slot: int, number: int, phase: str, name: str, args: Any, kwargs: Any) -> None:
        life = self.lives[slot]
        pulse = self.pulses[slot]
        if life.abandoned:
            self._answers.put((slot, number, self._call_now(slot, phase, name, args, kwargs)))
            return
        try:
            pulse.enter(slot, phase)
            answer = await self._loop.run_in_executor(self._pool, self._call_now, slot, phase, name, args, kwargs)
            if inspect.isawaitable(answer):
                answer = await answer
        except BaseException as error:
            end_if_forked(life.pid)
            if life.abandoned:
                raise
            answer = Failure.of(error, phase)
        pulse.enter(-1, "idle")
        if not life.abandoned:
            self._answers.put((slot, number, answer))

    def replies(self, timeout_s: float) -> dict[int, Any]:
        """Answers so far; waits for one at most `timeout_s`."""
        return drain(self._answers, self._call_numbers, timeout_s)

    def kill(self, worker: int) -> str:
        """Cancel the slot's coroutine, or abandon its thread."""
        life = self.lives[worker]
        found = (self._running.get(worker), self._calling.get(worker))
        tasks = [task for task in found if task is not None and not task.done()]
        _, phase, _ = self.pulses[worker].read()
        stack = "".join("".join(traceback.format_stack(frame)) for task in tasks for frame in task.get_stack())
        life.abandoned = True
        self.pulses[worker] = Pulse.local(1)[0]
        for task in tasks:
            self._loop.call_soon_threadsafe(self._cancel, worker, task)
        if phase != "idle" and (life.env is None or not _is_async(life.env)):  # idle: it has just finished
            self._stuck.append((worker, phase))
            self._pool.grow()
        return stack

    def _cancel(self, slot: int, task: asyncio.Task[None]) -> None:
        """On the loop, so that a turn that is given later cannot reach the task."""
        self._turns.pop(slot, None)
        task.cancel()

    def is_own_thread(self) -> bool:
        """As on `thread`."""
        return threading.current_thread() is self._thread or self._pool.is_own_thread()

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Close the envs, end the loop and its threads; name those that do not end."""
        problems: list[tuple[int, Failure | Loss]] = []
        if not self._thread.is_alive():  # a close that was interrupted at its very end
            return problems
        self._ending = True
        closing = self._close_all(problems, timeout_s)
        try:
            future = asyncio.run_coroutine_threadsafe(closing, self._loop)
        except RuntimeError:  # likewise: the loop has ended just now
            closing.close()
            return problems
        try:
            future.result(timeout_s)
        except TimeoutError:
            future.cancel()
        for slot, (_slot, phase, _since) in enumerate(pulse.read() for pulse in self.pulses):
            if _slot >= 0:
                self._stuck.append((slot, phase))
        for slot, phase in self._stuck:
            why = f"its call is still stuck in {phase} and cannot be ended"
            problems.append((slot, Failure(phase, why, "", kind="timeout")))
        self._pool.shutdown(wait=not self._stuck, timeout_s=5.0)
        with contextlib.suppress(RuntimeError):  # it has ended meanwhile: an earlier close was interrupted after this line
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        return problems

    async def _close_all(self, problems: list[tuple[int, Failure | Loss]], timeout_s: float) -> None:
        for turn in self._turns.values():
            turn.cancel()  # and with it the coroutine that waits for it
        waiting = [task for task in (*self._running.values(), *self._calling.values()) if not task.done()]
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
                    _, error = await self._loop.run_in_executor(self._pool, _outcome, life, env.close, (), {})
                    if error is not None:
                        problems.append((life.slot, Failure.of(error, "close")))
            except BaseException as error:
                if threading.current_thread() is not self._thread:
                    raise  # the loop has ended, and this coroutine is thrown away with it
                closing = asyncio.current_task()
                if closing is not None and closing.cancelling():
                    raise  # the time is over: what is still stuck is named by its pulse
                problems.append((life.slot, Failure.of(error, "close")))
            self.pulses[life.slot].enter(-1, "idle")


def _outcome(life: SlotLife, function: Any, args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    found = outcome(function, args, kwargs)
    end_if_forked(life.pid)
    return found


def _new_loop() -> asyncio.AbstractEventLoop:
    if not hasattr(select, "epoll"):
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(_FineSelector())


if hasattr(select, "epoll"):

    class _FineSelector(selectors.EpollSelector):
        """epoll counts in milliseconds and rounds up: a step of 1 ms took 1.5. `select` on epoll's own descriptor counts
        in microseconds; the price is a second system call where the loop has nothing to do anyway."""

        def select(self, timeout: float | None = None) -> Any:
            number = self.fileno()
            if timeout is not None and 0 < timeout < 0.1 and number < 1024:  # more descriptors `select` does not know
                select.select((number,), (), (), timeout)
                timeout = 0
            return super().select(timeout)


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
