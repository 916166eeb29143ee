"""What envs that wait reach in one process at best: a thread or a coroutine each, and a queue each, with no fleet at all."""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue
from typing import Any

from bench.contestants import Contestant, now
from bench.envs import factories


class Threads(Contestant):
    """A thread per env, each in a loop of its own; nothing is communicated."""

    def __init__(self, env: str, slots: int) -> None:
        super().__init__(env, slots)
        self._envs = [factory() for factory in factories(env, slots)]

    def run(self, seconds: float) -> tuple[int, float]:
        counts = [0] * self.slots
        start = now()
        threads = [threading.Thread(target=self._loop, args=(i, counts, start + seconds)) for i in range(self.slots)]
        for thread in threads:
            thread.start()
        while now() < start + seconds:
            threads[0].join(0.01)
        took, steps = now() - start, sum(counts)
        for thread in threads:
            thread.join()
        return steps, took

    def _loop(self, i: int, counts: list[int], end: float) -> None:
        env = self._envs[i]
        while now() < end:
            env.step(0)
            counts[i] += 1


class Tasks(Contestant):
    """A coroutine per env on one event loop; nothing is communicated."""

    def __init__(self, env: str, slots: int) -> None:
        super().__init__("unevenawait" if env == "unevensleep" else env, slots)
        self._envs = [factory() for factory in factories(self.env, slots)]

    def run(self, seconds: float) -> tuple[int, float]:
        return asyncio.run(self._run(seconds))

    async def _run(self, seconds: float) -> tuple[int, float]:
        steps = 0
        start = now()

        async def drive(env: Any) -> None:
            nonlocal steps
            while now() < start + seconds:
                await env.step(0)
                steps += 1

        tasks = [asyncio.ensure_future(drive(env)) for env in self._envs]
        await asyncio.sleep(seconds)
        took, done = now() - start, steps
        await asyncio.gather(*tasks)
        return done, took


class Queues(Contestant):
    """A thread per env that waits for its action in a queue of its own, one queue back: the least any fleet of threads does."""

    def __init__(self, env: str, slots: int) -> None:
        super().__init__(env, slots)
        self._asked: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(slots)]
        self._done: SimpleQueue[int] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, args=(i, factory()), daemon=True)
            for i, factory in enumerate(factories(env, slots))
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, i: int, env: Any) -> None:
        while (action := self._asked[i].get()) is not None:
            env.step(action)
            self._done.put(i)

    def run(self, seconds: float) -> tuple[int, float]:
        steps, start = 0, now()
        for queue in self._asked:
            queue.put(0)
        while now() < start + seconds:
            self._asked[self._done.get()].put(0)
            steps += 1
        took = now() - start
        for _ in range(self.slots):
            self._done.get()
        return steps, took

    def close(self) -> None:
        for queue, thread in zip(self._asked, self._threads):
            queue.put(None)
            thread.join(5)
