"""Rollouts in worker processes: for agents and environments that compute."""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from envfleet.backends.pool import DaemonPool
from envfleet.errors import BackendMissing, BadArgument, FleetError, NotPicklable
from envfleet.rollout.drive import Job, Rules, drive, rollout_steps
from envfleet.rollout.episode import Rollout
from envfleet.rollout.executors import JobRunner
from envfleet.rollout.loops import LoopThread
from envfleet.rollout.policy import BatchedPolicy
from envfleet.rollout.throttle import Throttle
from envfleet.rollout.worker import AskParent


class WorkerDied(FleetError):
    """A worker process ended while it ran a call: killed, or the code in it left the interpreter."""


class WorkerProcess:
    """One process and the parent's end of its socket."""

    def __init__(self) -> None:
        if sys.platform == "win32":
            raise BackendMissing("process mode", why="It hands a socket to its workers, which Windows cannot.")
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        with theirs:
            command = [sys.executable, "-m", "envfleet.rollout.worker", str(theirs.fileno())]
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent, which then hangs up
            )
        self.connection = Connection(ours.detach())
        self.known: list[str] = []

    def call(
        self,
        call: bytes,
        key: str | None,
        shared: bytes | None,
        policy: BatchedPolicy | None,
        timeout_s: float | None,
    ) -> Any:
        """Run one pickled call there; serve its policy requests meanwhile."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            send = shared if key is not None and key not in self.known else None
            self._send("call", key, send, call)
            if send is not None and key is not None:
                self.known = [*self.known, key][-4:]  # as many as the worker keeps
            while True:
                if deadline is not None and not self.connection.poll(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    raise WorkerDied(f"the worker was killed: the call ran longer than {timeout_s:g} s")
                kind, value = pickle.loads(self.connection.recv_bytes())
                if kind == "result":
                    return value
                if kind == "error":
                    raise value
                self._answer(policy, value)
        except (EOFError, OSError) as error:
            self.kill()
            raise WorkerDied(f"the worker process ended ({self._ending()}) in the middle of a call") from error

    def _answer(self, policy: BatchedPolicy | None, obs: Any) -> None:
        assert policy is not None
        try:
            self._send("action", policy(obs), None)
        except Exception as error:
            self._send("action", None, error)

    def _send(self, *message: Any) -> None:
        self.connection.send_bytes(cloudpickle.dumps(message))

    def _ending(self) -> str:
        code = self.process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def _end_group(self) -> None:
        """Kill the process and whatever was started in it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def close(self, timeout_s: float) -> None:
        """Hang up, wait for the process to end, kill it when it does not."""
        self.connection.close()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._end_group()

    def kill(self) -> None:
        """End it at once; one that has already ended keeps its own exit code."""
        try:
            self.process.wait(0.2)  # its end may be a moment younger than its hanging up
        except subprocess.TimeoutExpired:
            self._end_group()
        if not self.connection.closed:
            self.connection.close()


