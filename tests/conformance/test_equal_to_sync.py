"""make_vec against gymnasium.vector.SyncVectorEnv: the same bytes, infos, masks and final observations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import envfleet as ef
from envfleet.envs.probe import Mixed
from envfleet.testing import canonical, record

MODES = ("NextStep", "SameStep", "Disabled")
# Gymnasium 1.4 has retired Taxi-v3; where it is still there it is the one.
TAXI = "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"
BACKENDS = ("serial", "thread", "aio", "pipe", "shm")


class Chatty(gym.Env[Any, Any]):
    """Infos of every kind that Gymnasium treats in its own way, some there on some steps only."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Tuple((spaces.Discrete(50), spaces.Box(-9, 9, (2, 2), np.float16)))
        self.action_space = spaces.MultiDiscrete([3, 4])
        self.render_mode = render_mode
        self.count = 0

    def _obs(self) -> Any:
        return self.count, self.np_random.normal(size=(2, 2)).astype(np.float16)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        self.limit = int(self.np_random.integers(1, 6))
        info = {"limit": self.limit, "words": "first", "options": sorted(options or {})}
        return self._obs(), info if self.limit % 2 else {}

    def step(self, action: Any) -> Any:
        self.count += 1
        info: dict[str, Any] = {"array": np.arange(3, dtype=np.int16) + self.count, "flag": self.count % 2 == 0}
        if self.count % 3 == 0:
            info |= {"nested": {"deep": {"x": np.float32(self.count)}, "name": f"n{self.count}"}, "none": None}
        if self.count == 2:
            info |= {"npbool": np.bool_(True), "list": [1, self.count], "big": 2**40}
        ended = self.count >= self.limit
        return self._obs(), float(action.sum()), ended and self.limit % 2 == 0, ended, info

    def render(self) -> Any:
        return np.full((4, 4, 3), self.count, np.uint8)


ENVS: dict[str, Any] = {
    "CartPole-v1": lambda: gym.make("CartPole-v1", render_mode="rgb_array", max_episode_steps=12),
    "FrozenLake-v1": lambda: gym.make("FrozenLake-v1", render_mode="ansi"),
    "Taxi": lambda: gym.make(TAXI, render_mode="ansi", max_episode_steps=15),
    "Pendulum-v1": lambda: gym.make("Pendulum-v1", max_episode_steps=9),
    "Mixed": Mixed,
    "Chatty": lambda: Chatty("rgb_array"),
}
ATTRIBUTE = {"Mixed": "count", "Chatty": "count"}
DRAWN = ("FrozenLake-v1", "Taxi", "Chatty")  # cheap to render


def script(envs: Any, name: str, mode: str, steps: int) -> list[bytes]:
    """Everything a vector env gives in a run with every kind of call, as canonical bytes per call."""
    out = []
    rng = np.random.default_rng(11)
    envs.action_space.seed(5)

    def masked(mask: Any) -> None:
        out.append(canonical(envs.reset(options={"reset_mask": mask, "low": -0.02, "high": 0.02})))

    out.append(canonical(envs.reset(seed=123)))
    for step in range(steps):
        result = envs.step(envs.action_space.sample())
        out.append(canonical(result))
        ended = result[2] | result[3]
        if ended.any():
            if step % 3 == 0:
                out.append(canonical(envs.get_attr(ATTRIBUTE.get(name, "spec"))) if name in ATTRIBUTE else b"")
                out.append(canonical(envs.render()) if name in DRAWN else b"")
            if mode == "Disabled":
                masked(ended)
            elif step % 7 == 0:
                drawn = rng.random(envs.num_envs) < 0.5
                drawn[0] |= not drawn.any()  # a mask of nobody is refused
                masked(drawn) if step % 2 else masked(ended)
        if step and step % (steps // 3) == 0:
            out.append(canonical(envs.reset()))  # unseeded: each env's own stream goes on
        if step and step % (steps // 2) == 0:
            out.append(canonical(envs.reset(seed=[step + i if i % 2 else None for i in range(envs.num_envs)])))
    return out


def compare(name: str, backend: str, workers: int, mode: str, steps: int, num_envs: int = 6, **options: Any) -> None:
    if backend != "serial":
        options["num_workers"] = workers
    if backend in ("pipe", "shm"):
        options.setdefault("start_method", "fork")
    oracle = SyncVectorEnv([ENVS[name]] * num_envs, autoreset_mode=gym.vector.AutoresetMode(mode))
    ours = ef.make_vec([ENVS[name]] * num_envs, autoreset_mode=mode, backend=backend, **options)
    try:
        assert ours.observation_space == oracle.observation_space and ours.action_space == oracle.action_space
        assert ours.metadata["autoreset_mode"] == oracle.metadata["autoreset_mode"]
        wanted, got = script(oracle, name, mode, steps), script(ours, name, mode, steps)
        for i, (a, b) in enumerate(zip(wanted, got, strict=True)):
            assert a == b, f"call {i}:\n{a!r}\n{b!r}"
    finally:
        oracle.close()
        ours.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ENVS)
def test_serial_is_sync(name: str, mode: str) -> None:
    """Invariant 2: the one slot life does what Gymnasium's loop does, in every mode."""
    compare(name, "serial", 1, mode, 150)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_backends_are_sync(backend: str, mode: str) -> None:
    """Invariant 2 and 5 on the two envs with the most to say, with uneven shares per worker."""
    for name, workers in (("Chatty", 2), ("Mixed", 3), ("FrozenLake-v1", 5)):
        compare(name, backend, workers, mode, 60)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_start_methods_are_sync(start_method: str) -> None:
    compare("Chatty", "shm", 2, "SameStep", 60, num_envs=3, start_method=start_method)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ENVS)
