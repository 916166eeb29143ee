"""Rollouts in worker processes: for agents and environments that compute.

The workers are a fleet's: the same keeper starts and ends them, and their message loop runs functions by value ("run"). One has no
slots here. It never imports the user's `__main__`, and runs one call at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import cloudpickle

from envfleet.errors import BadArgument, FleetClosed, FleetError, NotPicklable, WorkerLost
from envfleet.faults.failure import Failure, load_value
from envfleet.rollout.episodes.episode import Rollout
from envfleet.rollout.executors.client_episode import ClientEpisode, Job, OnLoop, OnThread, Rules, Stop, on_this_thread, too_late
from envfleet.rollout.executors.executor import GRACE_S, RolloutExecutor, checked_workers, failed, lost
from envfleet.rollout.executors.executor_options import ExecutorOptions
from envfleet.rollout.executors.shared_policies import BatchedPolicy
from envfleet.rollout.executors.throttle import Throttle
from envfleet.util.daemon_pool import DaemonPool, outcome
from envfleet.util.loop_thread import LoopThread
from envfleet.workers.channel import Closed, ParentChannel, pair
from envfleet.workers.launcher import Keeper, default_start_method, working_folder
from envfleet.workers.protocol import MESSAGE, FromWorker, ToWorker
from envfleet.workers.shared_memory import Segment
from envfleet.workers.worker import WITHOUT_SLOTS

NUM_KEPT = 4  # agents a worker keeps
BEGUN = "begun"  # what a worker says instead of a question, which is a tuple of arguments


@dataclass(frozen=True)
class Call:
    """A call in a worker: a pickled function of one argument, the agent."""

    function: bytes
    agent: bytes = b""  # pickled; the worker keeps it by `key`
    key: str = ""  # without one, the argument is a function that asks `policy`, in the parent
    policy: BatchedPolicy | None = None
    timeout_s: float | None = None  # from when the function begins; what it needs is imported before
    stop: Stop = field(default_factory=Stop)  # wanted: it was given up


@dataclass
class WorkerProcess:
    """One process and the parent's end of its socket; used by one thread at a time."""

    pid: int
    channel: ParentChannel
    known: list[str] = field(default_factory=list)  # keys of the agents it keeps

    def run(self, call: Call) -> Any:
        """Run a call there and answer what it asks the policy meanwhile. Gives its result, or a Failure."""
        deadline = math.inf
        agent = None if call.key in self.known else call.agent
        self._send(ToWorker.RUN, partial(run_in_worker, call.function, call.key, agent, call.timeout_s is not None))
        if agent:
            self.known = [*self.known, call.key][-NUM_KEPT:]
        while True:
            what, data = pickle.loads(memoryview(self._receive(deadline))[1:])
            value = load_value(data, "call")
            if what == FromWorker.RAN:
                return value
            if value == BEGUN and call.timeout_s is not None:
                deadline = time.monotonic() + call.timeout_s
                answer: tuple[Any, BaseException | None] = (None, None)
            elif isinstance(value, Failure):
                answer = (None, value.exception)
            else:
                answer = outcome(call.policy, value, {})
            self._send(ToWorker.ANSWER, packed(answer))

    def _send(self, *message: Any) -> None:
        self.channel.send(MESSAGE + pickle.dumps(message))

    def _receive(self, deadline: float) -> bytes:
        while (frame := self.channel.take()) is None:
            if self.channel.eof:
                raise Closed
            left = deadline - time.monotonic()
            if not self.channel.wait(min(left, 60.0)) and left <= 0:
                raise TimeoutError
        return frame

    @property
    def alive(self) -> bool:
        """Whether the process runs, as far as its socket shows."""
        self.channel.wait(0.0)
        return not self.channel.eof


class CallTimeout(WorkerLost, TimeoutError):
    """A worker was killed because its call took too long."""


