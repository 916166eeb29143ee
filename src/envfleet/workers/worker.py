"""A worker process: runs many slots, one after another, on the parent's commands (`envfleet.workers.protocol`).

Values from an env are pickled separately inside side parts and replies: one that the parent cannot read affects its slot only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from envfleet.faults.failure import Failure, words_of
from envfleet.multiagent.agent_support import AGENTS
from envfleet.slots import compiled_core
from envfleet.slots.env_contract import describe
from envfleet.slots.factories import unpack_factories
from envfleet.slots.layout import Layout
from envfleet.slots.slab import Slab, Slots
from envfleet.slots.slot_life import Calls, SlotLife, drive, end_if_forked
from envfleet.workers.channel import Channel, Closed
from envfleet.workers.keeper import die_with
from envfleet.workers.protocol import ADVANCE, REPLY, SIDE, UP, FromWorker, ToWorker, pack_done, unpack_advance
from envfleet.workers.shared_memory import Pulse, Segment, SharedMap

STACK_SIGNAL = getattr(signal, "SIGUSR2", 0)  # Windows has none; there are no worker processes there
#: Steps longer than this are reported one by one, shorter ones together: a message costs about this much.
_REPORT_EACH_S = 50e-6
#: How long shorter ones are stepped until they are reported.
_REPORT_S = 1e-3


def worker_main(sock_fd: int, pulse_fd: int, stack_fd: int, keeper_pid: int) -> None:
    """The worker's main loop: serve until the parent closes or is gone."""
    settle(keeper_pid, sock_fd, pulse_fd, stack_fd)
    faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=True, chain=False)
    channel = Channel(socket.socket(fileno=sock_fd))
    channel.owner = os.getpid()
    with contextlib.suppress(Closed):  # the parent is gone
        start = pickle.loads(channel.recv())
        if channel.hung_up:
            return  # given up before it began: another worker has its slots by now
        words = np.frombuffer(mmap.mmap(pulse_fd, start["pulse_bytes"]), np.int64).reshape(-1, 8)
        kind = Worker
        if start["threads"]:
            from envfleet.workers.threaded_worker import SharingWorker as kind
        kind(channel, words, start).serve()


def settle(keeper_pid: int, *fds: int) -> None:
    """What every worker process does first: end with its keeper, keep its descriptors and the parent's Ctrl-C apart."""
    die_with(keeper_pid)
    for fd in fds:
        os.set_inheritable(fd, False)  # a child of the env must not keep our socket open after our end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Board(NamedTuple):
    """What the compiled life reports to: see compiled/board.c."""

    given: np.ndarray[Any, Any]
    done: np.ndarray[Any, Any]
    info: dict[int, Any]
    final_info: dict[int, Any]
    sided: list[tuple[int, int, int]]


