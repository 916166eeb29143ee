"""Whether a copy of an env is the env: what is compared, and what is refused."""

from __future__ import annotations

import collections
import enum
import functools
import math
import pickle
import random
import threading
import types
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from envfleet.backends.env_copy import CannotCopy, difference, packed, try_packed
from envfleet.envs.catch import PixelCatch
from envfleet.envs.connect4 import Connect4
from envfleet.envs.tmaze import TMaze


class Colour(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", "x y")


class Thing:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def method(self) -> None:
        return None


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a = [1]


class Forgetful(Thing):
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "secret"}


class Fresh(Thing):
    def __reduce__(self) -> Any:
        return Thing, ()


class Anew(Thing):
    def __reduce__(self) -> Any:
        return Anew, (), {"n": 1}


class Single(Thing):
    def __reduce__(self) -> str:
        return "SINGLE"


SINGLE = Single()


class Ez(gym.utils.EzPickle):
    def __init__(self) -> None:
        gym.utils.EzPickle.__init__(self)


class Listed(list):  # type: ignore[type-arg]
    pass


def function() -> None:
    return None


def generator(draws: int) -> np.random.Generator:
    rng = np.random.default_rng(5)
    rng.random(draws)
    rng.integers(3, dtype=np.int32)  # leaves half a word for next time
    return rng


GOOD = {
    "plain": (None, True, 1, -0.0, math.nan, math.inf, 1j, "é", b"b", ..., range(3), slice(1, 2)),
    "containers": {"a": [1, (2,)], 3: {4, 5}, "d": collections.deque([1], maxlen=2), "e": collections.OrderedDict(a=1)},
    "defaults": collections.defaultdict(list, a=[1]),
    "arrays": [np.zeros((2, 3), np.float32), np.asfortranarray(np.ones((2, 3))), np.array([b"S"]), np.float32(1.5)],
    "empty": [(), frozenset(), [], {}, np.zeros(0)],
    "dtypes": [np.dtype("f4"), np.float32, np.add],
    "random": [generator(3), np.random.RandomState(3), random.Random(2), np.random.PCG64(1), np.random.MT19937(1)],
    "spawned": [rng := np.random.default_rng(1), rng.spawn(2)],
    "names": [function, math.sin, Thing, Colour.RED, Pair(1, [2])],
    "spaces": gym.spaces.Dict({"a": gym.spaces.Box(0, 1, (2,), seed=1), "b": gym.spaces.Discrete(3)}),
    "instances": [Thing(a=1), Slotted(), functools.partial(function, 1, a=2), Thing().method, types.SimpleNamespace()],
}


@pytest.mark.parametrize("name", [name for name in GOOD if name != "instances"])
def test_what_is_known_is_copied(name: str) -> None:
    assert difference(GOOD[name], pickle.loads(pickle.dumps(GOOD[name]))) == ""


@pytest.mark.parametrize("value", GOOD["instances"][:4])  # type: ignore[index]
def test_instances_are_compared_by_what_they_hold(value: Any) -> None:
    assert difference(value, pickle.loads(pickle.dumps(value))) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True), (1, 1.0), (0.0, -0.0), (1.0, math.nan), ("a", "b"), ([1], (1,)), ([1], [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({1: 1}, {1.0: 1}),
        (np.zeros(2), np.zeros(2, np.float32)), (np.zeros(2), np.array([0.0, -0.0])), (np.zeros((2, 2)), np.zeros((2, 2)).T.copy("F")),
        (np.float32(1), np.float64(1)), (generator(1), generator(2)), (random.Random(1), random.Random(2)),
        (Thing(a=1), Thing(a=2)), (Thing(a=1), Thing(b=1)), (Thing(), Forgetful()), (Slotted(), Thing()),
        (collections.deque([1], 2), collections.deque([1], 3)), (function, math.sin), (Colour.RED, 1),
        (gym.spaces.Discrete(3, seed=1), gym.spaces.Discrete(3, seed=2)), (np.random.PCG64(1), np.random.MT19937(1)),
    ],
)  # fmt: skip
def test_differences_are_found(one: Any, other: Any) -> None:
    assert difference(one, other) and difference([one], [other])


def test_which_objects_are_one_counts() -> None:
    shared, array = [1], np.zeros(2)
    assert difference([shared, shared], [[1], [1]]) and difference([[1], [1]], [shared, shared])
    assert difference([array, array], [np.zeros(2), np.zeros(2)])
    ring: list[Any] = []
    ring.append(ring)
    assert difference(ring, pickle.loads(pickle.dumps(ring))) == "" and difference(ring, [[]])
    both = Thing(rng=generator(1))
    both.again = both.rng.bit_generator
    assert difference(both, pickle.loads(pickle.dumps(both))) == ""


@pytest.mark.parametrize(
    "value",
    [
        Forgetful(secret=1), Fresh(a=1), Anew(n=2), SINGLE, Ez(), Listed([1]), object(), {"a", "b"}, {(1, 2)},
        np.array([None]), memoryview(b"a"), lambda: None, (i for i in ()), threading.Lock(), [].append, gym.make("Ant-v5"),
        gym.make("LunarLander-v3"), 1 .__add__,
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_loses_something_or_is_not_known_stays(value: Any) -> None:
    with pytest.raises(CannotCopy):
        packed(Thing(value=value))
    assert isinstance(try_packed(Thing(value=value)), str)


class Guarded:
    """Its attributes cannot be set from outside, and one of them is hidden behind a property."""

    def __init__(self) -> None:
        self.__dict__.update(a=1, b=[2])

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    @property
    def b(self) -> None:
        return None

    @b.setter
    def b(self, value: Any) -> None:
        raise AttributeError("b")


def test_attributes_come_back_past_properties_and_setters() -> None:
    assert vars(pickle.loads(packed(Guarded()))) == {"a": 1, "b": [2]}
    box = gym.spaces.Box(0, 1, (2,), seed=3)
    assert (pickle.loads(packed(box)).sample() == box.sample()).all()


def test_arrays_over_one_memory_stay() -> None:
    whole = np.zeros((4, 2))
    assert isinstance(try_packed([whole[1:3], 1]), bytes)  # a view of something nobody else holds
    assert "share memory" in str(try_packed([whole, whole[1]]))
    assert "share memory" in str(try_packed([whole[:2], whole[1:]]))
    assert isinstance(try_packed([whole[:2], whole[2:]]), bytes)
    assert "memory of" in str(try_packed([np.frombuffer(memoryview(bytearray(8)).cast("B"), np.uint8)[:], 1]))


def test_a_copy_that_was_copied_can_be_copied() -> None:
    for env in (gym.make("CartPole-v1"), gym.make("FrozenLake-v1"), gym.make("Pendulum-v1"), TMaze(), PixelCatch(), Connect4()):
        env.reset(seed=3)
        env.action_space.seed(1)
        for _ in range(3):
            env = pickle.loads(packed(env))
            env.step(env.action_space.sample())
