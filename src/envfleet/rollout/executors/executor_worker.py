"""The worker process of `ProcessParallelExecutor`, started and ended by the same keeper as a fleet's workers.

It never imports the user's `__main__`: agents and factories arrive by value (cloudpickle). It answers one call at a time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
import traceback
from collections import OrderedDict
from typing import Any

import cloudpickle

from envfleet.workers.channel import Channel, Closed
from envfleet.workers.worker import settle

ENTRY = ("envfleet.rollout.executors.executor_worker", "main")
NUM_KEPT = 4  # agents a worker keeps

_parent: Channel | None = None


class AskParent:
    """Stands for a batched policy that lives in the parent: sends the observation, waits for the action."""

    def __call__(self, obs: Any, done: bool = False) -> Any:
        """Ask and wait."""
        assert _parent is not None
        _parent.send(cloudpickle.dumps(("act", obs)))
        action, error = pickle.loads(_parent.recv())
        if error is not None:
            raise error
        return action


def main(sock_fd: int, keeper_pid: int) -> None:
    """Serve calls until the parent hangs up."""
    global _parent
    settle(keeper_pid, sock_fd)
    _parent = channel = Channel(socket.socket(fileno=sock_fd))
    kept: OrderedDict[str, bytes] = OrderedDict()  # large values (agents) sent once and kept by key
    with contextlib.suppress(Closed):  # the parent has hung up, or is gone
        path, folder = pickle.loads(channel.recv())
        sys.path[:] = path
        with contextlib.suppress(OSError):  # a folder that is gone meanwhile: calls that need it will say so
            os.chdir(folder)
        while True:
            key, value, call = pickle.loads(channel.recv())
            if value is not None:
                kept[key] = value
                while len(kept) > NUM_KEPT:
                    kept.popitem(last=False)
            channel.send(_answer(call, None if key is None else kept[key]))


def _answer(call: bytes, agent: bytes | None) -> bytes:
    try:
        function, args, kwargs = pickle.loads(call)
        if agent is not None:
            kwargs = {**kwargs, "agent": pickle.loads(agent)}
        return _dumps("result", function(*args, **kwargs))
    except Closed:
        raise
    except Exception as error:
        error.add_note("in the worker process:\n" + traceback.format_exc())
        try:
            return _dumps("error", error)
        except Exception:  # an exception that does not pickle: its text has to do
            return _dumps("error", RuntimeError(f"{type(error).__name__}: {error}"))


def _dumps(*message: Any) -> bytes:
    data: bytes = cloudpickle.dumps(message)
    return data