class Worker:
    """The slots of this process, and the loop over the parent's messages. `words`: where it writes what it is doing, see `Pulse`."""

    def __init__(self, channel: Channel, words: np.ndarray[Any, Any], start: dict[str, Any]) -> None:
        self.channel = channel
        sys.path[:] = start["path"]
        if start["cwd"]:
            with contextlib.suppress(OSError):  # the folder no longer exists: an env that needs it will raise
                os.chdir(start["cwd"])
        self.by_value: bool = start["by_value"]
        self.words = words
        self.index: int = start["worker"]
        self.pulse = Pulse(self.words[start["slots"][0] if start["threads"] else self.index])
        self.tasks: dict[int, bytes] = start["tasks"]
        self.lives: dict[int, SlotLife] = {}
        self.slab: Slab | None = None
        self.runner: Any = None  # the compiled life, where there is one
        self.exchange: Any = None  # the compiled doorbell, for shm
        self._turns = np.zeros(0, np.uint32)  # [slot]: the turn it was given last
        self._board: _Board | None = None  # where the compiled life marks turns, where slots come over the socket
        self._mean_step_s = 0.0
        self._limit_threads(start["blas_threads"])
        self._build(start)

    def _limit_threads(self, count: int | None) -> None:
        if count is None:
            return
        # BLAS and OpenMP threads times workers is the most common reason to be slower than one process.
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[name] = str(count)
        import threadpoolctl

        self._limits = threadpoolctl.threadpool_limits(limits=count)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(count)

    def _build(self, start: dict[str, Any]) -> None:
        """Build the envs and report each one, as a description or as a failure."""
        try:
            factories = unpack_factories(start["factories"])
        except BaseException as error:
            failure = Failure.of(error, "init")
            for slot in start["slots"]:
                self._reply(FromWorker.BUILT, slot, failure)
            raise SystemExit(1) from None
        self.pulse.enter(-1, "idle")  # the parent had it in "init" since it started us; the lives say the rest
        self._factories, self._on_end = factories, start["on_end"]
        for slot in start["slots"]:
            life = self._new_life(slot)
            life.options = start["options"].get(slot)
            if not start["build"]:
                continue  # restarted worker: each env is built when its slot is sent
            self._build_one(life)

    def _new_life(self, slot: int) -> SlotLife:
        life = self.lives[slot] = SlotLife(slot, self._factories[slot], self._on_end, self.tasks, AGENTS)
        life.keep = dump_value  # what cannot be pickled fails in the life, with its phase and step
        return life

    def _add(self, slots: list[int], rows: bytes) -> None:
        """Slots that come from another worker: make lives for them, as after a start without building."""
        slab = self.slab
        assert slab is not None
        slab.unpack(np.array(slots), slab.names(*UP), rows)
        for slot in slots:
            self._new_life(slot).attach(slab)
        compiled = compiled_core.load()
        if compiled is not None:
            self._make_runner(compiled, None)

    def _build_one(self, life: SlotLife) -> None:
        drive_here(life, life.build(), self.pulse.enter)
        self._reply(FromWorker.BUILT, life.slot, self._described(life))

    def _described(self, life: SlotLife) -> Failure | bytes:
        if life.failure is not None:
            return life.failure
        try:
            return dump_value(describe(life.env))
        except BaseException as error:
            return Failure.of(error, "init")

    def _reply(self, *message: Any) -> None:
        self.channel.send(REPLY + pickle.dumps(message))

    # -- the loop -----------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Take messages until close; with an exchange, slots come through it and only the rest over the socket."""
        while True:
            has_message = self.exchange is None
            if not has_message:
                self.exchange.work(self.runner, self._send_side)
            while has_message or self.channel.has_frame():
                has_message = False
                frame = self.channel.recv()
                if frame[:1] == ADVANCE:
                    self._advance(frame)
                elif not self._message(*pickle.loads(memoryview(frame)[1:])):
                    return

    def _send_side(self, slot: int, turn: int) -> None:
        self.channel.send(SIDE + pickle.dumps((slot, turn, self._side_of(self.lives[slot]))))

    def _advance(self, frame: bytes) -> None:
        if not self.by_value and self.channel.hung_up:
            raise Closed  # given up, but not dead yet: another worker owns the shared rows
        slots = self._unpack(frame)
        while len(slots):
            mean_s = self._mean_step_s
            count = 1 if mean_s > _REPORT_EACH_S else int(_REPORT_S / max(mean_s, 1e-7))
            some, slots = slots[:count], slots[count:]
            before = time.perf_counter()
            sided = self._advance_some(some)
            took_s = (time.perf_counter() - before) / len(some)
            self._mean_step_s += (1 - 0.9 ** len(some)) * (took_s - mean_s)
            self._report(some, sided)

    def _advance_some(self, slots: Slots) -> list[int]:
        """Advance slots, one after the other; those that may have something beside their rows."""
        board = self._board
        names: list[int] = slots.tolist()
        if board is None:
            for slot in names:
                self._advance_one(slot)
            return names
        turns = self._turns[slots]
        board.given[slots] = board.done[slots] = turns - np.uint32(1)
        board.sided.clear()
        left, failed = slots, []
        while len(left):
            try:
                self.runner.run(left)
                break
            except BaseException as error:  # not a failure of the env, which is in the row: an error in the slot life itself
                at = max(0, int(np.count_nonzero(board.given[left] == turns[-len(left) :])) - 1)
                failed.append(int(left[at]))
                self.lives[failed[-1]].fail_in(error, "step")
                left = left[at + 1 :]
        if self.slab is not None and self.slab.has_mail:
            return names
        return failed + [slot for slot, _, _ in board.sided]

    def _unpack(self, frame: bytes) -> Slots:
        """The slots of an ADVANCE frame; their turns are noted, their rows written."""
        slab = self.slab
        assert slab is not None
        slots, turns, heads, at = unpack_advance(frame)
        self._turns[slots] = turns
        if self.by_value:
            slab.unpack_actions(slots, frame, at, heads)
        return slots

    def _advance_one(self, slot: int) -> None:
        life = self.lives[slot]
        life.turn = int(self._turns[slot])
        if self.runner is None or self.exchange is not None:
            # With the doorbell, the compiled life leaves infos where only the doorbell finds them: not for a slot that came
            # over the socket, behind a message that was too long to be there already.
            life.release()
            drive_here(life, life.advance(), self.pulse.enter)
            return
        try:
            self.runner.advance(slot, life.turn)
        except BaseException as error:  # not a failure of the env, which is in the row: an error in the slot life itself
            life.fail_in(error, "step")

    def _report(self, done: Slots, sided: list[int] | None = None) -> None:
        """Send rows. `sided`: which of them may have something beside them; None: each of them."""
        slab = self.slab
        assert slab is not None
        side = self._side(done.tolist() if sided is None else sided)
        rows = slab.pack(done, slab.names(*UP)) if self.by_value else b""
        self.channel.send(pack_done(done, self._turns[done], rows, side))

    def _side(self, done: list[int]) -> bytes:
        """What is beside the rows of these slots: infos, mailbox objects, failures. Empty when there is nothing."""
        parts = {}
        for slot in done:
            part = self._side_of(self.lives[slot])
            if part:
                parts[slot] = part
        return pickle.dumps(parts) if parts else b""

    def _side_of(self, life: SlotLife) -> dict[str, Any]:
        part: dict[str, Any] = {}
        if life.failure is not None:
            return {"failure": life.failure}
        if life.info:
            part["info"] = life.info
        if life.final_info:
            part["final_info"] = life.final_info
        assert self.slab is not None
        if self.slab.has_mail:
            part["mail"] = {kind: {i: box[life.slot] for i, box in self.slab.mail[kind].items()} for kind in ("obs", "final_obs")}
        return part

    # -- everything off the step path ---------------------------------------------------------------------------

    def _message(self, what: str, *args: Any) -> bool:
        if what == ToWorker.ATTACH:
            self._attach(*args)
        elif what == ToWorker.TASKS:
            self.tasks.update(args[0])
        elif what == ToWorker.OPTIONS:
            for slot, options in args[0].items():
                self.lives[slot].options = options
        elif what == ToWorker.MAIL:
            assert self.slab is not None
            for i, objects in args[0].items():
                for slot, value in objects.items():
                    self.slab.mail["action"][i][slot] = value
        elif what == ToWorker.CALL:
            self._call(*args)
        elif what == ToWorker.ADD:
            self._add(*args)
        elif what == ToWorker.FORGET:
            self.lives[args[0]].move_out()
        elif what == ToWorker.RUN:
            self._run(*args)
        elif what == ToWorker.CLOSE:
            self._close()
            return False
        return True

    def _attach(self, layout: Layout, num_slots: int, map_: SharedMap | None) -> None:
        """Set up the rows: this process's own for `pipe`, the shared ones for `shm`, with the doorbell behind them."""
        compiled = compiled_core.load()
        arena = None
        if map_ is None:
            self.slab = Slab(layout, num_slots, keep=False)  # the parent has the rows it was sent, until new ones come
        else:
            segment = Segment(self.channel.recv_fds(1)[0], map_.size_bytes)
            if self.channel.hung_up:
                raise Closed  # another worker owns the shared rings by now
            self.slab = Slab(layout, num_slots, segment.map, fill=False, keep_obs=map_.keep_obs)
            if map_.exchange_bytes:
                self.exchange, arena = map_.open(compiled, segment, me=self.index)
        self._turns = np.zeros(num_slots, np.uint32)
        for life in self.lives.values():
            life.attach(self.slab)
        if compiled is not None:
            self._make_runner(compiled, arena)

    def _make_runner(self, compiled: Any, arena: Any) -> None:
        assert self.slab is not None
        words = self.pulse.words
        self.runner = compiled_core.make_runner(compiled, self.slab, self.lives, self.pulse.enter, words, arena)
        if self.exchange is None:
            given, done = np.zeros((2, self.slab.num_slots), np.uint32)
            self._board = _Board(given, done, {}, {}, [])
            self.runner.set_board(tuple(self._board))

    def _call(self, slot: int, number: int, phase: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pulse = self.pulse_of(slot)
        answer: Failure | bytes
        try:
            pulse.enter(slot, phase)
            answer = dump_value(call_life(self.lives[slot], phase, name, args, kwargs))
        except BaseException as error:
            answer = Failure.of(error, phase)
        finally:
            pulse.enter(-1, "idle")
        self._reply(FromWorker.CALLED, slot, number, answer)

    def pulse_of(self, slot: int) -> Pulse:
        """The pulse of this slot."""
        return self.pulse

    def _run(self, function: Callable[[Callable[[Any], Any]], Any]) -> None:
        """Run a function of the parent's; what it is given asks the parent for something and waits for the answer."""
        answer: Failure | bytes
        try:
            answer = dump_value(function(self._ask))
        except Closed:
            raise
        except Exception as error:
            answer = Failure.of(error, "call")
        self._reply(FromWorker.RAN, answer)

    def _ask(self, question: Any) -> Any:
        self._reply(FromWorker.ASKED, dump_value(question))
        _, data = pickle.loads(memoryview(self.channel.recv())[1:])
        answer, error = pickle.loads(data)
        if error is not None:
            raise error
        return answer

    def _close(self) -> None:
        for life in self.lives.values():
            self._close_one(life)
        self._reply(FromWorker.BYE)

    def _close_one(self, life: SlotLife) -> None:
        pulse = self.pulse_of(life.slot)
        try:
            pulse.enter(life.slot, "close")
            life.close()
        except BaseException as error:
            self._reply(FromWorker.CLOSED, life.slot, Failure.of(error, "close"))
        pulse.enter(-1, "idle")


def call_life(life: SlotLife, phase: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call of the env's interface off the step path: method, attribute, set, render; and the moving of the env itself."""
    if name == "__adopt__":
        return life.move_in(pickle.loads(args[0]))
    if life.env is None:
        raise RuntimeError("the slot has no environment: it failed and was not rebuilt yet; reset it first")
    try:
        return _call_env(life, phase, name, args, kwargs)
    finally:
        end_if_forked(life.pid)


def _call_env(life: SlotLife, phase: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name == "__apply__":  # a function of ours over the env, e.g. the probe of backend="auto"
        life.release()
        return args[0](life.env)
    if name == "__set__":
        life.set_attr(*args)
        return None
    if phase == "render":
        life.release()
        return life.env.render()
    return life.call(name, args, kwargs)


def drive_here(life: SlotLife, calls: Calls, enter: Callable[[int, str], None]) -> None:
    """`drive` where no Ctrl-C ever arrives: a KeyboardInterrupt is the env's own, and is in the row already."""
    with contextlib.suppress(KeyboardInterrupt):
        drive(life, calls, enter)


def dump_value(value: Any) -> bytes:
    """A value an env made, as bytes; what cannot be pickled is a TypeError that says so."""
    try:
        return pickle.dumps(value)
    except Exception:
        pass  # a class that came here by value: cloudpickle can
    try:
        return cloudpickle.dumps(value)  # type: ignore[no-any-return]
    except Exception as error:
        raise TypeError(f"what the environment returned cannot be pickled: {words_of(error)}") from error


#: The start message of a worker that has no slots and only runs functions; `path` and `cwd` are added to it.
WITHOUT_SLOTS: dict[str, Any] = {
    "worker": 0,
    "pulse_bytes": 64,
    "by_value": True,
    "threads": False,
    "factories": pickle.dumps(([], [], [], b"")),
    "slots": [],
    "on_end": "wait",
    "tasks": {},
    "options": {},
    "blas_threads": None,
    "build": False,
}
