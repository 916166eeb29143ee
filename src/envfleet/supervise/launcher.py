"""The parent's side of the keeper: start it, have it start workers, learn of their ends, end it."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from collections import deque
from typing import Any

from envfleet.errors import BackendMissing, BadArgument, FleetError
from envfleet.supervise.channel import Channel, Closed, ParentChannel, pair
from envfleet.supervise.keeper import checked_pid, keeper_main, launch

START_METHODS = ("forkserver", "spawn", "fork")
#: What a fleet's worker process runs.
FLEET_WORKER = ("envfleet.supervise.worker", "worker_main")

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
        raise BadArgument(f"start_method={method!r}: choose one of {', '.join(START_METHODS)}")
    if not hasattr(os, "fork") or not hasattr(os, "killpg"):
        raise BackendMissing(
            "worker processes", why="This system has no fork and process groups; use backend='thread'."
        )
    return method


class Keeper:
    """One keeper process. `start_worker` returns the worker's pid, `exits` fills with (pid, exit code)."""

    def __init__(self, method: str) -> None:
        self.method = check_start_method(method)
        self.channel, theirs = pair()
        self.exits: dict[int, int] = {}
        self._started: deque[tuple[int, int]] = deque()
        if method == "fork":
            self.pid = self._fork(theirs)
            self._process = None
        else:
            self._process = launch(
                "envfleet.supervise.keeper",
                "fresh_main",
                [theirs.fileno(), os.getpid(), int(method == "spawn")],
                [theirs.fileno()],
            )
            self.pid = self._process.pid
        theirs.close()
        _parent_ends.add(self.channel)
        if method != "fork":
            self._send({"what": "setup", "path": list(sys.path)})

    def _fork(self, theirs: Channel) -> int:
        parent = os.getpid()
        # What is still in the buffers would be inherited, and printed once more by every process forked from here.
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

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self.channel.send(pickle.dumps(message))
        except Closed:
            raise FleetError(
                "the process that starts workers ended (killed from outside, or out of memory): make a new fleet"
            ) from None

    def start_worker(
        self, worker: int, fds: list[int], timeout_s: float = 60.0, entry: tuple[str, str] = FLEET_WORKER
    ) -> int:
        """Start a worker: a process that runs `module.function(*fds, keeper's pid)`; returns its pid."""
        self._send({"what": "start", "worker": worker, "num_fds": len(fds), "entry": entry})
        self.channel.send_fds(fds)
        deadline = time.monotonic() + timeout_s
        while not self._started:
            self.poll(deadline - time.monotonic())
            if self.channel.eof or time.monotonic() > deadline:
                raise FleetError(
                    f"worker {worker} could not be started with {self.method!r}: "
                    "the process that starts workers ended or did not answer (see its messages above)"
                )
        return self._started.popleft()[1]

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take in what the keeper says."""
        self.channel.wait(timeout_s)
        while self.channel.inbox:
            what, first, second = pickle.loads(self.channel.inbox.popleft())
            if what == "started":
                self._started.append((first, second))
            else:
                self.exits[first] = second

    def exit_code(self, pid: int, timeout_s: float) -> int | None:
        """The exit code of a worker that is ending; None when it does not end in time."""
        deadline = time.monotonic() + timeout_s
        while pid not in self.exits:
            left = deadline - time.monotonic()
            if left <= 0 or self.channel.eof:
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
            except (ProcessLookupError, PermissionError):  # it has ended; the keeper will tell how
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
                except ChildProcessError:  # somebody else has waited for it
                    done = self.pid
                if done:
                    if self._process is not None:
                        self._process.returncode = 0
                    return
                time.sleep(0.002)
            os.kill(checked_pid(self.pid), signal.SIGKILL)
