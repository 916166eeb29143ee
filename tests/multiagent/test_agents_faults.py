"""What goes wrong with many agents: failing envs, killed workers, bad input, odd envs; and tasks, seeds, interleavings."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import envfleet as ef
from envfleet.slots.layout import FAULT, QUARANTINED, READY
from envfleet.testing import Stream, descendants

pytest.importorskip("pettingzoo")

from pettingzoo import ParallelEnv

from tests.support.agent_loops import Crowd, crowd_aec, draw, joint
from tests.support.scripted_backend import ScriptedBackend

WAYS: dict[str, dict[str, Any]] = {
    "serial": {},
    "thread": {"num_workers": 2},
    "aio": {"num_workers": 2},
    "pipe": {"num_workers": 2, "start_method": "fork"},
    "shm": {"num_workers": 2, "start_method": "fork"},
}
STEADY = dict(num_agents=3, death=0.0, birth=0.0, max_cycles=50)


class Fragile(Crowd):
    """Raises in its `at`-th step, counted over its whole life."""

    def __init__(self, at: int, **options: Any) -> None:
        super().__init__(**options)
        self.at, self.steps = at, 0

    def step(self, actions: Any) -> Any:
        self.steps += 1
        if self.steps == self.at:
            raise RuntimeError("planted")
        return super().step(actions)


class OneEnds(Crowd):
    """The first agent ends by itself at the second step; the others go on to the fifth, where all is over."""

    def __init__(self) -> None:
        super().__init__(num_agents=3, death=0.0, birth=0.0, max_cycles=5)

    def step(self, actions: Any) -> Any:
        obs, rewards, terminated, truncated, infos = super().step(actions)
        if self._time == 2:
            terminated["walker_0"] = True
            infos["walker_0"] = {"why": "done"}
            self.agents.remove("walker_0")
        return obs, rewards, terminated, truncated, infos


class Quiet(ParallelEnv):  # type: ignore[type-arg]
    """Agents are only given observations in turn, and one disappears without a flag: what the rules do not foresee."""

    metadata = {"name": "quiet"}  # noqa: RUF012
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = ["a", "b"]
        self.agents: list[str] = []
        self.time = 0

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 9, (1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def _obs(self, agent: str) -> Any:
        return {agent: np.full(1, self.time + 1, np.float32)}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.agents, self.time = ["a", "b"], 0
        return self._obs("a"), {}

    def step(self, actions: Any) -> Any:
        assert list(actions) == [["a"], ["b"]][self.time % 2], actions
        self.time += 1
        rewards = {"a": 1.0, "b": 10.0}
        nobody = {"a": False, "b": False}
        if self.time == 5:
            self.agents = []
            return {}, rewards, {}, {}, {}
        return self._obs("ab"[self.time % 2]), rewards, nobody, nobody, {}


def test_an_agent_that_ends_alone() -> None:
    with ef.make(OneEnds, 2, backend="serial") as fleet:
        fleet.reset(seed=0)
        rows = [fleet.step(np.full((2, 3), n)) for n in range(6)]
    assert [row.active[0].tolist() for row in rows[:5]] == [[True] * 3, *[[False, True, True]] * 3, [True] * 3]
    assert rows[1].terminated[0].tolist() == [True, False, False] and rows[1].scored.all()
    assert rows[1].final_obs[0, 0, 0] == 2.0 and not rows[1].final_obs[0, 1:].any() and not rows[1].obs[0, 0].any()
    assert rows[1].info[0]["walker_0"] == {"why": "done"}
    assert rows[2].scored[0].tolist() == [False, True, True] and not rows[2].terminated.any()
    assert [bool(row.ended[0]) for row in rows] == [False] * 4 + [True, False]
    assert rows[4].truncated[0].tolist() == [False, True, True] and rows[4].scored[0].tolist() == [False, True, True]
    assert rows[4].ep_return[0, 0] == rows[1].ep_return[0, 0] == rows[0].reward[0, 0] + rows[1].reward[0, 0]


def test_agents_that_wait_and_agents_that_vanish() -> None:
    """What an agent earns while it has no observation is credited when it has one; one that vanishes has ended."""
    with ef.make(Quiet, 1, backend="serial") as fleet:
        batch = fleet.reset()
        assert batch.active.tolist() == [[True, False]]
        rows = [fleet.step([[1, 1]]) for _ in range(5)]
    assert [row.active[0].tolist() for row in rows[:4]] == [[False, True], [True, False], [False, True], [True, False]]
    assert [row.scored[0].tolist() for row in rows[:4]] == [[False, False], [True, False], [False, True], [True, False]]
    assert [row.reward[0].tolist() for row in rows[:4]] == [[0, 0], [2, 0], [0, 20], [2, 0]]
    last = rows[4]
    assert last.ended.all() and last.scored.all() and last.terminated.all() and not last.truncated.any()
    assert last.reward.tolist() == [[1.0, 20.0]] and last.ep_return.tolist() == [[5.0, 50.0]]
    assert last.final_obs[0, :, 0].tolist() == [5.0, 4.0]  # the last each of them had


@pytest.mark.parametrize("way", WAYS)
def test_an_env_that_raises_gives_a_fault_row_and_the_run_goes_on(way: str) -> None:
    envs = [functools.partial(Crowd, **STEADY), functools.partial(Fragile, 3, **STEADY)]
    with ef.make(envs, backend=way, on_fault="restart", max_restarts=1, **WAYS[way]) as fleet:
        fleet.reset(seed=0)
        rows = [fleet.step(np.ones((2, 3), int)) for _ in range(7)]
        assert [row.status[1] for row in rows] == [READY, READY, FAULT, READY, READY, QUARANTINED, QUARANTINED]
        fault = rows[2]
        assert fault.truncated[1].all() and not fault.terminated[1].any() and not fault.scored[1].any()
        assert fault.reward[1].tolist() == [0.0] * 3 and fault.ended[1] and fault.active[1].all()
        assert (fault.final_obs[1, :, 0] == 2.0).all() and (fault.obs[1, :, 0] == 0.0).all()
        assert (fault.ep_return[1] == rows[1].ep_return[1]).all() and fault.length[1] == 2
        assert not rows[6].active[1].any() and not rows[6].obs[1].any() and not rows[6].ended[1]
        assert [row.obs[0, 0, 0] for row in rows] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
        assert "RuntimeError: planted" in str(fleet.faults[0])
    with ef.make(envs, backend=way, **WAYS[way]) as fleet:
        fleet.reset(seed=0)
        with pytest.raises(ef.EnvFailed, match="planted"):
            for _ in range(3):
                fleet.step(np.ones((2, 3), int))


def test_an_aec_fault_cuts_off_those_who_wait_too() -> None:
    """Agents that acted and wait for the outcome are cut off with the one whose turn it was, each with its last view."""
    from pettingzoo.utils.conversions import parallel_to_aec

    def build() -> Any:
        return parallel_to_aec(Fragile(3, **STEADY))

    with ef.make(build, 1, backend="serial", on_fault="restart", with_state=True) as fleet:
        fleet.reset(seed=0)
        rows = [fleet.step([[1, 1, 1]]) for _ in range(9)]
    assert [row.status[0] for row in rows] == [READY] * 8 + [FAULT]
    last = rows[-1]
    assert last.truncated.all() and last.ended.all() and not last.scored.any()
    assert (last.final_obs[0, :, 0] == 2.0).all() and last.active.sum() == 1
    assert last.final_state.tolist() == [[2.0, 3.0]] and last.state[0, 0] == 0.0


def test_a_killed_worker_is_replaced() -> None:
    with ef.make(
        functools.partial(Crowd, **STEADY), 4, backend="shm", on_fault="restart", num_workers=2, start_method="fork"
    ) as fleet:
        fleet.reset(seed=0)
        fleet.step(np.ones((4, 3), int))
        victim = fleet.call("__class__", slots=[0]) and fleet._backend._workers[0].pid
        assert victim in descendants(os.getpid()) and victim > 1
        os.kill(victim, signal.SIGKILL)
        seen = [fleet.step(np.ones((4, 3), int)) for _ in range(4)]
        faulted = [row for row in seen if (row.status == FAULT).any()]
        assert faulted and faulted[0].truncated[0].all() and (faulted[0].final_obs[0, :, 0] == 1.0).all()
        assert seen[-1].status.tolist() == [READY] * 4 and seen[-1].scored.all()


def test_tasks_and_seeds_reach_each_slot() -> None:
    with ef.make(functools.partial(Crowd, **STEADY), 3, backend="serial") as fleet:
        fleet.reset(seed=[5, 6, 7], tasks=[{"max_cycles": n} for n in (1, 2, 3)])
        rows = [fleet.step(np.zeros((3, 3), int)) for _ in range(6)]
        assert [int(sum(row.ended[slot] for row in rows)) for slot in range(3)] == [6, 3, 2]
        assert rows[0].seed.tolist() == [5, 6, 7] and rows[0].task.tolist() == [0, 1, 2]
        again = fleet.reset(seed=[5, 6, 7]).obs
    with ef.make(functools.partial(Crowd, **STEADY), 3, backend="serial") as fleet:
        assert (fleet.reset(seed=5).obs == again).all()


class NoAgents(ParallelEnv):  # type: ignore[type-arg]
    metadata = {"name": "none"}  # noqa: RUF012

    def step(self, actions: Any) -> Any:
        raise AssertionError

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        raise AssertionError


class Wordy(Crowd):
    def observation_space(self, agent: str) -> Any:
        return spaces.Text(5)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ef.BadArgument, match="NoAgents has no possible_agents"):
        ef.make(NoAgents(), 2, backend="serial")
    with pytest.raises(ef.BadArgument, match="only Box, Discrete"):
        ef.make(Wordy(), 2, backend="shm")
    with pytest.raises(ef.EnvFailed, match="has no possible_agents"):
        ef.make(NoAgents, 2, backend="shm", start_method="fork")
    with pytest.raises(ef.SpacesDiffer, match="slot 1 has agents"):
        ef.make([functools.partial(Crowd, num_agents=n) for n in (2, 3)], backend="serial")
    with pytest.raises(ef.SpacesDiffer, match="slot 1 has agents"):
        ef.make([Crowd, lambda: __import__("gymnasium").make("CartPole-v1")], backend="serial")
    with pytest.raises(ef.EnvFailed, match="returned int, which has no reset and step"):
        ef.make([Crowd, lambda: 3], backend="serial")
    with pytest.raises(ef.BadArgument, match="AsyncPettingZooVecEnv"):
        ef.make_vec(Crowd, 2, backend="serial")
    with pytest.raises(ef.EnvFailed, match="with_state=True is for environments of many agents"):
        ef.make("CartPole-v1", 2, backend="serial", with_state=True)
    with ef.make(Crowd(), 2, backend="serial") as fleet:
        fleet.reset(seed=0)
        with pytest.raises(ef.BadArgument, match=r"need \(2, 4\)"):
            fleet.step(np.zeros((2, 3), int))


class Stranger(Crowd):
    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        self.agents = [*self.agents, "nobody"]
        return result


class Odd(Crowd):
    def step(self, actions: Any) -> Any:
        obs, *rest = super().step(actions)
        return {agent: seen[:2] for agent, seen in obs.items()}, *rest


@pytest.mark.parametrize(("env", "words"), [(Stranger, "'nobody' is not among possible_agents"), (Odd, "has shape")])
def test_what_an_env_must_not_return_is_a_fault(env: Any, words: str) -> None:
    with ef.make(env, 1, backend="serial") as fleet:
        fleet.reset(seed=0)
        with pytest.raises(ef.EnvFailed, match=words):
            fleet.step(np.zeros((1, 4), int))


def test_debug_checks_the_actions_of_active_agents_alone() -> None:
    with ef.make(crowd_aec, 1, backend="serial", debug=True) as fleet:
        batch = fleet.reset(seed=0)
        wild = np.full((1, 4), 99)
        with pytest.raises(ef.BadArgument, match="99"):
            fleet.step(wild)
        wild[batch.active] = 1
        assert fleet.step(wild).status[0] == READY


def test_auto_probes_and_the_short_path_equals_the_long_one(monkeypatch: Any) -> None:
    with ef.make(functools.partial(Crowd, mixed=True), 2) as fleet:
        assert fleet.plan.reason.startswith("auto")
        assert fleet.reset(seed=0).active.any()
    digests = set()
    for compiled in ("1", "0"):
        monkeypatch.setenv("ENVFLEET_COMPILED", compiled)
        for env in (functools.partial(Crowd, **STEADY),):
            with ef.make(env, 3, backend="serial") as fleet:
                stream, rng = Stream(), np.random.default_rng(0)
                stream.add(fleet.reset(seed=1, tasks=[{"max_cycles": n} for n in (4, 50, 7)]))
                for _ in range(60):
                    stream.add(fleet.step(rng.integers(0, 5, (3, 3))))
                digests.add(stream.digest())
    assert len(digests) == 1


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    portions=st.lists(st.tuples(st.integers(1, 15), st.integers(1, 4)), min_size=5, max_size=40),
    death=st.sampled_from([0.0, 0.1, 0.4]),
    birth=st.sampled_from([0.0, 0.3]),
    kind=st.sampled_from([crowd_aec, Crowd]),
    way=st.sampled_from(["serial", "thread", ScriptedBackend]),
)
def test_interleavings_do_not_change_what_a_slot_does(portions: Any, death: float, birth: float, kind: Any, way: Any) -> None:
    """Slots sent and received in portions give, slot by slot, a beginning of the rows they give when stepped in order."""
    env = functools.partial(kind, num_agents=3, death=death, birth=birth, max_cycles=6)
    backend, options = (way, WAYS[way]) if isinstance(way, str) else (way(), {})

    def rows_of(batch: Any, into: dict[int, list[bytes]]) -> None:
        for i, slot in enumerate(batch.slots.tolist()):
            assert batch.active[i].any() and np.isfinite(batch.reward[i]).all()
            parts = (batch.obs[i], batch.final_obs[i], batch.reward[i], batch.active[i], batch.scored[i], batch.truncated[i])
            into.setdefault(slot, []).append(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))

    apart: dict[int, list[bytes]] = {}
    with ef.make(env, 4, backend=backend, **options) as fleet:
        rngs = [np.random.default_rng(slot) for slot in range(4)]
        batch = fleet.reset(seed=8)
        rows_of(batch, apart)
        free, out = set(range(4)), 0
        for mask, count in portions:
            chosen = [slot for slot in sorted(free) if mask >> slot & 1]
            if chosen:
                fleet.send(np.stack([rngs[slot].integers(0, 5, 3) for slot in chosen]), chosen)
                free -= set(chosen)
                out += len(chosen)
            if out:
                batch = fleet.recv(at_least=min(count, out))
                rows_of(batch, apart)
                free |= set(batch.slots.tolist())
                out -= len(batch)
    together: dict[int, list[bytes]] = {}
    with ef.make(env, 4, backend="serial") as fleet:
        rngs = [np.random.default_rng(slot) for slot in range(4)]
        rows_of(fleet.reset(seed=8), together)
        for _ in range(max(map(len, apart.values()))):
            rows_of(fleet.step(np.stack([rng.integers(0, 5, 3) for rng in rngs])), together)
    for slot, rows in apart.items():
        assert rows == together[slot][: len(rows)]


class Told(Crowd):
    """Says in its infos what is legal."""

    def _told(self, infos: Any) -> Any:
        return {a: {**info, "action_mask": np.arange(5) <= int(a[-1])} for a, info in infos.items()}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        obs, infos = super().reset(seed, options)
        return obs, self._told(infos)

    def step(self, actions: Any) -> Any:
        *rest, infos = super().step(actions)
        return *rest, self._told(infos)


def test_declared_columns_come_from_the_agents_infos() -> None:
    with ef.make(Told, 3, backend="serial", columns={"action_mask": spaces.MultiBinary(5)}) as fleet:
        batch = fleet.reset(seed=0)
        for _ in range(20):
            counts = batch.action_mask.sum(axis=2)
            assert batch.action_mask.shape == (3, 4, 5)
            assert not counts[~batch.active].any()
            assert (counts[batch.active] == np.tile(np.arange(1, 5), (3, 1))[batch.active]).all()
            batch = fleet.step(np.zeros((3, 4), int))


def test_masks_and_state_fit_mixed_groups() -> None:
    with ef.make(functools.partial(Crowd, mixed=True), 3, backend="serial", with_state=True) as fleet:
        batch = fleet.reset(seed=2)
        rngs = [np.random.default_rng(slot) for slot in range(3)]
        for _ in range(30):
            acting = batch.action_mask["guard"].any(axis=2)
            assert (acting == batch.active[:, list(fleet.groups[1].indices)]).all()
            batch = fleet.step(joint(fleet, draw(fleet, batch, rngs)))
            assert (batch.state[:, 1] == batch.active.sum(axis=1)).all()
            assert (batch.final_state[batch.ended, 0] == batch.length[batch.ended]).all()
