"""The command `envfleet` as people meet it: in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import tomllib
from pathlib import Path

import psutil
import pytest

from envfleet.cli import doctor
from envfleet.cli.main import ALIASES, COMMANDS, main

ROOT = Path(__file__).parents[2]


def run(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "envfleet", *words], capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("name", sorted([*COMMANDS, *ALIASES]))
def test_every_command_has_help_and_a_docs_entry(name, capsys):
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    command = ALIASES.get(name, [name])[0]
    assert said.startswith(f"usage: envfleet {command}") and len(said.splitlines()) > 3
    pages = [page for page in (ROOT / "docs").rglob("*.md") if f"envfleet {name}" in page.read_text()]
    assert pages, f"no page of docs/ speaks of `envfleet {name}`"


def test_help_lists_what_is_there_and_nothing_else(capsys):
    assert main([]) == 0
    listed = set(re.findall(r"^    (\w+) ", capsys.readouterr().out, re.M))
    assert listed == set(COMMANDS)


def test_a_missing_extra_is_one_line_that_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it is a ModuleNotFoundError
    for name in [name for name in sys.modules if name.startswith(("envfleet.train", "envfleet.networks"))]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["train", "CartPole-v1"]) == 2
    assert capsys.readouterr().err == "envfleet: 'torch' is not available here. Install it: pip install \"envfleet[train]\"\n"


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["collect", "CartPole-v1", "--num-envs", "0"], "--num-envs: '0' is not a whole number from 1 up"),
        (["eval", "run", "--episodes", "few"], "--num-episodes/--episodes: 'few' is not a whole number from 1 up"),
        (["tune", "CartPole-v1", "--workers", "1,two"], "--num-workers/--workers: 'two' is not a whole number"),
        (["tune", "CartPole-v1", "--seconds", "-1"], "--seconds: '-1' is not a number of seconds above 0"),
        (["tune", "CartPole-v1", "--out", "a.xyz"], "--out: 'a.xyz' does not end in .png, .pdf or .svg"),
        (["collect", "CartPole-v1", "--seed", "-1"], "--seed: '-1' is not a whole number from 0 up"),
        (["eval", "run", "--seed", "-1"], "--seed: '-1' is not a whole number from 0 up"),
        (["serve", "CartPole-v1", "--env-kwargs", "{"], "--env-kwargs: '{' is not a JSON object"),
        (["doctor", "--jsno"], "unrecognized arguments: --jsno"),
    ],
)
def test_misuse_is_one_line_that_names_the_flag(words, wrong, capsys):
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("envfleet: ") and said.count("\n") == 1 and wrong in said and "--help" in said


def test_values_are_refused_by_name_before_anything_runs(tmp_path, capsys):
    for words, wrong in (
        (["serve", "CartPole-v1", "--port", "99999"], "port=99999: give a number from 0 to 65535"),
        (["serve", "CartPole-v1", "--max-sessions", "0"], "max_sessions=0: give 1 or more"),
        (["serve", "CartPole-v1", "--idle-timeout-s", "0"], "idle_timeout_s=0.0: give seconds above 0"),
        (["tune", "CartPole-v1", "--backends", "shm,ray"], "--backends ray: choose some of serial, shm,"),
        (["report", str(tmp_path), "--out", str(tmp_path)], "is a directory: give the name of a file"),
    ):
        assert main(words) == 2
        told = capsys.readouterr()
        assert wrong in told.err and told.err.count("\n") == 1 and not told.out


def test_the_demo_says_what_is_missing_before_its_first_part(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["demo"]) == 2
    told = capsys.readouterr()
    assert 'pip install "envfleet[train]"' in told.err and not told.out


def test_unknown_command_suggests_the_closest(capsys):
    assert main(["doctr"]) == 2
    assert capsys.readouterr().err == "envfleet: there is no command 'doctr'; did you mean 'doctor'?\n"


def test_errors_are_one_line_unless_a_traceback_is_asked_for():
    short = run("demo", "--backends", "--env", "Nope-v1")
    assert short.returncode == 2
    assert short.stderr.startswith("envfleet: unknown environment 'Nope-v1'") and short.stderr.count("\n") == 1
    assert "Traceback" in run("demo", "--backends", "--env", "Nope-v1", "--traceback").stderr
    assert "Traceback" in run("demo", "--backends", "--env", "Nope-v1", env={**os.environ, "ENVFLEET_DEBUG": "1"}).stderr


def test_a_failing_env_is_one_line_with_its_address(tmp_path):
    shown = run_command(tmp_path, "Faulty('step', 'raise', at=2)")
    assert shown.wait(60) == 2
    assert shown.stderr is not None
    lines = shown.stderr.read().splitlines()
    assert len(lines) == 1 and lines[0].startswith("envfleet: slot 0 failed in step (episode 0, step 1")
    assert lines[0].endswith("planted fault in step (--traceback shows the rest)")


def run_command(folder: Path, env: str) -> subprocess.Popen[str]:
    """A command of its own that steps one env for ever on shm, and says "stepping" before each step."""
    (folder / "own_command.py").write_text(
        textwrap.dedent(f"""
        import envfleet as ef
        from envfleet.envs.probe import *

        HELP = DESCRIPTION = "step for ever"

        def add_arguments(parser):
            pass

        def run(args):
            with ef.make(lambda: {env}, 2, backend="shm", num_workers=2) as fleet:
                fleet.reset(seed=0)
                while True:
                    print("stepping", flush=True)
                    fleet.step([0, 0])
        """)
    )
    code = "import sys; from envfleet.cli.main import main, COMMANDS; COMMANDS['own'] = 'own_command'; sys.exit(main(['own']))"
    search = os.pathsep.join([str(folder), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
    )


@pytest.mark.parametrize("env", ["Counting()", "Faulty('step', 'hang', at=1)"])
def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path, env):
    process = run_command(tmp_path, env)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "stepping\n"
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(signal.SIGINT)
    before = time.monotonic()
    process.stdout.read()
    assert process.wait(30) == 130
    assert time.monotonic() - before < 6  # 3 s is promised; the rest is slack for a loaded machine
    said = process.stderr.read()
    assert said.startswith("envfleet: interrupted") and said.count("\n") == 1
    gone, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_demo_compares_two_backends():
    done = run("demo", "--backends", "--steps", "400", "--num-envs", "4")
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall(r"sha256 (\w+)", done.stdout))) == 1
    assert done.stdout.splitlines()[-1] == "the two backends gave the same bytes"


def test_doctor_tries_every_start_method_without_importing_torch():
    code = "import sys; from envfleet.cli.main import main; code = main(['doctor', '--json']); assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {method: trial["ok"] for method, trial in report["start_methods"].items()} == dict.fromkeys(
        ("forkserver", "spawn", "fork"), True
    )
    assert report["machine"]["usable_cpus"] >= 1 and report["core"]["numpy"]


def test_doctor_speaks_to_people(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("CPUs", "open files", "forkserver", "compiled core", "[train]"):
        assert word in said


def test_doctor_knows_every_extra():
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    assert set(doctor.EXTRAS) == extras - {"all", "dev"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"open_files": 256}, "ulimit -n is 256"),
        ({"cpus": 64, "usable_cpus": 4}, "OMP_NUM_THREADS is not set"),
        ({"omp_threads": 8}, "OMP_NUM_THREADS=8 × 8 workers = 64 threads"),
        ({"shm_bytes": 1 << 20}, "/dev/shm has 1 MiB free"),
        ({"cgroup_memory_bytes": 256 << 20}, "the cgroup grants 256 MiB"),
        ({"compiler": None}, "no C compiler"),
    ],
)
def test_doctor_names_suspicious_settings(change, words):
    fine = {
        "cpus": 8,
        "usable_cpus": 8,
        "cgroup_cpus": None,
        "memory_bytes": None,
        "cgroup_memory_bytes": None,
        "open_files": 4096,
        "shm_bytes": None,
        "compiler": "cc",
        "omp_threads": None,
    }
    assert doctor.suspicious(doctor.Machine(**fine), compiled=False) == []
    (found,) = doctor.suspicious(doctor.Machine(**{**fine, **change}), compiled=False)
    assert words in found
