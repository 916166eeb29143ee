"""What RLlib is given, without RLlib: rows of a fleet in NextStep, faults, seeds, `env_config`, refusals."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.adapters.rllib_env import FleetEnv, fleet_env
from envfleet.errors import BadArgument, EnvFailed, FleetClosed, NotPicklable
from envfleet.util.trees import as_columns, tree_leaves
from tests.support.counting_envs import Counting, counting_from_mapping
from tests.support.system import child_env


def rows_of(fails: tuple[tuple[int, int], ...], steps: int, num_envs: int = 3, **options: Any) -> tuple[list[Any], FleetEnv]:
    """(obs, reward, terminated, truncated, faulted) of every step after the reset."""
    build = fleet_env(Counting.start_counting(), backend="serial", **options)
    envs = build({"num_envs": num_envs, "fails": fails})
    rows: list[Any] = [(envs.reset(seed=0)[0], None, None, None, None)]
    for _ in range(steps):
        obs, reward, terminated, truncated, infos = envs.step([0] * num_envs)
        rows.append((obs, reward, terminated, truncated, infos.get("envfleet.fault", np.zeros(num_envs, bool))))
    return rows, envs


def test_a_step_that_fails_ends_its_episode_truncated_and_the_next_row_is_the_first_of_the_restarted_environment() -> None:
    rows, envs = rows_of(((1, 3),), 6)
    obs = [row[0][1].tolist() for row in rows]
    # Instance 1 fails in its third step; instance 3 takes its place.
    assert obs == [[1, 0, 0], [1, 0, 1], [1, 0, 2], [1, 0, 2], [3, 0, 0], [3, 0, 1], [3, 0, 2]]
    assert [bool(row[3][1]) for row in rows[1:]] == [False, False, True, False, False, False]
    assert not any(row[2][1] for row in rows[1:])
    assert [row[1][1] for row in rows[1:]] == [1, 1, 0, 0, 1, 1]
    assert [bool(row[4][1]) for row in rows[1:]] == [False, False, True, False, False, False]
    assert [fault.slot for fault in envs.faults()] == [1]
    envs.close()


def test_the_other_slots_do_not_notice_a_fault() -> None:
    broken, one = rows_of(((1, 3), (3, 7)), 20)
    whole, two = rows_of((), 20)
    for ours, theirs in zip(broken[1:], whole[1:]):
        for slot in (0, 2):
            for column in range(4):
                assert np.array_equal(ours[column][slot], theirs[column][slot])
    one.close(), two.close()


def test_the_row_after_an_end_is_a_reset_row_and_its_action_is_not_used() -> None:
    rows, envs = rows_of((), 7, num_envs=1)
    assert [row[0][0].tolist()[1:] for row in rows] == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4], [0, 5], [1, 0], [1, 1]]
    assert [bool(row[2][0]) for row in rows[1:]] == [False] * 4 + [True] + [False] * 2
    envs.close()


def test_with_one_slot_a_fault_holds_all_slots_for_a_step() -> None:
    rows, envs = rows_of(((0, 2),), 4, num_envs=1)
    assert [row[0][0].tolist() for row in rows] == [[0, 0, 0], [0, 0, 1], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    assert [bool(row[3][0]) for row in rows[1:]] == [False, True, False, False]
    envs.close()


def test_a_reset_that_fails_is_a_reset_row_of_the_restarted_environment() -> None:
    rows, envs = rows_of(((1, 0),), 2)
    assert [row[0][1].tolist() for row in rows] == [[3, 0, 0], [3, 0, 1], [3, 0, 2]]
    assert [fault.phase for fault in envs.faults()] == ["reset"]
    assert not any(row[3].any() for row in rows[1:])
    envs.close()


def test_a_quarantined_slot_raises_its_fault() -> None:
    fails = tuple((instance, 1) for instance in range(1, 30))
    with pytest.raises(EnvFailed, match="no step today") as raised:
        rows_of(fails, 20, num_envs=2, max_restarts=1)
    assert "quarantined" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("shape", ["box", "discrete", "dict", "tuple"])
def test_the_last_good_observation_of_every_kind_of_space(shape: str) -> None:
    Counting.start_counting()
    envs = fleet_env(Counting, backend="serial")({"num_envs": 2, "shape": shape, "fails": ((1, 3),)})
    seen = [envs.reset(seed=0)[0]] + [envs.step([0, 0])[0] for _ in range(4)]
    leaves = [[leaf for _, leaf in tree_leaves(as_columns(envs.single_observation_space, obs))] for obs in seen]
    for before, at_fault, after in zip(leaves[2], leaves[3], leaves[4]):
        assert np.array_equal(before[1], at_fault[1])
        assert not np.array_equal(at_fault[1], after[1])
        assert not np.array_equal(before[0], at_fault[0])
    envs.close()


@pytest.mark.parametrize("given", [{"autoreset_mode": "SameStep"}, {"on_end": "reset"}, {"autoreset_mode": "Disabled"}])
def test_same_step_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(BadArgument, match="RLlib assumes NextStep"):
        fleet_env("CartPole-v1", **given)
    with pytest.raises(BadArgument, match="RLlib assumes NextStep"):
        fleet_env("CartPole-v1", backend="serial")({"num_envs": 1, **given})


def test_a_fleet_in_same_step_is_refused_and_closed() -> None:
    fleet = ef.make("CartPole-v1", 2, backend="serial", on_end="reset")
    with pytest.raises(BadArgument, match="SameStep"):
        FleetEnv(fleet)
    with pytest.raises(FleetClosed):
        fleet.reset()


def test_one_environment_is_not_a_fleet() -> None:
    with pytest.raises(BadArgument, match='gym_env_vectorize_mode="vector_entry_point"'):
        fleet_env("CartPole-v1")({})


def test_recipes_that_cannot_be_built_in_a_runner_are_refused_at_once() -> None:
    lock = threading.Lock()
    with pytest.raises(NotPicklable, match="lock"):
        fleet_env(lambda: (lock, gym.make("CartPole-v1"))[1])
    with pytest.raises(BadArgument, match="every env runner builds its own"):
        with ef.make("CartPole-v1", 1, backend="serial") as fleet:
            fleet_env(fleet)
    with pytest.raises(BadArgument, match="give one callable"):
        fleet_env([Counting, Counting])
    with pytest.raises(BadArgument, match="environment object"):
        fleet_env(gym.make("CartPole-v1"))
    with pytest.raises(BadArgument, match="unknown environment"):
        fleet_env("NoSuchEnvironment-v0")
    with pytest.raises(BadArgument, match="did you mean backend"):
        fleet_env("CartPole-v1", backed="serial")
    with pytest.raises(BadArgument, match="choose 'streams' or 'gymnasium'"):
        fleet_env("CartPole-v1", seeds="same")


def test_environments_with_many_agents_are_refused() -> None:
    spread = pytest.importorskip("mpe2.simple_spread_v3")
    with pytest.raises(BadArgument, match="many agents"):
        fleet_env(spread.parallel_env())
    with pytest.raises(BadArgument, match="many agents"):
        fleet_env(spread.parallel_env, backend="serial")({"num_envs": 1})


def test_env_config_reaches_the_environment_however_it_takes_its_arguments() -> None:
    Counting.start_counting()
    for build in (Counting, counting_from_mapping):
        envs = fleet_env(build)({"num_envs": 2, "length": 7, "backend": "serial"})
        assert envs.get_attr("length") == (7, 7)
        assert envs.fleet.plan.backend == "serial"
        envs.close()
    envs = fleet_env("CartPole-v1", backend="thread", env_kwargs={"render_mode": "rgb_array"})(
        {"num_envs": 2, "backend": "serial", "sutton_barto_reward": True}
    )
    assert envs.fleet.plan.backend == "serial"
    assert envs.envs[0].unwrapped._sutton_barto_reward and envs.envs[0].render_mode == "rgb_array"
    envs.close()
    with pytest.raises(BadArgument, match="did you mean length"):
        fleet_env(Counting)({"num_envs": 2, "lenght": 7})


def test_the_creator_travels_with_ids_that_only_this_process_knows() -> None:
    gym.register("OnlyHere-v0", entry_point=Counting)
    try:
        blob = cloudpickle.dumps(fleet_env("OnlyHere-v0", backend="serial"))
    finally:
        del gym.registry["OnlyHere-v0"]
    envs = pickle.loads(blob)({"num_envs": 2})
    assert envs.reset(seed=0)[0].shape == (2, 3)
    envs.close()
    gym.registry.pop("OnlyHere-v0", None)


def first_observations(seeds: Any, runner_seed: int) -> list[bytes]:
    envs = fleet_env("CartPole-v1", backend="serial", seeds=seeds)({"num_envs": 4})
    obs = envs.reset(seed=runner_seed)[0]
    envs.close()
    return [row.tobytes() for row in obs]


def test_no_two_slots_of_two_runners_share_a_seed() -> None:
    # RLlib gives runner w the seed `seed + w`.
    assert len({*first_observations("streams", 7), *first_observations("streams", 8)}) == 8
    assert len({*first_observations("gymnasium", 7), *first_observations("gymnasium", 8)}) == 5


def test_gymnasium_seeds_are_those_of_a_sync_vector_env() -> None:
    theirs = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * 4)
    assert first_observations("gymnasium", 7) == [row.tobytes() for row in theirs.reset(seed=7)[0]]
    theirs.close()


def test_without_ray_the_error_names_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None\nimport envfleet\nenvfleet.adapters.rllib"
    done = subprocess.run([sys.executable, "-c", code], env=child_env(), capture_output=True, text=True, timeout=60)
    assert 'pip install "envfleet[rllib]"' in done.stderr


def test_importing_envfleet_does_not_import_ray() -> None:
    code = "import sys, envfleet; from envfleet.adapters import rllib_env; assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=child_env(), check=True, timeout=60)
