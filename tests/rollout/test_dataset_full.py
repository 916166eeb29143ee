"""A disk that is full at any byte: what was added stays, nothing else is there, and the writer goes on once there is room."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from envfleet.cli.main import main
from envfleet.errors import DatasetDamaged, DatasetError, WriteFailed
from envfleet.rollout import DatasetWriter, Rollout, Rollouts, iter_rollouts
from envfleet.rollout.datasets.episode_codec import Codec
from envfleet.rollout.datasets.parquet import read_run
from tests.support.dataset_files import episode, everything, killed, numbers_on_disk, resumed
from tests.support.system import child_env, file_limit

pytest.importorskip("pyarrow")
HERE = Path(__file__).parent


def test_the_limit_at_a_hundred_different_bytes(tmp_path):
    size = killed(tmp_path / "whole", 8).stat().st_size
    limits = np.random.default_rng(0).choice(np.arange(1, size), 100, replace=False)
    failures = 0
    for limit in sorted(limits.tolist()):
        place = tmp_path / str(limit)
        added, failed = [], []
        with file_limit(limit):
            writer = DatasetWriter(place)
            for number in range(8):
                try:
                    writer.add(episode(number))
                    added.append(number)
                except WriteFailed:
                    failed.append(number)
            if added or any(place.glob("_tail-*")):
                assert numbers_on_disk(place) == added  # neither less nor more
        assert failed and set(added) == writer.ids
        failures += len(failed)
        for number in failed:  # there is room again
            writer.add(episode(number))
        writer.close()
        assert sorted(numbers_on_disk(place)) == list(range(8)) and not list(place.glob("_tail-*"))
        shutil.rmtree(place)
    assert failures >= 100


def test_a_shard_that_does_not_fit_keeps_its_tail(tmp_path):
    tail = killed(tmp_path / "one", 1).stat().st_size
    resumed(tmp_path / "one")[0].close()
    assert (tmp_path / "one" / "shard-00000.parquet").stat().st_size > tail
    tmp_path = tmp_path / "data"
    writer = DatasetWriter(tmp_path, shard_episodes=1)
    with file_limit(tail):  # a tail with one episode fits, its shard does not
        for number in range(9):
            writer.add(episode(number))
        assert numbers_on_disk(tmp_path) == list(range(9)) and not list(tmp_path.glob("shard-*"))
        with pytest.raises(WriteFailed, match="is safe"):
            writer.close()
    assert numbers_on_disk(tmp_path) == list(range(9)) and not list(tmp_path.glob(".*"))
    again, told = resumed(tmp_path, shard_episodes=1)
    with again:
        assert again.ids == set(range(9)) and not told
        again.add(episode(9))
    assert numbers_on_disk(tmp_path) == list(range(10)) and not list(tmp_path.glob("_tail-*"))


def test_resuming_on_a_full_disk_changes_nothing(tmp_path):
    tail = killed(tmp_path, 6)
    before = tail.read_bytes()
    with file_limit(1000), pytest.raises(WriteFailed):
        DatasetWriter(tmp_path, resume=True)
    assert tail.read_bytes() == before and numbers_on_disk(tmp_path) == list(range(6))
    again, told = resumed(tmp_path)
    again.close()
    assert again.ids == set(range(6)) and not told


def test_episodes_without_a_step_are_on_disk_too(tmp_path):
    def empty(number):
        return Rollout(
            observations=[], actions=[], rewards=[], terminated=[], truncated=[], episode=number, error=DatasetError("x")
        )

    writer = DatasetWriter(tmp_path)
    writer.add(empty(0))
    with file_limit(100), pytest.raises(WriteFailed):
        writer.add(empty(1))
    assert [rollout.episode for rollout in iter_rollouts(tmp_path)] == [0] and writer.ids == {0}
    writer._lock.close()  # killed
    again, told = resumed(tmp_path)
    with again:
        assert again.ids == {0} and not told
        again.add(episode(2))
        assert sorted(rollout.episode for rollout in iter_rollouts(tmp_path)) == [0, 2]
    loaded = {rollout.episode: rollout for rollout in Rollouts.load(tmp_path)}
    assert loaded[0].failed and everything(loaded[2]) == everything(episode(2))
    assert not list(tmp_path.glob("_early-*"))


def test_a_folder_without_an_episode_binds_nobody(tmp_path):
    writer = DatasetWriter(tmp_path, run={"seed": 1})
    writer._open_sink(Codec.of(episode(0)))  # killed right before its first episode
    writer._lock.close()
    with DatasetWriter(tmp_path, run={"seed": 2}) as writer:
        writer.add(episode(0))
    assert read_run(tmp_path) == {"seed": 2} and numbers_on_disk(tmp_path) == [0]


def test_a_removed_tail_is_told(tmp_path):
    writer = DatasetWriter(tmp_path / "data")
    writer.add(episode(0))
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(DatasetDamaged, match="it was removed"):
        writer.add(episode(1))
    writer._lock.close()


def test_a_large_episode_is_written_in_parts(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, bytes(data[:999]), at))  # a system that writes little
    with DatasetWriter(tmp_path) as writer:
        writer.add(episode(0, 500))
    assert numbers_on_disk(tmp_path, 500) == [0]


TMPFS = """
import os, subprocess, sys
import numpy as np
from tests.support.dataset_files import episode, numbers_on_disk
from envfleet.rollout import DatasetWriter
from envfleet.errors import WriteFailed

place = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
from pathlib import Path
import shutil
full = 0
for ballast in range(850_000, 1_040_000, 190_000 // int(sys.argv[2])):
    data, heavy = Path(place) / "data", Path(place) / "ballast"
    heavy.write_bytes(b"x" * ballast)
    writer, added, failed = DatasetWriter(data), [], []
    for number in range(12):
        try:
            writer.add(episode(number, 300))
            added.append(number)
        except WriteFailed:
            failed.append(number)
            if len(failed) == 3:
                assert numbers_on_disk(data, 300) == added
                heavy.unlink()  # somebody makes room
    full += bool(failed)
    assert sorted(numbers_on_disk(data, 300)) == added, (ballast, added, failed)
    heavy.unlink(missing_ok=True)
    for number in failed:
        writer.add(episode(number, 300))
        added.append(number)
    writer.close()
    assert sorted(numbers_on_disk(data, 300)) == sorted(added)
    again = DatasetWriter(data, resume=True)
    assert again.ids == set(added)
    again.close()
    shutil.rmtree(data)
print(full)
"""


def can_mount(place):
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", place], capture_output=True).returncode == 0


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.full)])
def test_a_real_full_disk(tmp_path, count):
    if not can_mount(tmp_path):
        pytest.skip("a small file system cannot be mounted here (not root, or no mount namespaces)")
    words = ["unshare", "-m", sys.executable, "-c", TMPFS, str(tmp_path), str(count)]
    done = subprocess.run(words, env=child_env(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= count * 0.9  # it really was full


# -- the command -----------------------------------------------------------------------------------------------------------


def collect(out, *more, env="CartPole-v1"):
    words = ["--num-envs", "2", "--backend", "serial", "--episodes", "30", *more]
    return main(["collect", env, "--out", str(out), *words])


def test_collect_on_a_full_disk_is_one_line_and_goes_on(tmp_path, capsys):
    with file_limit(20_000):
        assert collect(tmp_path / "a") == 3
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1 and "cannot be written (File too large)" in told[0] and "is safe" in told[0]
    there = len(Rollouts.load(tmp_path / "a"))
    assert 0 < there < 30
    assert collect(tmp_path / "a") == 0
    assert f"{there} of 30 episodes are there already" in capsys.readouterr().out
    assert collect(tmp_path / "b") == 0
    assert Rollouts.load(tmp_path / "a").digest() == Rollouts.load(tmp_path / "b").digest()


@pytest.mark.parametrize("limit", [0, 100, 3000])
def test_a_collect_that_fails_at_the_start_leaves_the_folder_usable(tmp_path, capsys, limit):
    out = tmp_path / "d"
    assert collect(out, env="NoSuchEnv-v9") == 2
    assert collect(out, "--policy", "nonsense") == 2
    assert collect(out, "--policy", str(HERE)) == 2  # a folder that holds no run
    with file_limit(limit):
        assert collect(out, "--seed", "7") == 3
    assert collect(out, "--seed", "1") == 0  # another command than any before
    assert len(Rollouts.load(out)) == 30


def test_converting_on_a_full_disk_keeps_the_episodes(tmp_path, capsys):
    pytest.importorskip("minari")
    pytest.importorskip("h5py")
    assert collect(tmp_path / "whole", "--format", "minari") == 0
    (file,) = tmp_path.rglob("main_data.hdf5")
    with file_limit(file.stat().st_size - 1000):  # enough for the tail, not for this
        assert collect(tmp_path / "m", "--format", "minari") == 3
    assert "all episodes are safe in" in capsys.readouterr().err
    assert collect(tmp_path / "m", "--format", "minari") == 0
    assert Rollouts.load(tmp_path / "m").digest() == Rollouts.load(tmp_path / "whole").digest()
