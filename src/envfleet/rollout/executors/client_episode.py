"""The life of one rollout over a client, written once as a coroutine.

It decides what happens next (reset, ask the agent, step) and keeps the record. A `Place` says how its calls are made: `OnThread`
blocks the thread it is on, so that the coroutine never suspends; `OnLoop` awaits on an event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from envfleet.errors import AgentFailed, BadArgument, ClientFailed, RolloutFailed, RolloutTimeout
from envfleet.rollout.episodes.episode import Rollout
from envfleet.rollout.executors.client_results import StepResult, own, parse_reset, parse_step
from envfleet.rollout.executors.shared_policies import BatchedPolicy
from envfleet.rollout.executors.thread_calls import Handover, Outcome
from envfleet.rollout.executors.throttle import Throttle
from envfleet.util.backoff import backoff_s
from envfleet.util.daemon_pool import DaemonPool

OnError = Literal["raise", "skip", "retry"]

#: What fails a rollout. An agent or a client that calls sys.exit() has failed; it does not end the program.
CALL_ERRORS = (Exception, SystemExit)


@dataclass(frozen=True)
class Rules:
    """The rules for every rollout; the constructor arguments of the executors."""

    on_error: OnError = "raise"
    max_retries: int = 3
    backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    jitter: float = 0.5
    rollout_timeout_s: float | None = None
    check_actions: bool = True

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip", "retry"):
            raise BadArgument(f"on_error must be 'raise', 'skip' or 'retry', got {self.on_error!r}")
        for name in ("max_retries", "backoff_s", "max_backoff_s", "jitter", "rollout_timeout_s"):
            value = getattr(self, name)
            if (value is not None or name != "rollout_timeout_s") and not (isinstance(value, numbers.Real) and float(value) >= 0):
                raise BadArgument(f"{name}={value!r}: give a number, 0 or more")

    @property
    def max_attempts(self) -> int:
        """How often one rollout may be started."""
        return 1 + (self.max_retries if self.on_error == "retry" else 0)

    def pause_s(self, attempt: int, draw: float) -> float:
        """Seconds before attempt + 1: doubling, with `draw` in [0, 1) spreading it by ± jitter."""
        pause = backoff_s(attempt, self.backoff_s, self.max_backoff_s)
        return pause * (1.0 + self.jitter * (2.0 * draw - 1.0))


@dataclass
class Stop:
    """Ends a collection early; unlike an event it can be pickled."""

    wanted: bool = False


@dataclass
class Job:
    """One rollout to collect."""

    client: Any
    agent: Any
    max_steps: int = 1000
    env_name: str = ""
    index: int = 0
    seed: int | None = None
    task: Any = None
    reset_kwargs: dict[str, Any] = field(default_factory=dict)
    stop: Stop = field(default_factory=Stop)  # wanted: end at the next step

    @property
    def from_factory(self) -> bool:
        """Whether the client still has to be built: a class, or a callable that is no client itself."""
        return isinstance(self.client, type) or (callable(self.client) and not hasattr(self.client, "step"))

    def reset_arguments(self, client: Any) -> dict[str, Any]:
        """Keyword arguments of the client's reset(): a task goes in as `task`, or in Gymnasium's options."""
        arguments = dict(self.reset_kwargs)
        if self.seed is not None:
            arguments["seed"] = self.seed
        if self.task is not None:
            takes: Mapping[str, Any] = {}
            with suppress(TypeError, ValueError):
                takes = inspect.signature(client.reset).parameters
            if "options" in takes and "task" not in takes:
                arguments.setdefault("options", {"task": self.task})
            else:
                arguments.setdefault("task", self.task)
        return arguments


class OnThread:
    """Every call blocks this thread; awaitables (of async clients and agents) go over `bridge` to a loop."""

    def __init__(self, bridge: Callable[[Awaitable[Any]], Any]) -> None:
        self._bridge = bridge

    async def call(self, function: Any, *args: Any, awaited: bool | None = None, client: Any = None) -> Outcome:
        """Make a call. `awaited` says whether it gives a coroutine, `client` whose it is; here nothing depends on them."""
        try:
            answer = function(*args)
            return self._bridge(answer) if inspect.isawaitable(answer) else answer, None
        except CALL_ERRORS as error:
            return None, error

    @asynccontextmanager
    async def turn(self, throttle: Throttle, client: Any) -> AsyncIterator[None]:
        """Block until the throttle allows a request."""
        with throttle.request(client):
            yield

    async def pause(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


class OnLoop:
    """Coroutines are awaited on the running loop; other calls may block and go to threads, an inline agent excepted."""

    def __init__(self, pool: DaemonPool, inline_agent: bool, on_stuck: Callable[[Any, Future[Any]], None]) -> None:
        self._client_calls = Handover(pool)
        self._agent_calls = None if inline_agent else Handover(pool)  # apart: clients wait, most agents do not
        self._on_stuck = on_stuck  # called with a client that a thread is in, and when that ends

    async def call(self, function: Any, *args: Any, awaited: bool | None = None, client: Any = None) -> Outcome:
        """Await a call of a client or, without one, of the agent; or have a thread make it.

        Whether it gives a coroutine is looked up unless `awaited` says so.
        """
        if isinstance(function, BatchedPolicy):
            function, awaited = function.ask, True
        elif awaited is None:
            awaited = is_async(function)
        threads = None if awaited else self._agent_calls if client is None else self._client_calls
        try:
            if threads is None:
                answer = function(*args)
            else:
                asked = threads.call(function, args)
                try:
                    answer, error = await asked
                except asyncio.CancelledError:
                    if (end := threads.give_up(asked)) is not None and client is not None:
                        self._on_stuck(client, end)
                    raise
                if error is not None:
                    return None, error
            return await answer if inspect.isawaitable(answer) else answer, None
        except CALL_ERRORS as error:
            return None, error

    def turn(self, throttle: Throttle, client: Any) -> AbstractAsyncContextManager[None]:
        """Wait until the throttle allows a request; other rollouts continue."""
        return throttle.request_async(client)

    async def pause(self, seconds: float) -> None:
        """Sleep; other rollouts continue."""
        await asyncio.sleep(seconds)


class Stopped(Exception):
    """The collection was cancelled while this rollout ran."""


def on_this_thread(coroutine: Coroutine[Any, Any, Rollout]) -> Rollout:
    """Run a coroutine whose every call blocks."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        rollout: Rollout = ended.value
        return rollout
    raise AssertionError("a rollout on a thread blocks and never suspends")