class ProcessWorkers(Executor):
    """A pool of worker processes behind the `concurrent.futures` interface.

    A worker that dies fails only the call it ran; the next call gets a new process.
    """

    def __init__(self, max_workers: int) -> None:
        self._threads = DaemonPool(max_workers, name="envfleet-process")  # one waits for each process
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        self._all: set[WorkerProcess] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function by value in a worker."""
        return self._threads.submit(self._call, dumps((fn, args, kwargs), "the call"), None, None, None, None)

    def submit_shared(
        self,
        call: bytes,
        key: str | None,
        shared: bytes | None,
        policy: BatchedPolicy | None,
        timeout_s: float | None,
        attempts: int = 1,
    ) -> Future[Any]:
        """Run a pickled call whose `agent` argument every worker keeps by key."""
        return self._threads.submit(self._call_again, attempts, call, key, shared, policy, timeout_s)

    def _call_again(self, attempts: int, *call: Any) -> Any:
        """Call; a death of the worker is tried again `attempts` times in all."""
        for left in reversed(range(attempts)):
            try:
                return self._call(*call)
            except WorkerDied:
                if not left:
                    raise

    def _call(self, call: bytes, *rest: Any) -> Any:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None or not worker.alive:
            fresh = WorkerProcess()
            with self._lock:
                if worker is not None:
                    self._all.discard(worker)
                self._all.add(fresh)
            worker = fresh
        try:
            return worker.call(call, *rest)
        finally:
            with self._lock:
                if worker.alive and not worker.connection.closed:
                    self._idle.append(worker)
                else:
                    self._all.discard(worker)

    def shutdown(  # type: ignore[override]
        self,
        wait: bool = True,
        *,
        cancel_futures: bool = False,
        timeout: float | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """Wait for running calls, at most the timeout; then end every process, for good."""
        limit = timeout_s if timeout_s is not None else timeout
        ended = self._threads.shutdown(wait=wait, cancel_futures=cancel_futures, timeout=limit)
        with self._lock:
            workers, self._all = list(self._all), set()
            self._idle.clear()
        for worker in workers:
            if ended:
                worker.close(timeout_s=2.0)
            else:
                worker._end_group()
        return ended or self._threads.shutdown(wait=True, timeout=2.0)


class ProcessParallelExecutor(JobRunner):
    """Collect rollouts in worker processes.

    `clients` are factories: callables that build a client, called in the worker. Agents travel by value, once
    per worker; a `BatchedPolicy` stays here and is asked over the workers' sockets. Request limits
    (`max_rate`, `max_in_flight`) cannot be kept across processes and are refused.

    Example:
        >>> import gymnasium as gym
        >>> with ProcessParallelExecutor(max_workers=1) as executor:
        ...     rollouts = executor.collect_rollouts([lambda: gym.make("CartPole-v1")], lambda obs, done: 1)
        >>> len(rollouts)
        1
    """

    def __init__(self, max_workers: int = 2, **rules: Any) -> None:
        super().__init__(**rules)
        if self.rules.throttle.active:
            raise BadArgument("max_rate and max_in_flight need one process to count in: use 'thread' or 'async'")
        self.max_workers = max_workers
        self.executor: ProcessWorkers = ProcessWorkers(max_workers)
        self._shared: tuple[Any, str, bytes] | None = None

    @property
    def concurrency(self) -> int:
        """How many rollouts run at once."""
        return self.max_workers

    collect_rollouts = JobRunner.run
    iter_rollouts = JobRunner.run_iter

    def submit_job(self, job: Job) -> Future[Rollout]:
        """Start one rollout in a worker."""
        policy = job.agent if isinstance(job.agent, BatchedPolicy) else None
        agent = AskParent() if policy is not None else job.agent
        if self._shared is None or self._shared[0] is not job.agent:
            data = dumps(agent, "the agent")
            self._shared = (job.agent, hashlib.sha256(data).hexdigest(), data)
        _, key, data = self._shared
        fields = {
            "client": job.client,
            "max_steps": job.max_steps,
            "env_name": job.env_name,
            "index": job.index,
            "seed": job.seed,
            "task": job.task,
            "reset_kwargs": job.reset_kwargs,
        }
        rules = {
            name: getattr(self.rules, name)
            for name in ("on_error", "max_retries", "backoff_s", "max_backoff_s", "jitter", "check_actions")
        }
        rules["rollout_timeout_s"] = self.rules.rollout_timeout_s
        call = dumps((run_in_worker, (fields, rules), {}), f"the factory of {job.env_name!r}")
        return self.executor.submit_shared(call, key, data, policy, self._deadline(), self.rules.max_attempts)

    def _deadline(self) -> float | None:
        """When a worker is killed: all attempts had their time, and some to start in."""
        limit = self.rules.rollout_timeout_s
        return None if limit is None else (limit + self.rules.max_backoff_s) * self.rules.max_attempts + 5.0

    def _end(self, wait: bool, timeout_s: float | None) -> bool:
        return self.executor.shutdown(wait=wait, cancel_futures=True, timeout=timeout_s)


def run_in_worker(fields: dict[str, Any], rules: dict[str, Any], agent: Any) -> Rollout:
    """Collect one rollout in this (worker) process."""
    loop = LoopThread()
    try:
        steps = rollout_steps(Job(agent=agent, **fields), Rules(**rules, throttle=Throttle()))
        return drive(steps, Throttle(), loop.wait_for)
    finally:
        loop.close()


def dumps(value: Any, what: str) -> bytes:
    """Pickle by value, or say what cannot travel."""
    try:
        data: bytes = cloudpickle.dumps(value)
        return data
    except Exception as error:
        raise NotPicklable(
            f"{what} cannot travel to a worker process ({type(error).__name__}: {error}); "
            "give a factory that builds it there"
        ) from error
