"""Libraries of users: written, built, listed, checked, run; and what is said when something is wrong with one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.cli.main import main
from envfleet.errors import BadArgument, EnvFailed, MissingExtra, WorkerLost
from envfleet.native.build_library import BuildFailed, build_library
from envfleet.native.library import load_library
from envfleet.native.native_env import NativeEnv
from envfleet.slots.layout import FAULT, READY
from tests.support.native_probes import NativeCounting, NativeFaulty, library, probe
from tests.support.system import child_env

ROOT = Path(__file__).parents[2]
SMALL = """
#include "envfleet_env.h"
struct Small {
    int64_t at;
    static constexpr const char *name = "Small";
    static void spaces(const double *, envfleet::Spaces &space) { space.obs.box<float>({1}); space.action.discrete(2); }
    void reset(envfleet::Call &call) { call.obs<float>()[0] = VALUE; }
    void step(envfleet::Call &call) { call.obs<float>()[0] = VALUE; }
};
ENVFLEET_ENV(Small)
"""


def small(folder: Path, value: int, name: str = "small") -> str:
    """A library whose observations are a number."""
    (folder / f"{name}.cpp").write_text(SMALL.replace("VALUE", str(value)))
    return str(build_library(folder / f"{name}.cpp")[0])


def test_the_commands_lead_from_nothing_to_a_fleet(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["native", "new", "walk.cpp"]) == 0
    assert "envfleet native build walk.cpp" in capsys.readouterr().out
    assert main(["native", "build", "walk.cpp"]) == 0
    assert 'ef.make("native:walk.so", num_envs=64)' in capsys.readouterr().out
    assert main(["native", "list", "walk.so"]) == 0
    assert "Walk" in (said := capsys.readouterr().out) and "option:      length = 10" in said
    assert main(["native", "check", "walk.so"]) == 0
    assert capsys.readouterr().out == "Walk: fine\n"
    assert main(["native", "list"]) == 0
    assert "CartPole-v1" in capsys.readouterr().out
    assert main(["native", "new", "walk.cpp"]) != 0  # what somebody wrote is not overwritten
    with ef.make("native:walk.so", 64, backend="native", env_kwargs={"length": 3}) as fleet:
        fleet.reset(seed=0)
        rows = [fleet.step(np.ones(64, np.int64)) for _ in range(5)]
        assert rows[-1].episode.min() == 1 and sum(batch.reward.sum() for batch in rows) >= 64


def test_the_example_of_the_page_is_built_and_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/native.md").read_text()
    (code,) = re.findall(r"```cpp\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("walk.cpp").write_text(code)
    assert main(["native", "build", "walk.cpp"]) == 0
    assert main(["native", "check", "walk.so"]) == 0
    with ef.make("native:walk.so", num_envs=4096, backend="native") as fleet:
        first = fleet.reset(seed=0)
        assert first.obs[:5, 0].tolist() == [int(np.random.default_rng(seed).integers(3)) for seed in range(5)]
        batch = fleet.step(np.ones(4096, np.int64))
        assert np.array_equal(batch.obs, first.obs + 1)


MANY = """
#include "envfleet_env.h"
struct NAME {
    int64_t at;
    static constexpr const char *name = "NAME";
    static void spaces(const double *, envfleet::Spaces &space) { space.obs.box<double>({1}); space.action.discrete(5); }
    void reset(envfleet::Call &call) { at = call.rng().below(1000); call.obs<double>()[0] = (double)at; }
    void move(envfleet::Call &call) {
        at = (at * 31 + call.action<int64_t>()[0]) % 1009;
        call.obs<double>()[0] = (double)at;
        call.reward = (double)(at % 7);
        call.terminated = at % 11 == 0;
    }
    STEP
};
ENVFLEET_ENV(NAME)
"""
ONE_BY_ONE = "void step(envfleet::Call &call) { move(call); }"
TOGETHER = """static void step_many(int64_t count, NAME *const *envs, envfleet::Call *calls) noexcept {
        for (int64_t i = 0; i < count; i++) envs[i]->move(calls[i]);
    }"""


@pytest.mark.parametrize("num_workers", [1, 2])
def test_steps_of_many_at_a_time_give_the_same_rows(tmp_path: Path, num_workers: int) -> None:
    fleets = []
    for name, step in (("Single", ONE_BY_ONE), ("Several", TOGETHER)):
        (tmp_path / f"{name}.cpp").write_text(MANY.replace("STEP", step).replace("NAME", name))
        path = build_library(tmp_path / f"{name}.cpp")[0]
        fleets.append(ef.make(f"native:{path}", 3000, backend="native", num_workers=num_workers))
    rng = np.random.default_rng(0)
    batches = [fleet.reset(seed=0) for fleet in fleets]
    for t in range(30):
        actions, slots = rng.integers(0, 5, 3000), np.sort(rng.choice(3000, 1700, replace=False))
        chosen = None if t % 3 else slots  # runs of neighbours of every length, too
        for fleet in fleets:
            fleet.send(actions if chosen is None else actions[chosen], chosen)
        batches = [fleet.recv() for fleet in fleets]
        for field in ("obs", "reward", "terminated", "episode", "step", "length", "ep_return", "final_obs", "slots"):
            ours, theirs = (getattr(batch, field) for batch in batches)
            assert np.array_equal(ours, theirs, equal_nan=True), field
    assert batches[0].episode.max() > 1
    for fleet in fleets:
        fleet.close()


def test_a_step_of_many_that_could_throw_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "bad.cpp").write_text(MANY.replace("STEP", TOGETHER.replace(" noexcept", "")).replace("NAME", "Bad"))
    with pytest.raises(BuildFailed, match="step_many is noexcept"):
        build_library(tmp_path / "bad.cpp")


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "small.cpp").write_text(SMALL)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(MissingExtra, match=r"'a C\+\+ compiler' is not available here. Install one"):
        build_library(tmp_path / "small.cpp")
    assert main(["native", "build", str(tmp_path / "small.cpp")]) != 0
    said = capsys.readouterr()
    assert "C++ compiler" in said.out + said.err and "Traceback" not in said.out + said.err
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingExtra, match=r"'no-such-compiler' is not available here\. The variable CXX"):
        build_library(tmp_path / "small.cpp")


def test_what_the_compiler_says_is_shown(tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "bad.cpp"
    source.write_text(SMALL.replace("VALUE", "nonsense"))
    with pytest.raises(BuildFailed, match=r"'nonsense' was not declared|undeclared identifier 'nonsense'|‘nonsense’ was not"):
        build_library(source)
    assert main(["native", "build", str(source)]) == 1
    assert "nonsense" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["bad.cpp"]  # no half library, no temporary file
    source.write_text(
        SMALL.replace("VALUE", "1")
        .replace("int64_t at;", "std::string at;")
        .replace("#include", "#include <string>\n#include", 1)
    )
    with pytest.raises(BuildFailed, match="an environment is copied as bytes"):
        build_library(source)


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvFailed, match="there is no library"):
        ef.make(f"native:{tmp_path}/absent.so", 2, backend="native")
    text = tmp_path / "text.so"
    text.write_text("hello")
    with pytest.raises(BadArgument, match="is not a library of native environments"):
        NativeEnv(str(text))
    with pytest.raises(BadArgument, match="is not a library of native environments"):
        NativeEnv(str(tmp_path))
    other = Path(ef.__file__).parent.glob("_scan*.so")
    with pytest.raises(BadArgument, match=r"is not a library of native environments: ENVFLEET_ENV\(YourStruct\) is missing"):
        NativeEnv(str(next(other)))
    (tmp_path / "empty.cpp").write_text(
        '#include "envfleet_env.h"\nENVFLEET_EXPORT const EnvTable *envfleet_env(int64_t) { return 0; }'
    )
    with pytest.raises(BadArgument, match="has no environment"):
        NativeEnv(str(build_library(tmp_path / "empty.cpp")[0]))
    with pytest.raises(BadArgument, match="has no environment 'Absent'; it has Counting"):
        NativeEnv(library(), "Absent")


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    header = (Path(ef.__file__).parent / "native/envfleet_env.h").read_text()
    (tmp_path / "envfleet_env.h").write_text(header.replace("#define ENVFLEET_ABI 1", "#define ENVFLEET_ABI 2"))
    with pytest.raises(
        BadArgument, match=r"was built with version 2 of envfleet_env\.h, and this envfleet has 1: build it again"
    ):
        load_library(small(tmp_path, 1))


def test_a_library_that_was_built_again_is_loaded_again(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        with ef.make(f"native:{small(tmp_path, value)}", 2, backend="native") as fleet:
            assert fleet.reset(seed=0).obs.tolist() == [[value]] * 2


def test_two_libraries_may_have_the_same_names(tmp_path: Path) -> None:
    one, other = small(tmp_path, 5, "one"), small(tmp_path, 6, "other")
    assert NativeEnv(one).reset()[0] == 5 and NativeEnv(other).reset()[0] == 6 and NativeEnv(one).reset()[0] == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lenght": 3}, "Faulty has no option 'lenght': it has phase, how, at, limit, busy_us"),
        ({"limit": "long"}, "the options of Faulty are numbers"),
        ({"limit": None}, "the options of Faulty are numbers"),
        ({"limit": 0}, "Faulty refuses its options: limit must be at least 1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadArgument, match=said):
        NativeEnv(library(), "Faulty", **options)


def test_wrong_tasks_are_refused() -> None:
    env = NativeEnv(library(), "Tasked")
    with pytest.raises(BadArgument, match="a task of Tasked has 1 numbers, not 2"):
        env.set_task([1, 2])
    with pytest.raises(BadArgument, match="Floats has no tasks"):
        probe("Floats")().reset(options={"task": 1})
    env.set_task(4)
    assert env.reset(seed=0)[0].tolist() == [4.0] and env.reset()[0].tolist() == [4.0]


# -- actions ---------------------------------------------------------------------------------------------------------

BACKENDS = ["native", "serial", "thread", "shm", "pipe"]
WRONG: dict[str, tuple[str, Any, str]] = {
    "too_large": ("Shifted", np.array([0, 4, 0]), "action 4 is not in Discrete"),
    "too_small": ("Shifted", np.array([0, -4, 0]), "action -4 is not in Discrete"),
    "another_dtype_too_large": ("Shifted", np.array([0, 100, 0], np.int16), "action 100 is not in Discrete"),
    "unsigned_beyond": ("Shifted", np.array([0, 2**64 - 1, 0], np.uint64), "action 18446744073709551615 is not in Discrete"),
    "floats": ("Shifted", np.array([0.0, 1.5, 0.0]), "the action has dtype float64, but Discrete"),
    "many_too_large": ("Indexed", np.array([[[0, 0], [0, 0]], [[0, 6], [0, 0]], [[0, 0], [0, 0]]]), "is not in MultiDiscrete"),
    "many_negative": (
        "Indexed",
        np.array([[[0, 0], [0, 0]], [[0, 0], [0, -1]], [[0, 0], [0, 0]]], np.int32),
        "is not in MultiDiscrete",
    ),
    "bytes_beyond": ("Bytes", np.full((3, 2, 3), [[[0]], [[256]], [[0]]]), "256.* is not in Box"),
    "floats_for_bytes": ("Bytes", np.full((3, 2, 3), 0.5), "the action has dtype float64, but Box"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_action_is_refused_with_its_slot(kind: str, backend: Any) -> None:
    name, actions, said = WRONG[kind]
    options: dict[str, Any] = {} if backend == "serial" else {"num_workers": 2}
    options |= {"start_method": "fork"} if backend in ("shm", "pipe") else {}
    with ef.make(probe(name), 3, backend=backend, **options) as fleet:
        fleet.reset(seed=0)
        good = np.zeros_like(actions) if actions.dtype.kind != "f" else np.zeros(actions.shape, np.int64)
        for _ in range(3):  # the first steps are taken in Python, the others in C
            before = fleet.step(good)
        with pytest.raises(EnvFailed, match=said) as failed:
            fleet.step(actions)
        assert failed.value.slot == (0 if "float" in kind else 1) and failed.value.phase == "step"
        after = fleet.reset(seed=1)
        assert after.status.tolist() == [READY] * 3 and before.scored.all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_batch_is_refused_before_it_is_sent(backend: Any) -> None:
    options: dict[str, Any] = {} if backend == "serial" else {"num_workers": 2}
    with ef.make(probe("Floats"), 3, backend=backend, **options) as fleet:
        fleet.reset(seed=0)
        for actions, said in (
            (np.zeros((3, 3, 2), np.float32), "shape"),
            (np.zeros((2, 2, 3), np.float32), "shape"),
            (np.full((3, 2, 3), "x"), "dtype"),
            (np.zeros((3, 2, 3), complex), "dtype"),
        ):
            with pytest.raises(BadArgument, match=said):
                fleet.step(actions)
        batch = fleet.step(np.arange(18, dtype=np.float32).reshape(3, 2, 3))
        assert batch.scored.all() and batch.obs.ravel().tolist() == list(range(18))


@pytest.mark.parametrize("name", ["Bytes", "SignedBytes", "Ints", "Longs", "Floats", "Doubles"])
def test_actions_of_every_type_arrive(name: str) -> None:
    with ef.make(probe(name), 3, backend="native", num_workers=2) as fleet:
        fleet.reset(seed=0)
        fleet.action_space.seed(0)
        for _ in range(4):
            action = fleet.action_space.sample()
            assert np.array_equal(fleet.step(action).obs, action)
        small_numbers = np.arange(18).reshape(3, 2, 3)
        for dtype in ("u1", "i4", "i8", "u8", "?"):
            assert np.array_equal(fleet.step(small_numbers.astype(dtype)).obs, small_numbers.astype(dtype))


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("how", "said"), [("raise", "planted fault in step"), ("number", "not a std::exception"), ("long", "x{200}")]
)
def test_what_is_thrown_is_a_failure_of_its_slot(how: str, said: str, workers: int) -> None:
    envs = [NativeCounting, lambda: NativeFaulty(how=how, at=4), NativeCounting]
    with ef.make(envs, backend="native", num_workers=workers) as fleet:
        fleet.reset(seed=0)
        for _ in range(3):
            fleet.step([0, 0, 0])
        with pytest.raises(EnvFailed, match=said) as failed:
            fleet.step([0, 0, 0])
        assert (failed.value.slot, failed.value.fault.step, failed.value.phase) == (1, 3, "step")


@pytest.mark.parametrize("workers", [1, 3])
def test_with_restarts_it_is_a_fault_row(workers: int) -> None:
    envs = [NativeCounting, lambda: NativeFaulty(at=4), NativeCounting]
    with ef.make(envs, backend="native", num_workers=workers, on_fault="restart") as fleet:
        fleet.reset(seed=0)
        rows = [fleet.step([0, 0, 0]) for _ in range(6)]
        assert [int(batch.status[1]) for batch in rows] == [READY, READY, READY, FAULT, READY, READY]
        assert rows[3].final_obs[1, 0] == 3.0 and rows[3].obs[1, 0] == 0.0 and not rows[3].scored[1]
        assert all(batch.scored[[0, 2]].all() for batch in rows)


def test_a_library_that_crashes_is_isolated_by_processes() -> None:
    envs = [NativeCounting, lambda: NativeFaulty(how="segv", at=3)]
    with ef.make(envs, backend="shm", num_workers=2, on_fault="restart", start_method="fork") as fleet:
        fleet.reset(seed=0)
        rows = [fleet.step([0, 0]) for _ in range(5)]
        assert [int(batch.status[1]) for batch in rows] == [READY, READY, FAULT, READY, READY]
        assert all(batch.scored[0] for batch in rows)
        assert "SIGSEGV" in str(fleet.faults[0])
    with ef.make(envs, backend="shm", num_workers=2, start_method="fork") as fleet:
        fleet.reset(seed=0)
        with pytest.raises(WorkerLost, match="SIGSEGV"):
            for _ in range(4):
                fleet.step([0, 0])


def test_auto_isolates_libraries_of_users() -> None:
    with ef.make(f"native:{library()}:Counting", 2) as fleet:
        assert fleet.plan.backend != "native"
    with ef.make("CartPole-v1", 2, backend="native") as fleet:
        assert fleet.plan.backend == "native"


def test_the_check_finds_what_breaks_the_contract(tmp_path: Path, capsys: Any) -> None:
    bad = SMALL.replace("struct Small", "static int64_t outside;\nstruct Small").replace("VALUE", "(float)++outside")
    (tmp_path / "bad.cpp").write_text(bad)
    path = str(build_library(tmp_path / "bad.cpp")[0])
    assert main(["native", "check", path, "--num-episodes", "1"]) == 1
    said = capsys.readouterr().out
    assert "gives another episode the second time" in said and "after its memory was restored" in said


def test_the_check_tells_what_is_thrown(capsys: Any) -> None:
    assert main(["native", "check", library(), "--num-episodes", "1"]) == 1
    assert "Faulty: \n  an episode failed: planted fault in step (seed 0)" in capsys.readouterr().out


def test_the_check_passes_over_what_only_python_can_make(capsys: Any) -> None:
    assert main(["native", "check", "--num-episodes", "1"]) == 0
    said = capsys.readouterr().out
    assert "MuJoCo: not checked" in said and "Cage2: fine" in said


def test_two_environments_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.cpp").write_text(
        SMALL.replace("VALUE", "1").replace("ENV(Small)", "ENVS(envfleet::Table<Small>::table, envfleet::Table<Small>::table)")
    )
    path = str(build_library(tmp_path / "twice.cpp")[0])
    # In a process of its own, because it used to search for ever.
    asks = f"from envfleet.native.library import load_library; load_library({path!r})"
    child = subprocess.run([sys.executable, "-c", asks], env=child_env(), capture_output=True, text=True, timeout=60)
    assert "has two environments with the name 'Small'" in child.stderr


@pytest.mark.parametrize("chosen", ["doubles", "floats"])
def test_a_class_with_other_spaces_than_its_library_writes_its_own_rows_only(chosen: str) -> None:
    """The library has float64 and the class says float32, or the other way round: Python converts, as for every environment."""

    class Declared(NativeEnv):
        def __init__(self) -> None:
            super().__init__(library(), chosen.capitalize())
            dtype = np.float32 if chosen == "doubles" else np.float64
            self.observation_space = gym.spaces.Box(-np.inf, np.inf, (2, 3), dtype)
            self.action_space = gym.spaces.Box(-np.inf, np.inf, (2, 3), dtype)

    with ef.make(Declared, 3, backend="native", num_workers=1) as fleet:
        fleet.reset(seed=0)
        actions = np.arange(18, dtype=fleet.single_action_space.dtype).reshape(3, 2, 3)
        for _ in range(4):
            batch = fleet.step(actions)
        assert np.array_equal(batch.obs, actions) and batch.reward.tolist() == [0.0] * 3
        fleet.reset(slots=[1])
        fleet.send(actions[:1], slots=[0])
        fleet.recv()
        assert not fleet.slab.obs[1].any()  # it was not written over by its neighbour


@pytest.mark.parametrize(
    ("compiler", "out", "said"),
    [('a "', "x.so", "CXX cannot be read"), ("c++", "", "is a folder"), ("c++", "absent/x.so", "there is no folder")],
)
def test_a_build_that_cannot_begin_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, out: str, said: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    (tmp_path / "small.cpp").write_text(SMALL)
    with pytest.raises(BadArgument, match=said):
        build_library(tmp_path / "small.cpp", tmp_path / out)


def test_what_render_throws_is_an_error(tmp_path: Path) -> None:
    drawing = '    int64_t render(char *, int64_t) const { throw std::runtime_error("no paper"); }\n};\nENVFLEET_ENV'
    (tmp_path / "small.cpp").write_text(SMALL.replace("VALUE", "1").replace("};\nENVFLEET_ENV", drawing))
    path = str(build_library(tmp_path / "small.cpp")[0])
    draws = f"from envfleet.native.native_env import NativeEnv; NativeEnv({path!r}, render_mode='ansi').render()"
    child = subprocess.run([sys.executable, "-c", draws], env=child_env(), capture_output=True, text=True, timeout=60)
    assert "RuntimeError: no paper" in child.stderr
