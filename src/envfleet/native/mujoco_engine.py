"""MuJoCo for native environments: its functions, a model and the memory to step it, as compiled/native/mujoco_engine.h reads them.

The addresses come from the installed package, so nothing is built against a version of MuJoCo. Environments with the same settings share
one engine. It has an `mjData` for every thread that may step at once; what belongs to one environment is in that environment's memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import weakref
from typing import Any

import numpy as np

from envfleet.errors import BadArgument
from envfleet.native.library import load_library, own_library
from envfleet.util.extras import from_extra
from envfleet.util.machine import usable_cpus

#: What compiled/native/mujoco.cpp has room for: numbers of a state, of contact forces, of an action.
_MOST = {"numbers in its state": 1000, "contact forces": 1000, "actuators": 100}
KINDS = ("Ant", "HalfCheetah", "AntDir", "AntGoal", "HalfCheetahVel", "HalfCheetahDir")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What an environment is made of: Gymnasium's arguments, and what a family of tasks adds."""

    kind: str
    xml_file: str
    frame_skip: int = 5
    forward_reward_weight: float = 1.0
    ctrl_cost_weight: float = 0.5
    contact_cost_weight: float = 0.0
    healthy_reward: float = 1.0
    main_body: int | str = 1
    terminate_when_unhealthy: bool = False
    healthy_z_range: tuple[float, float] = (0.2, 1.0)
    contact_force_range: tuple[float, float] = (-1.0, 1.0)
    reset_noise_scale: float = 0.1
    num_skipped_positions: int = 0
    include_cfrc_ext_in_observation: bool = False
    horizon: int = 0
    max_speed: float = 3.0
    tasks: tuple[float, ...] = ()

    @property
    def is_ant(self) -> bool:
        """Whether it is an Ant, which can fall over."""
        return self.kind.startswith("Ant")


class _Lane(ctypes.Structure):
    """`Lane` of the header."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("data", "qpos", "qvel", "ctrl", "main_xpos", "forces")),
        ("busy", ctypes.c_int64),
    )


class _Block(ctypes.Structure):
    """`Engine` of the header."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("step", "forward", "reset_data", "rne_post_constraint", "get_state", "set_state")),
        *((name, ctypes.c_void_p) for name in ("standard_normal", "model", "lanes", "start_qpos", "start_qvel", "tasks")),
        *((name, ctypes.c_int64) for name in ("num_lanes", "nq", "nv", "nu", "num_forces", "state_bits", "frame_skip", "kind")),
        *((name, ctypes.c_int64) for name in ("num_skipped", "shows_forces", "needs_forces", "ends_unhealthy", "horizon")),
        *((name, ctypes.c_int64) for name in ("num_tasks", "single_costs")),
        *((name, ctypes.c_double) for name in ("dt", "noise", "forward_weight", "ctrl_weight", "contact_weight")),
        *((name, ctypes.c_double) for name in ("healthy_reward", "low_z", "high_z", "low_force", "high_force", "max_speed")),
    )


