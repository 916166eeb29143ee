"""Native Ant and HalfCheetah: the same bits as the classes in Python."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import envfleet as ef
from envfleet.testing import record

pytest.importorskip("mujoco", reason="mujoco is not installed")

from envfleet.envs import mujoco_tasks, native_mujoco

ODD = {
    "forward_reward_weight": 0.3,
    "ctrl_cost_weight": 0.07,
    "contact_cost_weight": 0.1,
    "healthy_reward": -0.7,
    "healthy_z_range": (0.3, 0.8),
    "contact_force_range": (0.0, 0.7),
    "reset_noise_scale": 0.03,
    "exclude_current_positions_from_observation": False,
    "frame_skip": 3,
    "main_body": "aux_1",
}
PAIRS: dict[str, Any] = {
    "ant": (native_mujoco.NativeAnt, lambda: gym.make("Ant-v5")),
    "ant_without_forces": (
        lambda: native_mujoco.NativeAnt(include_cfrc_ext_in_observation=False),
        lambda: gym.make("Ant-v5", include_cfrc_ext_in_observation=False),
    ),
    "ant_odd": (lambda: native_mujoco.NativeAnt(**ODD), lambda: gym.make("Ant-v5", **ODD)),
    "cheetah": (native_mujoco.NativeHalfCheetah, lambda: gym.make("HalfCheetah-v5")),
    "antdir": (native_mujoco.NativeAntDir, mujoco_tasks.AntDir),
    "antdir_7": (lambda: native_mujoco.NativeAntDir(7), lambda: mujoco_tasks.AntDir(7)),
    "antgoal": (native_mujoco.NativeAntGoal, mujoco_tasks.AntGoal),
    "cheetahvel": (native_mujoco.NativeHalfCheetahVel, mujoco_tasks.HalfCheetahVel),
    "cheetahdir": (native_mujoco.NativeHalfCheetahDir, mujoco_tasks.HalfCheetahDir),
}


@pytest.mark.parametrize("name", PAIRS)
def test_every_step_and_reset_has_the_bits_of_the_class_in_python(name: str) -> None:
    ours, theirs = (make() for make in PAIRS[name])
    rng = np.random.default_rng(0)
    assert ours.reset(seed=3)[0].tobytes() == theirs.reset(seed=3)[0].tobytes()
    for _ in range(900):
        action = rng.uniform(-1, 1, ours.action_space.shape).astype(np.float32)
        mine, other = ours.step(action), theirs.step(action)
        assert mine[0].tobytes() == other[0].tobytes()
        assert np.float64(mine[1]).tobytes() == np.float64(other[1]).tobytes()
        assert (mine[2], mine[3]) == (bool(other[2]), bool(other[3]))
        if mine[2] or mine[3]:
            assert ours.reset()[0].tobytes() == theirs.reset()[0].tobytes()


@pytest.mark.parametrize("name", ["Ant-v5", "HalfCheetah-v5", "antgoal"])
def test_any_number_of_workers_gives_the_same_stream(name: str) -> None:
    digests = set()
    for workers in (1, 2, 3):
        with ef.make(name, num_envs=5, backend="native", num_workers=workers) as fleet:
            digests.add(record(fleet, 60).digest())
    assert len(digests) == 1


def test_a_copy_of_the_memory_continues_with_the_same_bits_in_eight_others() -> None:
    first, others = native_mujoco.NativeAnt(), [native_mujoco.NativeAnt() for _ in range(8)]
    first.reset(seed=1)
    actions = np.random.default_rng(1).uniform(-1, 1, (60, 8)).astype(np.float32)
    for action in actions[:20]:
        first.step(action)
    for other in others:
        other.memory[:] = first.memory
    for action in actions[20:]:
        expected = first.step(action)
        for other in others:
            got = other.step(action)
            assert got[0].tobytes() == expected[0].tobytes() and got[1:4] == expected[1:4]


def test_an_error_of_mujoco_is_an_error_of_its_slot(tmp_path: Any) -> None:
    from gymnasium.envs.mujoco.mujoco_env import expand_model_path

    with open(expand_model_path("ant.xml")) as file:
        text = file.read().replace("<option", '<size memory="12K"/><option', 1)
    path = os.path.join(tmp_path, "small.xml")
    with open(path, "w") as file:
        file.write(text)
    env = native_mujoco.NativeAnt(xml_file=path)
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="MuJoCo: mj_stackAlloc"):
        for _ in range(200):
            env.step(np.ones(8, np.float32))
    env.reset(seed=0)


def test_what_cannot_be_done_is_refused_by_name() -> None:
    with pytest.raises(ef.errors.BadArgument, match="camera_name"):
        native_mujoco.NativeAnt(camera_name="track")
    with pytest.raises(ef.errors.BadArgument, match="render_mode"):
        native_mujoco.NativeHalfCheetah(render_mode="rgb_array")


def test_a_fleet_gets_a_fault_row_for_an_error_of_mujoco(tmp_path: Any) -> None:
    from gymnasium.envs.mujoco.mujoco_env import expand_model_path

    with open(expand_model_path("ant.xml")) as file:
        text = file.read().replace("<option", '<size memory="12K"/><option', 1)
    path = os.path.join(tmp_path, "small.xml")
    with open(path, "w") as file:
        file.write(text)
    with ef.make(
        "Ant-v5", num_envs=2, backend="native", num_workers=2, on_fault="restart", env_kwargs={"xml_file": path}
    ) as fleet:
        fleet.reset(seed=0)
        batches = [fleet.step(np.ones((2, 8), np.float32)) for _ in range(40)]
    assert any(batch.faulted.any() for batch in batches)


def test_a_forked_child_does_not_wait_for_the_lanes_of_its_parent() -> None:
    env = native_mujoco.NativeHalfCheetah()
    for lane in env._engine._lanes:
        lane.busy = 1  # as if threads were stepping at the moment of the fork
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # ends it, should it wait for ever
        native_mujoco.NativeHalfCheetah().reset(seed=0)
        os._exit(0)
    for lane in env._engine._lanes:
        lane.busy = 0
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
