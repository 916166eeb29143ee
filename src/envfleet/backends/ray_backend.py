"""ray: workers are Ray actors, on one machine or many. Ray places them and says how they ended; everything else is as with `pipe`.

Rows travel over a connection of their own to each actor, or by Ray's calls with `transport="call"`. An actor is never started
again by Ray: that would be another process with other environments. A worker that is lost is replaced by us, when one of its slots is
sent next, and its slots come back as fault rows.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from envfleet.backends.pipe import PipeBackend
from envfleet.backends.ray_launcher import RayLauncher
from envfleet.backends.ray_options import RayOptions
from envfleet.backends.ray_relay import Relay
from envfleet.backends.worker_handle import WorkerHandle
from envfleet.faults.failure import Failure, Loss
from envfleet.slots.factories import Recipe
from envfleet.workers.channel import Channel, ParentChannel, pair
from envfleet.workers.launcher import Keeper
from envfleet.workers.shared_memory import Pulse
from envfleet.workers.stream import StreamParentChannel

#: How long the parent waits for Ray's word on how a worker ended. An actor that died says so in 10 ms, a lost machine in seconds.
_REASON_S = 0.1
#: A worker that is stuck in a call still sends its pulse, several times a second; one that does not is itself silent.
_SILENT_S = 1.0


class RayBackend(PipeBackend):
    """`num_workers` actors."""

    name = "ray"

    def __init__(self, num_workers: int | None = None, options: RayOptions | None = None) -> None:
        super().__init__(num_workers)
        self.start_method = None
        self.options = options or RayOptions()
        self._keys: dict[int, bytes] = {}  # worker -> the key of its connection
        self._far_ends: dict[int, Channel] = {}  # worker -> the other end of its channel, until a relay has it
        self._heard_s: dict[int, float] = {}  # worker -> when something came from it
        self._waiting: dict[int, int] = {}  # worker -> its start that has no place yet, or came while nobody needed it

    # -- starting -----------------------------------------------------------------------------------------------

    def start(self, recipe: Recipe) -> dict[int, dict[str, Any] | Failure | Loss]:
        """Start the actors; each builds its own envs."""
        self.options.connect()
        if self._wanted is None:
            self._wanted = self._free_places()
        return super().start(recipe)

    def _free_places(self) -> int:
        """How many workers the cluster has CPUs for, less one for the process that drives them."""
        import ray

        each = float(self.options.resources.get("num_cpus", 1)) or 1.0
        return max(1, int((ray.cluster_resources().get("CPU", 1.0) - 1) // each))

    def _make_pulses(self, count: int) -> None:
        self._all_pulses = Pulse.local(max(count, self.recipe.num_slots))
        self.pulses = self._all_pulses[:count]

    def _open_keeper(self) -> Keeper:
        return RayLauncher(self.options)

    @property
    def _launcher(self) -> RayLauncher:
        assert isinstance(self._keeper, RayLauncher)
        return self._keeper

    def _start_message(self, worker: WorkerHandle, build: bool) -> dict[str, Any]:
        recipe = self.recipe
        shortest = min(recipe.step_timeout_s, recipe.reset_timeout_s, recipe.init_timeout_s)
        message = super()._start_message(worker, build)
        ours = {"ENVFLEET_COMPILED": os.environ.get("ENVFLEET_COMPILED", "1")}
        return message | {"cwd": None, "environ": ours, "beats": (min(0.25, shortest / 4), shortest / 2)}

    def _open_channel(self, worker: WorkerHandle) -> ParentChannel:
        """Ask for an actor, unless one waits for this worker. Frames posted before it is there are sent then."""
        worker.rest()
        worker.told, worker.stack = (-1, 0, 0), ""
        worker.start_number = self._waiting.pop(worker.index, 0)
        if not worker.start_number:
            self._keys[worker.index] = os.urandom(32)
            worker.start_number = self._launcher.request(self._keys[worker.index])
        if self.options.transport == "stream":
            return StreamParentChannel(self._keys[worker.index])
        ours, self._far_ends[worker.index] = pair()
        return ours

    def _listen_to(self, channel: ParentChannel, worker: WorkerHandle) -> None:
        if not isinstance(channel, StreamParentChannel):
            super()._listen_to(channel, worker)
        self._connect(channel, worker)

    def _connect(self, channel: ParentChannel, worker: WorkerHandle) -> None:
        """Join a channel with its actor, if that is there."""
        connection = self._launcher.connections.get(worker.start_number)
        if connection is None:
            return
        if isinstance(channel, StreamParentChannel):
            channel.connect(connection)
            super()._listen_to(channel, worker)
        else:
            Relay(connection, self._far_ends.pop(worker.index))
        worker.rest()  # the time until it had a place is no silence of its
        self._launcher.late.pop(worker.start_number, None)
        del self._launcher.connections[worker.start_number]

    def has_deadline(self, slot: int) -> bool:
        """Not while its actor waits for a place: `spawn_timeout_s` is for that."""
        return self.has_place(self._workers[self.worker_of[slot]])

    def has_place(self, worker: WorkerHandle) -> bool:
        """Whether its actor runs."""
        return worker.start_number in self._launcher.pids

    # -- what the launcher says ------------------------------------------------------------------------------------

    def _poll(self, timeout_s: float) -> None:
        """As for local workers. What the launcher said may concern a worker that is needed only now; or handling it was interrupted."""
        if self._launcher.connections or self._launcher.late:
            self._hear_keeper()
        super()._poll(timeout_s)

    def _hear_keeper(self) -> None:
        """New connections; workers that have no place, have one after all, or have ended."""
        super()._hear_keeper()
        launcher = self._launcher
        by_number = {worker.start_number: worker for worker in self._workers}
        for number in list(launcher.connections):
            worker = by_number.get(number)
            if worker is None:  # given up meanwhile
                launcher.forget(number)
            elif worker.channel is not None:
                self._connect(worker.channel, worker)
                self._flush(worker)
            elif worker.index in self._waiting and number in launcher.late:
                del launcher.late[number]
                self.placings.append((worker.index, ""))
        for number, why in list(launcher.late.items()):
            worker = by_number.get(number)
            if worker is not None and worker.channel is not None and number not in launcher.connections:
                self._set_aside(worker, why)
        for index, number in list(self._waiting.items()):
            if number in launcher.refused or number in launcher.exits:  # it will never come: the next send asks for another
                self._give_back(index)

    def _give_back(self, index: int) -> None:
        """The start that this worker waits for is not wanted any more."""
        self._launcher.forget(self._waiting[index])
        self.placings.append((index, ""))
        del self._waiting[index]

    def resize(self, num_workers: int, has_env: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
        """As for local workers. Slots that had no place, and are with a worker that has one now, can go on."""
        try:
            super().resize(num_workers, has_env)
        finally:
            for index in [index for index in self._waiting if index >= self.num_workers]:
                self._give_back(index)
            self.placings.extend((index, "") for index in range(self.num_workers) if index not in self._waiting)

    def _set_aside(self, worker: WorkerHandle, why: str) -> None:
        """A worker has no place: what was posted for it is dropped, the request stays."""
        self._waiting[worker.index] = worker.start_number
        self.placings.append((worker.index, why))
        worker.loss_told = True
        self._forget(worker)

    def _collect_built(self) -> dict[int, dict[str, Any] | Failure | Loss]:
        """As for local workers. One that has no place counts as lost at the start."""
        while len(self._built) < self.recipe.num_slots:
            if all(worker.channel is None or self.has_place(worker) for worker in self._workers):
                break
            self._poll(0.05)
            for index, why in self.placings:
                for slot in self._workers[index].slots:
                    self._built.setdefault(slot, Loss(index, None, -1, "init", words=why))
            self.placings.clear()
            if self.is_broken:
                break
        return super()._collect_built()

    # -- ending -------------------------------------------------------------------------------------------------

    def _end_of(self, worker: WorkerHandle) -> int | None:
        """Wait shortly for Ray's reason. A worker that is lost without one may have taken its machine along: avoid that."""
        launcher, number = self._launcher, worker.start_number
        launcher.hurry()
        code = launcher.exit_code(number, _REASON_S)
        if code is None:
            launcher.avoid(number)
            launcher.kill(number)
        return code

    def _end_words(self, worker: WorkerHandle) -> str:
        launcher = self._launcher
        why = launcher.reasons.get(worker.start_number)
        where = f"on {launcher.where(worker.start_number)}"
        return f"{where} ended: {why}" if why else f"{where} closed its connection, and Ray does not say why yet"

    def kill(self, worker: int) -> str:
        """End an actor. Rows that it completed before count. It may be its machine that is silent: avoid that until it answers."""
        stuck = self._workers[worker]
        if stuck.channel is not None:
            stuck.channel.pump()
            self._take_frames(stuck, stuck.channel)
        if time.monotonic() - self._heard_s.get(worker, 0.0) > _SILENT_S:
            self._launcher.avoid(stuck.start_number)
        self._launcher.kill(stuck.start_number)
        self._forget(stuck)
        return stuck.stack

    def _take_frames(self, worker: WorkerHandle, channel: ParentChannel) -> None:
        if channel.has_message:
            self._heard_s[worker.index] = time.monotonic()
        super()._take_frames(worker, channel)

    def _release(self) -> None:
        for worker in self._workers:
            self._forget(worker)
            worker.close()
        self.pulses = []
        if self._keeper is not None:
            self._keeper.close()
        self._keeper = None


def worker_nodes(backend: RayBackend) -> list[str]:
    """[worker]: the id of the machine it is on, empty while it has none."""
    launcher = backend._launcher
    return [launcher.nodes.get(worker.start_number, "") for worker in backend._workers]
