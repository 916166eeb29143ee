"""The Python face of one native environment: a `gymnasium.Env` over its memory.

A fleet steps native environments without Python (`compiled/native_life.c`). This class makes them ordinary environments as well: it is
what the Python slot life steps, what wrappers wrap, and what moves to another process.
"""

from __future__ import annotations

import ctypes
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding
from numpy.typing import NDArray

from envfleet.errors import BadArgument
from envfleet.native.library import ERROR_BYTES, Entry, EnvCall, load_library, own_library, space_of, text_of

_RANDOM_BYTES = 64
_MASK = 2**64 - 1
#: Attributes that belong to one process: they are made anew where the environment moves to.
_MADE_ANEW = ("_entry", "_options", "_error", "_obs", "_action", "_shared", "memory")


class NativeEnv(gym.Env[Any, Any]):
    """One environment of a library that was written against `envfleet_env.h`.

    Its memory holds the random stream, the state and the task: a copy of it is a copy of the environment.

    Args:
        library: path of the library; None: the one that is built with envfleet.
        name: which of its environments; None: the only one.
        render_mode: "ansi", if the environment can draw itself as text.
        options: the options that the environment names.

    Example:
        >>> env = NativeEnv(name="CartPole-v1")
        >>> obs, info = env.reset(seed=0)
        >>> obs.shape, env.action_space
        ((4,), Discrete(2))
    """

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012 - the attribute Gymnasium reads

    def __init__(
        self, library: str | None = None, name: str | None = None, render_mode: str | None = None, **options: Any
    ) -> None:
        self._made_with = (library, name, render_mode, options)
        self._entry = _entry(library, name)
        self._options = self._entry.options(options)
        spaces = self._entry.spaces(self._options)
        self.observation_space, self.action_space = space_of(spaces.obs), space_of(spaces.action)
        self.task_size = int(spaces.task_size)
        self.render_mode = render_mode
        self._state_bytes = int(self._entry.table.state_bytes)
        self.memory: NDArray[np.uint8] = _aligned(self.memory_bytes)
        self._obs = np.zeros(self.observation_space.shape or (), self.observation_space.dtype)
        self._action = np.zeros(self.action_space.shape or (), self.action_space.dtype)  # what its step reads: shape and dtype
        self._error = ctypes.create_string_buffer(ERROR_BYTES)
        self._is_seeded = False
        self._shared = self.share()
        if self._entry.table.init(self._state_at, self._options, self._shared, self._error):
            raise BadArgument(f"{self._entry.name} refuses its options: {text_of(self._error)}")

    def share(self) -> int | None:
        """The address of what all environments of a class share (`EnvCall.shared`); subclasses give one."""
        return None

    # -- memory -------------------------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """How much memory one environment needs, in whole cache lines."""
        return self._task_at + (_lines(8 * (1 + self.task_size)) if self.task_size else 0)

    @property
    def _task_at(self) -> int:
        return _RANDOM_BYTES + _lines(self._state_bytes)

    @property
    def _state_at(self) -> int:
        return int(self.memory.ctypes.data) + _RANDOM_BYTES

    @property
    def state_view(self) -> NDArray[np.uint8]:
        """The bytes of the state."""
        return self.memory[_RANDOM_BYTES : _RANDOM_BYTES + self._state_bytes]

    @property
    def kind(self) -> str:
        """What its memory means: the environment, the file it was built into, and its options."""
        names = [self._entry.table.option_names[i].decode() for i in range(self._entry.table.num_options)]
        options = ", ".join(f"{name}={value}" for name, value in zip(names, self._options))
        return f"{self._entry.name}({options}){self._entry.build}"

    def use_memory(self, memory: NDArray[np.uint8]) -> None:
        """Move to other memory, e.g. a row of one block for all slots."""
        memory[:] = self.memory
        self.memory = memory

    def fits_rows(self, obs: NDArray[Any], action: NDArray[Any]) -> bool:
        """Whether its library reads and writes such arrays of rows. A class may declare other spaces, and a library may be built again."""
        pairs = ((obs, self._obs), (action, self._action))
        return all(rows.dtype == own.dtype and rows.shape[2:] == own.shape for rows, own in pairs)

    def native_parts(self) -> tuple[int, NDArray[np.uint8], int, int, int, int, int]:
        """What the compiled core needs to step it: see `native_arm` in compiled/native_life.c."""
        numbers = int(np.prod(self.action_space.shape or (), dtype=np.int64))
        return self._entry.address, self.memory, self.task_size, *self._counted, numbers, self._shared or 0

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in _MADE_ANEW}
        return {**state, "memory": self.memory.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        library, name, render_mode, options = state["_made_with"]
        NativeEnv.__init__(self, library, name, render_mode, **options)
        self.memory[:] = state.pop("memory")
        vars(self).update(state)

    # -- the random stream --------------------------------------------------------------------------------------

    @property
    def np_random(self) -> np.random.Generator:
        """A generator that continues as the environment's own stream would. It is a copy: drawing from it changes nothing here."""
        self._seed_once()
        words = self.memory[:_RANDOM_BYTES].view(np.uint64)
        half = self.memory[32:40].view(np.uint32)
        bits: Any = np.random.PCG64()
        numbers = {"state": int(words[0]) << 64 | int(words[1]), "inc": int(words[2]) << 64 | int(words[3])}
        bits.state = {"bit_generator": "PCG64", "state": numbers, "has_uint32": int(half[0]), "uinteger": int(half[1])}
        return np.random.Generator(bits)

    @np_random.setter
    def np_random(self, value: np.random.Generator) -> None:
        state: Any = value.bit_generator.state
        if state["bit_generator"] != "PCG64":
            raise BadArgument(f"a native environment draws from PCG64, as Gymnasium does, not from {state['bit_generator']}")
        words, numbers = self.memory[:_RANDOM_BYTES].view(np.uint64), state["state"]
        words[:4] = [numbers["state"] >> 64, numbers["state"] & _MASK, numbers["inc"] >> 64, numbers["inc"] & _MASK]
        self.memory[32:40].view(np.uint32)[:] = state["has_uint32"], state["uinteger"]
        self._is_seeded = True

    #: Gymnasium's own name of it, which its checker reads.
    _np_random = np_random

    def _seed_once(self) -> None:
        if not self._is_seeded:
            self.np_random, self._np_random_seed = seeding.np_random()

    # -- the environment ----------------------------------------------------------------------------------------

    def set_task(self, task: Any) -> None:
        """The task of the next episodes, until another is set."""
        if not self.task_size:
            raise BadArgument(f"{self._entry.name} has no tasks")
        numbers = np.asarray(self.encode_task(task), np.float64).reshape(-1)
        if numbers.size != self.task_size:
            raise BadArgument(f"a task of {self._entry.name} has {self.task_size} numbers, not {numbers.size}: {task!r}")
        self._task_memory[0], self._task_memory[1:] = 1.0, numbers

    def encode_task(self, task: Any) -> Any:
        """A task as the numbers that the environment reads; subclasses whose tasks are not numbers say how."""
        return task

    @property
    def _task_memory(self) -> NDArray[np.float64]:
        return self.memory[self._task_at :].view(np.float64)[: 1 + self.task_size]

    def use_options(self, options: dict[str, Any]) -> None:
        """What `reset(options=…)` means beside the task; here nothing. Overridden instead of `reset`, which a fleet calls in C++ only."""

    def _call(self, action: NDArray[Any] | None = None) -> EnvCall:
        call = EnvCall(random=int(self.memory.ctypes.data), obs=int(self._obs.ctypes.data), shared=self._shared)
        call.error = ctypes.cast(self._error, ctypes.c_char_p)
        if self.task_size and self._task_memory[0]:
            call.task = int(self._task_memory.ctypes.data) + 8
        if action is not None:
            call.action = int(action.ctypes.data)
        return call

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. `options={"task": …}` sets the task."""
        if seed is not None:
            self.np_random, self._np_random_seed = seeding.np_random(seed)
        self._seed_once()
        if options:
            self.use_options(options)
            if options.get("task") is not None:
                self.set_task(options["task"])
        if self._entry.table.reset(self._state_at, ctypes.byref(self._call())):
            raise RuntimeError(text_of(self._error))
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step."""
        given = self._checked(action)  # it has to live as long as the call, which has its address
        call = self._call(given)
        if self._entry.table.step(1, ctypes.byref(ctypes.c_void_p(self._state_at)), ctypes.byref(call)) != 1:
            raise RuntimeError(text_of(self._error))
        return self._observation(), call.reward, bool(call.terminated), bool(call.truncated), {}

    def _checked(self, action: Any) -> NDArray[Any]:
        """The action as the native code reads it. What it could not hold, or what is not one of a fixed number of actions, is refused."""
        space, given, own = self.action_space, np.asarray(action), self._action
        if given.shape != own.shape:
            raise BadArgument(f"the action has shape {given.shape}, but {space} has {own.shape}")
        whole = own.dtype.kind in "iu"
        if given.dtype.kind not in ("biu" if whole else "biuf"):
            raise BadArgument(f"the action has dtype {given.dtype}, but {space} needs {own.dtype}")
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite, as in NumPy
            converted = np.asarray(given, own.dtype, order="C")
        count, start = self._counted
        if (whole and (converted != given).any()) or (count and ((converted < start) | (converted >= start + count)).any()):
            raise BadArgument(f"action {given.tolist()} is not in {space}")
        return converted

    @property
    def _counted(self) -> tuple[int, int]:
        """How many values each number of the action has, and the first; (0, 0) if it is of a box."""
        space = self.action_space
        if isinstance(space, gym.spaces.MultiDiscrete):
            return int(space.nvec.flat[0]) if space.nvec.size else 0, 0
        return (int(space.n), int(space.start)) if isinstance(space, gym.spaces.Discrete) else (0, 0)

    def _observation(self) -> Any:
        return self._obs.copy() if self._obs.ndim else self._obs[()]

    def render(self) -> str | None:
        """The environment as text, with render_mode "ansi"."""
        draw = self._entry.table.render
        if self.render_mode != "ansi" or not draw:
            return None
        room = 65536
        text = ctypes.create_string_buffer(room)
        size_bytes = draw(self._state_at, text, room)
        if size_bytes < 0:  # it threw, and the text says what
            raise RuntimeError(text_of(text))
        return text.raw[: min(room, size_bytes)].decode(errors="replace")


def _entry(library: str | None, name: str | None) -> Entry:
    entries = load_library(own_library() if library is None else library)
    if name is None and len(entries) == 1:
        return next(iter(entries.values()))
    if name not in entries:
        raise BadArgument(f"the library has no environment {name!r}; it has {', '.join(entries)}")
    return entries[name]


def _lines(size_bytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-size_bytes // 64) * 64


def _aligned(size_bytes: int) -> NDArray[np.uint8]:
    block = np.zeros(size_bytes + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + size_bytes]
