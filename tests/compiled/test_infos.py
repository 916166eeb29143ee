"""Infos cross a process as bytes: what comes out is what went in, whichever way was taken."""

import pickle

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import envfleet as ef
from envfleet.core.infos import PLAIN, read_info
from envfleet.slots import compiled_core


class Telling(gym.Env):
    """Says in its info what it was told to say."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        self.words = {}

    def say(self, words):
        self.words = words

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, self.words


@pytest.fixture(scope="module")
def fleet():
    with ef.make(Telling, 2, backend="shm", num_workers=1) as fleet:
        fleet.reset(seed=0)
        for _ in range(3):
            fleet.step([0, 0])
        yield fleet


def through(fleet, info):
    fleet.call("say", info)
    fleet.step([0, 0])
    return fleet.step([0, 0])


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return pickle.dumps(a) == pickle.dumps(b)  # NaN equals itself here


PLAIN_INFO = {
    "float": 0.1,
    "nan": float("nan"),
    "int": -(2**63),
    "yes": True,
    "no": False,
    "nothing": None,
    "text": "grüße",
    "np.float64": np.float64(2.5),
    "np.float32": np.float32(2.5),
    "np.float16": np.float16(2.5),
    "np.int8": np.int8(-3),
    "np.uint64": np.uint64(2**64 - 1),
    "np.bool": np.bool_(True),
    "np.complex": np.complex128(1 + 2j),
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "empty": np.zeros((0, 3)),
    "zero-d": np.array(4.0),
    "flags": np.array([True, False]),
    "": 1,
}
OTHER_INFOS = [
    {"big": 2**70},
    {"nested": {"a": [1, 2]}},
    {"strings": np.array(["a", "b"])},
    {"objects": np.array([None, 1], dtype=object)},
    {"foreign": np.arange(3, dtype=">i4")},
    {"strided": np.arange(6).reshape(2, 3).T},
    {"date": np.datetime64("2020-01-01")},
    {"lone": "\ud800"},
    {"too big for the arena": "x" * 100_000},
    {7: "a key that is no string"},
]


def test_plain_infos_come_back_with_their_types(fleet):
    batch = through(fleet, PLAIN_INFO)
    if "present" in compiled_core.status():
        assert batch._info[0][0] == PLAIN  # still bytes: nobody has looked
    assert same(batch.info[0], PLAIN_INFO)


@pytest.mark.parametrize("info", OTHER_INFOS, ids=lambda info: str(next(iter(info))))
def test_every_other_info_goes_through_pickle(fleet, info):
    assert same(through(fleet, info).info[1], pickle.loads(pickle.dumps(info)))


VALUES = st.one_of(
    st.floats(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.text(max_size=8),
    st.floats(width=32).map(np.float32),
    st.lists(st.integers(-5, 5), max_size=4).map(lambda values: np.array(values, np.int32)),
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(max_size=6), VALUES, max_size=5))
def test_any_plain_info(fleet, info):
    assert same(through(fleet, info).info[0], info)


def test_read_info_takes_pickles_too():
    assert read_info(pickle.dumps({"a": 1})) == {"a": 1}
