"""The conformance suite on `native`: with the probe environments in Python, which it runs beside native ones, and with twins of them in
C++, which its threads step. And native environments give the same bytes on every backend."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import envfleet as ef
from envfleet.backends.native_backend import NativeBackend
from envfleet.envs.registry import native_version
from envfleet.errors import BadArgument
from envfleet.native.native_env import NativeEnv
from envfleet.testing import conformance, record
from tests.support.native_probes import NativeCounting, NativeFaulty, NativeTasked

#: Checks of the twins. The others are about infos and nested spaces, which native environments do not have.
TWINS = (
    conformance.same_bytes_as_serial,
    conformance.every_slot_sent_comes_back,
    conformance.rows_carry_their_identity,
    conformance.ends_keep_the_last_observation,
    conformance.a_held_row_is_its_holders,
    conformance.the_envs_can_be_called,
    conformance.a_failing_env_is_a_fault,
    conformance.closing_is_complete,
)


@pytest.fixture(params=["compiled", "python"])
def core(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ENVFLEET_COMPILED", "1" if request.param == "compiled" else "0")
    monkeypatch.setattr(NativeBackend, "native_only", False)
    return str(request.param)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_native_passes_the_check(check: Any, core: str) -> None:
    check(conformance.Start("native"))


@pytest.mark.parametrize("check", TWINS, ids=lambda check: check.__name__)
def test_native_probes_pass_the_check(check: Any, core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, twin in (("Counting", NativeCounting), ("Tasked", NativeTasked), ("Faulty", NativeFaulty)):
        monkeypatch.setattr(conformance, name, twin)
    check(conformance.Start("native"))


def test_environments_in_python_are_refused() -> None:
    with pytest.raises(BadArgument, match="slot 0 has <Counting"):
        ef.make(conformance.Counting, 2, backend="native")
    with pytest.raises(BadArgument, match="'FrozenLake-v1' has no native version"):
        ef.make("FrozenLake-v1", 2, backend="native")
    with pytest.raises(BadArgument, match="'gridworld-team' steps its agents as one"):
        ef.make("gridworld-parallel", 2, backend="native")


NAMES = ["CartPole-v1", "Pendulum-v1", "gridnavi", "gridworld-team", "connect4-medium", "cage2", "Ant-v5"]
ENVS = {**{name: name for name in NAMES}, "tasked": NativeTasked, "faulty": functools.partial(NativeFaulty, at=7)}
#: Backend, workers, at_least.
RUNS = [("native", 1, None), ("native", 2, 2), ("native", 3, 1), ("thread", 2, 1), ("shm", 2, 2), ("pipe", 2, None)]


def streamed(env: Any, on_end: Any, backend: Any, workers: int, at_least: int | None) -> str:
    """The stream of a fleet with a fault policy, tasks and seeds ahead."""
    options: dict[str, Any] = {"num_workers": workers} if backend != "serial" else {}
    options |= {"start_method": "fork"} if backend in ("shm", "pipe") else {}
    built = native_version(env)[0] if isinstance(env, str) else env
    with ef.make(built, 5, backend=backend, on_end=on_end, on_fault="restart", max_restarts=10**6, **options) as fleet:
        if env is NativeTasked:
            fleet.assign(range(5), tasks=[7, 8, None, 9, 7])
        fleet.assign([1, 3], seeds=[11, 2**40])
        # A slot that failed waits before it is rebuilt, so there are few faults here.
        return record(fleet, 70 if isinstance(env, str) else 10, seed=7, at_least=at_least).digest()


@pytest.mark.parametrize("on_end", ["reset", "wait"])
@pytest.mark.parametrize("name", ENVS)
def test_a_native_environment_gives_the_same_bytes_everywhere(name: str, on_end: str) -> None:
    if name == "Ant-v5":
        pytest.importorskip("mujoco", reason="mujoco is not installed")
    wanted = streamed(ENVS[name], on_end, "serial", 1, None)
    for run in RUNS:
        assert streamed(ENVS[name], on_end, *run) == wanted, run


def test_the_core_steps_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every name: nothing of the class in Python is called after the first steps, also not at the ends of episodes."""
    from envfleet.envs.registry import NATIVE

    for name in NATIVE:
        if "mujoco" in NATIVE[name]:
            pytest.importorskip("mujoco", reason="mujoco is not installed")
        with ef.make(name, 3, backend="native", num_workers=2) as fleet:
            fleet.reset(seed=0)
            space = fleet.action_space
            space.seed(0)
            for _ in range(3):
                fleet.step(space.sample())
            with monkeypatch.context() as patch:
                patch.setattr(NativeEnv, "step", None)
                patch.setattr(NativeEnv, "reset", None)
                rows = [fleet.step(space.sample()) for _ in range(60)]
            assert all(batch.scored.all() for batch in rows), name
            assert np.isfinite(rows[-1].reward).all()
