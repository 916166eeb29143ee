import json

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet.errors import BadArgument
from envfleet.remote import codec, errors, quickjson
from envfleet.remote.result import action_payload
from envfleet.remote.wire import BadFrame, Endpoint, decode, encode, parse_result


@pytest.mark.parametrize(
    ("url", "ws", "public"),
    [
        ("http://a:8000", "ws://a:8000/ws", "http://a:8000"),
        ("ws://a:8000/ws", "ws://a:8000/ws", "http://a:8000"),
        ("https://a/space/", "wss://a/space/ws", "https://a/space"),
        ("wss://a/ws?session_id=1", "wss://a/ws?session_id=1", "https://a"),
        ("http://[::1]:9", "ws://[::1]:9/ws", "http://[::1]:9"),
    ],
)
def test_addresses(url, ws, public):
    endpoint = Endpoint.parse(url)
    assert (endpoint.ws, endpoint.public) == (ws, public)


def test_no_secret_is_shown():
    endpoint = Endpoint.parse("https://me:pa%20ss@host:1/x?key=k3y", {"X-Key": "hidden"}, token="t0ken")
    assert endpoint.headers["Authorization"] == "Bearer t0ken"
    shown = repr(endpoint) + endpoint.public
    assert not any(secret in shown for secret in ("pa", "k3y", "hidden", "t0ken"))
    with pytest.raises(BadArgument) as error:
        Endpoint.parse("ftp://me:secret@host")
    assert "secret" not in str(error.value)


def test_text_frames():
    assert json.loads(encode("step", {"a": np.arange(3), "b": np.float32(0.5)})) == {
        "type": "step",
        "data": {"a": [0, 1, 2], "b": 0.5},
    }
    assert decode(encode("state")) == ("state", None)
    assert decode(b'{"type": "state"}') == ("state", None)


@pytest.mark.parametrize("dtype", ["u1", "i4", "f4", "f8", "?", "c8", ">i2"])
def test_binary_frames_give_arrays_back(dtype):
    array = (np.arange(24).reshape(2, 3, 4) % 5).astype(dtype)
    kind, data = decode(encode("observation", {"obs": array, "deep": [{"x": array[0]}], "n": 1}, binary=True))
    assert kind == "observation" and data["n"] == 1
    assert data["obs"].dtype == array.dtype and np.array_equal(data["obs"], array)
    assert np.array_equal(data["deep"][0]["x"], array[0])
    data["obs"][:] = 0  # it is the caller's own memory


def test_binary_frames_are_hardly_larger_than_their_arrays():
    frame = encode("observation", {"observation": {"obs": np.zeros((84, 84, 4), np.uint8)}, "reward": 0.0}, binary=True)
    assert len(frame) <= 1.05 * 84 * 84 * 4
    assert isinstance(encode("observation", {"n": 1}, binary=True), str)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200), st.binary(max_size=100).map(lambda b: b"EFR1" + b)))
def test_no_frame_breaks_the_reader(frame):
    try:
        kind, _ = decode(frame)
        assert isinstance(kind, str)
    except BadFrame:
        pass


def test_hostile_frames_are_refused():
    good = encode("observation", {"obs": np.zeros(4)}, binary=True)
    for bad in (
        good[:-1],
        good + b"x",
        good.replace(b"<f8", b"|O8"),
        good.replace(b"[4]", b"[9]"),
        good.replace(b"[4]", b"[-1]"),
        "[" * 100_000,
        "null",
        '{"type": 3}',
    ):
        with pytest.raises(BadFrame):
            decode(bad)


def test_results_take_metadata_from_either_place():
    nested = parse_result({"observation": {"n": 1, "metadata": {"k": 1}}, "reward": True, "done": False})
    beside = parse_result({"observation": {"n": 1}, "reward": None, "done": True, "metadata": {"truncated": True}})
    assert nested.metadata == {"k": 1} and nested.reward == 1.0 and nested.observation == {"n": 1}
    assert beside.reward is None and beside.truncated and not beside.terminated
    for broken in ({}, [], {"observation": {}, "reward": "much"}):
        with pytest.raises(BadFrame):
            parse_result(broken)


