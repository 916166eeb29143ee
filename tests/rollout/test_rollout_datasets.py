import datetime
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass

import numpy as np
import pytest

from envfleet.errors import BadArgument, FleetClosed, FolderBusy
from envfleet.rollout import DatasetError, DatasetWriter, ParallelEnvironmentExecutor, Rollout, Rollouts, iter_rollouts
from tests.support.dataset_files import full_episode as make
from tests.support.rollout_clients import Counter, stay
from tests.support.system import child_env

pytest.importorskip("pyarrow")


def assert_equal(a, b):
    assert a.digest() == b.digest()
    for name in ("env_name", "seed", "task", "slot", "episode", "infos", "reset_info", "wall_s", "attempts"):
        assert getattr(a, name) == getattr(b, name), name
    for name in ("policy_version", "step_latencies", "terminated", "truncated"):
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert a.extras.keys() == b.extras.keys()
    assert all(np.array_equal(a.extras[k], b.extras[k]) for k in a.extras)


def test_parquet_round_trip_of_everything(tmp_path):
    rollouts = Rollouts(make(i, length=1 + i % 5) for i in range(25))
    rollouts.save(tmp_path / "data", shard_episodes=10)
    assert sorted(p.name for p in (tmp_path / "data").glob("shard*")) == [f"shard-0000{i}.parquet" for i in range(3)]
    loaded = Rollouts.load(tmp_path / "data")
    assert len(loaded) == 25
    for before, after in zip(rollouts, loaded):
        assert_equal(before, after)
    assert loaded.stats().mean_return == rollouts.stats().mean_return


def test_parquet_opens_in_pandas(tmp_path):
    pandas = pytest.importorskip("pandas")
    Rollouts(make(i) for i in range(5)).save(tmp_path)
    frame = pandas.read_parquet(tmp_path)
    assert frame["id"].tolist() == list(range(5)) and frame["episode_length"].tolist() == [4] * 5
    assert np.stack(frame["observations/pose/0"][0]).shape == (5, 2)


def test_objects_and_texts_travel_as_json(tmp_path):
    @dataclass
    class Board:
        cells: list
        note: str

    text = Rollout(observations=["go", "stop"], actions=["left"], rewards=[1], terminated=[True], truncated=[False])
    Rollouts([text]).save(tmp_path / "text")
    (loaded,) = Rollouts.load(tmp_path / "text")
    assert loaded.observations.tolist() == ["go", "stop"] and loaded.actions.tolist() == ["left"]
    boards = [Board([1, 2], "x"), Board([3], "y")]
    board = Rollout(observations=boards, actions=[0], rewards=[1], terminated=[True], truncated=[False])
    Rollouts([board, board]).save(tmp_path / "board")
    loaded = Rollouts.load(tmp_path / "board")
    assert len(loaded) == 2 and loaded[0].observations[1] == {"cells": [3], "note": "y"}


def test_failed_rollouts_keep_their_error_and_partial_data(tmp_path):
    clients = [Counter(3, fail_at=-1), Counter(3, fail_at=0), Counter(3, fail_at=2), Counter(3)]
    with ParallelEnvironmentExecutor(on_error="skip") as executor:
        rollouts = executor.collect_rollouts(clients, stay)
    rollouts[1].observations.clear()  # as when reset() itself had failed
    Rollouts([rollouts[1], *rollouts[:1], *rollouts[2:]]).save(tmp_path)
    loaded = Rollouts.load(tmp_path)
    assert [len(r) for r in loaded] == [3, 0, 2, 3] and [r.failed for r in loaded] == [False, True, True, False]
    assert "the motor burnt out" in str(loaded[2].error)
    assert loaded.stats().num_failed == 2
    Rollouts([rollouts[1]]).save(tmp_path / "nothing_but_failures")
    assert len(Rollouts.load(tmp_path / "nothing_but_failures")) == 1


def test_every_added_episode_survives_a_torn_write(tmp_path):
    writer = DatasetWriter(tmp_path)
    for i in range(5):
        writer.add(make(i))
    (tail,) = tmp_path.glob("_tail-*")
    five = tail.read_bytes()
    writer.add(make(5))
    six = tail.read_bytes()
    assert len(list(iter_rollouts(tmp_path))) == 6  # readable while being written
    writer._lock.close()  # this writer is dead now
    for end in range(len(five), len(six), 37):
        tail.write_bytes(five + six[len(five) : end])  # killed while it wrote the sixth: it was not committed
        assert [rollout.episode for rollout in iter_rollouts(tmp_path)] == list(range(5))
    with DatasetWriter(tmp_path, resume=True) as again:
        assert again.ids == set(range(5))
        again.add(make(5))
    loaded = Rollouts.load(tmp_path)
    for i, rollout in enumerate(loaded):
        assert_equal(rollout, make(i))
    assert len(loaded) == 6 and not list(tmp_path.glob("_tail-*"))


def test_a_kill_between_renaming_and_deleting_makes_no_duplicates(tmp_path):
    with DatasetWriter(tmp_path) as writer:
        writer.add(make(0))
        (tail,) = tmp_path.glob("_tail-*")
        copy = tail.read_bytes()
    tail.write_bytes(copy)
    assert len(Rollouts.load(tmp_path)) == 1
    with DatasetWriter(tmp_path, resume=True) as writer:
        assert writer.ids == {0}
    assert len(Rollouts.load(tmp_path)) == 1 and not tail.exists()