class ProcessWorkers(DaemonPool):
    """A pool of worker processes behind the `concurrent.futures` interface; a thread waits for each.

    A worker that dies fails only the call it ran; the next call gets a new process.
    """

    def __init__(self, max_workers: int) -> None:
        self._keeper: Keeper | None = None
        self._lock = threading.Lock()  # the keeper is not thread-safe: one thread at a time uses it
        self._page = Segment.create(64)  # a worker's pulse and stacks go here; nothing reads them
        self._idle: list[WorkerProcess] = []
        self._at_work: dict[int, WorkerProcess] = {}  # by the id of a call
        self._num_started, self._ended = 0, False
        super().__init__(max_workers, name="envfleet-process")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function by value in a worker."""
        return self.submit_call(Call(dumps(lambda agent: fn(*args, **kwargs), "the call")))

    def submit_call(self, call: Call) -> Future[Any]:
        """Run a call in a worker."""
        return super().submit(self._run, call)

    def give_up(self, call: Call) -> None:
        """End the worker that runs a call: the call ends with WorkerLost."""
        call.stop.wanted = True
        with self._lock:
            worker = self._at_work.get(id(call))
            if worker is not None and self._keeper is not None:
                self._keeper.kill(worker.pid)

    def _run(self, call: Call) -> Any:
        with self._lock:
            if call.stop.wanted:
                raise WorkerLost("the call was given up before it began")
            worker = self._idle.pop() if self._idle else None
            if worker is None or not worker.alive:
                worker = self._started()
            self._at_work[id(call)] = worker
        try:
            value = worker.run(call)
        except TimeoutError:
            self._end(worker, wait_s=0.0)
            raise CallTimeout(f"the worker was killed: the call ran longer than {call.timeout_s:g} s") from None
        except Closed as closed:
            raise WorkerLost(f"the worker process ended ({self._end(worker)}) in the middle of a call") from closed
        finally:
            with self._lock:
                del self._at_work[id(call)]
        with self._lock:
            self._idle.append(worker)
        if isinstance(value, Failure):
            raise value.exception
        return value

    def _started(self) -> WorkerProcess:
        """A new worker process, the lock being held."""
        if self._ended:
            raise FleetClosed("the executor")
        self._num_started += 1
        if self._keeper is not None:
            try:
                return self._started_by(self._keeper)
            except FleetError:  # it was killed, and the workers with it: another one then
                self._keeper.close()
        self._keeper = Keeper(default_start_method())
        return self._started_by(self._keeper)

    def _started_by(self, keeper: Keeper) -> WorkerProcess:
        ours, theirs = pair()
        try:
            pid = keeper.start_worker(self._num_started, [theirs, self._page, self._page])
            ours.send(pickle.dumps({**WITHOUT_SLOTS, "path": list(sys.path), "cwd": working_folder()}))
        except BaseException:
            ours.close()
            raise
        return WorkerProcess(pid, ours)

    def _end(self, worker: WorkerProcess, wait_s: float = 0.2) -> str:
        """Make sure that a worker and all it started have ended; says how it did."""
        worker.channel.close()
        with self._lock:
            if self._keeper is None:
                return "the executor was shut down"
            code = self._keeper.exit_code(worker.pid, wait_s)  # its socket may close shortly before it ends
            if code is None:
                self._keeper.kill(worker.pid)
                code = self._keeper.exit_code(worker.pid, 2.0)
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def _close(self) -> None:
        """End every worker, then the keeper."""
        with self._lock:
            self._ended = True
            keeper, self._keeper = self._keeper, None
            idle, self._idle = self._idle, []
        if keeper is not None:
            keeper.close()
        for worker in idle:
            worker.channel.close()
        self._page.close()

    __del__ = _close

    def shutdown(self, wait: bool = True, **options: Any) -> bool:  # type: ignore[override]
        """Wait for running calls, at most the timeout; then end every process."""
        ended = super().shutdown(wait, **options)
        self._close()  # a thread that still waits for a worker sees it end
        return ended or super().shutdown(wait=True, timeout=2.0)


def packed(answer: tuple[Any, BaseException | None]) -> bytes:
    """The answer of a policy for the waiting worker; what cannot be pickled is sent as text."""
    try:
        data: bytes = cloudpickle.dumps(answer)
    except Exception as why:
        action, error = answer
        text = f"{type(error).__name__}: {error}" if error is not None else f"the action {action!r} cannot be sent ({why})"
        data = pickle.dumps((None, RuntimeError(text)))
    return data


class ProcessParallelExecutor(RolloutExecutor):
    """Collect rollouts in worker processes.

    `clients` are factories: callables that build a client, called in the worker. Agents are pickled by value, once
    per worker; a `BatchedPolicy` stays here and is asked over the workers' sockets. Request limits
    (`max_rate`, `max_in_flight`) cannot be kept across processes and are refused.

    Example:
        >>> import gymnasium as gym
        >>> with ProcessParallelExecutor(num_workers=1) as executor:
        ...     rollouts = executor.collect_rollouts([lambda: gym.make("CartPole-v1")], lambda obs, done: 1)
        >>> len(rollouts)
        1
    """

    def __init__(self, num_workers: int = 2, *, max_workers: int | None = None, **rules: Unpack[ExecutorOptions]) -> None:
        self.num_workers = self.max_workers = checked_workers(num_workers, max_workers=max_workers)
        super().__init__(self.num_workers, **rules)
        if self._throttle.active:
            raise BadArgument("max_rate and max_in_flight need one process to count in: use 'thread' or 'async'")
        self.executor = ProcessWorkers(self.num_workers)
        self._agent: tuple[Any, str, bytes] | None = None  # the last one, its key, and pickled

    collect_rollouts = RolloutExecutor.run
    iter_rollouts = RolloutExecutor.run_iter

    def _completed(self, jobs: Sequence[Job]) -> Iterator[Rollout]:
        """Pickle all jobs before any starts: what cannot be pickled is an error of the call, not of one rollout."""
        self._agent = None  # pickled once in every call: it may have learned since the last one
        return super()._completed([replace(job, client=self._packed(job)) for job in jobs])

    def _packed(self, job: Job) -> Call:
        policy = job.agent if isinstance(job.agent, BatchedPolicy) else None
        agent, key = b"", ""
        if policy is None:
            if self._agent is None or self._agent[0] is not job.agent:
                data = dumps(job.agent, "the agent")
                self._agent = (job.agent, hashlib.sha256(data).hexdigest(), data)
            _, key, agent = self._agent
        work = partial(run_rollout, replace(job, agent=None), self.rules)
        limit_s = self.rules.rollout_timeout_s
        what = "the factory" if job.from_factory else f"the client {type(job.client).__name__}"
        return Call(
            dumps(work, f"{what} of {job.env_name!r}"), agent, key, policy, None if limit_s is None else limit_s + GRACE_S
        )

    async def _attempt(self, job: Job, place: OnLoop) -> Rollout:
        """One attempt in a worker, which is killed if it takes too long, or if the collection is given up."""
        call = replace(job.client, stop=Stop())
        running = self.executor.submit_call(call)
        waiter = asyncio.wrap_future(running)
        try:
            await asyncio.wait([waiter])
            rollout: Rollout = waiter.result()
            return rollout
        except asyncio.CancelledError:
            self.executor.give_up(call)
            waiter.add_done_callback(lambda _: waiter.cancelled() or waiter.exception())
            await asyncio.wait([waiter], timeout=5.0)
            raise
        except CallTimeout as late:
            return failed(job, too_late(job, self.rules.rollout_timeout_s, -1), late)
        except Exception as error:
            return lost(job, error)


_kept: dict[str, bytes] = {}  # in a worker: agents that were sent once, by key


def run_in_worker(function: bytes, key: str, agent: bytes | None, timed: bool, ask: Callable[[Any], Any]) -> Any:
    """In the worker: call a function with the agent of this key, or with one that asks the parent."""
    if agent:
        _kept[key] = agent
        while len(_kept) > NUM_KEPT:
            del _kept[next(iter(_kept))]
    call, argument = pickle.loads(function), pickle.loads(_kept[key]) if key else lambda *question: ask(question)
    if timed:
        ask(BEGUN)
    return call(argument)


def run_rollout(job: Job, rules: Rules, agent: Any) -> Rollout:
    """Make one attempt at a rollout in this (worker) process."""
    loop = LoopThread()
    try:
        episode = ClientEpisode(replace(job, agent=agent), rules, Throttle(), OnThread(loop.wait_for))
        return on_this_thread(episode.play())
    finally:
        if not job.from_factory and callable(close := getattr(job.client, "close", None)):
            with suppress(Exception):  # the rollout is complete; this client is a copy that nobody else has
                close()
        loop.close()


def dumps(value: Any, what: str) -> bytes:
    """Pickle by value, or say what cannot be pickled."""
    try:
        data: bytes = cloudpickle.dumps(value)
        return data
    except Exception as error:
        raise NotPicklable(
            f"{what} cannot be sent to a worker process ({type(error).__name__}: {error}); give a factory that builds it there"
        ) from error