def test_full_equivalence(name: str, backend: str, mode: str) -> None:
    """2,000 steps x 6 slots, on every backend, for 1, 2, 3 and 5 workers."""
    for workers in (1, 2, 3, 5) if backend != "serial" else (1,):
        compare(name, backend, workers, mode, 2000)


@pytest.mark.full
@pytest.mark.parametrize("name", ENVS)
def test_full_hashes(name: str) -> None:
    """Invariant 5: one SHA-256 of the canonical stream over all backends and worker counts."""
    digests = {}
    for backend in BACKENDS:
        for workers in (1, 2, 3, 5) if backend != "serial" else (1,):
            options: dict[str, Any] = {} if backend == "serial" else {"num_workers": workers}
            if backend in ("pipe", "shm"):
                options["start_method"] = "fork"
            with ef.make([ENVS[name]] * 6, backend=backend, **options) as fleet:
                digests[backend, workers] = record(fleet, 2000, seed=42).digest()
    assert len(set(digests.values())) == 1, digests


def test_custom_masks_are_refused_as_gymnasium_does() -> None:
    oracle, ours = SyncVectorEnv([Chatty] * 2), ef.make_vec(Chatty, 2, backend="serial")
    for envs in (oracle, ours):
        envs.reset(seed=0)
    for mask in ([True, False], np.array([1, 0]), np.array([True]), np.zeros(2, bool)):
        kinds = []
        for envs in (oracle, ours):
            with pytest.raises(Exception) as raised:
                envs.reset(options={"reset_mask": mask})
            kinds.append(raised.type)
        assert kinds[0] is kinds[1]
    oracle.close()
    ours.close()


def test_disabled_mode_refuses_to_step_an_ended_env() -> None:
    ours = ef.make_vec(Chatty, 3, autoreset_mode="Disabled", backend="serial")
    ours.reset(seed=0)
    with pytest.raises(AssertionError, match="have no running episode"):  # Gymnasium's own is an AssertionError too
        for _ in range(10):
            ours.step(ours.action_space.sample())
    ours.close()


class Told(gym.Env[Any, Any]):
    """Its info has the type, dtype and bytes of each part of its action."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Dict(key=spaces.Discrete(9), move=spaces.Box(-1, 1, (2,), np.float32))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return 0, {}

    def step(self, action: Any) -> Any:
        return 0, 0.0, False, False, {"got": told(action)}


def told(action: Any) -> list[Any]:
    return [(name, isinstance(part, np.generic), part.dtype.str, part.shape, part.tobytes()) for name, part in action.items()]


@pytest.mark.parametrize("backend", ["serial", "thread", "pipe", "shm"])
def test_each_env_gets_its_action_in_the_dtype_of_its_own_send(backend: str) -> None:
    """Dtypes differ between parts, between slots and between sends; a foreign byte order gives the same numbers."""
    rng, slots_out = np.random.default_rng(5), 0
    dtypes = ["?", "i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8", ">f8", ">i4"]
    with ef.make(Told, num_envs=4, backend=backend, num_workers=None if backend == "serial" else 2) as fleet:
        fleet.reset()
        for _ in range(60):
            idle, expected = rng.permutation(4), {}
            for slots in (idle[:2], idle[2:3], idle[3:]):
                parts = {"key": rng.integers(0, 2, len(slots)), "move": rng.normal(size=(len(slots), 2))}
                batch = {name: part.astype(rng.choice(dtypes)) for name, part in parts.items()}
                native = {name: part.astype(part.dtype.newbyteorder("=")) for name, part in batch.items()}
                each = gym.vector.utils.iterate(gym.vector.utils.batch_space(Told.action_space, len(slots)), native)
                expected |= {int(slot): told(action) for slot, action in zip(slots, each)}
                fleet.send(batch, slots)
            rows = fleet.recv()
            slots_out += len(rows)
            assert {slot: info["got"] for slot, info in zip(rows.slots.tolist(), rows.info)} == expected
    assert slots_out == 240
