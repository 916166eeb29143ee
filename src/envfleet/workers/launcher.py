"""The parent's side of the keeper: start it, let it start workers, read how they ended, end it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from envfleet.errors import BadArgument, FleetError, KeeperLost, MissingExtra
from envfleet.workers.channel import Channel, Closed, HasFileno, ParentChannel, pair
from envfleet.workers.keeper import checked_pid, keeper_main, launch
from envfleet.workers.protocol import FromKeeper, ToKeeper

START_METHODS = ("forkserver", "spawn", "fork")

# Parent ends of every live fleet: a forked keeper closes its copies, so that a socket's end is seen when it ends.
_parent_ends: set[ParentChannel] = set()


def default_start_method() -> str:
    """forkserver where there is fork, spawn elsewhere."""
    return "forkserver" if hasattr(os, "fork") else "spawn"


def check_start_method(method: str | None) -> str:
    """A start method this system has, or a clear error."""
    if method is None:
        return default_start_method()
    if method not in START_METHODS:
        # The first words are those of Python's multiprocessing for the same mistake.
        raise BadArgument(f"cannot find context for {method!r}: start_method is one of {', '.join(START_METHODS)}")
    if not hasattr(os, "fork") or not hasattr(os, "killpg"):
        raise MissingExtra("worker processes", why="This system has no fork and process groups; use backend='thread'.")
    return method


def working_folder() -> str | None:
    """The current folder, None when it has been deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


class Keeper:
    """One keeper process. Its messages fill `pids`, `refused` and `exits`; `gone` says that it has ended.

    Starting a worker does not wait for it: frames for it may be sent at once, its pid comes later.
    """

    why_gone = "the process that starts workers ended (killed from outside, or out of memory)"

    def __init__(self, method: str) -> None:
        self.method = check_start_method(method)
        self.channel, theirs = pair()
        self.exits: dict[int, int] = {}  # pid -> exit code
        self.pids: dict[int, int] = {}  # number of a start -> pid
        self.refused: dict[int, str] = {}  # number of a start -> why there is no process
        self._last_start = 0
        self._unwanted: set[int] = set()  # starts of workers that were given up before their pid was known
        if method == "fork":
            self.pid = self._fork(theirs)
            self._process = None
        else:
            self._process = launch(
                "envfleet.workers.keeper", "fresh_main", [theirs.fileno(), os.getpid(), int(method == "spawn")], [theirs.fileno()]
            )
            self.pid = self._process.pid
        theirs.close()
        _parent_ends.add(self.channel)
        if method != "fork":
            self._send({"what": ToKeeper.SETUP, "path": list(sys.path)})

    def _fork(self, theirs: Channel) -> int:
        parent = os.getpid()
        # What is still in the buffers would be inherited, and printed again by every process forked from here.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue  # a closed or absent stream holds nothing
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            for end in (*_parent_ends, self.channel):
                end.close()
            keeper_main(theirs, parent, "fork")
        finally:
            os._exit(0)

    @property
    def gone(self) -> bool:
        """Whether the keeper has ended, and all workers with it."""
        return self.channel.eof

    def _send(self, message: dict[str, Any], files: Sequence[HasFileno] = ()) -> None:
        try:
            self.channel.send(pickle.dumps(message), files)
        except Closed:
            self.channel.eof = True
            raise KeeperLost from None

    def request_worker(self, files: Sequence[HasFileno]) -> int:
        """Ask for a process that runs `worker_main(*descriptors, keeper's pid)`; returns the number of the request."""
        self._last_start += 1
        self._send({"what": ToKeeper.START, "number": self._last_start, "num_fds": len(files)}, files)
        return self._last_start

    def start_worker(self, worker: int, files: Sequence[HasFileno], timeout_s: float = 60.0) -> int:
        """`request_worker`, and wait for its pid."""
        number = self.request_worker(files)
        deadline = time.monotonic() + timeout_s
        while number not in self.pids:
            self.poll(deadline - time.monotonic())
            if self.gone:
                raise KeeperLost
            if number in self.refused or time.monotonic() > deadline:
                why = self.refused.get(number, "the process that starts workers did not answer")
                raise FleetError(f"worker {worker} could not be started with {self.method!r}: {why}")
        return self.pids[number]

    def poll(self, timeout_s: float = 0.0) -> None:
        """Read the keeper's messages."""
        self.channel.wait(timeout_s)
        while (frame := self.channel.peek()) is not None:
            what, key, value = pickle.loads(frame)
            if what == FromKeeper.STARTED:
                self.exits.pop(value, None)  # a number that an earlier worker had
                self.pids[key] = value
                if key in self._unwanted:
                    self.kill(value)
            elif what == FromKeeper.REFUSED:
                self.refused[key] = value
            elif what == FromKeeper.EXIT:
                self.exits[key] = value
            self.channel.drop()

    def pid_of(self, number: int, timeout_s: float) -> int | None:
        """The pid of a worker that was asked for; None when there is none, or it does not become known in time."""
        deadline = time.monotonic() + timeout_s
        while number not in self.pids:
            left = deadline - time.monotonic()
            if left <= 0 or self.gone or number in self.refused:
                return None
            self.poll(left)
        return self.pids[number]

    def wanted_pid(self, number: int, timeout_s: float) -> int | None:
        """`pid_of` a worker that is to be ended. One whose pid does not become known in time is killed when it does."""
        pid = self.pid_of(number, timeout_s)
        if pid is None:
            self._unwanted.add(number)
        return pid

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of a worker that is ending; None when it does not end in time."""
        deadline = time.monotonic() + timeout_s
        while pid not in self.exits:
            left = deadline - time.monotonic()
            if left <= 0 or self.gone:
                return None
            self.poll(left)
        return self.exits[pid]

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Signal a worker's whole process group."""
        checked_pid(pid)
        if pid in self.exits:
            return
        try:
            os.killpg(pid, number)
        except (ProcessLookupError, PermissionError):
            try:
                os.kill(pid, number)
            except (ProcessLookupError, PermissionError):  # it has ended; the keeper will report how
                return

    def close(self) -> None:
        """End the keeper and with it every worker that is left. Bounded."""
        _parent_ends.discard(self.channel)
        with contextlib.suppress(OSError):
            self.channel.sock.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold copies: end it for all
        self.channel.close()
        for attempt in range(2):
            deadline = time.monotonic() + (3.0 if attempt == 0 else 2.0)
            while time.monotonic() < deadline:
                try:
                    done, _ = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # it was waited for elsewhere
                    done = self.pid
                if done:
                    if self._process is not None:
                        self._process.returncode = 0
                    return
                time.sleep(0.002)
            os.kill(checked_pid(self.pid), signal.SIGKILL)