def test_error_codes_have_types():
    def of(code, **more):
        return errors.from_frame({"code": code, "message": "m", **more}, "http://a")

    full = of("CAPACITY_REACHED", active_sessions=2, max_sessions=2)
    assert isinstance(full, errors.CapacityReached) and (full.active, full.max) == (2, 2)
    assert isinstance(of("EXECUTION_ERROR"), errors.EnvError)
    assert of("VALIDATION_ERROR", errors=[1]).details == {"errors": [1]}
    assert isinstance(of("SESSION_ERROR"), errors.SessionRefused)
    assert of("NEW_ONE").code == "NEW_ONE"


def test_actions_of_every_kind():
    class Model:
        def model_dump(self):
            return {"message": "hi", "metadata": {}}

    assert action_payload(Model()) == {"message": "hi"}
    assert action_payload("hi", "message") == {"message": "hi"}
    with pytest.raises(BadArgument):
        action_payload(dict)


SPACES = [
    spaces.Discrete(5, start=2),
    spaces.Box(np.array([-4.8, -np.inf], "f4"), np.array([4.8, np.inf], "f4")),
    spaces.Box(0, 255, (3, 4, 1), np.uint8),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.MultiDiscrete([3, 4]),
    spaces.Text(12, min_length=2, charset="abc"),
    spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,), np.float64)]),
    spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Dict({"c": spaces.Box(0, 1, (2,))})}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_spaces_and_their_values_cross_the_wire_unchanged(space):
    described = json.loads(json.dumps(codec.space_to_json(space)))
    assert codec.space_from_json(described) == space
    json.dumps(codec.schema(space), allow_nan=False)
    space.seed(1)
    dialect = codec.Dialect(space, space)
    for _ in range(20):
        value = space.sample()
        back = dialect.action(json.loads(json.dumps(dialect.payload(value), allow_nan=False)))
        assert space.contains(back)
        assert codec.to_json(space, back) == codec.to_json(space, value)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Discrete(2), True),
        (spaces.Discrete(2), 2),
        (spaces.Discrete(2), "1"),
        (spaces.Discrete(2), 0.5),
        (spaces.Discrete(2), float("nan")),
        (spaces.Discrete(2), None),
        (spaces.Box(0, 1, (2,)), [0.5]),
        (spaces.Box(0, 1, (2,)), [0.5, "x"]),
        (spaces.Box(0, 1, (2,)), [0.5, 2.0]),
        (spaces.Text(3), 3),
        (spaces.Tuple([spaces.Discrete(2)]), 1),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 1}),
    ],
    ids=str,
)
def test_wrong_actions_are_named(space, value):
    dialect = codec.Dialect(spaces.Discrete(1), space)
    with pytest.raises(codec.BadAction):
        dialect.action(value if isinstance(space, spaces.Dict) else {"action": value})


def test_numbers_json_lacks_become_null():
    assert codec.jsonable({"a": np.array([1.0, np.nan]), "b": float("inf"), "c": object()}) == {
        "a": [1.0, None],
        "b": None,
        "c": None,
    }


def test_json_is_the_standard_librarys():
    values = [{}, [], "", "é\u2028\x00", 0, -1.5e300, True, None, {"a": [1, {"b": None}]}, {1: 2, None: 3}, (1, 2)]
    write = quickjson.encoder(str)
    for value in values:
        text = json.dumps(value, separators=(",", ":"))
        assert write(value) == text
        assert quickjson.loads(text) == quickjson.loads(f" {text}\n") == json.loads(text)
    assert write({"a": 1j}) == '{"a":"1j"}'
    for bad in ("", "  ", "{", "[1] x", "nul", "'a'"):
        with pytest.raises(ValueError, match="line 1"):
            quickjson.loads(bad)
    with pytest.raises(RecursionError):
        quickjson.loads("[" * 100_000)
