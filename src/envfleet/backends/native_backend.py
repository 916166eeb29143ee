"""native: environments in C or C++, stepped in batches without the interpreter lock, by the caller and threads beside it.

Rows are those of `serial`, whose runner steps native environments too. This backend adds threads, one block of memory for all states,
and snapshots. Deadlines cannot be enforced: native code that hangs blocks a thread that nothing can end, and a segfault ends the process.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from numpy.typing import NDArray

from envfleet.backends.base import EnvState
from envfleet.backends.local import Described
from envfleet.backends.serial import SerialBackend
from envfleet.errors import BadArgument
from envfleet.faults.failure import Failure, Loss
from envfleet.native.native_env import NativeEnv
from envfleet.slots.factories import Recipe
from envfleet.slots.layout import Layout
from envfleet.slots.slab import Slab, Slots
from envfleet.util.machine import usable_cpus

#: Wrappers that keep nothing between steps but the number of steps, which follows from the row.
_WITHOUT_STATE = (TimeLimit, OrderEnforcing, PassiveEnvChecker)


class NativeBackend(SerialBackend):
    """Steps where the caller waits, and in `num_workers - 1` threads beside it."""

    name = "native"
    #: Whether environments in Python are refused. They would run as on `serial`.
    native_only = True

    def __init__(self, num_workers: int | None = None) -> None:
        super().__init__()
        self._wanted = num_workers
        self._has_threads = False
        self._was_stopped = False  # stop_threads was called; it may have been interrupted
        self._states: NDArray[np.uint8] = np.zeros((0, 0), np.uint8)  # [slot, bytes]: the memory of every environment

    def start(self, recipe: Recipe) -> dict[int, Described]:
        """Build the environments; one that is not native is refused."""
        self.num_workers = min(self._wanted or usable_cpus(), recipe.num_slots)
        built = super().start(recipe)
        for life in self.lives:
            if self.native_only and life.env is not None and not isinstance(getattr(life.env, "unwrapped", None), NativeEnv):
                raise BadArgument(
                    f"backend 'native' steps environments written in C or C++, and slot {life.slot} has {life.env}: "
                    "use backend='auto', or write it in C++. Wrappers in Python cannot be native, and families with inner episodes have one: docs/native.md"
                )
        return built

    def _make_lives(self, recipe: Recipe) -> None:
        super()._make_lives(recipe)
        for life in self.lives:
            life.make_env = partial(self._make_env, life.slot, life.make_env)

    def _make_env(self, slot: int, make: Callable[[], Any]) -> Any:
        """Build an environment; one that replaces another lives in its memory, which others may look at (true states)."""
        env = make()
        inner = getattr(env, "unwrapped", None)
        if isinstance(inner, NativeEnv) and inner.memory_bytes <= self._states.shape[1]:
            inner.use_memory(self._states[slot, : inner.memory_bytes])
        return env

    def attach(self, layout: Layout) -> Slab:
        """Rows on the heap, states in one block, threads if several were asked for."""
        slab = super().attach(layout)
        envs = {
            life.slot: life.env.unwrapped for life in self.lives if isinstance(getattr(life.env, "unwrapped", None), NativeEnv)
        }
        if envs:
            self._states = _block(len(self.lives), max(env.memory_bytes for env in envs.values()))
            for slot, env in envs.items():
                env.use_memory(self._states[slot, : env.memory_bytes])
        if self._runner is not None and self.num_workers > 1:
            self._runner.start_threads(self.num_workers - 1)
            self._has_threads = True
        return slab

    def submit(self, slots: Slots) -> None:
        """Let the threads step; a small batch is stepped at once."""
        if self._has_threads:
            self._runner.submit(np.ascontiguousarray(slots))
        else:
            super().submit(slots)

    def wait(self, at_least: int, timeout_s: float) -> None:
        """Step too, until enough slots are done."""
        if self._has_threads:
            self._wait_until(max(0, self.num_out - at_least), timeout_s)
        else:
            self._take_sided()

    def _wait_until(self, target: int, timeout_s: float) -> None:
        # A signal handler runs when C returns, so a long wait is made of short ones. A slot with something beside its row is out until
        # that is taken over.
        deadline = time.monotonic() + timeout_s
        self._take_sided()
        while self.num_out > target:
            left_s = deadline - time.monotonic()
            self._runner.wait(target, min(0.1, max(0.0, left_s)))
            self._take_sided()
            if left_s <= 0:
                return

    def round(self, slots: Slots, timeout_s: float) -> bool:
        """Step all slots now, with all threads."""
        if not self._has_threads:
            return super().round(slots, timeout_s)
        plain = self._runner.submit(slots)
        if plain is None:
            plain = self._runner.wait(0, timeout_s) and not self.num_out
        if plain:
            return True
        self._take_sided()
        return False

    def settle(self) -> None:
        """Take over what was left beside rows. Slots that are out are still being stepped, unless there are no threads."""
        if not self._has_threads:
            super().settle()
            return
        self._wait_until(0, 0.0)

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """End the threads, close the environments; says if a thread hangs."""
        if self._has_threads:
            was_stopped, self._was_stopped = self._was_stopped, True
            hung = self._runner.stop_threads(timeout_s)
            self._has_threads = False
            if hung or was_stopped:  # of a close that was interrupted nobody knows whether threads hang
                # They will still write to rows and states: all of it stays in memory for good, and no environment is closed.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
                text = f"{hung or 'some'} of its threads hang in native code and cannot be ended"
                return [(0, Failure("step", text, "", kind="timeout"))] if hung else []
        problems = super().close(timeout_s)
        self.lives.clear()  # they hold this backend, and a cycle would stay in memory until the collector runs
        return problems

    # -- snapshots ----------------------------------------------------------------------------------------------

    def states(self, slots: Slots) -> list[EnvState]:
        """Copies of the environments' memory: state, random stream and task."""
        envs = [self._layers_of(slot)[-1] for slot in slots.tolist()]
        return [EnvState(env.kind, env.memory.tobytes()) for env in envs]

    def set_states(self, slots: Slots, states: Sequence[EnvState]) -> None:
        """Give environments another state; their counters follow from the heads of their rows."""
        for slot, state in zip(slots.tolist(), states):
            *wrappers, env = self._layers_of(slot)
            self.lives[slot].release()  # the task in memory may be another now
            env.memory[:], env._is_seeded = np.frombuffer(state.memory, np.uint8), True
            for wrapper in wrappers:
                if isinstance(wrapper, TimeLimit):
                    wrapper._elapsed_steps = int(self.slab.head["now_length"][slot])  # type: ignore[assignment]

    def _layers_of(self, slot: int) -> list[Any]:
        """The wrappers of a slot, the outermost first, and its environment. Those whose state would be missing are refused."""
        layers = [self.lives[slot].env]
        while type(layers[-1]) in _WITHOUT_STATE:
            layers.append(layers[-1].env)
        if not isinstance(layers[-1], NativeEnv):
            raise BadArgument(
                f"slot {slot} has {type(layers[-1]).__name__} around its environment: what a wrapper remembers is not in a snapshot, "
                "so only fleets without wrappers (but time limits) have snapshots"
            )
        return layers


def _block(rows: int, size_bytes: int) -> NDArray[np.uint8]:
    """Rows that begin at a cache line each."""
    block = np.zeros(rows * size_bytes + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + rows * size_bytes].reshape(rows, size_bytes)
