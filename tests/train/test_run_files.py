"""Run folders: one trainer at a time, damaged files are named, and a full disk says what is safe."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from envfleet.cli.main import main
from envfleet.errors import (
    BadArgument,
    CheckpointDamaged,
    CheckpointError,
    DamagedWarning,
    FolderBusy,
    TrainingStopped,
    WriteFailed,
)
from envfleet.train import PPOTrainer, load_agent
from envfleet.train.checkpoint import Checkpoints, plain, read
from envfleet.train.loggers import TableLogger, read_rows
from envfleet.train.run_folder import RunFolder
from tests.support.system import child_env, file_limit
from tests.support.training import Poisoned, config

STATE = {"weights": np.arange(600, dtype=np.float32), "numbers": [1, 2.5, None, "text"], "update": 3}
WORDS = ["train", "CartPole-v1", "--n-envs", "2", "--num-steps", "32", "--backend", "serial", "--no-tensorboard", "--quiet"]
WORDS += ["--preset", "none", "--checkpoint-every", "1"]


def damages(whole, flips=500, cuts=200, seed=0):
    rng = random.Random(seed)
    for trial in range(flips):
        data = bytearray(whole)
        for _ in range(1 if trial % 5 else 3):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        yield bytes(data)
    for _ in range(cuts):
        yield whole[: rng.randrange(len(whole))]


def comparable(state):
    return state["weights"].tobytes(), state["numbers"], state["update"]


@pytest.mark.parametrize("age", ["new", "old"])
def test_no_change_of_a_checkpoint_goes_unnoticed(tmp_path, age):
    path = tmp_path / "a.pt"
    if age == "new":
        path = Checkpoints(tmp_path).save(3, STATE)
        assert torch.load(path, weights_only=True)["format"] == 2  # still a file as torch writes it
    else:  # before there were digests: the archive's own checksums
        torch.save({"format": 1, "state": plain(STATE)}, path)
    whole = path.read_bytes()
    noticed = 0
    for data in damages(whole):
        path.write_bytes(data)
        try:
            assert comparable(read(path)) == comparable(STATE)
        except CheckpointDamaged as damaged:
            assert damaged.path == path
            noticed += 1
    assert noticed == 700 or (age == "old" and noticed > 600)
    path.write_bytes(whole)
    assert comparable(read(path)) == comparable(STATE)


def test_no_change_of_the_metrics_goes_unnoticed(tmp_path):
    logger = TableLogger(tmp_path)
    for update in range(1, 21):
        logger.log({"update": update, "return": update * 1.25, "sps": 1000.0 / update}, step=64 * update)
    logger.close()
    path = tmp_path / "metrics.jsonl"
    whole, right = path.read_bytes(), read_rows(tmp_path)
    assert [row["update"] for row in right] == list(range(1, 21)) and "crc32" not in right[0]
    for data in damages(whole):
        path.write_bytes(data)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            TableLogger(tmp_path, resumed_at=20).close()
        kept = list(tmp_path.glob("_metrics.jsonl.damaged-*"))
        if told:
            assert [one.read_bytes() for one in kept] == [data]
            assert all(row in right for row in read_rows(tmp_path))
        else:
            assert not kept and read_rows(tmp_path) == right
        for one in kept:
            one.unlink()


def test_metrics_from_before_there_were_checksums(tmp_path):
    lines = [json.dumps({"step": 64 * update, "update": update}) + "\n" for update in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 25')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TableLogger(tmp_path, resumed_at=2).close()
        assert [row["update"] for row in read_rows(tmp_path)] == [1, 2]


# -- a damaged checkpoint of a real run ------------------------------------------------------------------------------------


def spoil(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)
    return bytes(data)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "run"
    assert main([*WORDS, "--out", str(run), "--total-steps", "256"]) == 0
    return run


@pytest.fixture
def run(finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


def one_line(capsys):
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_the_one_before_a_damaged_checkpoint_is_used_and_told_in_one_line(run, tmp_path, capsys):
    *_, before, last = Checkpoints(run).paths()
    data = spoil(last)
    assert main(["eval", str(run), "--episodes", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["update"] == 3
    assert err.count("\n") == 1 and f"{last} is damaged" in err and f"{before.name} is used instead" in err
    words = ["collect", "CartPole-v1", "--out", str(tmp_path / "d"), "--episodes", "2", "--num-envs", "2"]
    assert main([*words, "--backend", "serial", "--policy", str(run)]) == 0
    assert f"{last} is damaged" in one_line(capsys)
    with pytest.warns(DamagedWarning):
        assert load_agent(run).update == 3
    assert last.read_bytes() == data  # those who only read touch nothing
    assert main([*WORDS, "--out", str(run), "--total-steps", "384", "--resume"]) == 0
    assert f"(kept as _{last.name}.damaged-1); {before.name} is used instead" in one_line(capsys)
    assert (last.parent / f"_{last.name}.damaged-1").read_bytes() == data
    assert Checkpoints(run).load_latest()["update"] == 6
    assert [row["update"] for row in read_rows(run)] == [1, 2, 3, 4, 5, 6]


def test_without_a_whole_checkpoint_there_is_a_clear_error(run, capsys):
    for path in Checkpoints(run).paths():
        spoil(path)
    assert main([*WORDS, "--out", str(run), "--total-steps", "384", "--resume"]) == 2
    line = one_line(capsys)
    assert "every checkpoint in" in line and all(path.name in line for path in Checkpoints(run).paths())
    with pytest.raises(CheckpointError, match="every checkpoint in"):
        load_agent(run)
    assert len(Checkpoints(run).paths()) == 3  # nothing was deleted


def test_checkpoints_that_are_dropped_while_one_reads(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    first = checkpoints.save(1, STATE)
    real, calls = Checkpoints.paths, []

    def list_then_drop(self):
        found = real(self)
        if not calls:
            checkpoints.save(2, STATE)
            first.unlink()
        calls.append(found)
        return found

    reader = Checkpoints(tmp_path)
    monkeypatch.setattr(reader, "paths", lambda: list_then_drop(reader))
    assert comparable(reader.load_latest()) == comparable(STATE) and len(calls) == 2
    (tmp_path / "checkpoints" / "update_000000003.pt").symlink_to("nowhere")
    with pytest.warns(DamagedWarning, match="cannot be opened; update_000000002.pt is used instead"):
        Checkpoints(tmp_path).load_latest()


def test_a_damaged_best_one_is_an_error_that_names_it(run, capsys):
    best = Checkpoints(run).best
    spoil(best)
    assert main(["eval", str(run), "--episodes", "1", "--checkpoint", "best"]) == 2
    assert f"{best} is damaged" in one_line(capsys)


# -- one trainer at a time -------------------------------------------------------------------------------------------------

TRAINER = """
import sys
from envfleet.train import PPOConfig, PPOTrainer
config = PPOConfig(env="CartPole-v1", num_envs=2, num_steps=16, total_steps=32 * 40, preset="none", backend="serial",
                   tensorboard=False, report=False, out=sys.argv[1], resume=True)
