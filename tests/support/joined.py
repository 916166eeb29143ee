"""Joined fleets for tests: the same environments spread over several backends."""

from __future__ import annotations

from typing import Any

import envfleet as ef
from envfleet.testing.conformance import Start

#: (slots, backend, options): every backend of this machine that runs any environment.
EVERY = (
    (2, "serial", {}),
    (1, "thread", {}),
    (1, "aio", {}),
    (3, "pipe", {"num_workers": 2, "start_method": "fork"}),
    (3, "shm", {"num_workers": 2, "start_method": "fork"}),
)
NUM_SLOTS = sum(count for count, _, _ in EVERY)


def joined(env: Any, parts: Any = EVERY, **options: Any) -> ef.Fleet:
    """A joined fleet; `options` go to every part, and `env` may be a list with one callable per slot."""
    fleets, first = [], 0
    for count, backend, own in parts:
        mine = env[first : first + count] if isinstance(env, list) else env
        fleets.append(ef.make(mine, count, backend=backend, **{**options, **own}))
        first += count
    return ef.join(fleets)


class JoinedStart(Start):
    """Starts fleets whose first half is `shm` and whose second half is `serial`."""

    def __init__(self) -> None:
        super().__init__("shm")

    def __call__(self, env: Any, num_envs: int | None = None, num_workers: int | None = None, **options: Any) -> ef.Fleet:
        """A joined fleet of so many slots."""
        num_envs = num_envs or len(env)
        first = (num_envs + 1) // 2
        parts = [(first, "shm", {"num_workers": num_workers, "start_method": "fork"})]
        parts += [(num_envs - first, "serial", {})] if num_envs > first else []
        return joined(env, parts, **options)
