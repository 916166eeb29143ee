"""The worker process of `ProcessParallelExecutor`: `python -m envfleet.rollout.worker FD`.

It never imports the user's `__main__`: agents and factories arrive by value (cloudpickle). It answers one
call at a time; a reader thread ends the process the moment the parent is gone, also in the middle of a step.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

_channel: Channel | None = None


class Channel:
    """The worker's end: calls come in on one queue, answers of the parent's policy on the other."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.calls: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="envfleet-reader", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                message = pickle.loads(self.connection.recv_bytes())
                (self.answers if message[0] == "action" else self.calls).put(message)
        except (EOFError, OSError):
            # The parent is gone or has hung up; nobody can receive what is being computed. Simulators that an
            # environment started here go with us: the worker leads a process group of its own.
            if os.getpgrp() == os.getpid():
                os.killpg(os.getpid(), signal.SIGKILL)
            os._exit(0)

    def send(self, *message: Any) -> None:
        """Send a message by value."""
        self.connection.send_bytes(cloudpickle.dumps(message))


class AskParent:
    """Stands for a batched policy that lives in the parent: sends the observation, waits for the action."""

    def __call__(self, obs: Any, done: bool = False) -> Any:
        """Ask and wait."""
        assert _channel is not None
        _channel.send("act", obs)
        _, action, error = _channel.answers.get()
        if error is not None:
            raise error
        return action


def main(fd: int) -> None:
    """Serve calls until the parent hangs up."""
    global _channel
    _channel = channel = Channel(Connection(fd))
    shared: OrderedDict[str, Any] = OrderedDict()  # large values (agents) sent once and kept by key
    while True:
        _, key, value, call = channel.calls.get()
        if value is not None:
            shared[key] = value
            while len(shared) > 4:
                shared.popitem(last=False)
        try:
            function, args, kwargs = pickle.loads(call)
            if key is not None:
                kwargs = {**kwargs, "agent": pickle.loads(shared[key])}
            channel.send("result", function(*args, **kwargs))
        except Exception as error:
            error.add_note("in the worker process:\n" + traceback.format_exc())
            _send_error(channel, error)


def _send_error(channel: Channel, error: Exception) -> None:
    try:
        channel.send("error", error)
    except Exception:  # an exception that does not pickle: its text has to do
        channel.send("error", RuntimeError(f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    # Run as __main__, the class above would be pickled under a name that the parent does not have.
    from envfleet.rollout import worker

    worker.main(int(sys.argv[1]))
