"""Rollouts in worker processes: for agents and environments that compute."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import cloudpickle

from envfleet.errors import BadArgument, FleetClosed, FleetError, NotPicklable
from envfleet.rollout.episodes.episode import Rollout
from envfleet.rollout.executors.client_episode import Job, Rules, drive, rollout_steps
from envfleet.rollout.executors.executor_worker import ENTRY, NUM_KEPT, AskParent
from envfleet.rollout.executors.shared_policies import BatchedPolicy
from envfleet.rollout.executors.thread_executor import JobRunner
from envfleet.rollout.executors.throttle import Throttle
from envfleet.util.daemon_pool import DaemonPool, outcome
from envfleet.util.loop_thread import LoopThread
from envfleet.workers.channel import Closed, ParentChannel, pair
from envfleet.workers.launcher import Keeper, check_start_method, default_start_method


class WorkerDied(FleetError):
    """A worker process ended while it ran a call: killed, or the code in it left the interpreter."""


class _Staff:
    """The keeper of a pool's workers. It is not made for threads, so one at a time talks to it."""

    def __init__(self) -> None:
        self.method = check_start_method(default_start_method())
        self._lock = threading.Lock()
        self._keeper: Keeper | None = None
        self._num_started = 0
        self._closed = False

    def start(self) -> tuple[int, ParentChannel]:
        """A new worker process and the parent's end of its socket."""
        with self._lock:
            if self._closed:
                raise FleetClosed("the executor")
            self._num_started += 1
            if self._keeper is not None:
                try:
                    return self._start(self._keeper)
                except FleetError:  # somebody killed it, and the workers went with it: another one then
                    self._keeper.close()
            self._keeper = Keeper(self.method)
            return self._start(self._keeper)

    def _start(self, keeper: Keeper) -> tuple[int, ParentChannel]:
        ours, theirs = pair()
        try:
            pid = keeper.start_worker(self._num_started, [theirs], entry=ENTRY)
            ours.send(pickle.dumps((list(sys.path), os.getcwd())))
        except BaseException:
            ours.close()
            raise
        return pid, ours

    def end(self, pid: int) -> str:
        """Make sure that a worker and all it started have ended; says how it did."""
        with self._lock:
            if self._keeper is None:
                return "the executor was shut down"
            code = self._keeper.exit_code(pid, 0.2)  # its end may be a moment younger than its hanging up
            if code is None:
                self._keeper.kill(pid)
                code = self._keeper.exit_code(pid, 2.0)
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End every worker, then the keeper."""
        with self._lock:
            self._closed = True
            keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.close()


class WorkerProcess:
    """One process and the parent's end of its socket; used by one thread at a time."""

    def __init__(self, staff: _Staff) -> None:
        self._staff = staff
        self.pid, self._channel = staff.start()
        self._known: list[str] = []
        self._ended = False

    def call(
        self,
        call: bytes,
        key: str | None,
        shared: bytes | None,
        policy: BatchedPolicy | None,
        timeout_s: float | None,
    ) -> Any:
        """Run one pickled call there; serve its policy requests meanwhile."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            value = shared if key is not None and key not in self._known else None
            self._channel.send(pickle.dumps((key, value, call)))
            if value is not None and key is not None:
                self._known = [*self._known, key][-NUM_KEPT:]
            while True:
                kind, value = pickle.loads(self._receive(deadline))
                if kind == "result":
                    return value
                if kind == "error":
                    raise value
                assert policy is not None
                self._channel.send(_packed(outcome(policy, (value,), {})))
        except TimeoutError:
            self.end()
            raise WorkerDied(f"the worker was killed: the call ran longer than {timeout_s:g} s") from None
        except Closed as closed:
            raise WorkerDied(f"the worker process ended ({self.end()}) in the middle of a call") from closed

    def _receive(self, deadline: float) -> bytes:
        while (frame := self._channel.take()) is None:
            if self._channel.eof:
                raise Closed
            left = deadline - time.monotonic()
            if not self._channel.wait(min(left, 60.0)) and left <= 0:
                raise TimeoutError
        return frame

    @property
    def alive(self) -> bool:
        """Whether the process runs, as far as its socket tells."""
        if not self._ended:
            self._channel.wait(0.0)
        return not self._ended and not self._channel.eof

    def end(self) -> str:
        """End it and all it started; says how it ended."""
        self._ended = True
        self._channel.close()
        return self._staff.end(self.pid)


class ProcessWorkers(Executor):
    """A pool of worker processes behind the `concurrent.futures` interface.

    A worker that dies fails only the call it ran; the next call gets a new process.
    """

    def __init__(self, max_workers: int) -> None:
        self._threads = DaemonPool(max_workers, name="envfleet-process")  # one waits for each process
        self._staff = _Staff()
        self._lock = threading.Lock()
        self._idle: list[WorkerProcess] = []
        weakref.finalize(self, self._staff.close)

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

    def _call(self, *call: Any) -> Any:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None or not worker.alive:
            worker = WorkerProcess(self._staff)
        try:
            return worker.call(*call)
        finally:
            if worker.alive:
                with self._lock:
                    self._idle.append(worker)

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
        self._staff.close()  # whoever still waits for a worker sees it end
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()
        return ended or self._threads.shutdown(wait=True, timeout=2.0)


def _packed(answer: tuple[Any, BaseException | None]) -> bytes:
    """What a policy answered, for its worker, which waits for it: what cannot travel is told in words."""
    try:
        data: bytes = cloudpickle.dumps(answer)
    except Exception as why:
        action, error = answer
        told = (
            f"{type(error).__name__}: {error}" if error is not None else f"the action {action!r} cannot travel ({why})"
        )
        data = pickle.dumps((None, RuntimeError(told)))
    return data


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
