"""Agents shared by many episodes: one call for many observations, or one caller at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from envfleet.errors import BadArgument
from envfleet.rollout.tree import Tree, stack_values, tree_rows


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
        return ThreadSafeAgent, (self.agent,)  # a lock cannot travel; the other process makes its own


class BatchedPolicy:
    """`policy(obs_batch) -> actions`, called once for all episodes that are waiting for an action.

    Pass it to an executor in place of `agent_fn`. A batch is sent off when `max_batch` observations wait,
    when every running episode waits (nothing more can come), or when the oldest has waited `max_wait_s`.
    Observations are stacked as arrays (dicts and tuples part by part); actions are read back row by row.

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
        self._waiting: deque[tuple[float, Any, Future[Any]]] = deque()
        self._changed = threading.Condition()
        self._running = 0  # episodes that may still ask
        self._server: threading.Thread | None = None

    def __call__(self, obs: Any, done: bool = False) -> Any:
        """Wait for the batch this observation goes with and return its action."""
        return self.submit(obs).result()

    async def ask(self, obs: Any, done: bool = False) -> Any:
        """The same for async code: other episodes go on while this one waits."""
        return await asyncio.wrap_future(self.submit(obs))

    def submit(self, obs: Any) -> Future[Any]:
        """Queue an observation; the future gets its action."""
        future: Future[Any] = Future()
        with self._changed:
            self._waiting.append((time.monotonic(), obs, future))
            self.num_requests += 1
            if self._server is None:
                self._server = threading.Thread(target=self._serve, name="envfleet-policy", daemon=True)
                self._server.start()
            self._changed.notify_all()
        return future

    def enter(self) -> None:
        """Tell that one more episode runs and will ask; executors do it for you."""
        with self._changed:
            self._running += 1

    def leave(self) -> None:
        """Tell that an episode ended; the rest no longer waits for it."""
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

    def _next_batch(self) -> list[tuple[float, Any, Future[Any]]] | None:
        with self._changed:
            while not self._due():
                if not self._waiting and self._running <= 0:
                    # Nobody is left to serve. The next submit starts a new thread: none stays behind.
                    self._server = None
                    return None
                oldest = self._waiting[0][0] + self.max_wait_s - time.monotonic() if self._waiting else None
                self._changed.wait(oldest)
            return [self._waiting.popleft() for _ in range(min(self.max_batch, len(self._waiting)))]

    def _due(self) -> bool:
        waiting = len(self._waiting)
        if not waiting:
            return False
        full = waiting >= self.max_batch or waiting >= self._running
        return full or time.monotonic() - self._waiting[0][0] >= self.max_wait_s

    def _answer(self, batch: list[tuple[float, Any, Future[Any]]]) -> None:
        futures = [future for _, _, future in batch if future.set_running_or_notify_cancel()]
        try:
            self.num_calls += 1
            actions = split_rows(self.policy(self._stack([obs for _, obs, _ in batch])), len(batch))
        except Exception as error:
            for future in futures:
                future.set_exception(error)
            return
        for (_, _, future), action in zip(batch, actions):
            if not future.cancelled():
                future.set_result(action)


def split_rows(actions: Any, count: int) -> list[Any]:
    """Take a batch of actions apart, one per row; refuses a batch of another size.

    Example:
        >>> split_rows([3, 4], 2)
        [3, 4]
    """
    detach = getattr(actions, "detach", None)
    if callable(detach):  # a PyTorch tensor, wherever it lives
        actions = detach().cpu().numpy()
    if isinstance(actions, (dict, tuple)):
        return [tree_rows(actions, row) for row in range(count)]
    if actions is None or not hasattr(actions, "__len__") or len(actions) != count:
        size = len(actions) if hasattr(actions, "__len__") else None
        got = f"{size} actions" if size is not None else repr(actions)
        raise BadArgument(f"the policy was given {count} observations and returned {got}; one action a row is needed")
    return list(actions)
