"""PettingZoo environments in the fleet: rows, masks, credit and ends, on every backend."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.testing import Stream

pytest.importorskip("pettingzoo")

from tests.support.agent_loops import Crowd, by_agent, crowd_aec, draw, joint, plain_aec, plain_parallel

BACKENDS = {
    "serial": {},
    "thread": {"num_workers": 3},
    "aio": {"num_workers": 3},
    "pipe": {"num_workers": 2, "start_method": "fork"},
    "shm": {"num_workers": 2, "start_method": "fork"},
}


def start(env: Any, count: int, backend: str, **options: Any) -> ef.Fleet:
    return ef.make(env, count, backend=backend, **BACKENDS[backend], **options)


def same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return all(same(got[key], value) for key, value in wanted.items())
    return got.dtype == wanted.dtype and got.tobytes() == np.ascontiguousarray(wanted).tobytes()


def zero(value: Any) -> bool:
    return not any(v.any() for v in value.values()) if isinstance(value, dict) else not np.any(value)


@pytest.mark.parametrize("mixed", [False, True], ids=["one group", "two groups"])
def test_births_and_deaths_are_those_of_a_plain_loop(mixed: bool) -> None:
    """64 envs: every byte of every row is what PettingZoo's own loop gives; masks count the living."""
    make, steps, count = functools.partial(Crowd, mixed=mixed), 40, 64
    table = np.random.default_rng(5).integers(0, 3, (steps, count, 4))
    wanted = [plain_parallel(make(), lambda t, s=slot: table[t, s], steps, seed=9 + slot) for slot in range(count)]
    with start(make, count, "serial") as fleet:
        batches = [fleet.reset(seed=9)] + [fleet.step(joint(fleet, table[t])) for t in range(steps)]
        agents, totals = list(fleet.agents), np.zeros((count, 4))
        assert agents == make().possible_agents and fleet.num_agents == 4
        for t, batch in enumerate(batches):
            assert batch.reward.dtype == np.float64 and batch.terminated.dtype == batch.truncated.dtype == bool
            assert batch.active.sum() == sum(len(rows[t]["active"]) for rows in wanted)
            assert np.isfinite(batch.reward).all() and np.isfinite(batch.ep_return).all()
            final = batch.final_obs
            for slot in range(count):
                row = wanted[slot][t]
                seen, ends = by_agent(fleet, batch.obs, slot), by_agent(fleet, final, slot)
                assert batch.ended[slot] == row["ended"]
                for i, agent in enumerate(agents):
                    assert batch.active[slot, i] == (agent in row["active"])
                    assert same(seen[i], row["obs"][agent]) if batch.active[slot, i] else zero(seen[i])
                    told = row["scored"].get(agent, (0.0, False, False))
                    assert batch.scored[slot, i] == (agent in row["scored"])
                    mine = (batch.reward[slot, i], batch.terminated[slot, i], batch.truncated[slot, i])
                    assert mine == told
                    assert same(ends[i], row["final"][agent]) if agent in row["final"] else zero(ends[i])
                # What a newborn is greeted with is nobody's reward, but belongs to the return.
                totals[slot] += [row["earned"].get(agent, 0.0) for agent in agents]
                assert (batch.ep_return[slot] == totals[slot]).all()
                if batch.ended[slot]:
                    totals[slot] = 0.0


@pytest.mark.parametrize("env", [Crowd, functools.partial(Crowd, mixed=True), crowd_aec], ids=["one", "mixed", "aec"])
def test_every_backend_gives_the_same_bytes(env: Any) -> None:
    for on_end, count, steps in (("reset", 64, 15), ("wait", 6, 30)):
        digests = set()
        for backend in BACKENDS:
            with start(env, count, backend, on_end=on_end, with_state=True) as fleet:
                rngs = [np.random.default_rng(slot) for slot in range(count)]
                stream, batch = Stream(), fleet.reset(seed=3)
                for _ in range(steps):
                    stream.add(batch)
                    batch = fleet.step(joint(fleet, draw(fleet, batch, rngs)))
                stream.add(batch)
                digests.add(stream.digest())
        assert len(digests) == 1


def transitions(fleet: Any, num_sends: int, choose: Any, seed: int) -> list[list[tuple[Any, ...]]]:
    """Per slot: (agent, action, reward, terminated, truncated) in the order in which they closed, agents in order."""
    made: list[list[tuple[Any, ...]]] = [[] for _ in range(fleet.num_envs)]
    opened: list[dict[int, Any]] = [{} for _ in range(fleet.num_envs)]
    batch = fleet.reset(seed=seed)
    for n in range(num_sends):
        actions = choose(n)
        for slot in range(fleet.num_envs):
            for i in np.flatnonzero(batch.active[slot]).tolist():
                opened[slot][i] = actions[slot, i]
        batch = fleet.step(joint(fleet, actions))
        for slot in range(fleet.num_envs):
            for i in np.flatnonzero(batch.scored[slot]).tolist():
                flags = bool(batch.terminated[slot, i]), bool(batch.truncated[slot, i])
                made[slot].append((fleet.agents[i], opened[slot].pop(i), batch.reward[slot, i], *flags))
            if batch.ended[slot]:
                assert not opened[slot]  # every transition of the episode was closed
    return made


