"""The keeper: one process per fleet (or process executor) that starts the workers and ends them, also if the parent is killed.

It is the workers' parent process. Under "fork" it is forked from the user's process, under "forkserver" it is a fresh
interpreter that forks workers, under "spawn" a fresh interpreter that launches fresh interpreters. Because workers are
never started by the user's process itself, nothing imports the user's `__main__`, and a restarted worker comes from a
clean process image.

It ends everything when its socket closes or its parent process changes (so also on SIGKILL of the parent): each worker
has its own process group, which is killed; processes that an env started and detached are re-parented to the keeper,
which kills them too.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import traceback
from typing import Any

from envfleet.workers.channel import Channel, Closed
from envfleet.workers.protocol import FromKeeper, ToKeeper

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
#: How often the keeper checks whether its parent still exists, if the socket does not show it.
_LOOK_S = 0.25


def keeper_main(channel: Channel, parent_pid: int, method: str) -> None:
    """The keeper's main loop; returns when everything it started has ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    workers: set[int] = set()
    launched: dict[int, Any] = {}
    poller = select.poll()
    poller.register(channel.sock, select.POLLIN)
    poller.register(wake_read, select.POLLIN)
    try:
        while os.getppid() == parent_pid:
            events = poller.poll(_LOOK_S * 1000)
            if any(fd == wake_read for fd, _ in events):
                os.read(wake_read, 4096)
            _reap(channel, workers, launched)
            if any(fd == channel.fileno() for fd, _ in events):
                _serve(channel, method, workers, launched, (wake_read, wake_write))
    except Closed:
        pass  # the parent has closed, or is gone: time to end
    finally:
        _end_all(workers)


def _serve(channel: Channel, method: str, workers: set[int], launched: dict[int, Any], wake: tuple[int, int]) -> None:
    message = pickle.loads(channel.recv())
    if message["what"] == ToKeeper.SETUP:
        sys.path[:] = message["path"]
        return
    fds = channel.recv_fds(message["num_fds"])
    try:
        if method == "spawn":
            process = launch("envfleet.workers.worker", "worker_main", [*fds, os.getpid()], fds)
            launched[process.pid], pid = process, process.pid
        else:
            pid = _fork_worker(channel, fds, wake)
    except OSError as error:  # no memory, too many processes: one worker is missing, the others go on
        channel.send(pickle.dumps((FromKeeper.REFUSED, message["number"], str(error))))
        return
    finally:
        for fd in fds:
            os.close(fd)
    workers.add(pid)
    channel.send(pickle.dumps((FromKeeper.STARTED, message["number"], pid)))


def _fork_worker(channel: Channel, fds: list[int], wake: tuple[int, int]) -> int:
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.close()
        for fd in wake:
            os.close(fd)
        os.setsid()
        from envfleet.workers.worker import worker_main

        worker_main(*fds, keeper)  # type: ignore[call-arg]  # three descriptors
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                pass  # a closed or absent stream has nothing to flush
        os._exit(code)


def _reap(channel: Channel, workers: set[int], launched: dict[int, Any]) -> None:
    """Report every child that ended, and kill what is left of its group."""
    while True:
        try:
            pid, status = _next_ended(workers)
        except ChildProcessError:  # no child is left
            return
        if not pid:
            return
        if pid in workers:
            workers.discard(pid)
            if pid in launched:
                launched.pop(pid).returncode = 0  # reaped here: Popen must not wait for it again
            channel.send(pickle.dumps((FromKeeper.EXIT, pid, os.waitstatus_to_exitcode(status))))


def _next_ended(workers: set[int]) -> tuple[int, int]:
    """(pid, status) of a child that has ended, reaped; (0, 0) when there is none."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in workers:
            _kill_group(pid)  # its number is free by now, but a new process rarely gets one that was just used
        return pid, status
    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return 0, 0
    if found.si_pid in workers:
        _kill_group(found.si_pid)  # before it is reaped, while its number is still its own
    return os.waitpid(found.si_pid, 0)


def _end_all(workers: set[int]) -> None:
    for pid in workers:
        _kill_group(pid)
    for _ in range(50):  # orphans of orphans appear as their parents die; bounded, so that the keeper always ends
        children = _children()
        if not children:
            break
        for pid in children:
            _kill(pid)
        for pid in children:
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue  # reaped already


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:  # no such list in this kernel: the groups were killed, what left its group is not found
        return []


def checked_pid(pid: int) -> int:
    """A process number that may be signalled. 0, 1 and negative ones mean groups, init, or every process there is."""
    if pid <= 1:
        raise ProcessLookupError(f"{pid} is not a process of ours")
    return pid


def _kill_group(pid: int) -> None:
    checked_pid(pid)
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        _kill(pid)  # it has not made its own group yet


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # it has ended, and its number may be another process's
        return


def die_with(parent_pid: int) -> None:
    """Ask the kernel to end this process with its parent (Linux), and end now if that came too late."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def launch(module: str, function: str, args: list[int], fds: list[int]) -> subprocess.Popen[bytes]:
    """A fresh interpreter that runs `module.function(*args)`, in a session of its own, holding only `fds`."""
    package_root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    code = (
        f"import sys; sys.path.insert(0, {package_root!r}); "
        f"from {module} import {function}; {function}({', '.join(map(str, args))})"
    )
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -W, -X, -O … as the user set them
    return subprocess.Popen([sys.executable, *flags, "-c", code], pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)


def fresh_main(fd: int, parent_pid: int, spawn: int) -> None:
    """Entry of a keeper in a fresh interpreter. Imports what every worker needs, so that forks of it start warm."""
    import envfleet.workers.worker  # noqa: F401

    channel = Channel(socket.socket(fileno=fd))
    keeper_main(channel, parent_pid, "spawn" if spawn else "forkserver")
