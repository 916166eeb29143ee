"""The script users start from: one W&B run and one video writer, with as many workers as environments."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

for needed in ("pettingzoo", "stable_baselines3", "wandb", "moviepy"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples/custom_env_main.py"


def test_one_wandb_run_and_one_video_writer_with_8_workers(tmp_path):
    """As a user runs it: the script is `__main__`, every environment has a process of its own."""
    text = SCRIPT.read_text()
    for old, new in (('"num_workers": 2', '"num_workers": 8'), ('"total_steps": 8_192', '"total_steps": 1_024')):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "main.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "main.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1
    videos = sorted(path.name for path in tmp_path.glob("videos/*"))
    assert videos[0] == "env-0-episode-0.mp4"
    assert all(name.startswith("env-0-") for name in videos)


def test_importing_the_script_starts_nothing_and_only_environment_0_films(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("custom_env_main", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    import gymnasium as gym

    envs = [script.make_env(index, script.CONFIG) for index in range(8)]
    assert [isinstance(env, gym.wrappers.RecordVideo) for env in envs] == [True] + [False] * 7
    assert not list(tmp_path.glob("wandb"))
