"""`envfleet train`, `envfleet eval` and `train_ppo.py`, as users call them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import envfleet as ef
from envfleet.cli.main import main
from envfleet.errors import BadArgument
from envfleet.train import PPOConfig, PPOTrainer
from envfleet.train.checkpoint import Checkpoints, read
from envfleet.train.config import ALIASES, FIELDS, RANGES, checked, default_of, field_name, kinds_of
from envfleet.train.settings import parse, schema, settings_from_yaml
from tests.support.system import child_env

ROOT = Path(__file__).parents[2]
ENV = child_env()
SMALL = ["--n-envs", "2", "--total-steps", "512", "--num-steps", "64", "--backend", "serial", "--no-tensorboard"]


def call(capsys, *words):
    code = main([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


def test_train_then_eval(capsys, tmp_path):
    run = tmp_path / "run"
    code, out, _ = call(capsys, "train", "CartPole-v1", *SMALL, "--out", run, "--eval-every", 2, "--eval-episodes", 2)
    assert code == 0 and "run folder" in out
    names = {path.name for path in run.iterdir()}
    assert {"checkpoints", "config.json", "metrics.csv", "metrics.jsonl", "report.html"} <= names
    header, *rows = (run / "metrics.csv").read_text().splitlines()
    assert len(rows) == 4 and "eval/mean_return" in header and "return/CartPole-v1" in header
    page = (run / "report.html").read_text()
    assert "<svg" in page and "envfleet train CartPole-v1 --preset none" in page and "http" not in page
    code, out, _ = call(capsys, "eval", run, "--episodes", 5, "--json")
    found = json.loads(out)
    assert code == 0 and found["num_episodes"] == 5 and found["mean_return"] == pytest.approx(sum(found["returns"]) / 5)
    code, out, _ = call(capsys, "eval", run, "--episodes", 2, "--checkpoint", "best", "--sample")
    assert code == 0 and "return" in out


def test_the_report_repeats_the_run(capsys, tmp_path):
    run = tmp_path / "a"
    call(capsys, "train", "CartPole-v1", *SMALL, "--out", run, "--gamma", "0.9", "--hidden", "32,32", "--quiet")
    command = re.search(r"<pre>(envfleet train .*?)</pre>", (run / "report.html").read_text()).group(1)
    words = command.split()[1:]
    words[words.index("--out") + 1] = str(tmp_path / "b")
    assert call(capsys, *words, "--quiet")[0] == 0
    first, second = (Checkpoints(tmp_path / name).load_latest()["team"]["policies"]["shared"]["net"] for name in "ab")
    assert all((first[name] == second[name]).all() for name in first)


def test_resume_and_existing_run(capsys, tmp_path):
    words = ["train", "CartPole-v1", *SMALL, "--out", tmp_path, "--quiet"]
    assert call(capsys, *words)[0] == 0
    code, _, err = call(capsys, *words)
    assert code == 2 and "--resume" in err
    longer = [word if word != "512" else "1024" for word in words]
    assert call(capsys, longer[0], "--resume", *longer[1:])[0] == 0
    assert Checkpoints(tmp_path).load_latest()["update"] == 8


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["CartPoel-v1"], "Close names: CartPole-v1"),
        (["run.yaml"], "run.yaml is no environment but a file of settings: envfleet train --config run.yaml"),
        (["CartPole-v1", "--set", "env.num_env=2"], "there is no setting 'env.num_env'. Did you mean num_envs?"),
        (["CartPole-v1", "--set", "gamma"], "NAME=VALUE is needed"),
        (["CartPole-v1", "--n-envs", "many"], "--num-envs many: a whole number is needed"),
        (["CartPole-v1", "--arch", "brain"], "--arch brain: it is one of markov, memory, memory_markov"),
        (["CartPole-v1", "--learning-rate", "-1"], "--learning-rate -1: 0 or more is needed"),
        (["CartPole-v1", "--gamma", "1.5"], "--gamma 1.5: a number from 0 to 1 is needed"),
        (["CartPole-v1", "--seed", "-1"], "--seed -1: 0 or more is needed"),
        (["CartPole-v1", "--num-episodes", "0"], "--num-episodes 0: at least 1 is needed"),
        (["CartPole-v1", "--step-timeout-s", "nan"], "--step-timeout-s nan: a number above 0 is needed"),
        (["CartPole-v1", "--hidden", "64,0"], "--hidden 64,0: at least one hidden layer is needed, and one unit in each"),
        (["CartPole-v1", "--set", "gamma=2"], "--set gamma=2: a number from 0 to 1 is needed"),
        (["CartPole-v1", "--nenvs", "8"], "unrecognized arguments: --nenvs 8; did you mean --n-envs?"),
        (["--resume"], "--resume needs the folder of the run: --resume DIR"),
        (["--resume", "nowhere"], "--resume: there is no run in nowhere"),
        (["--resume", "one", "--out", "two", "CartPole-v1"], "--resume one and --out two name two folders"),
        (["CartPole-v1", "--preset", "magic"], "there is no preset 'magic'"),
        (["--config", "nowhere.yaml"], "there is no configuration file"),
        (["CartPole-v1", "--out", "/proc/nothing/run"], "cannot be written"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(capsys, words, told):
    code, _, err = call(capsys, "train", *words, "--quiet")
    assert code == 2 and told in err


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"num_envs": "8"}, "num_envs='8': a whole number is needed"),
        ({"num_envs": 8.5}, "num_envs=8.5: a whole number is needed"),
        ({"num_envs": True}, "num_envs=True: a whole number is needed"),
        ({"hidden": 5}, "hidden=5: a list of whole numbers like 64,64 is needed"),
        ({"hidden": (64.5,)}, "hidden=(64.5,): a list of whole numbers like 64,64 is needed"),
        ({"gamma": None}, "gamma=None: a number is needed"),
        ({"gamma": float("nan")}, "gamma=nan: a number from 0 to 1 is needed"),
        ({"wandb": "yes"}, "wandb='yes': true or false is needed"),
        ({"backend": "dask"}, "backend='dask': it is one of auto, "),
    ],
)
def test_settings_in_python_are_refused_by_type_and_range(wrong, told):
    with pytest.raises(BadArgument, match=re.escape(told)):
        PPOConfig(**wrong)


def test_every_number_has_a_range_and_every_default_is_in_it():
    numbers = {name for name in FIELDS if {int, float, tuple} & set(kinds_of(name)[0])}
    assert numbers == set(RANGES)
    assert all(checked(name, default_of(spec)) == default_of(spec) for name, spec in FIELDS.items())
    assert PPOConfig(num_envs=np.int64(3), gamma=np.float32(0.5)).to_dict()["num_envs"] == 3


def test_resume_with_the_folder_alone_takes_the_settings_of_the_run(capsys, tmp_path):
    run = tmp_path / "run"
    assert call(capsys, "train", "CartPole-v1", *SMALL, "--gamma", "0.9", "--out", run, "--quiet")[0] == 0
    code, out, _ = call(capsys, "train", "--resume", run)
    assert code == 0 and "this run has reached its 512 steps" in out
    code, out, _ = call(capsys, "train", "--resume", run, "--total-steps", 1024)
    assert code == 0 and "resumed: 512 steps" in out and "1,024 steps in" in out
    assert Checkpoints(run).load_latest()["config"]["gamma"] == 0.9
    code, _, err = call(capsys, "train", "--resume", run, "--gamma", "0.5")
    assert code == 2 and "gamma was 0.9 and is 0.5" in err
    assert call(capsys, "train", "--resume", "--out", run)[0] == 0
    code, out, _ = call(capsys, "report", run, "--out", tmp_path / "again.html")
    assert code == 0 and "again.html" in out and "<svg" in (tmp_path / "again.html").read_text()


def test_the_header_says_what_is_run_and_that_nothing_is_saved(capsys, tmp_path):
    _, out, _ = call(capsys, "train", "CartPole-v1", *SMALL)
    head = out.splitlines()[:3]
    assert head[0] == "PPO on CartPole-v1: 512 steps, 2 environments × 64 steps per update, seed 1"
    assert head[1] == "fleet: serial, 1 worker, 2 slots: asked for"
    assert head[2] == "device: cpu; nothing is saved: --out DIR (out=…) keeps checkpoints and logs"
    _, out, _ = call(capsys, "train", "CartPole-v1", *SMALL, "--out", tmp_path / "run", "--num-episodes", 3)
    assert f"saved in {tmp_path / 'run'}" in out and "3 episodes" in out and "/3  steps" in out


def test_wandb_without_a_login_is_one_line_and_the_folder_stays_free(capsys, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")

    def refuse(**options):
        raise wandb.errors.UsageError("No API key configured")

    monkeypatch.setattr(wandb, "init", refuse)
    words = ["train", "CartPole-v1", *SMALL, "--out", tmp_path, "--quiet"]
    code, _, err = call(capsys, *words, "--wandb")
    assert code == 2 and err.count("\n") == 1 and "--wandb: Weights & Biases cannot be used here (No API key configured)" in err
    assert call(capsys, *words)[0] == 0


def test_a_variable_that_wandb_refuses_is_one_line(capsys, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "")
    code, _, err = call(capsys, "train", "CartPole-v1", *SMALL, "--out", tmp_path, "--quiet", "--wandb")
    assert code == 2 and err.count("\n") == 1 and "Weights & Biases refuses a setting" in err and "mode" in err


def test_eval_of_nothing(capsys, tmp_path):
    code, _, err = call(capsys, "eval", tmp_path)
    assert code == 2 and "there is no run in" in err


def test_yaml_sections_aliases_and_wrong_keys(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("env:\n  env_name: tmaze\n  num_parallel_workers: 3\n  kwargs: {length: 4}\ntrain:\n  lr: 1e-3\n")
    assert settings_from_yaml(path) == {
        "env": "tmaze", "num_envs": 3, "env_kwargs": {"length": 4}, "learning_rate": 1e-3,
    }  # fmt: skip
    path.write_text("train:\n  learning_rat: 1\n")
    with pytest.raises(BadArgument, match=r"'train.learning_rat'. Did you mean learning_rate\? Settings of train: .*gamma"):
        settings_from_yaml(path)
    path.write_text("trane:\n  gamma: 1\n")
    with pytest.raises(BadArgument, match="the sections are env and train"):
        settings_from_yaml(path)
    path.write_text("env:\n  gamma: 1\n")
    with pytest.raises(BadArgument, match="It belongs to the section train"):
        settings_from_yaml(path)
    path.write_text("env: [")
    with pytest.raises(BadArgument, match="not valid YAML"):
        settings_from_yaml(path)


def test_the_shipped_config_is_read():
    settings = settings_from_yaml(ROOT / "examples" / "configs" / "cartpole.yaml")
    assert PPOConfig(**settings).num_envs == 8


def test_every_setting_has_a_text_and_the_schema_is_valid_yaml(tmp_path):
    assert all(len(spec.metadata["help"]) > 5 for spec in FIELDS.values())
    assert set(ALIASES.values()) <= set(FIELDS) and not set(ALIASES) & set(FIELDS)
    path = tmp_path / "all.yaml"
    path.write_text(schema())
    settings = {**settings_from_yaml(path), "preset": "none"}
    assert PPOConfig(**settings) == PPOConfig(preset="none")


def test_what_is_given_wins_over_the_preset_and_that_over_the_defaults():
    assert PPOConfig(env="CartPole-v1").gamma == 0.98
    assert PPOConfig(env="CartPole-v1", gamma=0.99).gamma == 0.99
    assert PPOConfig(env="CartPole-v1", preset="none").gamma == 0.99
    assert PPOConfig(env="MyEnv-v0", preset="catch").gamma == 0.95
    assert PPOConfig(n_envs=3).num_envs == 3
    with pytest.raises(BadArgument, match="Did you mean gamma"):
        PPOConfig(gama=0.5)


def test_settings_are_read_by_their_other_names_and_from_text():
    assert field_name("n-envs") == "num_envs" and field_name("train.ent_coef") == "entropy"
    assert parse("total_steps", "1e5") == 100_000 and parse("total_steps", "100_000") == 100_000
    assert parse("env_kwargs", "length=5,name=x") == {"length": 5, "name": "x"}
    for name, wrong in (("num_envs", 1.5), ("num_envs", True), ("gamma", "x"), ("wandb", "maybe"), ("seed", None)):
        with pytest.raises(BadArgument):
            parse(name, wrong)


def test_train_ppo_at_the_root(tmp_path):
    words = [
        "--n-envs", "2", "--parallel-start-method", "spawn", "--num-episodes", "5", "--device", "cpu",
        "--learning-rate", "3e-4", "--checkpoint-dir", str(tmp_path / "parallel_v1"),
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(ROOT / "train_ppo.py"), *words], env=ENV, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "episodes" in done.stdout
    saved = Checkpoints(tmp_path / "parallel_v1").load_latest()
    assert saved["config"]["start_method"] == "spawn" and saved["counters"]["num_episodes"] >= 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_first(tmp_path, number):
    words = ["-m", "envfleet", "train", "CartPole-v1", *SMALL, "--out", str(tmp_path), "--checkpoint-every", "0"]
    words[words.index("512")] = "100000000"
    process = subprocess.Popen([sys.executable, *words], env=ENV, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("step "):  # comes after the first update
        assert process.poll() is None
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in out
    assert Checkpoints(tmp_path).load_latest()["update"] >= 1


def test_wandb_is_one_run_and_video_is_of_slot_0(capsys, tmp_path):
    pytest.importorskip("wandb")
    pytest.importorskip("imageio_ffmpeg")
    run = tmp_path / "run"
    words = ["--wandb", "--wandb-mode", "offline", "--video-every", 2, "--backend", "shm", "--num-workers", 2]
    assert call(capsys, "train", "catch", *SMALL, *words, "--out", run, "--quiet")[0] == 0
    assert len(list((run / "wandb").glob("offline-run-*"))) == 1
    videos = list((run / "videos").iterdir())
    assert videos and all(path.suffix == ".mp4" and path.stat().st_size > 1000 for path in videos)  # no .txt: replayed alike


def test_checkpoints_hold_plain_values_only(capsys, tmp_path):
    call(capsys, "train", "CartPole-v1", *SMALL, "--out", tmp_path, "--quiet")
    state = read(Checkpoints(tmp_path).paths()[-1])
    assert {"team", "counters", "running", "config"} <= set(state)
    assert {"net", "optimiser", "memory", "rng"} <= set(state["team"]["policies"]["shared"])


def test_a_killed_worker_does_not_end_a_run(tmp_path):
    """By default the run goes on: the slots of a worker that is gone are rebuilt, and what they cost is counted."""
    config = PPOConfig(env="CartPole-v1", num_envs=4, num_steps=16, total_steps=64 * 6, backend="shm", num_workers=2,
                       preset="none", out=str(tmp_path / "run"))  # fmt: skip
    with PPOTrainer(config) as trainer:
        trainer.train_episode_vectorized()
        os.kill(trainer.fleet._backend._workers[0].pid, signal.SIGKILL)
        result = trainer.train()
        assert trainer.fleet.faults and all("SIGKILL" in fault.cause for fault in trainer.fleet.faults)
    assert result.num_steps >= config.total_steps and result.num_faults > 0 and result.quarantined == []


def test_a_fault_that_ends_a_run_leaves_a_checkpoint(tmp_path):
    config = PPOConfig(env="CartPole-v1", num_envs=2, num_steps=16, total_steps=10_000, backend="shm", num_workers=1,
                       preset="none", on_fault="raise", out=str(tmp_path / "run"))  # fmt: skip
    with PPOTrainer(config) as trainer:
        trainer.train_episode_vectorized()
        os.kill(trainer.fleet._backend._workers[0].pid, signal.SIGKILL)
        with pytest.raises(ef.WorkerLost) as caught:
            trainer.train()
        assert any("--resume" in note for note in caught.value.__notes__)
        reached = trainer.counters.update
    with PPOTrainer(dataclasses.replace(config, resume=True, total_steps=32 * (reached + 2))) as again:
        assert again.counters.update == reached
        again.train()


@pytest.mark.parametrize("env", [None, 5])
def test_what_is_no_environment_is_refused_by_name(env):
    with pytest.raises(BadArgument, match=f"env={env}: give a name"):
        PPOTrainer(PPOConfig(env=env))
