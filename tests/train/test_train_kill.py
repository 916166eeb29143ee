"""Runs that are killed: every restart resumes, no checkpoint is unreadable, and the end is the same bit by bit."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from envfleet.errors import CheckpointError
from envfleet.train.checkpoint import Checkpoints, read, write
from tests.support.system import child_env

CHILD = """
import sys
from envfleet.train import PPOConfig, PPOTrainer

folder, updates, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = PPOConfig(
    env="CartPole-v1", num_envs=4, num_steps=16, total_steps=64 * updates, num_epochs=1, num_minibatches=2, backend="serial",
    tensorboard=False, report=False, out=folder, resume=True, checkpoint_every=every,
)
with PPOTrainer(config) as trainer:
    while not trainer.finished:
        trainer.train_episode_vectorized()
        print(trainer.counters.update, flush=True)
        if trainer.counters.update % every == 0:
            trainer.save()
    trainer.save()
"""


def start(folder, updates, every):
    words = [sys.executable, "-c", CHILD, str(folder), str(updates), str(every)]
    return subprocess.Popen(words, env=child_env(), stdout=subprocess.PIPE, text=True)


def finished(folder, updates, every):
    process = start(folder, updates, every)
    process.communicate(timeout=280)
    assert process.returncode == 0
    return Checkpoints(folder).load_latest()


def killed_and_resumed(folder, updates, every, kills, seed):
    rng = np.random.default_rng(seed)
    for kill in range(kills):
        process = start(folder, updates, every)
        assert process.stdout is not None
        # Kill as soon as it says it has come so far: it is then anywhere in its next steps, or in writing a file.
        share = updates // (kills + 1)
        wanted = share * (kill + 1) + int(rng.integers(-share // 2, share // 2))
        for line in process.stdout:
            if int(line) >= wanted:
                break
        process.kill()
        process.communicate()
        for path in [*Checkpoints(folder).paths(), Checkpoints(folder).best]:
            if path.exists():
                read(path)
    return finished(folder, updates, every)


def same(one, other):
    assert one["update"] == other["update"]
    ours, theirs = (state["team"]["policies"]["shared"] for state in (one, other))
    for part in ("net", "optimiser"):
        for name, value in ours[part].items():
            wanted = theirs[part][name]
            assert torch.equal(value, wanted) if isinstance(value, torch.Tensor) else value == wanted, name
    assert ours["rng"] == theirs["rng"]
    assert one["running"]["ledger"] == other["running"]["ledger"]


def test_kill_and_resume_gives_the_same_weights(tmp_path):
    whole = finished(tmp_path / "whole", 200, 10)
    same(whole, killed_and_resumed(tmp_path / "parts", 200, 10, kills=1, seed=0))


@pytest.mark.full
@pytest.mark.timeout(900)  # twenty-two processes that import PyTorch
def test_twenty_kills_at_random_moments(tmp_path):
    whole = finished(tmp_path / "whole", 400, 1)
    same(whole, killed_and_resumed(tmp_path / "parts", 400, 1, kills=20, seed=1))


# -- the files -------------------------------------------------------------------------------------------------------------


def test_round_trip_of_values(tmp_path):
    state = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "flags": np.array([True, False]),
        "nothing": np.zeros((0, 4)),
        "tensor": torch.arange(3),
        "numbers": [1, 2.5, None, True, "text", 2**100],
        7: {"deep": np.float32(1.5)},
    }
    write(tmp_path / "a.pt", state)
    back = read(tmp_path / "a.pt")
    for name in ("array", "flags", "nothing"):
        assert back[name].dtype == state[name].dtype and (back[name] == state[name]).all()
        assert back[name].shape == state[name].shape
    assert back["numbers"] == state["numbers"] and back[7]["deep"] == 1.5 and torch.equal(back["tensor"], state["tensor"])
    with pytest.raises(TypeError, match="cannot go into a checkpoint"):
        write(tmp_path / "b.pt", {"bad": object()})


def test_nothing_in_a_checkpoint_is_executed(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/owned",)

    torch.save({"format": 1, "state": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path / "evil.pt")
    assert not (tmp_path / "owned").exists()


def test_unreadable_and_foreign_files(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for update in (1, 2):
        checkpoints.save(update, {"update": update})
    checkpoints.paths()[-1].write_bytes(b"cut short")  # a disk that lies; ours are renamed into place whole
    assert checkpoints.load_latest()["update"] == 1
    torch.save({"format": 99, "state": {}}, tmp_path / "new.pt")
    with pytest.raises(CheckpointError, match="upgrade envfleet"):
        read(tmp_path / "new.pt")
    torch.save([1], tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not a checkpoint of envfleet"):
        read(tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read(tmp_path / "missing.pt")


def test_best_survives_the_old_ones(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for update in range(1, 6):
        checkpoints.save(update, {"update": update}, best=update == 2)
    assert [read(path)["update"] for path in checkpoints.paths()] == [4, 5]
    assert read(checkpoints.best)["update"] == 2
    assert not list(checkpoints.folder.glob(".*"))