async def with_retries(
    job: Job, rules: Rules, attempt: Callable[[], Awaitable[Rollout]], pause: Callable[[float], Awaitable[None]]
) -> Rollout:
    """Make attempts until one is good or the rules allow no more."""
    for number in range(1, rules.max_attempts + 1):
        rollout = await attempt()
        rollout.attempts = number
        # A wrong answer is a bug of the agent: a retry would not help.
        is_wrong = isinstance(rollout.error, AgentFailed) and rollout.error.__cause__ is None
        if rollout.error is None or is_wrong or number == rules.max_attempts or job.stop.wanted:
            break
        await pause(rules.pause_s(number, random.random()))
    return rollout


@dataclass
class ClientEpisode:
    """One attempt at a rollout: a job, how it is treated, where it runs."""

    job: Job
    rules: Rules
    throttle: Throttle
    place: OnThread | OnLoop
    thread: threading.Thread | None = None  # the one it runs on
    complete: bool = False  # only the client is still to be closed
    unwanted: bool = False  # it was given up: a call that returns late is followed by no other
    _began: float | None = None

    def __post_init__(self) -> None:
        self.rollout = new_rollout(self.job)
        self._seconds = self.rollout.seconds
        self._seconds.update(agent=0.0, env=0.0, network=0.0, waiting=0.0)

    @property
    def age_s(self) -> float:
        """For how long it has been running."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    async def play(self) -> Rollout:
        """Collect the rollout; a failed record is returned, not raised."""
        job, rollout, client = self.job, self.rollout, None
        self.thread, self._began, rollout.started_s = threading.current_thread(), time.perf_counter(), time.time()
        try:
            client = await self._build() if job.from_factory else job.client
            await self._play(client, rollout)
        except RolloutFailed as error:
            rollout.error = error
        rollout.wall_s, self.complete = self.age_s, True
        if job.from_factory and callable(close := getattr(client, "close", None)):
            await self.place.call(close, client=client)  # the episode is complete: an error in closing must not undo it
        elif callable(offer := getattr(client, "offer_session", None)):
            offer()  # a client of ours: until its next reset others may have its session
        return rollout

    def play_here(self) -> Rollout:
        """The same on this thread, if the place is one."""
        return on_this_thread(self.play())

    def given_up(self, why: RolloutFailed) -> Rollout:
        """The record as it is now. A thread that is still in a call of the client goes on with its own."""
        if self.complete:
            return replace(self.rollout)
        record, steps = self.rollout, len(self.rollout.step_latencies)  # what is written last
        names = ("actions", "rewards", "terminated", "truncated", "infos", "step_latencies")
        lists = {name: getattr(record, name)[:steps] for name in names}
        lists["observations"] = record.observations[: steps + 1]
        return replace(record, **lists, seconds=dict(record.seconds), wall_s=self.age_s, error=why)

    async def _build(self) -> Any:
        begin = time.perf_counter()
        client, error = await self.place.call(self.job.client, client=self.job.client)
        self._seconds["env"] += time.perf_counter() - begin
        if error is not None:
            message = f"building the client raised {_text(error)}"
            raise ClientFailed(message, env_name=self.job.env_name, phase="init") from error
        return client

    async def _play(self, client: Any, rollout: Rollout) -> None:
        job, limit_s = self.job, self.rules.rollout_timeout_s
        result, _ = await self._ask_client(client, parse_reset, -1)
        rollout.observations.append(own(result.obs))
        rollout.reset_info = result.info
        space = getattr(client, "action_space", None) if self.rules.check_actions else None
        awaited = is_async(getattr(client, "step", None)), is_async(job.agent)  # once, not at every step
        done, step = result.terminated or result.truncated, 0
        while not done and step < job.max_steps:
            if job.stop.wanted or self.unwanted:
                raise self._failed("the collection was stopped", "stopped", step) from Stopped()
            action = await self._ask_agent(result.obs, done, space, step, awaited[1])
            result, seconds = await self._ask_client(client, parse_step, step, action, awaited=awaited[0])
            step += 1
            done = result.terminated or result.truncated
            cut = not done and step >= job.max_steps
            rollout.actions.append(own(action))
            rollout.rewards.append(result.reward)
            rollout.terminated.append(result.terminated)
            rollout.truncated.append(result.truncated or cut)
            rollout.observations.append(own(result.obs))
            rollout.infos.append(result.info)
            rollout.step_latencies.append(seconds)
            if limit_s is not None and not done and self.age_s > limit_s:
                raise too_late(job, limit_s, step)

    async def _ask_client(
        self, client: Any, parse: Callable[[Any], StepResult], step: int, *action: Any, awaited: bool | None = None
    ) -> tuple[StepResult, float]:
        """Call step, or reset without an action; also returns how many seconds it took, without the wait for the throttle."""
        phase = "step" if action else "reset"
        try:
            function = client.step if action else partial(client.reset, **self.job.reset_arguments(client))
            stats = getattr(client, "stats", None)  # of a client of ours
            asked, opening_s = time.perf_counter(), 0.0 if action else getattr(stats, "opening_s", 0.0)
            async with self.place.turn(self.throttle, client) if self.throttle.active else nullcontext():
                begin = time.perf_counter()
                answer, error = await self.place.call(function, *action, awaited=awaited, client=client)
                seconds = time.perf_counter() - begin
            opening_s = 0.0 if action else getattr(stats, "opening_s", 0.0) - opening_s
            network_s = min(getattr(stats, "round_trip_s", 0.0), seconds - opening_s)
            self._seconds["waiting"] += begin - asked + opening_s
            self._seconds["network"] += network_s
            self._seconds["env"] += seconds - opening_s - network_s
            if error is None:
                return parse(answer), seconds
        except CALL_ERRORS as broken:
            error = broken
        raise self._failed(f"{phase}() raised {_text(error)}", phase, step) from error

    async def _ask_agent(self, obs: Any, done: bool, space: Any, step: int, awaited: bool) -> Any:
        begin = time.perf_counter()
        action, error = await self.place.call(self.job.agent, obs, done, awaited=awaited)
        self._seconds["agent"] += time.perf_counter() - begin
        if error is not None:
            message = f"the agent raised {_text(error)}"
        elif action is None:
            message = "the agent returned None instead of an action"
        elif space is not None and not _contains(space, action):
            message = f"the agent returned {action!r}, which is not in the action space {space}"
        else:
            return action
        raise AgentFailed(message, env_name=self.job.env_name, phase="agent", step=step, value=action) from error

    def _failed(self, message: str, phase: str, step: int) -> ClientFailed:
        return ClientFailed(message, env_name=self.job.env_name, phase=phase, step=step)


def new_rollout(job: Job) -> Rollout:
    """The record of a job, still empty."""
    return Rollout(env_name=job.env_name, seed=job.seed, task=job.task, episode=job.index)


def too_late(job: Job, limit_s: float | None, step: int, why: str = "") -> RolloutTimeout:
    """The error of a rollout that overran its time."""
    message = why or f"the rollout ran longer than rollout_timeout_s={limit_s:g}"
    return RolloutTimeout(message, env_name=job.env_name, phase="timeout", step=step)


def _contains(space: Any, action: Any) -> bool:
    contains = getattr(space, "contains", None)
    if contains is None:
        return True
    try:
        return bool(contains(action))
    except Exception:  # spaces raise for values they cannot compare: these are not valid actions either
        return False


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def is_async(function: Any) -> bool:
    """Whether calling it gives a coroutine, also for objects with an `async def __call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
