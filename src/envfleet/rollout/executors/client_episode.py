"""The life of one rollout over a client, written once as a generator; drivers perform its requests.

`rollout_steps` decides what happens next (reset, ask the agent, step, wait before a retry) and keeps the
record. A driver only moves control: `drive` on a thread, `drive_async` on an event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from envfleet.errors import BadArgument
from envfleet.rollout.episodes.episode import Rollout
from envfleet.rollout.executors.client_results import StepResult, own, parse_reset, parse_step
from envfleet.rollout.executors.shared_policies import BatchedPolicy
from envfleet.rollout.executors.thread_calls import Handover
from envfleet.rollout.executors.throttle import Throttle
from envfleet.rollout.rollout_errors import AgentFailed, ClientFailed, RolloutFailed
from envfleet.util.backoff import backoff_s

OnError = Literal["raise", "skip", "retry"]

#: What fails a rollout. An agent or a client that calls sys.exit() has failed; it does not end the program.
CALL_ERRORS = (Exception, SystemExit)


@dataclass(frozen=True)
class Rules:
    """How an executor treats every rollout; the constructor arguments of the executors."""

    on_error: OnError = "raise"
    max_retries: int = 3
    backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    jitter: float = 0.5
    rollout_timeout_s: float | None = None
    check_actions: bool = True
    throttle: Throttle = field(default_factory=Throttle)

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "skip", "retry"):
            raise BadArgument(f"on_error must be 'raise', 'skip' or 'retry', got {self.on_error!r}")
        if self.max_retries < 0:
            raise BadArgument(f"max_retries must not be negative, got {self.max_retries}")

    @property
    def max_attempts(self) -> int:
        """How often one rollout may be begun."""
        return 1 + (self.max_retries if self.on_error == "retry" else 0)

    def pause_s(self, attempt: int, draw: float) -> float:
        """Seconds before attempt + 1: doubling, with `draw` in [0, 1) spreading it by ± jitter."""
        pause = backoff_s(attempt, self.backoff_s, self.max_backoff_s)
        return pause * (1.0 + self.jitter * (2.0 * draw - 1.0))


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
    stop: threading.Event = field(default_factory=threading.Event)  # set: end at the next step

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
            try:
                takes = inspect.signature(client.reset).parameters
            except (TypeError, ValueError):
                takes = MappingProxyType({})
            if "options" in takes and "task" not in takes:
                arguments.setdefault("options", {"task": self.task})
            else:
                arguments.setdefault("task", self.task)
        return arguments


@dataclass(slots=True)
class Request:
    """Something the driver has to do: call `function` (and note how long it took), or wait."""

    function: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    client: Any = None  # set for requests to the environment: these are throttled
    is_agent: bool = False
    awaited: bool | None = None  # whether calling it gives a coroutine; None: nobody has looked yet
    wait_s: float = 0.0
    seconds: float = 0.0


class Stopped(Exception):
    """The collection was given up while this rollout ran."""


Steps = Generator[Request, Any, Rollout]


class Threads(NamedTuple):
    """Where the sync calls of an event loop run: apart, since clients wait; an agent of None runs on the loop."""

    client: Handover
    agent: Handover | None


def rollout_steps(job: Job, rules: Rules) -> Steps:
    """Collect one rollout, with retries; the failed record is returned, not raised."""
    attempt = 1
    while True:
        rollout = Rollout(env_name=job.env_name, seed=job.seed, task=job.task, episode=job.index, attempts=attempt)
        rollout.started_s = time.time()
        begin = time.perf_counter()
        client: Any = None
        try:
            client = (yield from _build(job)) if job.from_factory else job.client
            yield from _episode(job, rules, client, rollout, begin)
        except RolloutFailed as error:
            rollout.error = error
        rollout.wall_s = time.perf_counter() - begin
        if job.from_factory and client is not None:
            yield from _close(client)
        final = rollout.error is None or attempt >= rules.max_attempts or job.stop.is_set()
        # A wrong answer is the agent's code being wrong: asking again would only be slower.
        if final or (isinstance(rollout.error, AgentFailed) and rollout.error.__cause__ is None):
            return rollout
        yield Request(wait_s=rules.pause_s(attempt, random.random()))
        attempt += 1


def _build(job: Job) -> Generator[Request, Any, Any]:
    try:
        return (yield Request(job.client))
    except CALL_ERRORS as error:
        raise ClientFailed(f"building the client raised {_text(error)}", env_name=job.env_name, phase="init") from error


def _close(client: Any) -> Generator[Request, Any, None]:
    close = getattr(client, "close", None)
    if callable(close):
        try:
            yield Request(close)
        except CALL_ERRORS:  # the episode is complete; a failing farewell must not undo it
            pass


def _episode(job: Job, rules: Rules, client: Any, rollout: Rollout, begin: float) -> Generator[Request, Any, None]:
    arguments = job.reset_arguments(client)
    result, _ = yield from _ask_client(job, client, "reset", -1, parse_reset, (), arguments)
    rollout.observations.append(own(result.obs))
    rollout.reset_info = result.info
    space = getattr(client, "action_space", None) if rules.check_actions else None
    done = result.terminated or result.truncated
    awaited = is_async(getattr(client, "step", None)), is_async(_asker(job.agent))  # once, not at every step
    step = 0
    while not done and step < job.max_steps:
        if job.stop.is_set():
            error = ClientFailed("the collection was stopped", env_name=job.env_name, phase="stopped", step=step)
            raise error from Stopped()
        action = yield from _ask_agent(job, result.obs, done, space, step, awaited[1])
        result, seconds = yield from _ask_client(job, client, "step", step, parse_step, (action,), {}, awaited[0])
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
        if rules.rollout_timeout_s is not None and not done and time.perf_counter() - begin > rules.rollout_timeout_s:
            message = f"the rollout ran longer than rollout_timeout_s={rules.rollout_timeout_s:g}"
            raise ClientFailed(message, env_name=job.env_name, phase="timeout", step=step) from TimeoutError(message)


def _ask_client(
    job: Job,
    client: Any,
    phase: str,
    step: int,
    parse: Callable[[Any], StepResult],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    awaited: bool | None = None,
) -> Generator[Request, Any, tuple[StepResult, float]]:
    try:
        request = Request(getattr(client, phase), args, kwargs, client=client, awaited=awaited)
        return parse((yield request)), request.seconds
    except CALL_ERRORS as error:
        message = f"{phase}() raised {_text(error)}"
        raise ClientFailed(message, env_name=job.env_name, phase=phase, step=step) from error


def _ask_agent(job: Job, obs: Any, done: bool, space: Any, step: int, awaited: bool) -> Generator[Request, Any, Any]:
    where = {"env_name": job.env_name, "phase": "agent", "step": step}
    try:
        action = yield Request(job.agent, (obs, done), is_agent=True, awaited=awaited)
    except CALL_ERRORS as error:
        raise AgentFailed(f"the agent raised {_text(error)}", **where) from error  # type: ignore[arg-type]
    if action is None:
        raise AgentFailed("the agent returned None instead of an action", **where)  # type: ignore[arg-type]
    if space is not None and not _contains(space, action):
        message = f"the agent returned {action!r}, which is not in the action space {space}"
        raise AgentFailed(message, **where, value=action)  # type: ignore[arg-type]
    return action


def _contains(space: Any, action: Any) -> bool:
    contains = getattr(space, "contains", None)
    if contains is None:
        return True
    try:
        return bool(contains(action))
    except Exception:  # spaces raise at what they cannot compare: that is no action of theirs either
        return False


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def drive(steps: Steps, throttle: Throttle, bridge: Callable[[Awaitable[Any]], Any]) -> Rollout:
    """Perform a rollout on this thread; awaitables (async clients and agents) go over `bridge` to a loop."""
    try:
        request = next(steps)
        while True:
            try:
                answer = _perform(request, throttle, bridge)
            except CALL_ERRORS as error:
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as stop:
        rollout: Rollout = stop.value
        return rollout


def _perform(request: Request, throttle: Throttle, bridge: Callable[[Awaitable[Any]], Any]) -> Any:
    if request.function is None:
        time.sleep(request.wait_s)
        return None
    if request.client is not None and throttle.active:
        with throttle.request(request.client):
            return _timed(request, bridge)
    return _timed(request, bridge)


def _timed(request: Request, bridge: Callable[[Awaitable[Any]], Any]) -> Any:
    assert request.function is not None
    begin = time.perf_counter()
    answer = request.function(*request.args, **request.kwargs)
    if inspect.isawaitable(answer):
        answer = bridge(answer)
    request.seconds = time.perf_counter() - begin
    return answer


async def drive_async(steps: Steps, throttle: Throttle, threads: Threads) -> Rollout:
    """Perform a rollout on the running loop; what is not `async def` goes to `threads`, for it may block."""
    try:
        request = next(steps)
        while True:
            try:
                answer = await _perform_async(request, throttle, threads)
            except CALL_ERRORS as error:
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as stop:
        rollout: Rollout = stop.value
        return rollout


async def _perform_async(request: Request, throttle: Throttle, threads: Threads) -> Any:
    if request.function is None:
        await asyncio.sleep(request.wait_s)
        return None
    if request.client is not None and throttle.active:
        async with throttle.request_async(request.client):
            return await _timed_async(request, threads)
    return await _timed_async(request, threads)


async def _timed_async(request: Request, threads: Threads) -> Any:
    assert request.function is not None
    begin = time.perf_counter()
    function = _asker(request.function)
    awaited = is_async(function) if request.awaited is None else request.awaited
    hop = None if awaited else threads.agent if request.is_agent else threads.client
    if hop is None:
        answer = function(*request.args, **request.kwargs)
    else:
        answer = await hop.call(function, *request.args, **request.kwargs)
    if inspect.isawaitable(answer):
        answer = await answer
    request.seconds = time.perf_counter() - begin
    return answer


def _asker(agent: Any) -> Any:
    """What async code calls: a batched policy has a coroutine for it."""
    return agent.ask if isinstance(agent, BatchedPolicy) else agent


def is_async(function: Any) -> bool:
    """Whether calling it gives a coroutine, also for objects with an `async def __call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
