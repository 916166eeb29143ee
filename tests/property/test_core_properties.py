"""Random spaces round-trip on every backend; random interleavings keep the invariants."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envfleet as ef
from envfleet.envs.probe import Tasked
from envfleet.slots.layout import FAULT, QUARANTINED, READY
from envfleet.testing import canonical
from envfleet.testing.conformance import Start
from tests.support.scripted_backend import Fate, ScriptedBackend
from tests.support.ways import WAYS

DTYPES = [np.float16, np.float32, np.float64, np.int8, np.uint8, np.int16, np.int32, np.uint16, np.int64]
LEAVES = st.one_of(
    st.builds(
        lambda dtype, shape: spaces.Box(0, 100, tuple(shape), dtype),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 3), max_size=3),
    ),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)),
    st.builds(lambda n: spaces.MultiDiscrete(n), st.lists(st.integers(1, 5), min_size=1, max_size=3)),
    st.builds(spaces.MultiBinary, st.integers(1, 5)),
    st.builds(spaces.Text, st.integers(1, 8)),
    st.builds(lambda: spaces.Sequence(spaces.Box(0, 1, (2,)))),
    st.builds(lambda: spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3))),
    st.builds(lambda: spaces.OneOf((spaces.Discrete(3), spaces.Box(0, 1, (2,))))),
)
SPACES = st.recursive(
    LEAVES,
    lambda sub: st.one_of(
        st.builds(lambda parts: spaces.Dict(parts), st.dictionaries(st.sampled_from("abcd"), sub, min_size=1, max_size=3)),
        st.builds(lambda parts: spaces.Tuple(parts), st.lists(sub, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


class Sampler(gym.Env[Any, Any]):
    """Observations drawn from its space; keeps what it was given, to be asked for."""

    def __init__(self, observation: Any, action: Any) -> None:
        self.observation_space, self.action_space = observation, action
        self.given: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.observation_space.seed(seed)
        self.left = 3
        self.last = self.observation_space.sample()
        return self.last, {}

    def step(self, action: Any) -> Any:
        self.given = action
        self.left -= 1
        self.last = self.observation_space.sample()
        return self.last, 0.0, self.left == 0, False, {}


def settle(examples: int) -> Any:
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks, derandomize=True)


def round_trip(way: str, observation: Any, action: Any) -> None:
    backend, options = WAYS[way]
    with Start(backend, **options)(lambda: Sampler(observation, action), 2, 2, on_end="wait") as fleet:
        batch = fleet.reset(seed=7)
        action.seed(1)
        for _ in range(3):
            sent = [action.sample(), action.sample()]
            batched = concatenate(action, sent, create_empty_array(action, 2))
            batch = fleet.step(batched)
            seen = list(fleet.get_attr("last"))
            wanted = concatenate(observation, seen, create_empty_array(observation, 2))
            assert canonical(batch.obs) == canonical(wanted)
            given_ = fleet.get_attr("given")
            again = concatenate(action, list(given_), create_empty_array(action, 2))
            assert canonical(again) == canonical(batched)
        assert batch.ended.all() and canonical(batch.final_obs) == canonical(wanted)


@pytest.mark.parametrize(("way", "examples"), [("serial", 60), ("thread", 15), ("aio", 15), ("pipe", 10), ("shm", 10)])
def test_spaces_round_trip(way: str, examples: int) -> None:
    @settle(examples)
    @given(observation=SPACES, action=SPACES)
    def check(observation: Any, action: Any) -> None:
        round_trip(way, observation, action)

    check()


FATES = st.sampled_from([Fate()] * 6 + [Fate(after_s=0.3), Fate(after_s=2.0), Fate("die"), Fate("stall")])
MOVES = st.lists(
    st.tuples(st.sampled_from(["send", "recv", "recv", "assign", "reset", "ready"]), st.integers(1, 15), st.integers(1, 4)),
    min_size=1,
    max_size=40,
)


@settle(150)
@given(moves=MOVES, fates=st.lists(FATES, max_size=60), workers=st.integers(1, 4))
def test_random_interleavings_keep_the_invariants(moves: Any, fates: Any, workers: int) -> None:
    """Invariants 1 (rows untouched while out), 4 (all come back), 6 (identity without a gap), 7 (close)."""
    queue = list(fates)
    backend = ScriptedBackend(workers, script=lambda slot, nth: queue.pop() if nth and queue else Fate())
    fleet = ef.make(Tasked, 4, backend=backend, on_fault="restart", max_restarts=2, step_timeout_s=5.0)
    fleet.reset(seed=0, tasks=[1, 2, 3, 4])
    out: set[int] = set()
    sent, received, number = np.zeros(4, int), np.zeros(4, int), 10
    last = {slot: (0, -1) for slot in range(4)}  # episode, step of the newest row

    def take(batch: Any) -> None:
        assert (np.diff(batch.slots) > 0).all() and set(batch.slots.tolist()) <= out
        for i, slot in enumerate(batch.slots.tolist()):
            out.discard(slot)
            received[slot] += 1
            status, episode, step = int(batch.status[i]), int(batch.episode[i]), int(batch.step[i])
            assert status in (READY, FAULT, QUARANTINED) and batch.scored[i] == (status == READY and step >= 0)
            if status == READY and step >= 0:
                assert (episode, step) == (last[slot][0], last[slot][1] + 1)
                assert fleet.task_value(batch.task[i]) is not None
                last[slot] = (episode + 1, -1) if batch.ended[i] else (episode, step)
            elif status == FAULT:
                last[slot] = (int(fleet.slab.started[slot]) - 1, -1)

    for move, mask, count in moves:
        slots = [slot for slot in range(4) if mask >> slot & 1]
        if move == "send" and (free := [slot for slot in slots if slot not in out]):
            fleet.send([0] * len(free), free)
            out.update(free)
            sent[free] += 1
        elif move == "recv" and out:
            take(fleet.recv(at_least=min(count, len(out))))
        elif move == "assign":
            number += 1
            fleet.assign(slots, tasks=[number] * len(slots))
        elif move == "ready":
            assert set(fleet.ready().tolist()) <= out
        elif move == "reset" and (free := [slot for slot in slots if slot not in out]):
            batch = fleet.reset(slots=free)
            for i, slot in enumerate(free):
                last[slot] = (int(fleet.slab.started[slot]) - 1, -1)
                assert batch.status[i] != READY or batch.step[i] == -1
    while out:
        take(fleet.recv(at_least=1))
    assert sent.tolist() == received.tolist() and backend.touched == [] and backend.out == []
    fleet.close()
    fleet.close()
