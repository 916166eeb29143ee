"""What a user's type checker sees: no public name is `Any`, common mistakes are found, and correct code is not refused.

`tests/support/typing/mistakes.py` and `correct.py` are handed to mypy and pyright; nothing in them runs.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from envfleet import adapters
from envfleet.backends.ray_options import RayOptions
from envfleet.core.construct import make
from envfleet.core.fleet_options import BackendName, EnvOptions, FleetOptions, OnEnd, OnFault, StartMethod
from envfleet.remote.client_config import ClientConfig, ClientOptions
from envfleet.remote.server_config import ServerConfig, ServerOptions
from envfleet.rollout.executors.client_episode import Rules
from envfleet.rollout.executors.executor import make_jobs
from envfleet.rollout.executors.executor_options import JobOptions, RuleOptions

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "support" / "typing"
PACKAGES = ("envfleet", "envfleet.rollout", "envfleet.remote", "envfleet.train", "envfleet.adapters")
#: Modules without a list of names: what they define is read from their source, so that a missing library does not matter.
MODULES = ("envfleet.errors", "envfleet.testing", *(f"envfleet.adapters.{name}" for name in sorted(adapters.__all__)))
#: Values that users get from the main calls, and what they read of them.
VALUES = """
fleet = ef.make("CartPole-v1")
batch = fleet.step([0])
collector = ef.Collector(fleet)
rollouts = collector.collect(3)
executor = ef.ParallelRolloutCollector()
client = ef.HttpEnvClient("http://127.0.0.1:8000")
config = ef.PPOConfig()
trainer = ef.PPOTrainer(config)
agent = envfleet.train.load_agent("run")
"""
READS = """
fleet; batch; collector; rollouts; executor; client; config; trainer; agent
fleet.plan; fleet.num_envs; fleet.faults; fleet.quarantined; fleet.is_out; fleet.ready(); fleet.recv(); fleet.reset(); fleet.layout
fleet.observation_space; fleet.single_action_space; fleet.spec; fleet.slab; fleet.agents; fleet.groups
batch.reward; batch.terminated; batch.truncated; batch.ended; batch.slots; batch.info; batch.final_info; batch.columns; batch.step
batch.length; batch.ep_return; batch.seed; batch.task; batch.status; batch.scored; batch.active; batch.faulted; batch.episode
collector.ledger; collector.stats(); collector.verdict(); collector.segment(3); collector.episodes(3); collector.segment(3).reward
rollouts[0]; rollouts.stats(); rollouts.successes; rollouts.failures; rollouts.digest(); rollouts[0].episode_return
rollouts[0].dones; rollouts[0].infos; rollouts[0].error; rollouts.save("x"); collector.stats().mean_return
executor.collect([], print); executor.collect_with_stats([], print); executor.iter_rollouts([], print)
client.reset(); client.step({}); client.state(); client.stats; client.url; client.reset().reward; client.reset().done
config.learning_rate; config.num_updates; config.hidden; trainer.train(); trainer.train().mean_return; trainer.evaluate(3)
trainer.save(); agent.policy(3); agent.evaluate(3); ef.make_vec("x"); ef.make_vec("x").fleet; ef.make_vec("x").step([0])
ef.ParallelEnv([print]); ef.VectorizedEnvs("x").fleet; ef.AgentsAsBatch(fleet); ef.episode_seed(1, "eval", 2, 3); ef.serve
envfleet.rollout.iter_rollouts("d"); envfleet.rollout.DatasetWriter("d").ids; envfleet.remote.Server("echo").url
"""


def names() -> list[str]:
    public = [f"{name}.{each}" for name in PACKAGES for each in importlib.import_module(name).__all__]
    for name in MODULES:
        source = ROOT / "src" / name.replace(".", "/")
        source = source / "__init__.py" if source.is_dir() else source.with_suffix(".py")
        defined = [node.name for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        assert defined, name
        public += [f"{name}.{each}" for each in defined if not each.startswith("_")]
    return public


def revealing() -> tuple[str, dict[int, str]]:
    """A script that reveals the type of every public name and value, and the expression of each line."""
    lines = [f"import {name}" for name in (*PACKAGES, *MODULES)] + ["import envfleet as ef", *VALUES.split("\n")]
    what = {}
    for each in [*names(), *filter(None, map(str.strip, re.split("[;\n]", READS)))]:
        lines.append(f"reveal_type({each})")
        what[len(lines)] = each
    return "\n".join(lines) + "\n", what


Found = dict[str, dict[int, str]]  # by file and line: what the checker says


def run_mypy(paths: list[Path], folder: Path) -> Found:
    pytest.importorskip("mypy")
    config = folder / "mypy.ini"
    # These would take minutes to read, and no public name of ours is one of theirs.
    config.write_text(
        "[mypy]\nstrict = True\ndisallow_any_generics = False\nignore_missing_imports = True\n"
        "[mypy-torch.*,torchrl.*,tensordict.*,stable_baselines3.*,tianshou.*]\nfollow_imports = skip\n"
    )
    options = ["--no-error-summary", "--cache-dir", str(folder), "--config-file", str(config), "--follow-imports=silent"]
    done = subprocess.run([sys.executable, "-m", "mypy", *options, *map(str, paths)], capture_output=True, text=True)
    found: Found = {path.name: {} for path in paths}
    for name, number, text in re.findall(r"(\w+\.py):(\d+): (?:error|note): (.*)", done.stdout):
        found[name][int(number)] = found[name].get(int(number), "") + text
    return found


def run_pyright(paths: list[Path], folder: Path) -> Found:
    if importlib.util.find_spec("pyright") is None or shutil.which("node") is None:
        pytest.skip("pyright and node are not installed")
    for path in paths:
        shutil.copy(path, folder / path.name)
    config = {"pythonVersion": "3.11", "extraPaths": [str(ROOT / "src")], "include": [path.name for path in paths]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    words = [sys.executable, "-m", "pyright", "-p", ".", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(paths), done.stdout + done.stderr
    found: Found = {path.name: {} for path in paths}
    for each in report["generalDiagnostics"]:
        if each["severity"] in ("error", "information"):
            lines, number = found[Path(each["file"]).name], each["range"]["start"]["line"] + 1
            lines[number] = lines.get(number, "") + each["message"]
    return found


@pytest.fixture(scope="module", params=[run_mypy, run_pyright], ids=["mypy", "pyright"])
def found(request, tmp_path_factory) -> Found:
    """What a checker says of all files: it is started once."""
    folder = tmp_path_factory.mktemp("types")
    revealed = tmp_path_factory.mktemp("revealed") / "revealed.py"
    revealed.write_text(revealing()[0])
    return request.param([FILES / "mistakes.py", FILES / "correct.py", revealed], folder)


def test_every_mistake_is_found_and_nothing_else(found):
    lines = (FILES / "mistakes.py").read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    said = found["mistakes.py"]
    assert len(wrong) > 100
    assert [lines[number - 1] for number in sorted(wrong - said.keys())] == [], "not found"
    assert {lines[number - 1]: said[number] for number in sorted(said.keys() - wrong)} == {}, "found by mistake"


def test_nothing_is_found_in_correct_uses(found):
    assert found["correct.py"] == {}


def test_no_public_name_and_no_value_of_a_main_call_is_any(found):
    said, what = found["revealed.py"], revealing()[1]
    assert len(what) > 200
    unknown = re.compile(r'is "(Any|Unknown)"')
    assert {each: said.get(line) for line, each in what.items() if unknown.search(said.get(line, 'is "Any"'))} == {}


def fields(cls: type) -> set[str]:
    return {each.name for each in dataclasses.fields(cls)}


@pytest.mark.parametrize(
    ("options", "known"),
    [
        (FleetOptions, set(inspect.signature(make).parameters) - {"env", "num_envs", "on_end", "observation_mode", "unknown"}),
        (EnvOptions, set(FleetOptions.__optional_keys__) - {"backend", "num_workers", "start_method"} - fields(RayOptions)),
        (ClientOptions, fields(ClientConfig)),
        (ServerOptions, fields(ServerConfig) | {"workers"}),
        (RuleOptions, fields(Rules)),
        (JobOptions, {"seeds", "tasks", "reset_kwargs"} & set(inspect.signature(make_jobs).parameters)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_typed_options_are_the_options(options, known):
    assert set(options.__optional_keys__) == known


def test_typed_choices_are_what_is_accepted():
    from envfleet.core.construct import BACKENDS
    from envfleet.core.engine_choice import ENGINES
    from envfleet.errors import BadArgument

    assert set(typing.get_args(BackendName)) == {"auto", *BACKENDS, *ENGINES}
    for name, choices in (("on_end", OnEnd), ("on_fault", OnFault)):
        for choice in typing.get_args(choices):
            make("CartPole-v1", backend="serial", **{name: choice}).close()
        with pytest.raises(BadArgument, match=name):
            make("CartPole-v1", backend="serial", **{name: "other"})
    assert set(typing.get_args(StartMethod)) == {"forkserver", "spawn", "fork"}