with PPOTrainer(config) as trainer:
    while not trainer.finished:
        trainer.train_episode_vectorized()
        trainer.save()
        print(trainer.counters.update, flush=True)
        sys.stdin.readline()
"""


def test_a_second_trainer_is_refused_and_a_dead_one_does_not_block(tmp_path, capsys):
    words = [sys.executable, "-c", TRAINER, str(tmp_path)]
    first = subprocess.Popen(words, env=child_env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "1\n"
    settings = {"num_envs": 2, "num_steps": 16, "total_steps": 1280, "seed": 1, "out": str(tmp_path), "resume": True}
    for more in ([], ["--resume"]):
        assert main([*WORDS, "--out", str(tmp_path), *more]) == 2
        line = one_line(capsys)
        assert f"another process is training in {tmp_path} (process {first.pid} on " in line
    with pytest.raises(FolderBusy) as busy:
        PPOTrainer(config(**settings))
    assert busy.value.owner["pid"] == first.pid
    first.stdin.write("\n")
    first.stdin.flush()
    assert first.stdout.readline() == "2\n"  # it was not disturbed
    first.kill()
    first.communicate()
    with PPOTrainer(config(**settings)) as second:
        assert second.counters.update == 2


def test_half_made_files_of_living_processes_are_not_touched(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    living = folder / f".update_000000001.pt.{os.getppid()}.tmp"
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = folder / f".update_000000001.pt.{dead.pid}.tmp"
    living.touch()
    left.touch()
    with PPOTrainer(config(out=str(tmp_path), resume=True)) as trainer:
        trainer.train_episode_vectorized()
        trainer.save()
    assert living.exists() and not left.exists()


# -- a full disk -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_cut_off_at_a_hundred_different_bytes(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, STATE, best=True)
    whole = path.read_bytes()
    for limit in np.random.default_rng(0).choice(len(whole), 100, replace=False).tolist():
        with file_limit(limit), pytest.raises(OSError, match="File too large"):
            checkpoints.save(2, STATE)
        assert [found.name for found in sorted(checkpoints.folder.iterdir())] == ["best.pt", path.name]
        assert path.read_bytes() == whole and checkpoints.last_good == path
    checkpoints.save(2, STATE)
    assert comparable(checkpoints.load_latest()) == comparable(STATE)


def test_metrics_on_a_full_disk_are_whole_lines(tmp_path):
    row = {"update": 1, "return": 1 / 3}
    for limit in range(1, 200, 7):
        with file_limit(limit):
            logger = TableLogger(tmp_path)
            done = 0
            with pytest.raises(OSError, match="File too large"):
                for update in range(1, 9):
                    logger.log({**row, "update": update}, step=update)
                    done = update
        text = (tmp_path / "metrics.jsonl").read_text()
        assert text.count("\n") == len(read_rows(tmp_path)) >= done and (not text or text.endswith("\n"))
        logger.log({**row, "update": 99}, step=99)  # there is room again
        assert [row["update"] for row in read_rows(tmp_path)][-1] == 99
        logger.close()


@pytest.mark.parametrize("limit", [0, 300, 9_000])
def test_training_on_a_full_disk_is_one_line_that_says_what_is_safe(run, limit, capsys):
    words = [*WORDS, "--out", str(run), "--total-steps", "384", "--resume"]
    last = Checkpoints(run).paths()[-1]
    before = last.read_bytes()
    with file_limit(limit):
        assert main(words) == 3
    line = one_line(capsys)
    assert line.startswith("envfleet: ") and "File too large" in line
    assert f"the last good checkpoint is {last}" in line and "--resume" in line
    assert last.read_bytes() == before and not list(run.rglob(".*.tmp"))
    assert main(words) == 0
    assert Checkpoints(run).load_latest()["update"] == 6
    assert [row["update"] for row in read_rows(run)] == [1, 2, 3, 4, 5, 6]


def test_a_new_run_on_a_full_disk_can_be_begun_again(tmp_path, capsys):
    words = [*WORDS, "--out", str(tmp_path / "run"), "--total-steps", "128"]
    with file_limit(100):
        assert main(words) == 3
    assert "no checkpoint was written yet" in one_line(capsys)
    assert main([*words, "--resume"]) == 0


def test_a_nan_on_a_full_disk_is_still_told(tmp_path):
    with PPOTrainer(config(env=Poisoned, out=str(tmp_path))) as trainer:
        trainer.train_episode_vectorized()
        with file_limit(0), pytest.raises(TrainingStopped, match="not finite") as stopped:
            trainer.train_episode_vectorized()
        assert stopped.value.checkpoint is None
        assert any("no checkpoint was written yet" in note for note in stopped.value.__notes__)


def test_saving_works_again_once_there_is_room(tmp_path):
    with PPOTrainer(config(out=str(tmp_path), checkpoint_every=0)) as trainer:
        trainer.train_episode_vectorized()
        last = trainer.save()
        trainer.train_episode_vectorized()
        with file_limit(0), pytest.raises(WriteFailed, match=f"the last good checkpoint is {last}"):
            trainer.save()
        assert trainer.save().exists()


FULL = """
import subprocess, sys
from pathlib import Path
from envfleet.cli.main import main
place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], check=True)
words = ["train", "CartPole-v1", "--n-envs", "2", "--num-steps", "32", "--backend", "serial", "--quiet", "--preset", "none",
         "--checkpoint-every", "1", "--total-steps", "256", "--out", str(place / "run"), "--resume"]
