"""What a user's type checker sees: every public name has a type, and common mistakes are found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import envfleet
import envfleet.remote
import envfleet.rollout
import envfleet.train

pytest.importorskip("mypy")

PACKAGES = (envfleet, envfleet.rollout, envfleet.remote, envfleet.train)
#: Lines with a mistake, and what the checker must say of each.
MISTAKES = {
    'ef.make("CartPole-v1", num_env=8)': "call-arg",
    'ef.make("CartPole-v1", num_envs="8")': "arg-type",
    'ef.make("CartPole-v1", backend=3)': "arg-type",
    "fleet.reset(seed=0).rewards": "attr-defined",
    "fleet.stepp([0])": "attr-defined",
    "ef.Colector": "attr-defined",
    "ef.errors.EnvFaild": "attr-defined",
    "ef.train.PPOTrainer": "",  # no mistake
    'ef.make_vec("CartPole-v1", 4).step([0, 0, 0, 0])': "",
}


def check(tmp_path: Path, source: str) -> str:
    path = tmp_path / "used.py"
    path.write_text(source)
    config = tmp_path / "mypy.ini"
    # torch alone would take a minute to read, and no public name of ours is one of its.
    config.write_text("[mypy]\nignore_missing_imports = True\n[mypy-torch.*]\nfollow_imports = skip\n")
    options = ["--no-error-summary", "--cache-dir", str(tmp_path), "--config-file", str(config), "--follow-imports=silent"]
    done = subprocess.run([sys.executable, "-m", "mypy", *options, str(path)], capture_output=True, text=True)
    return done.stdout + done.stderr


def test_type_checkers_know_every_public_name_and_find_mistakes(tmp_path):
    names = [f"{module.__name__}.{name}" for module in PACKAGES for name in module.__all__]
    lines = ["import envfleet, envfleet.rollout, envfleet.remote, envfleet.train", "import envfleet as ef"]
    lines += ['fleet = ef.make("CartPole-v1")'] + [f"reveal_type({name})" for name in names] + list(MISTAKES)
    found: dict[int, str] = {}
    for number, text in re.findall(r"used\.py:(\d+): (.*)", check(tmp_path, "\n".join(lines) + "\n")):
        found[int(number)] = found.get(int(number), "") + text
    for i, name in enumerate(names, start=4):
        assert "Revealed type" in found[i] and 'is "Any"' not in found[i], f"{name}: {found[i]}"
    for i, (line, wanted) in enumerate(MISTAKES.items(), start=4 + len(names)):
        assert f"[{wanted}]" in found.get(i, "") if wanted else i not in found, f"{line}: {found.get(i)}"
