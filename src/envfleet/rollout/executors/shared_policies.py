"""Agents shared by many episodes: one call for many observations, or one caller at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from envfleet.errors import BadArgument
from envfleet.util.daemon_pool import outcome
from envfleet.util.trees import Tree, stack_values, tree_rows


class ThreadSafeAgent:
    """An agent behind a lock: one caller at a time. Attributes are those of the agent.

    Example:
        >>> agent = ThreadSafeAgent(lambda obs, done: 0)
        >>> agent([1.0], False)
        0
    """

    def __init__(self, agent: Callable[..., Any]) -> None:
        self.agent = agent
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the agent when no other thread is in it."""
        with self._lock:
            return self.agent(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("agent", "_lock"):  # not yet set while being unpickled
            raise AttributeError(name)
        return getattr(self.agent, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return ThreadSafeAgent, (self.agent,)  # a lock cannot be pickled; the other process makes its own


class BatchedPolicy:
    """`policy(obs_batch) -> actions`, called once for all episodes that are waiting for an action.

    Pass it to an executor in place of `agent_fn`. The policy is called when `max_batch` observations wait,
    when every running episode waits, or when the oldest observation has waited for `max_wait_s`.
    Observations are stacked as arrays (dicts and tuples part by part), or as `stack` does it: `stack=list` gives the policy a
    list with one observation each, as for text. Actions are read back row by row.

    Example:
        >>> policy = BatchedPolicy(lambda obs: obs.sum(axis=1), max_batch=8)
        >>> float(policy([1.0, 2.0]))
        3.0
        >>> policy.num_calls, policy.num_requests
        (1, 1)
    """

    def __init__(
        self,
        policy: Callable[[Tree], Any],
        max_batch: int = 64,
        max_wait_s: float = 0.005,
        stack: Callable[[Sequence[Any]], Tree] = stack_values,
    ) -> None:
        if max_batch < 1:
            raise BadArgument(f"max_batch must be at least 1, got {max_batch}")
        self.policy, self.max_batch, self.max_wait_s = policy, max_batch, max_wait_s
        self.num_calls = 0
        self.num_requests = 0
        self._stack = stack
        self._waiting: deque[_Question] = deque()
        self._changed = threading.Condition()
        self._running = 0  # episodes that may still ask
        self._server: threading.Thread | None = None

    def __call__(self, obs: Any, done: bool = False) -> Any:
        """Wait for the batch this observation goes with and return its action."""
        question = _Question(obs, None)
        self._put(question)
        question.blocked.acquire()  # released with the answer
        return question.action()

    async def ask(self, obs: Any, done: bool = False) -> Any:
        """The same for async code: other episodes go on while this one waits."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        question = _Question(obs, future)
        self._put(question)
        await future
        return question.action()

    def _put(self, question: _Question) -> None:
        with self._changed:
            self._waiting.append(question)
            self.num_requests += 1
            if self._server is None:
                self._server = threading.Thread(target=self._serve, name="envfleet-policy", daemon=True)
                self._server.start()
            # The first sets the alarm, the last calls for the answer; waking the server for the others costs a thread
            # switch each.
            if len(self._waiting) == 1 or self._full():
                self._changed.notify()

    def enter(self) -> None:
        """Count one more episode that runs and will ask; executors do it for you."""
        with self._changed:
            self._running += 1

    def leave(self) -> None:
        """Count an episode that ended; the rest no longer waits for it."""
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    @property
    def mean_batch(self) -> float:
        """Observations per call so far."""
        return self.num_requests / max(1, self.num_calls)

    def _serve(self) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            self._answer(batch)

    def _next_batch(self) -> list[_Question] | None:
        with self._changed:
            while not self._due():
                if not self._waiting and self._running <= 0:
                    # No episode is left to serve. The next request starts a new thread: none stays behind.
                    self._server = None
                    return None
                oldest = self._waiting[0].since + self.max_wait_s - time.monotonic() if self._waiting else None
                self._changed.wait(oldest)
            return [self._waiting.popleft() for _ in range(min(self.max_batch, len(self._waiting)))]

    def _full(self) -> bool:
        return len(self._waiting) >= min(self.max_batch, self._running)

    def _due(self) -> bool:
        if not self._waiting:
            return False
        return self._full() or time.monotonic() - self._waiting[0].since >= self.max_wait_s

    def _answer(self, batch: list[_Question]) -> None:
        self.num_calls += 1
        actions, error = outcome(self._actions, (batch,), {})
        raised_at = None if error is None else error.__traceback__
        loops: dict[asyncio.AbstractEventLoop, list[_Question]] = {}
        for row, question in enumerate(batch):
            question.outcome = (None, error) if error is not None else (actions[row], None)
            question.raised_at = raised_at
            if question.future is None:
                question.blocked.release()
            else:
                loops.setdefault(question.future.get_loop(), []).append(question)
        for loop, questions in loops.items():
            try:
                loop.call_soon_threadsafe(_wake, questions)
            except RuntimeError:  # the loop was closed meanwhile: no episode waits there any more
                continue

    def _actions(self, batch: list[_Question]) -> list[Any]:
        return split_rows(self.policy(self._stack([question.obs for question in batch])), len(batch))


class _Question:
    """One observation that waits for its action: a thread on the lock `blocked`, a coroutine on `future`."""

    __slots__ = ("blocked", "future", "obs", "outcome", "raised_at", "since")

    def __init__(self, obs: Any, future: asyncio.Future[None] | None) -> None:
        self.obs, self.future, self.since = obs, future, time.monotonic()
        self.blocked = threading.Lock()
        self.blocked.acquire()
        self.outcome: tuple[Any, BaseException | None] = (None, None)
        self.raised_at: TracebackType | None = None

    def action(self) -> Any:
        """The answer, or what the policy raised."""
        action, error = self.outcome
        if error is not None:
            raise error.with_traceback(self.raised_at)  # all of a batch raise the same one: each would add its own frames
        return action


def _wake(questions: list[_Question]) -> None:
    for question in questions:
        if question.future is not None and not question.future.done():  # its episode may have been given up
            question.future.set_result(None)


def split_rows(actions: Any, count: int) -> list[Any]:
    """Split a batch of actions, one per row; a batch of another size is an error."""
    detach = getattr(actions, "detach", None)
    if callable(detach):  # a PyTorch tensor, wherever it lives
        actions = detach().cpu().numpy()
    if isinstance(actions, (dict, tuple)):
        return [tree_rows(actions, row) for row in range(count)]
    if not hasattr(actions, "__len__") or len(actions) != count:
        got = f"{len(actions)} actions" if hasattr(actions, "__len__") else repr(actions)
        raise BadArgument(f"the policy was given {count} observations and returned {got}; one action per row is needed")
    return list(actions)