def test_the_aec_twin_makes_the_transitions_of_the_parallel_env() -> None:
    """The action depends on the agent and the cycle alone, so that both walk the same way through the same crowd."""
    kinds = dict(num_agents=4, max_cycles=9, death=0.1)
    with start(functools.partial(Crowd, **kinds), 6, "serial") as fleet:
        parallel = transitions(fleet, 60, lambda n: np.tile([0, 1, 2, 3], (6, 1)), seed=4)
    with start(functools.partial(crowd_aec, **kinds), 6, "serial") as fleet:
        turns = transitions(fleet, 150, lambda n: np.tile([0, 1, 2, 3], (6, 1)), seed=4)
    for slot in range(6):
        for agent in ("walker_0", "walker_1", "walker_2", "walker_3"):
            one = [row for row in parallel[slot] if row[0] == agent]
            two = [row for row in turns[slot] if row[0] == agent]
            assert len(two) > 10 and two[: len(one)] == one[: len(two)]


def test_an_aec_env_makes_the_transitions_of_its_own_loop() -> None:
    from pettingzoo.classic import tictactoe_v3

    for make in (functools.partial(crowd_aec, num_agents=3), tictactoe_v3.env):
        probe = make()
        size = probe.action_space(probe.possible_agents[0]).n
        table = np.random.default_rng(1).integers(0, size, (120, 4, len(probe.possible_agents)))
        with start(make, 4, "serial") as fleet:
            got = transitions(fleet, 120, lambda n, table=table: table[n], seed=2)
        for slot in range(4):
            wanted = plain_aec(make(), lambda n, s=slot, table=table: table[n, s], 120, seed=2 + slot)
            assert sorted(got[slot], key=repr) == sorted(wanted, key=repr)


def play(fleet: Any, num_games: int, seed: int) -> int:
    """Play two-player zero-sum games with random legal moves; every game's end is checked. Gives the number played."""
    rng, batch, games = np.random.default_rng(seed), fleet.reset(seed=seed), 0
    while games < num_games:
        assert (batch.active.sum(axis=1) == 1).all()
        assert (batch.action_mask.any(axis=2) == batch.active).all()  # the one to move has a move; nobody else has
        batch = fleet.step((rng.random(batch.action_mask.shape) * batch.action_mask).argmax(axis=2))
        for row in np.flatnonzero(batch.ended):
            games += 1
            assert batch.scored[row].all() and batch.terminated[row].all()
            assert batch.reward[row].sum() == 0.0 and set(batch.reward[row]) in ({1.0, -1.0}, {0.0})
            assert (batch.ep_return[row] == batch.reward[row]).all()  # no illegal move was punished on the way
            assert batch.length[row] >= 5
        going = ~batch.ended
        assert (batch.reward[going] == 0.0).all() and not (batch.terminated | batch.truncated)[going].any()
    return games


def test_zero_sum_is_credited_to_both_players() -> None:
    from pettingzoo.classic import connect_four_v3, tictactoe_v3

    with start(connect_four_v3.env, 16, "shm") as fleet:
        assert play(fleet, 300, seed=0) >= 300
    with start(tictactoe_v3.raw_env, 8, "serial") as fleet:
        assert play(fleet, 300, seed=1) >= 300


@pytest.mark.full
def test_ten_thousand_games_of_connect_four() -> None:
    from pettingzoo.classic import connect_four_v3

    with start(connect_four_v3.env, 64, "shm") as fleet:
        assert play(fleet, 10_000, seed=2) >= 10_000


def test_third_party_environments_run() -> None:
    from pettingzoo.classic import rps_v2

    with start(functools.partial(rps_v2.env, max_cycles=5), 3, "serial") as fleet:
        batch = fleet.reset(seed=0)
        for _ in range(22):
            batch = fleet.step(np.tile([0, 1], (3, 1)))  # rock against paper
            if batch.ended.any():
                assert batch.truncated.all() and batch.ep_return[0].tolist() == [-5.0, 5.0]
        assert batch.episode[0] == 2
    pytest.importorskip("mpe2")
    from mpe2 import simple_push_v3, simple_spread_v3

    with start(simple_spread_v3.parallel_env, 4, "shm") as fleet:
        fleet.reset(seed=0)
        rows = [fleet.step(np.full((4, 3), n % 5)) for n in range(26)]
        assert rows[24].ended.all() and rows[24].truncated.all() and not rows[25].ended.any()
        assert rows[0].obs.shape == (4, 3, 18) and rows[24].final_obs.any(axis=2).all()
    with start(simple_push_v3.parallel_env, 2, "shm", with_state=True) as fleet:
        batch = fleet.reset(seed=0)
        assert [group.name for group in fleet.groups] == ["adversary", "agent"]
        batch = fleet.step({"adversary": [[0], [1]], "agent": [[2], [3]]})
        assert {name: value.shape for name, value in batch.obs.items()} == {"adversary": (2, 1, 8), "agent": (2, 1, 19)}
        assert batch.state.shape == (2, 27) and batch.scored.all()


@pytest.mark.parametrize("env", [Crowd, crowd_aec])
def test_ends_by_truncation_alone_have_a_final_observation(env: Any) -> None:
    with start(functools.partial(env, num_agents=3, death=0.0, birth=0.0, max_cycles=4), 5, "serial") as fleet:
        batch, ends = fleet.reset(seed=0), 0
        for _ in range(60):
            batch = fleet.step(np.ones((5, 3), int))
            ends += int(batch.truncated.sum())
            assert not batch.terminated.any() and (batch.truncated.any(axis=1) == batch.ended).all()
            last = batch.final_obs[batch.truncated]
            assert (last[:, 0] == 4.0).all() and (last[:, 2] == 1.0).all()  # time, and the action it saw last
            assert (batch.obs[batch.active][:, 0] < 4.0).all()
        assert ends >= 5 * 3 * 5