class Engine:
    """A model with its settings. It must live as long as an environment that uses it: each keeps a reference."""

    def __init__(self, settings: Settings, path: str) -> None:
        with from_extra("mujoco"):
            import mujoco
        self.settings = settings
        self.model = mujoco.MjModel.from_xml_path(path)
        self._check(mujoco, path)
        self._datas = [mujoco.MjData(self.model) for _ in range(usable_cpus() + 1)]
        self._start = self._datas[0].qpos.copy(), self._datas[0].qvel.copy()
        self._tasks = np.array(settings.tasks, np.float64)
        self._lanes = (_Lane * len(self._datas))(*map(self._lane, self._datas))
        self._block = self._filled(mujoco)
        low, high = self.model.actuator_ctrlrange.astype(np.float32).T
        self.action_bounds = low, high
        num_forces = (self.model.nbody - 1) * 6 * settings.include_cfrc_ext_in_observation
        self.obs_size = int(self.model.nq + self.model.nv - settings.num_skipped_positions + num_forces)

    @property
    def address(self) -> int:
        """Where the block is that compiled code reads."""
        return ctypes.addressof(self._block)

    def _check(self, mujoco: Any, path: str) -> None:
        """Refuse what one state row cannot hold, by name."""
        model, sleeps = self.model, getattr(mujoco.mjtEnableBit, "mjENBL_SLEEP", None)
        have = (mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION), model.nbody * 6, model.nu)
        for (what, most), number in zip(_MOST.items(), have):
            if number > most:
                raise BadArgument(f"{path} has {number} {what}, backend 'native' has room for {most}: use backend='auto'")
        if model.nplugin or (sleeps is not None and model.opt.enableflags & int(sleeps)):
            what = "plugins" if model.nplugin else "the flag 'sleep'"
            raise BadArgument(f"{path} uses {what}, whose state cannot be moved between threads: use backend='auto'")
        if self.settings.is_ant and model.nq < 3:
            raise BadArgument(f"{path} has {model.nq} positions, and the third is the height of an Ant: give another model")

    def _lane(self, data: Any) -> _Lane:
        main = data.body(self.settings.main_body).xpos if self.settings.is_ant else data.xpos[0]
        fields = (data.qpos, data.qvel, data.ctrl, main, data.cfrc_ext)
        return _Lane(data._address, *(int(field.ctypes.data) for field in fields), 0)

    def _filled(self, mujoco: Any) -> _Block:
        settings, model = self.settings, self.model
        functions = ctypes.CDLL(mujoco._functions.__file__)  # symbols are looked up in the library it is linked to as well
        names = ("mj_step", "mj_forward", "mj_resetData", "mj_rnePostConstraint", "mj_getState", "mj_setState")
        addresses = [_address(getattr(functions, name)) for name in names]
        user_error = ctypes.addressof(ctypes.c_void_p.in_dll(functions, "mju_user_error"))
        handle = load_library(own_library())["MuJoCo"].library.envfleet_mujoco_handle_errors
        handle.argtypes, handle.restype = (ctypes.c_void_p,), None
        handle(user_error)
        block = _Block(*addresses, _address(_standard_normal()))
        block.model, block.lanes, block.num_lanes = model._address, ctypes.addressof(self._lanes), len(self._lanes)
        block.start_qpos, block.start_qvel, block.tasks = (int(one.ctypes.data) for one in (*self._start, self._tasks))
        block.nq, block.nv, block.nu, block.num_forces = model.nq, model.nv, model.nu, model.nbody * 6
        block.state_bits, block.frame_skip = int(mujoco.mjtState.mjSTATE_INTEGRATION), settings.frame_skip
        block.kind, block.num_skipped = KINDS.index(settings.kind), settings.num_skipped_positions
        block.shows_forces = settings.include_cfrc_ext_in_observation
        block.needs_forces = settings.include_cfrc_ext_in_observation or settings.kind == "Ant"
        block.ends_unhealthy, block.horizon = settings.terminate_when_unhealthy, settings.horizon
        block.num_tasks, block.single_costs = len(self._tasks), (0.5 * np.float32(1)).dtype == np.float32
        block.dt, block.noise = model.opt.timestep * settings.frame_skip, settings.reset_noise_scale
        block.forward_weight, block.ctrl_weight = settings.forward_reward_weight, settings.ctrl_cost_weight
        block.contact_weight, block.healthy_reward = settings.contact_cost_weight, settings.healthy_reward
        block.low_z, block.high_z = settings.healthy_z_range
        block.low_force, block.high_force = settings.contact_force_range
        block.max_speed = settings.max_speed
        return block


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _standard_normal() -> Any:
    """NumPy's own function behind `Generator.standard_normal`, so that the bits are those of the installed version."""
    from numpy.random import _bounded_integers, _generator

    for module in (_generator, _bounded_integers):
        found = getattr(ctypes.CDLL(module.__file__), "random_standard_normal", None)
        if found is not None:
            return found
    raise BadArgument(
        f"NumPy {np.__version__} as installed here does not export random_standard_normal, which native MuJoCo environments "
        "draw their first velocities from: use backend='auto', or NumPy from PyPI"
    )


_engines: weakref.WeakValueDictionary[Any, Engine] = weakref.WeakValueDictionary()


def engine_for(settings: Settings) -> Engine:
    """The engine with these settings: the one that exists, unless its file was changed since."""
    with from_extra("mujoco"):
        import mujoco  # noqa: F401 - Gymnasium's own message names another package
    from gymnasium.envs.mujoco.mujoco_env import expand_model_path

    try:
        path = expand_model_path(settings.xml_file)
    except OSError:
        raise BadArgument(f"there is no model {settings.xml_file!r}: give the path of a MuJoCo XML file") from None
    # A fork may come while threads hold lanes of the parent's: in the child nobody would give them back.
    key = settings, path, os.stat(path).st_mtime_ns, os.getpid()
    engine = _engines.get(key)
    if engine is None:
        engine = _engines[key] = Engine(settings, path)
    return engine