heavy = place / "ballast"
for size in (2_090_000, 2_000_000, 1_900_000):
    heavy.write_bytes(b"x" * size)
    assert main(words) == 3, size
    heavy.unlink()
assert main(words) == 0
"""


def test_a_real_full_disk(tmp_path):
    """With TensorBoard, whose files a thread of its own writes."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode
    ):
        pytest.skip("a small file system cannot be mounted here (not root, or no mount namespaces)")
    pytest.importorskip("tensorboard")
    words = ["unshare", "-m", sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = [line for line in done.stderr.splitlines() if "No space left" in line]
    assert len(lines) == 3 and "Traceback" not in done.stderr


def test_what_cannot_be_written_into_the_folder_is_refused_before_training(tmp_path):
    with pytest.raises(BadArgument, match=r"env_kwargs=.* cannot be written into the run folder \(PosixPath"):
        PPOTrainer(config(out=str(tmp_path / "run"), env_kwargs={"render_mode": tmp_path}))
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), float("nan"), (1, 2)])
def test_a_run_whose_settings_are_arrays_or_nan_is_resumed(tmp_path, value):
    first = config(out=str(tmp_path / "run"), env=Poisoned, env_kwargs={"extra": value}, total_steps=64)
    folder = RunFolder(first)
    assert folder.open() is None
    folder._refuse_other_run(first.to_dict())  # the same settings
    other = {**first.to_dict(), "env_kwargs": {"extra": 7}}
    with pytest.raises(CheckpointError, match="another run"):
        folder._refuse_other_run(other)
    folder._lock.close()
