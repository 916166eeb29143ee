"""Both implementations of CAGE 2 against recordings, against each other, and against known returns."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest

import envfleet as ef
from envfleet.envs.cage2 import Cage2Env, NativeCage2Env
from envfleet.envs.cage2.red_agents import RED_NAMES
from envfleet.envs.cage2.scenario import NUM_ACTIONS
from envfleet.envs.cage2.verify import main as verify
from tests.support.cage2 import GOLDEN, careful_blue, recordings

#: red, blue -> mean return of 100 steps and its standard deviation, from 40,000 episodes.
RETURNS = {
    ("bline", "sleep"): (-1134.8, 20),
    ("bline", "uniform"): (-744.9, 353),
    ("meander", "sleep"): (-972.1, 70),
    ("meander", "uniform"): (-580.7, 287),
    ("sleep", "sleep"): (0.0, 0),
    ("sleep", "uniform"): (-8.97, 2.9),
}
NUM_IN_TABLE = 40_000


def test_all_recorded_episodes_are_as_recorded(capsys):
    assert verify([str(recordings())]) == 0
    assert capsys.readouterr().out == (
        "python: 131 episodes, 13100 steps, 0 differences\nnative: 131 episodes, 13100 steps, 0 differences\n"
    )


def test_golden_episodes_are_as_recorded(capsys):
    assert verify([str(GOLDEN)]) == 0
    assert "native: 12 episodes, 720 steps, 0 differences" in capsys.readouterr().out


@pytest.mark.parametrize("implementation", ["python", "native"])
def test_a_changed_recording_is_found(tmp_path, capsys, implementation):
    content = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    content["episodes"][1]["r"][7] -= 0.1
    changed = tmp_path / "changed.json.gz"
    changed.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert verify([str(changed), "--implementation", implementation]) == 1
    said = capsys.readouterr().out
    assert f"{implementation}: episode 1, step 7" in said and f"{implementation}: 12 episodes, 720 steps, 1 differences" in said
    assert verify([str(changed), "-n", "1", "--implementation", implementation]) == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"plain text", "not a whole gzipped JSON file"),
        (GOLDEN.read_bytes()[:3000], "not a whole gzipped JSON file"),
        (gzip.compress(b'{"meta": {}}'), "has no 'hosts'"),
        (gzip.compress(b"[1, 2]"), "not a recording of CAGE 2 episodes"),
    ],
)
def test_a_damaged_recording_is_an_error_that_says_so(tmp_path, capsys, content, said):
    damaged = tmp_path / "damaged.json.gz"
    damaged.write_bytes(content)
    assert verify([str(damaged)]) == 2
    assert said in capsys.readouterr().err


def test_a_recording_that_is_not_there_is_an_error(tmp_path, capsys):
    assert verify([str(tmp_path / "none.json.gz")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err


def test_a_recording_with_an_action_that_does_not_exist_is_refused(tmp_path, capsys):
    content = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    content["episodes"][0]["a"][0] = 145
    wrong = tmp_path / "wrong.json.gz"
    wrong.write_bytes(gzip.compress(json.dumps(content).encode()))
    assert verify([str(wrong)]) == 2
    assert "episode 0 has an action that does not exist" in capsys.readouterr().err


def assert_equal_episodes(red, green, rule, blue, num_episodes):
    python, native = (kind(red, green, 100, rule) for kind in (Cage2Env, NativeCage2Env))
    rng = np.random.default_rng(7)
    for episode in range(num_episodes):
        seed = episode if episode % 2 == 0 else None  # every other episode goes on with the stream of the one before
        first = python.reset(seed=seed)[0], native.reset(seed=seed)[0]
        assert not first[0].any() and not first[1].any()
        truncated = False
        while not truncated:
            action = {"sleep": lambda: 0, "uniform": lambda: int(rng.integers(NUM_ACTIONS))}.get(
                blue, lambda: careful_blue(rng, python.state())
            )()
            seen, reward, _, truncated, _ = python.step(action)
            seen_native, *others = native.step(action)
            assert np.array_equal(seen, seen_native) and others == [reward, False, truncated, {}]
            assert python.state() == native.state()


@pytest.mark.parametrize("rule", ["strict", "source"])
@pytest.mark.parametrize("blue", ["sleep", "uniform", "careful"])
@pytest.mark.parametrize("green", ["sleep", "active"])
@pytest.mark.parametrize("red", RED_NAMES)
def test_the_same_seed_gives_the_same_episodes(red, green, blue, rule):
    assert_equal_episodes(red, green, rule, blue, num_episodes=6)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("blue", ["sleep", "uniform", "careful"])
@pytest.mark.parametrize("green", ["sleep", "active"])
@pytest.mark.parametrize("red", RED_NAMES)
def test_the_same_seed_gives_the_same_200_episodes(red, green, blue):
    assert_equal_episodes(red, green, "strict", blue, num_episodes=200)


def returns(red, blue, backend, num_envs, num_episodes):
    """The returns of so many episodes of 100 steps."""
    rng = np.random.default_rng(11)
    found = []
    with ef.make(
        "cage2", num_envs, backend=backend, env_kwargs={"red_agent": red}, num_workers=1 if backend == "native" else None
    ) as fleet:
        fleet.reset(seed=5)
        while len(found) * num_envs < num_episodes:
            for _ in range(100):
                actions = rng.integers(NUM_ACTIONS, size=num_envs) if blue == "uniform" else np.zeros(num_envs, np.int64)
                batch = fleet.step(actions)
            assert batch.truncated.all()
            found.append(batch.ep_return)
    return np.concatenate(found)


@pytest.mark.parametrize(("red", "blue"), RETURNS)
@pytest.mark.parametrize(
    ("backend", "num_envs", "num_episodes"),
    [pytest.param("native", 1000, 40_000, marks=pytest.mark.full), ("native", 1000, 4_000), ("serial", 20, 100)],
)
def test_mean_returns_are_those_of_the_original(red, blue, backend, num_envs, num_episodes):
    found, (mean, sd) = returns(red, blue, backend, num_envs, num_episodes), RETURNS[red, blue]
    standard_error = sd * math.sqrt(1 / len(found) + 1 / NUM_IN_TABLE)
    # The table has one decimal, so half of it is added.
    assert len(found) == num_episodes and abs(found.mean() - mean) <= 3 * standard_error + 0.05