def test_sigkill_loses_at_most_the_episode_being_written(tmp_path):
    script = textwrap.dedent(
        f"""
        from tests.support.dataset_files import full_episode as make
        from envfleet.rollout import DatasetWriter
        writer = DatasetWriter({str(tmp_path)!r}, shard_episodes=7)
        for i in range(10**9):
            writer.add(make(i))
            print(i, flush=True)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], env=child_env(), stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if int(line) >= 40:
            break
    process.send_signal(signal.SIGKILL)
    told = [int(line) for line in process.stdout.read().split()]
    process.wait()
    process.stdout.close()
    last = told[-1] if told else 40
    loaded = Rollouts.load(tmp_path)
    assert [r.episode for r in loaded] == list(range(len(loaded))) and len(loaded) >= last + 1
    assert_equal(loaded[last], make(last))


def test_misuse_is_told(tmp_path):
    run = {"env": "Maze", "seed": 1}
    with DatasetWriter(tmp_path, run=run) as writer:
        writer.add(make(0))
        with pytest.raises(DatasetError, match="episode 0 is already"):
            writer.add(make(0))
        with pytest.raises(FolderBusy, match="another process is writing"):
            DatasetWriter(tmp_path, run=run, resume=True)
        with pytest.raises(DatasetError, match="one kind"):
            writer.add(make(1, extras={}))
        with pytest.raises(DatasetError, match="'actions' has dtype float64"):
            writer.add(make(1, actions=np.ones(4)))
    with pytest.raises(FleetClosed):
        writer.add(make(1))
    with pytest.raises(DatasetError, match="already holds a dataset"):
        DatasetWriter(tmp_path, run=run)
    with pytest.raises(DatasetError, match="seed: 1 then, 2 now"):
        DatasetWriter(tmp_path, run={**run, "seed": 2}, resume=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetError, match="holds neither"):
        Rollouts.load(tmp_path / "empty")
    with pytest.raises(BadArgument, match="format"):
        Rollouts([make(0)]).save(tmp_path / "x", format="csv")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (b"abc", "bytes"),
        (1j, "complex"),
        (np.array([1j]), "complex"),
        (datetime.datetime(2020, 1, 1), "datetime"),
        (np.datetime64("2020-01-01", "ns"), "datetime64"),
        ({1: "a"}, "the key 1 is of type int"),
        (object(), "of type object"),
    ],
)
@pytest.mark.parametrize("where", ["infos", "reset_info", "task", "observations"])
def test_what_would_be_read_back_as_text_is_refused(tmp_path, value, what, where):
    odd = {"infos": [{"deep": [value]}] * 4, "reset_info": {"deep": value}, "task": value, "observations": [[value, "x"]] * 5}
    with DatasetWriter(tmp_path) as writer:
        with pytest.raises(DatasetError, match=what):
            writer.add(make(0, **{where: odd[where]}))
        assert not writer.ids


def test_keys_of_observations_that_are_not_text_are_refused(tmp_path):
    with DatasetWriter(tmp_path) as writer, pytest.raises(DatasetError, match="observations has the key 7"):
        writer.add(make(0, observations=[{7: 1.0}] * 5))


def test_minari_round_trip(tmp_path):
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    from gymnasium import spaces

    pose = spaces.Tuple((spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(2)))
    space = spaces.Dict({"image": spaces.Box(0, 255, (3, 2), np.uint8), "pose": pose})
    rollouts = Rollouts(make(i, length=2 + i) for i in range(4))
    options = {"dataset_id": "maze/random-v0", "observation_space": space, "action_space": spaces.Discrete(4)}
    rollouts.save(tmp_path, format="minari", **options)
    loaded = Rollouts.load(tmp_path)
    for before, after in zip(rollouts, loaded):
        assert_equal(before, after)
    dataset = minari.MinariDataset(tmp_path / "maze" / "random-v0" / "data")  # Minari itself agrees
    assert dataset.total_episodes == 4 and dataset.total_steps == sum(len(r) for r in rollouts)
    assert dataset[1].observations["image"].shape == (4, 3, 2)
    with pytest.raises(BadArgument, match="observation_space"):
        rollouts.save(tmp_path / "b", format="minari")


@pytest.mark.full
def test_ten_thousand_episodes_of_32_environments_reload_equal(tmp_path):
    import envfleet as ef
    from envfleet.rollout import Collector

    hashes = []
    with ef.make("CartPole-v1", num_envs=32, backend="shm", num_workers=2) as fleet, DatasetWriter(tmp_path) as writer:
        for rollout in Collector(fleet, random_actions=True, seed=0, mode="async").episodes(10_000):
            hashes.append(rollout.digest())
            writer.add(rollout)
    assert [rollout.digest() for rollout in iter_rollouts(tmp_path)] == hashes and len(set(hashes)) == 10_000


def test_two_parts_with_one_column_name_are_refused(tmp_path):
    episode = make(0)
    length = len(episode.rewards)
    episode.observations = {"a/b": np.zeros(length + 1), "a": {"b": np.ones(length + 1)}}
    with DatasetWriter(tmp_path / "data") as writer, pytest.raises(DatasetError, match="the same column name"):
        writer.add(episode)
