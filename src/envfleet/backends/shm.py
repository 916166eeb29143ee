"""shm: worker processes over shared rows; only slot numbers travel, through rings in the same memory.

With the compiled core, parent and workers wake each other by a doorbell that spins while gaps are short and sleeps when
they are long. With `isolate=False` the parent steps one share of the slots itself: on few cores that is faster, because
no third process competes for them, but an env that crashes its process then ends the trainer, and deadlines cannot
be enforced in that share. Without the compiled core, slot numbers travel over the workers' sockets.

Slots can be moved into the parent's share and back, one by one, while the caller owns them. Parent and worker both have a
life for such a slot; `worker_of` alone says which of the two has the env, and it changes in one step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np

from envfleet.backends.env_copy import try_packed
from envfleet.backends.local import Described, LocalBackend
from envfleet.backends.processes import ProcessBackend
from envfleet.backends.slot_mover import Mover
from envfleet.backends.worker_handle import WorkerHandle
from envfleet.faults.failure import Failure, Loss, load_value
from envfleet.multiagent.agent_support import AGENTS
from envfleet.slots import compiled_core
from envfleet.slots.factories import Recipe
from envfleet.slots.layout import ALIGN, Layout
from envfleet.slots.slab import Slab, Slots
from envfleet.slots.slot_life import SlotLife, drive, unwatched
from envfleet.util.machine import cpu_time_of, usable_cpus
from envfleet.workers.channel import ParentChannel
from envfleet.workers.protocol import MESSAGE, ToWorker
from envfleet.workers.shared_memory import Segment, SharedMap
from envfleet.workers.worker import call_life


class ShmBackend(ProcessBackend):
    """Rows in shared memory."""

    name = "shm"
    by_value = False

    def __init__(
        self,
        num_workers: int | None = None,
        start_method: str | None = None,
        isolate: bool = True,
        spin_s: float = 0.004,
        mover: Mover | None = None,
    ) -> None:
        super().__init__(num_workers, start_method)
        self._compiled = compiled_core.load()
        if self._compiled is not None and not hasattr(self._compiled, "Exchange"):
            self._compiled = None  # built on a system without futexes
        self._isolate = isolate or self._compiled is None
        self._spin_s = spin_s
        self._exchange: Any = None
        self._segment: Segment | None = None
        self._mover = mover if self._compiled is not None else None
        self.spare = int(self._isolate and self._mover is not None)
        self._own = -1  # the parent's share, where it has one
        self._lives: dict[int, SlotLife] = {}  # the parent's: of every slot, or of none
        self._all_lives_runner: Any = None
        self._runner: Any = None  # the same while the parent's share is not empty, else None: nothing to look for
        self._all_alive = True
        self._all_told = True  # every worker knows every task, and has been sent all that it was to be sent
        self._sided: list[tuple[int, int, int]] = []  # (slot, turn, whether broken) with something beside their rows

    # -- the parent's own share ---------------------------------------------------------------------------------

    def _is_own(self, worker: int) -> bool:
        # The last share, so that the other workers are rung before the parent starts on its own slots.
        return worker == self._own

    def _is_mine(self, slot: int) -> bool:
        return bool(self.worker_of[slot] == self._own)

    def start(self, recipe: Recipe) -> dict[int, Described]:
        """As all process backends; the parent's share is the last, or one more."""
        workers = min(self._wanted or usable_cpus(), recipe.num_slots)
        self._own = workers - 1 + self.spare if self.spare or not self._isolate else -1
        return super().start(recipe)

    def _build_own(self) -> None:
        self._home = self.worker_of.copy()
        if self._own < 0:
            return
        for slot, factory in enumerate(self.recipe.factories):
            self._lives[slot] = SlotLife(slot, factory, self.recipe.on_end, self._tasks, AGENTS)
        for slot in self._workers[self._own].slots:
            life = self._lives[slot]
            drive(life, life.build(), unwatched)
            described: Described = LocalBackend._described(life)
            self._built[slot] = described

    def has_deadline(self, slot: int) -> bool:
        """Not the parent's own share."""
        return not self._is_mine(slot)

    # -- memory -------------------------------------------------------------------------------------------------

    def _make_slab(self, layout: Layout) -> Slab:
        count = self.recipe.num_slots
        keep_obs = self.recipe.keep_obs
        slab_bytes = layout.offsets(count, True, keep_obs)[1]
        self._map = SharedMap(slab_bytes, self.num_workers, count, keep_obs=keep_obs)
        if self._compiled is not None:
            exchange_bytes = -(-self._compiled.Exchange.size(self.num_workers + self.spare, count) // ALIGN) * ALIGN
            self._map = dataclasses.replace(
                self._map,
                exchange_bytes=exchange_bytes,
                arena_bytes=compiled_core.ARENA_BYTES,
                spin_s=self._spin_s,
                spare=self.spare,
            )
        self._segment = Segment.create(self._map.size_bytes)
        slab = Slab(layout, count, self._segment.map, keep_obs=keep_obs)
        if self._compiled is not None:
            board = (self.given, self.done, self.info, self.final_info, self._sided)
            self._exchange, self._arena = self._map.open(self._compiled, self._segment, self._own, board)
        for life in self._lives.values():
            life.attach(slab)
        if self._lives:
            self._all_lives_runner = compiled_core.make_runner(
                self._compiled, slab, self._lives, unwatched, None, self._arena, True
            )
            self._runner = None if self.spare else self._all_lives_runner
        return slab

    def _post_attach(self, channel: ParentChannel) -> bool:
        if self._layout is None or self._segment is None:
            return False
        message = cloudpickle.dumps((ToWorker.ATTACH, self._layout, self.recipe.num_slots, self._map))
        channel.post(MESSAGE + message, [self._segment])
        return True

    def _flush(self, worker: WorkerHandle, patience_s: float = 0.2) -> None:
        """Send what waits, and ring: with the doorbell, a worker looks at its socket only when it is rung for it."""
        super()._flush(worker, patience_s)
        channel = worker.channel
        self._all_told &= channel is None or not channel.pending
        if self._exchange is None or channel is None or not worker.attached or channel.pending:
            return
        if worker.rung != channel.next_number:
            self._exchange.control(worker.index)
            worker.rung = channel.next_number

    # -- stepping -----------------------------------------------------------------------------------------------

    def submit(self, slots: Slots) -> None:
        """Put the slots into their workers' rings and ring."""
        if self._exchange is None:
            super().submit(slots)
            return
        if not self._all_alive or not self._all_told:
            self._prepare(slots)
        late = [worker.index for worker in self._workers if worker.channel is not None and worker.channel.pending]
        if late:
            # What these were sent before is still on its way: the slots follow behind it, over the same socket.
            waiting = np.isin(self.worker_of[slots], late)
            super().submit(slots[waiting])
            slots = slots[~waiting]
        self._exchange.submit(np.ascontiguousarray(self._without_lost(slots)), self.worker_of)

    def _prepare(self, slots: Slots) -> None:
        """Workers that are there and know all tasks."""
        self.settle()
        lost = [loss.worker for loss in self.losses]  # not started again before the supervisor has dealt with them
        for index in np.unique(self.worker_of[slots]).tolist():
            if not self._is_own(index) and index not in lost:
                self._prepared(self._workers[index])
        needed = np.unique(self.worker_of).tolist()
        self._all_alive = all(w.alive or self._is_own(w.index) or w.index not in needed for w in self._workers)
        self._all_told = all(
            w.channel is None or (w.num_tasks == len(self._tasks) and not w.channel.pending) for w in self._workers
        )

    def give_tasks(self, tasks: Mapping[int, bytes]) -> None:
        """Also when this is interrupted: `submit` checks whether all workers know all tasks."""
        self._all_told = False
        super().give_tasks(tasks)

    def round(self, slots: Slots, timeout_s: float) -> bool:
        """Wake workers, step, wait and collect in one call of the compiled doorbell, while `SlotTable.plain` is set."""
        if self._exchange is None or not self._all_alive or self.info or self.final_info or not self._all_told or self._sided:
            return super().round(slots, timeout_s)
        if self._exchange.round(slots, self.worker_of, timeout_s, self._runner):
            return True
        self.wait(self.num_out, timeout_s)
        return False

    def wait(self, at_least: int, timeout_s: float) -> None:
        """Step the parent's own share, then wait for the workers; look after them whenever that takes long."""
        if self._exchange is None:
            super().wait(at_least, timeout_s)
            return
        target = self.num_out - at_least
        deadline = time.monotonic() + timeout_s
        while True:
            need = max(0, self.num_out - target)
            enough = self._exchange.wait(need, max(0.0, deadline - time.monotonic()), self._runner)
            self._collect()
            if not enough:
                self.settle()
                self._poll(0.0)
            if self.num_out <= target or self.has_trouble or time.monotonic() >= deadline:
                return

    def _collect(self) -> None:
        self.num_stale = self._exchange.collect(self._arena)
        while self._sided:
            slot, turn, broken = entry = self._sided[0]
            if self.given[slot] == turn != self.done[slot]:
                self._take_side(slot, turn, bool(broken))
            if self._sided and self._sided[0] is entry:  # else it was handled already: its worker was found dead
                del self._sided[0]

    def _take_side(self, slot: int, turn: int, broken: bool) -> None:
        """What a slot left with Python: in our own life, or on its worker's socket, sent before the slot was done."""
        if self._is_mine(slot):
            life = self._lives[slot]
            part: dict[str, Any] = {"info": life.info, "final_info": life.final_info, "failure": life.failure}
        else:
            worker = self._workers[self.worker_of[slot]]
            if self._parts.get(slot, (-1,))[0] != turn and worker.channel is not None:
                worker.channel.pump()
                self._take(worker)
                if self.done[slot] == turn:
                    return
            part_turn, part = self._parts.get(slot, (-1, {}))
            broken |= part_turn != turn
        failure = part.get("failure") or self._take_mail(slot, part)
        if failure is None and broken:
            failure = Failure("step", "it was interrupted in the middle of its step or reset", "")
        if failure is not None:
            self.failures[slot] = failure
        for kept, name in ((self.info, "info"), (self.final_info, "final_info")):
            if failure is not None:
                kept.pop(slot, None)
            elif part.get(name) is not None:
                kept[slot] = part[name]  # what is not here may be in the arena, and was taken from there
        self.done[slot] = turn
        self._parts.pop(slot, None)

    def settle(self) -> None:
        """As of all process backends; and what the doorbell says."""
        super().settle()
        if self._exchange is not None:
            self._collect()
            for worker in self._workers:
                self._flush(worker, 0.0)

    def _end_of(self, worker: WorkerHandle) -> int | None:
        code = super()._end_of(worker)
        self._drop_rings(worker)  # not before it has ended: one that only closed its socket would step what it reads there
        return code

    def kill(self, worker: int) -> str:
        """End the worker; what it had finished is kept."""
        stack = super().kill(worker)
        self._drop_rings(self._workers[worker])
        return stack

    def _drop_rings(self, worker: WorkerHandle) -> None:
        self._all_alive = False
        if self._exchange is not None:
            self._collect()
            self._exchange.forget(worker.index)

    # -- moving -------------------------------------------------------------------------------------------------

    def mind(self, free: Callable[[], Slots]) -> None:
        """Let the mover look at the machine; it may move slots that are `free`."""
        if self._mover is not None and not self.has_trouble:  # trouble is dealt with first, by slots as they are now
            self._mover.mind(self, free)

    def moved(self) -> np.ndarray[Any, Any]:
        """[slot]: whether it was moved into this process."""
        moved: np.ndarray[Any, Any] = self.worker_of != self._home
        return moved

    def resident(self) -> np.ndarray[Any, Any]:
        """[slot]: whether it is in this process, from the start or moved."""
        here: np.ndarray[Any, Any] = self.worker_of == self._own
        return here

    def cpu_s(self) -> float:
        """CPU seconds that this process and its workers have used, as far as the kernel reports them."""
        assert self._keeper is not None
        pids = [self._keeper.pids.get(worker.start_number) for worker in self._workers if worker.alive]
        return time.process_time() + sum(cpu_time_of(pid) for pid in pids if pid is not None)

    def move_in(self, slots: list[int], timeout_s: float = 1.0) -> dict[int, str]:
        """Move slots that the caller owns from their workers into this process; returns why not, for those that cannot be moved.

        The worker packs its env and keeps it. Once `worker_of` names the parent, the worker's copy is unused, and the worker
        is sent FORGET. Before that, the parent's copy is unused.
        """
        if self.slab.has_mail or self.slab.layout.agents:
            return dict.fromkeys(slots, "objects or many agents in its rows")
        refused: dict[int, str] = {}
        asked = self.ask(slots, "__apply__", [(try_packed,)] * len(slots), self.worker_of, timeout_s)
        for slot, data in asked.items():
            env = load_value(data, "call") if isinstance(data, bytes) else data
            if isinstance(env, (Failure, str)):
                refused[slot] = env.summary if isinstance(env, Failure) else env
                continue
            self._lives[slot].move_in(env)
            self._runner = self._all_lives_runner
            self.worker_of[slot] = self._own
            self._message(self._workers[self._home[slot]], ToWorker.FORGET, slot)
        return refused

    def move_back(self, slots: list[int], timeout_s: float = 1.0) -> dict[int, str]:
        """Move slots back to their workers; returns why not, for those that cannot be moved."""
        refused: dict[int, str] = {}
        blobs: dict[int, tuple[bytes]] = {}
        for slot in slots:
            life = self._lives[slot]
            life.release()
            data = try_packed(life.env)
            if isinstance(data, bytes):
                self._prepared(self._workers[self._home[slot]])  # it may have ended meanwhile
                blobs[slot] = (data,)
            else:
                refused[slot] = data
        for slot, answer in self.ask([*blobs], "__adopt__", [*blobs.values()], self._home, timeout_s).items():
            if isinstance(answer, Failure):
                refused[slot] = answer.summary
                continue
            self.worker_of[slot] = self._home[slot]
            self._lives[slot].move_out()
        if not self.resident().any():
            self._runner = None if self.spare else self._all_lives_runner
        return refused

    # -- off the step path --------------------------------------------------------------------------------------

    def give_options(self, options: Mapping[int, dict[str, Any] | None]) -> None:
        """To the lives of the parent's share, and to the workers."""
        for slot, value in options.items():
            if self._is_mine(slot):
                self._lives[slot].options = value
        super().give_options({slot: value for slot, value in options.items() if not self._is_mine(slot)})

    def give_mail(self, mail: Mapping[int, Mapping[int, Any]]) -> None:
        """To the parent's own mailbox, and to the workers."""
        for i, objects in mail.items():
            for slot in filter(self._is_mine, objects):
                self.slab.mail["action"][i][slot] = objects[slot]
        super().give_mail(mail)

    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """In the parent's own lives here, in the others by message."""
        for i, slot in enumerate(slots):
            mine = args[i] if each else args
            if self._is_mine(slot):
                self._replies[slot] = self._call_own(slot, phase, name, mine, kwargs)
            else:
                super().call([slot], phase, name, mine, kwargs)

    def _call_own(self, slot: int, phase: str, name: str, args: Any, kwargs: Any) -> Any:
        try:
            return call_life(self._lives[slot], phase, name, args, kwargs)
        except KeyboardInterrupt as error:
            self.failures[slot] = Failure.of(error, phase)  # the state of its env is unknown
            raise
        except BaseException as error:
            return Failure.of(error, phase)

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Close the parent's own envs, then the workers."""
        problems: list[tuple[int, Failure | Loss]] = []
        for life in self._lives.values():
            try:
                life.close()
            except (Exception, SystemExit, GeneratorExit) as error:
                problems.append((life.slot, Failure.of(error, "close")))
        problems += super().close(timeout_s)
        self._exchange = self._runner = self._all_lives_runner = None
        if self._segment is not None:
            self._segment.close()
            self._segment = None
        return problems
