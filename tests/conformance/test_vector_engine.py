"""Gymnasium's vectorised environments as slots of a fleet, with the same engine as oracle; and what every engine refuses."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.errors import BadArgument, EnvFailed, FleetClosed
from envfleet.slots.layout import FAULT, QUARANTINED, READY
from tests.support.vector_envs import Counters, counters


def fleet_of(num_envs: int = 3, mode: str = "SameStep", **options: Any) -> Any:
    return ef.make(counters(mode=mode), num_envs, backend="vector", **options)


def test_rows_are_those_of_gymnasiums_vector_env_to_the_bit() -> None:
    oracle = gym.make_vec("CartPole-v1", 5, vectorization_mode="vector_entry_point")
    obs, _ = oracle.reset(seed=3)
    over, total, rng = np.zeros(5, bool), np.zeros(5), np.random.default_rng(0)
    with ef.make("CartPole-v1", 5, backend="vector") as fleet:
        assert fleet.on_end == "wait" and "vector" in str(fleet.plan) and "one seed" in str(fleet.plan)
        first = fleet.reset(seed=3)
        assert first.obs.tobytes() == obs.tobytes() and first.seed.tolist() == [3, 4, 5, 6, 7]
        for _ in range(120):
            actions = rng.integers(0, 2, 5)
            obs, reward, terminated, truncated, _ = oracle.step(actions)
            batch = fleet.step(actions)
            total = np.where(over, 0.0, total + reward)
            assert batch.obs.tobytes() == obs.tobytes() and batch.reward.tolist() == reward.tolist()
            assert batch.terminated.tolist() == terminated.tolist() and batch.truncated.tolist() == truncated.tolist()
            assert batch.scored.tolist() == (~over).tolist() and ((batch.step == -1) == over).all()
            assert batch.ep_return.tolist() == total.tolist()
            over = terminated | truncated
            assert batch.active.tolist() == (~over).tolist()
            assert batch.final_obs[over].tobytes() == obs[over].tobytes()
        assert batch.episode.min() >= 1
    oracle.close()


def test_ends_of_a_same_step_engine_keep_the_last_observation() -> None:
    with fleet_of(columns={"twice": gym.spaces.Box(0, 999, (), np.int64)}) as fleet:
        fleet.reset(seed=1)
        rows = [fleet.step([1, 2, 3]) for _ in range(6)]
        assert [batch.obs["count"][:, 0].tolist() for batch in rows[:4]] == [[1, 1, 1], [0, 2, 2], [1, 0, 3], [0, 1, 0]]
        assert rows[1].final_obs["count"][0, 0] == 2 and rows[2].final_obs["count"][1, 0] == 3
        assert rows[1].ended.tolist() == [True, False, False] and rows[1].ep_return.tolist() == [2, 4, 6]
        assert (
            rows[2].episode.tolist() == [1, 0, 0] and rows[2].step.tolist() == [0, 2, 2] and rows[2].length.tolist() == [1, 3, 3]
        )
        assert rows[0].twice.tolist() == [2, 2, 2]
        assert rows[0].seed.tolist() == [1, 2, 3] and rows[2].seed.tolist() == [-1, 2, 3]


def test_what_was_received_stays_as_it_was() -> None:
    with fleet_of() as fleet:
        kept = fleet.reset(seed=0)
        before = kept.obs["count"].copy()
        fleet.step([0, 0, 0])
        assert (kept.obs["count"] == before).all()


REFUSED = {
    "partial": (lambda fleet: fleet.send([0], [1]), "does not declare partial sends"),
    "partial reset": (lambda fleet: fleet.reset(slots=[0]), "does not declare partial sends"),
    "seed ahead": (lambda fleet: fleet.assign([0], seeds=[4]), "does not declare seeds per slot"),
    "seeds that do not follow": (lambda fleet: fleet.reset(seed=[1, 1, 1]), "does not declare seeds per slot"),
    "tasks": (lambda fleet: fleet.reset(tasks="hard"), "does not declare tasks"),
    "options": (lambda fleet: fleet.reset(options={"low": 0}), "does not declare options"),
    "call": (lambda fleet: fleet.get_attr("count"), "no environment object per slot"),
    "render": (lambda fleet: fleet.render(), "no environment object per slot"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_declared_is_refused_and_changes_nothing(what: str) -> None:
    use, words = REFUSED[what]
    with fleet_of() as one, fleet_of() as other:
        one.reset(seed=2), other.reset(seed=2)
        with pytest.raises(BadArgument, match=f"vector:Counters-v0.*{words}"):
            use(one)
        for _ in range(4):
            a, b = one.step([1, 1, 1]), other.step([1, 1, 1])
            assert a.obs["luck"].tolist() == b.obs["luck"].tolist() and a.episode.tolist() == b.episode.tolist()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"on_end": "wait"}, "cannot do on_end='wait'"),
        ({"num_workers": 2}, "no threads to choose"),
        ({"wrappers": [lambda env: env]}, "leave out wrappers"),
        ({"start_method": "spawn"}, "leave out start_method"),
        ({"mode": "Disabled"}, "autoreset_mode"),
    ],
)
def test_make_refuses_what_an_engine_cannot_do(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        fleet_of(**options)
    assert Counters.num_open == 0


def test_a_backend_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BadArgument, match="no vector_entry_point"):
        ef.make("Pendulum-v1", 2, backend="vector")
    with pytest.raises(BadArgument, match="needs a name"):
        ef.make("CartPole-v1", 2, backend="jax")
    with pytest.raises(BadArgument, match="run by backend 'envpool', not 'shm'"):
        ef.make("envpool:CartPole-v1", 2, backend="shm")


def test_an_error_of_the_engine_is_a_fault_of_all_slots() -> None:
    with fleet_of() as fleet:
        fleet.reset(seed=5)
        Counters.trouble = {2: ValueError("planted")}
        fleet.step([0, 0, 0])
        with pytest.raises(EnvFailed, match="all 3 slots in one call") as caught:
            fleet.step([1, 2, 3])
        assert isinstance(caught.value.__cause__, ValueError) and caught.value.fault.seed == 5
        assert [fault.slot for fault in fleet.faults] == [0, 1, 2]
        again = fleet.reset(seed=5)
        assert again.status.tolist() == [READY] * 3 and again.seed.tolist() == [5, 6, 7] and Counters.num_open == 1


def test_a_failed_engine_is_rebuilt_and_gives_the_same_rows_in_every_run() -> None:
    def run() -> list[Any]:
        with fleet_of(on_fault="restart", max_restarts=1) as fleet:
            fleet.reset(seed=5)
            Counters.trouble = {3: ValueError("planted")}
            rows = [fleet.step([1, 1, 1]) for _ in range(6)]
        assert rows[2].status.tolist() == [FAULT] * 3 and rows[2].truncated.all() and not rows[2].scored.any()
        assert rows[2].final_obs["count"][:, 0].tolist() == [0, 2, 2] and rows[2].obs["count"][:, 0].tolist() == [0, 0, 0]
        assert rows[3].status.tolist() == [READY] * 3 and rows[3].obs["count"][:, 0].tolist() == [1, 1, 1]
        return [batch.obs["luck"].tolist() for batch in rows]

    assert run() == run()


def test_an_engine_that_fails_too_often_is_quarantined_as_a_whole() -> None:
    with fleet_of(on_fault="restart", max_restarts=1) as fleet:
        fleet.reset(seed=5)
        Counters.trouble = {1: ValueError("one"), 2: ValueError("two")}
        assert fleet.step([0, 0, 0]).status.tolist() == [FAULT] * 3
        assert fleet.step([0, 0, 0]).status.tolist() == [QUARANTINED] * 3
        assert fleet.quarantined.tolist() == [0, 1, 2]


def test_an_interrupt_in_the_engine_reaches_the_caller_and_the_fleet_can_be_reset() -> None:
    with fleet_of() as fleet:
        fleet.reset(seed=5)
        Counters.trouble = {1: KeyboardInterrupt()}
        with pytest.raises(KeyboardInterrupt):
            fleet.step([0, 0, 0])
        batch = fleet.reset(seed=9)
        assert batch.seed.tolist() == [9, 10, 11] and batch.step.tolist() == [-1] * 3
        assert fleet.step([0, 0, 0]).scored.all()


def test_a_result_of_the_wrong_shape_is_a_fault_that_says_so() -> None:
    with ef.make(counters(wrong_shape=True), 3, backend="vector") as fleet:
        with pytest.raises(EnvFailed, match=r"obs\['count'\] has shape \(3, 2\), but 3 slots need \(3, 1\)"):
            fleet.reset(seed=0)


def test_closing_closes_the_engine_once(no_leaks: Any) -> None:
    fleet = fleet_of()
    fleet.reset(seed=0)
    fleet.close()
    fleet.close()
    assert Counters.num_open == 0
    with pytest.raises(FleetClosed):
        fleet.step([0, 0, 0])
    dropped = fleet_of()
    del dropped
    assert Counters.num_open == 0


@pytest.mark.parametrize("seeds", [["a", "b"], [2**70, 2**70 + 1], [0.5, 1.5], -1])
def test_what_is_no_seed_is_refused_before_the_engine_is_asked(seeds: Any) -> None:
    with ef.make("CartPole-v1", 2, backend="vector", on_end="wait") as fleet:
        first = fleet.reset(seed=0).obs
        with pytest.raises(BadArgument, match="give a whole number from 0"):
            fleet.reset(seed=seeds)
        assert np.array_equal(fleet.reset(seed=0).obs, first)
