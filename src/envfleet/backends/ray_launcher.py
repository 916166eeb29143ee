"""Starts, watches and ends the Ray actors of a fleet. It stands in the place of the keeper of local workers, with the same interface.

A thread of its own talks to Ray, because most of Ray's calls wait, and a caller may be interrupted at any moment. It tells the
parent what happened by messages over a socket pair, as a keeper process does; where a keeper has a pid, it has the number of a start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import queue
import socket
import threading
import time
from typing import Any

from envfleet.backends.ray_options import RayOptions
from envfleet.errors import BadArgument
from envfleet.workers.channel import Closed, pair
from envfleet.workers.launcher import Keeper
from envfleet.workers.protocol import FromKeeper
from envfleet.workers.ray_worker import RayWorker, RelayedRayWorker
from envfleet.workers.stream import prove

#: How long a machine is avoided after a worker was lost there without a reason, unless it answers before.
AVOID_S = 120.0
#: How long a connection to a worker may take.
_CONNECT_S = 10.0
#: Between two looks while something is expected, and while nothing is.
_BUSY_S, _CALM_S = 0.02, 0.5
_NODE_LABEL = "ray.io/node-id"


@dataclasses.dataclass
class _Start:
    """One actor, from the request to its end."""

    number: int
    key: bytes
    began_s: float
    actor: Any = None
    listening: Any = None  # the answer of `listen`, until it is there
    serving: Any = None  # of `serve`, which comes when the worker is over
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    avoided: frozenset[str] = frozenset()  # machines it was kept away from
    is_late: bool = False


class RayLauncher(Keeper):
    """The actors of one fleet."""

    def __init__(self, options: RayOptions) -> None:
        import ray

        self.options = options
        self.method = "ray"
        self.exits, self.pids, self.refused = {}, {}, {}
        self._last_start, self._unwanted = 0, set()
        self.connections: dict[int, Any] = {}  # number of a start -> its connection, or the actor itself with transport="call"
        self.late: dict[int, str] = {}  # number of a start -> why it has no place yet
        self.reasons: dict[int, str] = {}  # number of a start -> how it ended
        self.nodes: dict[int, str] = {}  # number of a start -> where it is
        self._ray = ray
        if options.transport == "stream":
            self._kind = ray.remote(RayWorker)
        else:
            self._kind = ray.remote(concurrency_groups={"swap": 2})(RelayedRayWorker)
        # Ray must neither start a worker again nor repeat a call: the envs in it would be other ones, and nobody would know.
        self._base = {"max_restarts": 0, "max_task_retries": 0, **options.actor_options()}
        try:
            self._kind.options(**self._base)
        except (TypeError, ValueError) as error:
            raise BadArgument(f"Ray refuses what each worker is to have (resources, placement): {error}") from error
        self.channel, self._theirs = pair()
        self._starts: dict[int, _Start] = {}
        self._avoided: dict[str, float] = {}  # node -> until when
        self._probes: dict[Any, str] = {}  # a task on an avoided machine -> the machine
        self._requests: queue.SimpleQueue[tuple[str, int, bytes]] = queue.SimpleQueue()
        self._end_awaited_until_s = 0.0
        self._closing = False
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="envfleet-ray", daemon=True)
        self._thread.start()

    # -- for the parent -----------------------------------------------------------------------------------------

    def request(self, key: bytes) -> int:
        """Ask for an actor whose connection uses this key; returns the number of the start."""
        self._last_start += 1
        self._requests.put(("start", self._last_start, key))
        return self._last_start

    def kill(self, pid: int, number: int = 9) -> None:
        """End the actor of a start. Does not wait for it."""
        self._requests.put(("kill", pid, b""))

    def avoid(self, start: int) -> None:
        """Place no worker on the machine of this start until it answers."""
        self._requests.put(("avoid", start, b""))

    def hurry(self) -> None:
        """A worker has ended, and the parent waits for Ray's reason."""
        self._requests.put(("hurry", 0, b""))

    def forget(self, start: int) -> None:
        """Nobody wants the actor of this start any more."""
        self.late.pop(start, None)
        connection = self.connections.pop(start, None)
        if isinstance(connection, socket.socket):
            connection.close()
        self.kill(start)

    def where(self, start: int) -> str:
        """The machine of a start, in words."""
        node = self.nodes.get(start, "")
        return f"node {node[:12]}" if node else "a machine that Ray had not named yet"

    def close(self) -> None:
        """End all actors. Bounded."""
        self._closing = True
        self._requests.put(("close", 0, b""))
        self._thread.join(5.0)
        self.channel.close()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_requests()
                self._look()
        except Exception as error:  # Ray was shut down, or its head is gone
            self.why_gone = f"the connection to Ray ended ({type(error).__name__}: {str(error)[:300]})"
        finally:
            for start in self._starts.values():
                self._end(start)
            for number in list(self.connections):
                self.forget(number)
            self._theirs.close()

    def _expects(self) -> bool:
        awaited = self._probes or time.monotonic() < self._end_awaited_until_s
        return bool(awaited) or any(start.listening is not None for start in self._starts.values())

    def _take_requests(self) -> None:
        timeout_s = 0.0 if self._expects() else _CALM_S
        while not self._closing:
            try:
                what, number, key = self._requests.get(timeout=timeout_s) if timeout_s else self._requests.get_nowait()
            except queue.Empty:
                return
            timeout_s = 0.0
            if what == "start":
                self._starts[number] = _Start(number, key, time.monotonic())
                self._create(self._starts[number])
            elif what == "kill" and number in self._starts:
                self._end(self._starts.pop(number))
                self._tell(FromKeeper.EXIT, number, -9)
            elif what == "hurry":
                self._end_awaited_until_s = time.monotonic() + _CALM_S
            elif what == "avoid" and self.nodes.get(number):
                self._avoid(self.nodes[number])

    def _create(self, start: _Start) -> None:
        now = time.monotonic()
        start.avoided = frozenset(node for node, until in self._avoided.items() if until > now)
        options = dict(self._base)
        if start.avoided:
            options["label_selector"] = {_NODE_LABEL: f"!in({','.join(sorted(start.avoided))})"}
        start.actor = self._kind.options(**options).remote()
        start.listening = start.actor.listen.remote(start.key, self.options.ports)

    def _end(self, start: _Start) -> None:
        if start.actor is not None:
            with contextlib.suppress(Exception):  # Ray is gone, and the actor with it
                self._ray.kill(start.actor)

    def _look(self) -> None:
        """Find out what has become of everything that was asked of Ray."""
        waiting: dict[Any, Any] = {start.listening: start for start in self._starts.values() if start.listening is not None}
        serving: dict[Any, Any] = {start.serving: start for start in self._starts.values() if start.serving is not None}
        refs = [*waiting, *serving, *self._probes]
        if not self._ray.is_initialized():
            raise ConnectionError("Ray was shut down")
        if not refs:
            return
        ready, _ = self._ray.wait(refs, num_returns=1, timeout=_BUSY_S if self._expects() else 0)
        for ref in ready:
            if ref in waiting:
                self._arrived(waiting[ref])
            elif ref in serving:
                self._over(serving[ref])
            else:
                self._answered(ref)
        self._look_for_late()

    def _arrived(self, start: _Start) -> None:
        from envfleet import __version__

        try:
            start.about = self._ray.get(start.listening)
        except Exception as error:
            self._refuse(start, _words(error))
            return
        start.listening = None
        self.nodes[start.number] = start.about["node"]
        if start.about["version"] != __version__:
            theirs = start.about["version"]
            self._refuse(
                start, f"{self.where(start.number)} has envfleet {theirs}, this machine has {__version__}: install the same"
            )
            return
        start.serving = start.actor.serve.remote()
        if self.options.transport == "call":
            self.connections[start.number] = start.actor
            self._tell(FromKeeper.STARTED, start.number, start.number)
        else:
            # In a thread: a machine that does not answer must not delay the others.
            threading.Thread(target=self._connect, args=(start,), name="envfleet-ray-connect", daemon=True).start()

    def _connect(self, start: _Start) -> None:
        address = (start.about["host"], start.about["port"])
        sock = None
        try:
            sock = socket.create_connection(address, timeout=_CONNECT_S)
            if not prove(sock, start.key, is_parent=True, timeout_s=_CONNECT_S):
                raise ConnectionError("whoever listens there does not have the key")
        except OSError as error:
            if sock is not None:
                sock.close()
            why = f"no connection to {address[0]}:{address[1]} ({error}): open ports with ports=(first, last), or use transport='call'"
            self._refuse(start, why)
            return
        self.connections[start.number] = sock
        self._tell(FromKeeper.STARTED, start.number, start.number)

    def _refuse(self, start: _Start, why: str) -> None:
        start.listening = None
        self._requests.put(("kill", start.number, b""))
        self.reasons[start.number] = why
        self._tell(FromKeeper.REFUSED, start.number, why)

    def _over(self, start: _Start) -> None:
        """A worker has ended; why is in the answer of its long call."""
        code = 0
        try:
            self._ray.get(start.serving)
        except Exception as error:
            self.reasons[start.number] = _words(error)
            code = 1
        self._end(start)
        self._starts.pop(start.number, None)
        self._tell(FromKeeper.EXIT, start.number, code)

    def _tell(self, what: str, number: int, value: Any) -> None:
        with self._sending, contextlib.suppress(Closed):  # the parent has closed
            self._theirs.send(pickle.dumps((what, number, value)))

    # -- machines to avoid, and machines that are full ------------------------------------------------------------

    def _avoid(self, node: str) -> None:
        """Keep workers away from a machine, and ask it for a sign of life."""
        if not self.options.may_avoid_nodes or node in self._avoided:
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._avoided[node] = time.monotonic() + AVOID_S
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        probe = self._ray.remote(_sign_of_life).options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote()
        self._probes[probe] = node

    def _answered(self, probe: Any) -> None:
        """An avoided machine has answered, or Ray knows that it is gone. Only the first ends its being avoided."""
        node = self._probes.pop(probe)
        try:
            self._ray.get(probe)
        except Exception:  # Ray says why, and places nothing there any more
            return
        self._avoided.pop(node, None)
        for start in [start for start in self._starts.values() if start.listening is not None and node in start.avoided]:
            self._end(start)
            self._create(start)

    def _look_for_late(self) -> None:
        now = time.monotonic()
        for start in self._starts.values():
            if start.listening is not None and not start.is_late and now - start.began_s > self.options.spawn_timeout_s:
                start.is_late = True
                needs = ", ".join(
                    f"{name} {value:g}" for name, value in self.options.resources.items() if isinstance(value, (int, float))
                )
                self.late[start.number] = (
                    f"has no place: Ray found none within spawn_timeout_s={self.options.spawn_timeout_s:g} (it needs {needs}): "
                    "add machines, or ask for fewer workers or less for each; `ray status` shows what is free"
                )
                self._tell(FromKeeper.LATE, start.number, 0)


def _sign_of_life() -> int:
    return os.getpid()


def _words(error: BaseException) -> str:
    """What Ray says, in one line; of an exception in an actor, that exception without Ray's traceback before it."""
    if isinstance(cause := getattr(error, "cause", None), Exception):
        error = cause
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("class_name:", "actor_id:", "namespace:"))]
    return f"{type(error).__name__}: {' '.join(told)}"[:600]
