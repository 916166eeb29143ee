"""What pipe and shm share: workers in processes of their own, started and ended by a keeper.

The two differ in where rows are: `pipe` sends them by value over the worker's socket, `shm` keeps them in memory that
parent and workers share. A worker that dies is started again when one of its slots is submitted next.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import pickle
import select
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

import cloudpickle
import numpy as np

from envfleet.backends.base import Backend, spread
from envfleet.backends.worker_handle import WorkerHandle
from envfleet.errors import KeeperLost
from envfleet.faults.failure import Failure, Loss, load_value
from envfleet.slots.factories import Recipe
from envfleet.slots.layout import Layout
from envfleet.slots.slab import Slab, Slots
from envfleet.util.machine import usable_cpus
from envfleet.workers.channel import Closed, ParentChannel, pair
from envfleet.workers.keeper import checked_pid
from envfleet.workers.launcher import Keeper, check_start_method, working_folder
from envfleet.workers.protocol import DONE, MESSAGE, PULSE, SIDE, FromWorker, ToWorker, pack_advance, unpack_done, unpack_pulse
from envfleet.workers.shared_memory import Pulse, Segment
from envfleet.workers.worker import STACK_SIGNAL

#: How often reading a frame may be interrupted before its worker is given up.
_MAX_ATTEMPTS = 20


class ProcessBackend(Backend):
    """Common to pipe and shm."""

    can_kill = True
    by_value: bool
    threads = False  # whether every slot has a thread of its own in its worker
    spare = 0  # 1: the parent has a share of its own, empty until slots are moved into it

    def __init__(self, num_workers: int | None = None, start_method: str | None = None) -> None:
        super().__init__()
        self._wanted = num_workers
        self.start_method = check_start_method(start_method)
        self._tasks: dict[int, bytes] = {}
        self._workers: list[WorkerHandle] = []
        self._keeper: Keeper | None = None
        self._layout: Layout | None = None
        self._parts: dict[int, tuple[int, dict[str, Any]]] = {}  # slot -> turn and what it left beside its row
        self._stashed: dict[int, tuple[int, Any]] = {}  # slot -> turn and its row before that turn's was taken in
        self._options: dict[int, tuple[int, Any]] = {}  # slot -> the turn it had when it was given options, and they
        self._last_shares: tuple[Any, list[tuple[int, Slots]]] = None, []
        self._built: dict[int, dict[str, Any] | Failure | Loss] = {}
        self._closing: list[tuple[int, Failure | Loss]] = []
        self._poller = select.poll()
        self._by_fd: dict[int, WorkerHandle] = {}

    # -- starting -----------------------------------------------------------------------------------------------

    def start(self, recipe: Recipe) -> dict[int, dict[str, Any] | Failure | Loss]:
        """Start the keeper and the workers; each builds its own envs, all at once."""
        self.recipe = recipe
        self._factories = recipe.pack()  # before any process starts: what cannot be pickled is refused here
        self.num_workers = min(self._wanted or usable_cpus(), recipe.num_slots)
        self.worker_of = spread(recipe.num_slots, self.num_workers)
        shares = self.num_workers + self.spare
        self._make_pulses(recipe.num_slots if self.threads else shares)
        self._keeper = self._open_keeper()
        self._poller.register(self._keeper.channel.sock, select.POLLIN)
        for i in range(shares):
            slots = np.flatnonzero(self.worker_of == i).tolist()
            pulses = [self.pulses[slot] for slot in slots] if self.threads else [self.pulses[i]]
            self._workers.append(WorkerHandle(i, slots, pulses, self._keeper))
        for worker in self._workers:
            if not self._is_own(worker.index):
                self._launch(worker, build=True)
        self._build_own()
        return self._collect_built()

    def _make_pulses(self, count: int) -> None:
        self._pulse_segment = Segment.create(max(count, self.recipe.num_slots) * 64)  # `resize` may add workers
        words = np.frombuffer(self._pulse_segment.map, np.int64).reshape(-1, 8)
        words[:, 0] = -1
        self._all_pulses = [Pulse(row) for row in words]
        self.pulses = self._all_pulses[:count]

    def _open_keeper(self) -> Keeper:
        return Keeper(self.start_method or "")

    def _is_own(self, worker: int) -> bool:
        """Whether this worker's slots are stepped by the parent itself."""
        return False

    def _build_own(self) -> None:
        """Build the parent's own share of the envs, where it has one."""

    def _launch(self, worker: WorkerHandle, build: bool) -> None:
        start = cloudpickle.dumps(self._start_message(worker, build))
        ours = self._open_channel(worker)
        try:
            ours.post(start)
            worker.num_tasks, worker.attempts, worker.handing = len(self._tasks), 0, None
            worker.attached = not build and self._post_attach(ours)
            worker.rung = ours.next_number
            self._listen_to(ours, worker)
        except BaseException:
            ours.close()  # a worker that starts anyway finds its socket closed, and ends
            raise
        worker.loss_told = False
        worker.channel = ours  # from here on it counts as started
        self._flush(worker)

    def _start_message(self, worker: WorkerHandle, build: bool) -> dict[str, Any]:
        return {
            "path": list(sys.path),
            "cwd": working_folder(),
            "worker": worker.index,
            "pulse_bytes": 64 * len(self._all_pulses),
            "by_value": self.by_value,
            "threads": self.threads,
            "factories": self._factories,
            # Those that it steps, and those that are elsewhere now and may come back (a share of the parent's, a resize).
            "slots": sorted({*np.flatnonzero(self.worker_of == worker.index).tolist(), *worker.slots}),
            "on_end": self.recipe.on_end,
            "tasks": dict(self._tasks),
            "options": self._options_of(worker),
            "blas_threads": self.recipe.blas_threads,
            "build": build,
        }

    def _open_channel(self, worker: WorkerHandle) -> ParentChannel:
        """Ask for a process, and give this side of the channel to it. Frames may be posted at once."""
        assert self._keeper is not None
        ours, theirs = pair()
        # The deadline begins now: starting the process and loading the factory may hang as a constructor may.
        worker.pulses[0].enter(worker.slots[0], "init")
        os.ftruncate(worker.stack_file.fileno(), 0)
        try:
            worker.start_number = self._keeper.request_worker([theirs, self._pulse_segment, worker.stack_file])
        except BaseException as error:
            ours.close()
            self.is_broken |= isinstance(error, KeeperLost)
            raise
        return ours

    def _listen_to(self, channel: ParentChannel, worker: WorkerHandle) -> None:
        self._by_fd[channel.fileno()] = worker
        self._poller.register(channel.sock, select.POLLIN)

    def _collect_built(self) -> dict[int, dict[str, Any] | Failure | Loss]:
        """Wait until every slot is built, failed, or lost with its worker. Deadlines are per constructor."""
        while len(self._built) < self.recipe.num_slots:
            self._poll(0.05)
            if self.is_broken:
                raise self.broken()
            for loss in self.losses:
                for slot in self._workers[loss.worker].slots:
                    self._built.setdefault(slot, loss)
            self.losses.clear()
            for worker in self._workers:
                slot, phase, since = worker.doing()
                if slot >= 0 and worker.alive and time.monotonic() - since > self.recipe.init_timeout_s:
                    text = f"__init__ took longer than init_timeout_s={self.recipe.init_timeout_s:g}"
                    self._built[slot] = Failure("init", text, self.kill(worker.index), kind="timeout")
                    worker.loss_told = True
                    for other in worker.slots:
                        self._built.setdefault(other, Loss(worker.index, None, slot, phase))
        return self._built

    def attach(self, layout: Layout) -> Slab:
        """Lay out the rows here and in every worker."""
        self._layout = layout
        self._count_turns()
        self.slab = self._make_slab(layout)
        for worker in self._workers:
            if worker.channel is not None:
                worker.attached = self._post_attach(worker.channel)
                worker.rung = worker.channel.next_number
                self._flush(worker)
        return self.slab

    @abc.abstractmethod
    def _make_slab(self, layout: Layout) -> Slab:
        """The rows, where parent and workers will find them."""

    @abc.abstractmethod
    def _post_attach(self, channel: ParentChannel) -> bool:
        """Send a worker the location of its rows. Returns False before there are any."""

    # -- stepping -----------------------------------------------------------------------------------------------

    def submit(self, slots: Slots) -> None:
        """One message per worker: the list of its slots and turns (and, for pipe, their rows)."""
        self.settle()
        slots = self._without_lost(slots)
        for index, mine in self._shares_of(slots):
            worker = self._workers[index]
            channel = self._prepared(worker)
            if channel is None:
                self._without_lost(mine)
                continue
            turns = self.given[mine] + np.uint32(1)
            frame = pack_advance(mine, turns, *self._pack_rows(worker, mine))
            # Interrupted between the next lines: `settle` sees by the number whether the frame was posted.
            worker.handing = (mine, turns, channel, channel.next_number)
            channel.post(frame)
            self.given[mine] = turns
            worker.handing = None
            self._flush(worker)

    def _shares_of(self, slots: Slots) -> list[tuple[int, Slots]]:
        """(worker, which of the slots it steps). Mostly all slots are sent, again and again: the last answer is kept."""
        key = (slots.tobytes(), self.worker_of.tobytes())
        if key != self._last_shares[0]:
            owners = self.worker_of[slots]
            self._last_shares = key, [(int(index), slots[owners == index]) for index in np.unique(owners)]
        return self._last_shares[1]

    def _pack_rows(self, worker: WorkerHandle, slots: Slots) -> tuple[bytes, bool]:
        """What a worker has to be sent of the rows, and whether the heads are in it."""
        return b"", True

    def _without_lost(self, slots: Slots) -> Slots:
        """Count the turn of slots whose worker is among the losses, hand them to no worker, and return the others.

        They are out until the supervisor handles the loss. The worker that replaces the lost one must not get them: when it
        reads their rows, these hold the command and the seed of the next turn.
        """
        if not self.losses:
            return slots
        lost = np.isin(self.worker_of[slots], [loss.worker for loss in self.losses])
        self.given[slots[lost]] += np.uint32(1)
        return slots[~lost]

    def broken(self) -> KeeperLost:
        """Says why the keeper is gone."""
        return KeeperLost(Keeper.why_gone if self._keeper is None else self._keeper.why_gone)

    def check(self) -> None:
        """Without the keeper nothing can be started or ended, and the workers have ended too."""
        if self._keeper is not None and not self._keeper.gone:
            self._keeper.channel.pump()
        self.is_broken |= self._keeper is not None and self._keeper.gone

    def settle(self) -> None:
        """Complete a `submit`, or the recording of a lost worker, that an exception interrupted."""
        for worker in self._workers:
            if worker.handing is not None:
                slots, turns, channel, number = worker.handing
                if channel.next_number > number:
                    self.given[slots] = turns
                worker.handing = None
            if worker.channel is None and not worker.loss_told:
                self._tell_loss(worker)

    def _prepared(self, worker: WorkerHandle) -> ParentChannel | None:
        """The channel of a worker that is there and knows all tasks; starts it again if it is not.

        None: it has ended meanwhile, and is among the losses.
        """
        if worker.channel is None:
            self._launch(worker, build=False)
        if worker.num_tasks != len(self._tasks):
            self._tell_tasks(worker)
        return worker.channel

    def wait(self, at_least: int, timeout_s: float) -> None:
        """Take in messages until enough is done, a worker is lost, or the time is over."""
        self.settle()
        target = self.num_out - at_least
        deadline = time.monotonic() + timeout_s
        while True:
            enough = self.num_out <= target or self.has_trouble
            left = 0.0 if enough else deadline - time.monotonic()
            self._poll(max(0.0, left))
            if enough or left <= 0:
                return

    def sockets(self) -> Collection[int]:
        """Of the living workers and the keeper."""
        keeper = [] if self._keeper is None or self._keeper.gone else [self._keeper.channel.fileno()]
        return [*self._by_fd, *keeper]

    def _poll(self, timeout_s: float) -> None:
        """Read messages of workers and keeper; wait for the first one at most `timeout_s`."""
        for worker in self._workers:
            if worker.channel is not None and worker.channel.pending:
                self._flush(worker, 0.0)
                timeout_s = min(timeout_s, 0.01)
            if worker.channel is not None and worker.channel.has_message and worker.channel.peek() is not None:
                timeout_s = 0.0
                self._take(worker)
        if self._keeper is not None and self._keeper.channel.has_message:
            self._hear_keeper()
        try:
            ready = self._poller.poll(timeout_s * 1000)
        except RuntimeError:  # another thread polls: one of the two closes, while the other could not leave its call in time
            time.sleep(min(timeout_s, 0.01))
            return
        for fd, _ in ready:
            found = self._by_fd.get(fd)
            if found is not None and found.channel is not None and found.channel.fileno() == fd:
                found.channel.pump()
                self._take(found)
            elif self._keeper is not None and fd == self._keeper.channel.fileno():
                self._hear_keeper()
            else:  # of a worker whose end is recorded, or was being recorded when that was interrupted
                self._by_fd.pop(fd, None)
                with contextlib.suppress(KeyError):
                    self._poller.unregister(fd)

    def _hear_keeper(self) -> None:
        """A worker's end is noticed even where its socket stays open, held by a process that its env has started."""
        keeper = self._keeper
        assert keeper is not None
        keeper.poll()
        for worker in self._workers:
            ended = keeper.pids.get(worker.start_number) in keeper.exits or worker.start_number in keeper.refused
            if ended and worker.channel is not None:
                worker.channel.pump()
                self._take(worker)
                self._mark_lost(worker)
        if keeper.gone:
            self.is_broken = True
            with contextlib.suppress(KeyError):
                self._poller.unregister(keeper.channel.sock)

    def _take(self, worker: WorkerHandle) -> None:
        """Process the frames that have arrived, and the end of the worker."""
        channel = worker.channel
        assert channel is not None
        self._take_frames(worker, channel)
        if channel.eof:
            self._mark_lost(worker)

    def _take_frames(self, worker: WorkerHandle, channel: ParentChannel) -> None:
        """A frame is removed after it was processed; until then this can be repeated."""
        while (frame := channel.peek()) is not None:
            worker.attempts += 1
            if worker.attempts > _MAX_ATTEMPTS:
                channel.eof = True  # it cannot be read, even after retries: what follows cannot be trusted
                break
            if frame[:1] == DONE:
                self._take_done(worker, frame)
            elif frame[:1] == SIDE:
                slot, turn, part = pickle.loads(frame[1:])
                self._parts[slot] = (turn, part)
            elif frame[:1] == PULSE:
                self._take_pulse(worker, frame)
            else:
                self._take_reply(*pickle.loads(frame[1:]))
            channel.drop()
            worker.attempts = 0

    def _take_pulse(self, worker: WorkerHandle, frame: memoryview) -> None:
        """What a worker without shared memory is doing. A call that is known already keeps the time at which it began here."""
        words, elapsed_ns, stack = unpack_pulse(frame)
        if worker.told != words:
            worker.told = words
            worker.pulses[0].words[:3] = words[0], words[1], time.monotonic_ns() - elapsed_ns
        worker.stack = stack or worker.stack

    def _take_done(self, worker: WorkerHandle, frame: memoryview) -> None:
        slots, turns, at, end = unpack_done(frame)
        parts = pickle.loads(frame[end:]) if len(frame) > end else {}
        current = turns == self.given[slots]
        self.num_stale += int(len(slots) - np.count_nonzero(current))
        current &= self.done[slots] != turns  # not those that were taken in before this was interrupted
        if parts or self.info or self.final_info:  # else nothing is beside these rows, and nothing was beside the rows before
            for slot in slots[current].tolist():
                self._take_part(slot, parts.get(slot, {}))
        if end > at:
            self._take_rows(worker, slots, current, frame, at)
        self.done[slots[current]] = turns[current]

    def _take_rows(self, worker: WorkerHandle, slots: Slots, current: Any, frame: memoryview, at: int) -> None:
        """Take in the rows of a DONE frame."""

    def _take_part(self, slot: int, part: dict[str, Any]) -> None:
        """Take in what is beside a row, before the row itself."""
        self._keep_side(slot, part.get("info"), part.get("final_info"))
        failure = part.get("failure") or self._take_mail(slot, part)
        if failure is not None:
            self._stashed[slot] = int(self.given[slot]), self.delivered(slot)
            self.failures[slot] = failure

    def _take_mail(self, slot: int, part: dict[str, Any]) -> Failure | None:
        mail = part.get("mail", {})
        values = [(kind, i, load_value(data, "step")) for kind, boxes in mail.items() for i, data in boxes.items()]
        for _, _, value in values:
            if type(value) is Failure:  # not isinstance: that runs code of the value
                return value
        for kind, i, value in values:
            self.slab.mail[kind][i][slot] = value
        return None

    def delivered(self, slot: int) -> Any:
        """The row as it was last delivered."""
        turn, row = self._stashed.get(slot, (-1, None))
        return row if turn == self.given[slot] else super().delivered(slot)

    def _take_reply(self, what: str, *args: Any) -> None:
        if what == FromWorker.BUILT:
            self._built[args[0]] = load_value(args[1], "init")
        elif what == FromWorker.CALLED:
            slot, number, answer = args
            if self._call_numbers.get(slot) == number:
                self._replies[slot] = load_value(answer, "call")
        elif what == FromWorker.CLOSED:
            self._closing.append((args[0], args[1]))

    def _mark_lost(self, worker: WorkerHandle) -> None:
        """The worker is gone, or will be: record it once."""
        self._forget(worker)
        if not worker.loss_told:
            self._tell_loss(worker)

    def _tell_loss(self, worker: WorkerHandle) -> None:
        """Find out how a worker's process ended, and add it to the losses. May be interrupted, and is then repeated."""
        slot, phase = worker.last_seen()
        code = self._end_of(worker)
        self.losses.append(Loss(worker.index, code, slot, phase, words=self._end_words(worker)))
        worker.loss_told = True
        worker.rest()

    def _end_words(self, worker: WorkerHandle) -> str:
        """How a worker ended, where its exit code does not say it."""
        return ""

    def _end_of(self, worker: WorkerHandle) -> int | None:
        """The exit code of a worker that has closed its socket; ends it if it still runs."""
        keeper = self._keeper
        assert keeper is not None
        pid = keeper.wanted_pid(worker.start_number, 1.0)
        if pid is None:
            return None
        code = keeper.exit_code(pid, 1.0)
        if code is None:
            keeper.kill(pid)
            code = keeper.exit_code(pid, 1.0)
        return code

    def _forget(self, worker: WorkerHandle) -> None:
        channel, worker.channel = worker.channel, None
        worker.attached = False
        if channel is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._poller.unregister(channel.sock)
            self._by_fd.pop(channel.fileno(), None)
            channel.close()

    def _flush(self, worker: WorkerHandle, patience_s: float = 0.2) -> None:
        """Send what waits for a worker."""
        channel = worker.channel
        if channel is None:
            return
        try:
            channel.flush(patience_s)
        except Closed:
            channel.pump()
            channel.eof = True
            self._take(worker)

    def _message(self, worker: WorkerHandle, *message: Any) -> None:
        if worker.channel is not None:
            worker.channel.post(MESSAGE + cloudpickle.dumps(message))
            self._flush(worker)

    # -- off the step path --------------------------------------------------------------------------------------

    def give_tasks(self, tasks: Mapping[int, bytes]) -> None:
        """Every running worker gets them now, a restarted one when it starts."""
        self._tasks.update(tasks)
        for worker in self._workers:
            self._tell_tasks(worker)

    def _tell_tasks(self, worker: WorkerHandle) -> None:
        if worker.channel is not None and worker.num_tasks < len(self._tasks):
            self._message(worker, ToWorker.TASKS, dict(itertools.islice(self._tasks.items(), worker.num_tasks, None)))
            worker.num_tasks = len(self._tasks)

    def give_options(self, options: Mapping[int, dict[str, Any] | None]) -> None:
        """To the workers of these slots. If one is lost before the reset is sent, its replacement gets them."""
        self._options.update((slot, (int(self.given[slot]), value)) for slot, value in options.items())
        self._by_worker(ToWorker.OPTIONS, options)

    def _options_of(self, worker: WorkerHandle) -> dict[int, Any]:
        """Options of resets that have not been sent yet."""
        given = {slot: self._options[slot] for slot in worker.slots if slot in self._options}
        return {slot: value for slot, (turn, value) in given.items() if turn == self.given[slot]}

    def give_mail(self, mail: Mapping[int, Mapping[int, Any]]) -> None:
        """To the workers of these slots."""
        grouped: dict[int, dict[int, dict[int, Any]]] = {}
        for i, objects in mail.items():
            for slot, value in objects.items():
                grouped.setdefault(int(self.worker_of[slot]), {}).setdefault(i, {})[slot] = value
        for index, mine in grouped.items():
            self._message(self._workers[index], ToWorker.MAIL, mine)

    def _by_worker(self, what: str, values: Mapping[int, Any]) -> None:
        for worker in self._workers:
            mine = {slot: value for slot, value in values.items() if self.worker_of[slot] == worker.index}
            if mine:
                self._prepared(worker)
                self._message(worker, what, mine)

    def call(self, slots: list[int], phase: str, name: str, args: Any, kwargs: Any, each: bool = False) -> None:
        """One message per slot."""
        self.settle()
        for i, slot in enumerate(slots):
            worker = self._workers[self.worker_of[slot]]
            self._prepared(worker)
            number = self._next_call(slot)
            self._replies.pop(slot, None)  # to a call that was interrupted
            self._message(worker, ToWorker.CALL, slot, number, phase, name, args[i] if each else args, kwargs)

    def replies(self, timeout_s: float) -> dict[int, Any]:
        """Answers that have arrived."""
        if not self._replies:
            self._poll(timeout_s)
        replies, self._replies = self._replies, {}
        return replies

    def ask(self, slots: list[int], name: str, args: list[Any], owner: np.ndarray[Any, Any], timeout_s: float) -> dict[int, Any]:
        """Call something in these slots' workers; the answers that come in time. Those that come later are dropped."""
        self.settle()
        answers: dict[int, Any] = {}
        deadline, wanted = time.monotonic() + timeout_s, set(slots)
        asked = 0
        for slot, mine in zip(slots, args):
            worker, number = self._workers[owner[slot]], self._next_call(slot)
            self._replies.pop(slot, None)
            asked += worker.alive
            self._message(worker, ToWorker.CALL, slot, number, "call", name, mine, {})
        while len(answers) < asked and not (self.losses or self.is_broken or self.is_closing):
            if (left := deadline - time.monotonic()) <= 0:
                break
            # An answer of another slot belongs to a call that was interrupted.
            answers.update((slot, answer) for slot, answer in self.replies(min(left, 0.05)).items() if slot in wanted)
        for slot in slots:
            self._next_call(slot)
        return answers

    # -- ending -------------------------------------------------------------------------------------------------

    def kill(self, worker: int) -> str:
        """Ask for the Python stacks, then end the worker and all it started. Rows that it completed before its end count."""
        stuck = self._workers[worker]
        assert self._keeper is not None
        pid = self._keeper.wanted_pid(stuck.start_number, 1.0)
        stack = self._stack(stuck, pid) if pid is not None else ""
        if pid is not None:
            self._keeper.kill(pid)
            self._keeper.exit_code(pid, 2.0)
        if stuck.channel is not None:
            stuck.channel.pump()
            self._take_frames(stuck, stuck.channel)
        self._forget(stuck)
        return stack

    def end_worker(self, slot: int, phase: str, words: str, kind: str) -> None:
        """End the worker of a slot, and say so."""
        stuck = self._workers[self.worker_of[slot]]
        stack = self.kill(stuck.index)
        self.losses.append(Loss(stuck.index, None, slot, phase, words, stack, kind))
        stuck.loss_told = True
        stuck.rest()

    def _stack(self, worker: WorkerHandle, pid: int) -> str:
        try:
            os.kill(checked_pid(pid), STACK_SIGNAL)
        except ProcessLookupError:  # it has ended by itself: no stack is left to show
            return ""
        deadline = time.monotonic() + 1.0
        size = -1
        while time.monotonic() < deadline:
            now = os.fstat(worker.stack_file.fileno()).st_size
            if now and now == size:
                break
            size = now
            time.sleep(0.01)
        return os.pread(worker.stack_file.fileno(), 1 << 16, 0).decode(errors="replace")

    def close(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        """Ask, wait, kill; then end the keeper, which ends whatever is left, also when this is interrupted."""
        if self._keeper is None:
            return []
        try:
            return self._close_workers(timeout_s)
        finally:
            self._release()

    def _close_workers(self, timeout_s: float) -> list[tuple[int, Failure | Loss]]:
        deadline = time.monotonic() + timeout_s
        self.settle()
        for worker in self._workers:
            self._message(worker, ToWorker.CLOSE)
        while any(worker.alive for worker in self._workers) and time.monotonic() < deadline:
            self._poll(min(0.2, max(0.0, deadline - time.monotonic())))
        problems = self._closing
        for worker in self._workers:
            if worker.alive:
                slot, phase, _ = worker.doing()
                stack = self.kill(worker.index)
                if slot >= 0:
                    why = f"did not return within {timeout_s:g} s; its worker was killed"
                    problems.append((slot, Failure(phase, why, stack, kind="timeout")))
        for loss in self.losses:
            if loss.exit_code and loss.slot >= 0:
                problems.append((loss.slot, loss))
        return problems

    def _release(self) -> None:
        for worker in self._workers:
            self._forget(worker)
            worker.close()
        self.pulses = []
        self._pulse_segment.close()
        if self._keeper is not None:
            self._keeper.close()
        self._keeper = None  # last: until then an interrupted close can be called again
