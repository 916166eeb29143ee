import json
import struct

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from envfleet import errors
from envfleet.errors import BadArgument
from envfleet.remote import Endpoint, exact_protocol, message_json, space_codec, wire
from envfleet.remote.exact_protocol import BadFrame
from envfleet.remote.message_json import MAX_DEPTH
from envfleet.remote.result import action_payload
from envfleet.remote.wire import decode, encode, encode_request, parse_result


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
def test_an_address_gives_the_websocket_and_the_public_url(url, ws, public):
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


def test_text_frames_are_plain_json():
    assert json.loads(encode("step", {"a": np.arange(3), "b": np.float32(0.5)})) == {
        "type": "step",
        "data": {"a": [0, 1, 2], "b": 0.5},
    }
    assert decode(encode("state"))[:2] == ("state", None)
    assert decode(b'{"type": "state"}')[:2] == ("state", None)


@pytest.mark.parametrize("dtype", ["u1", "i4", "f2", "f4", "f8", "g", "?", "c8", ">i2", "U3", "S2", "M8[s]"])
@pytest.mark.parametrize("binary", [True, False])
def test_exact_frames_give_arrays_back(dtype, binary):
    array = (np.arange(24).reshape(2, 3, 4) % 5).astype(dtype)
    frame = exact_protocol.encode("observation", 5, {"obs": array, "deep": [{"x": array[0]}], "n": 1}, binary=binary)
    assert isinstance(frame, bytes if binary else str)
    kind, data, number, _ = exact_protocol.decode(frame)
    assert (kind, number, data["n"]) == ("observation", 5, 1)
    assert data["obs"].dtype == array.dtype and np.array_equal(data["obs"], array)
    assert np.array_equal(data["deep"][0]["x"], array[0])
    data["obs"][:] = data["obs"][0, 0, 0]  # it is the caller's own memory


def test_binary_frames_are_hardly_larger_than_their_arrays():
    data = {"observation": {"obs": np.zeros((84, 84, 4), np.uint8)}, "reward": 0.0}
    assert len(exact_protocol.encode("observation", 1, data, binary=True)) <= 1.05 * 84 * 84 * 4
    assert isinstance(exact_protocol.encode("observation", 1, {"n": 1}, binary=True), str)


ANYTHING = st.one_of(
    st.binary(max_size=200),
    st.text(max_size=200),
    st.binary(max_size=100).map(lambda b: b"EFR2" + b),
    st.recursive(st.none() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(
        lambda value: json.dumps(value)
    ),
    st.tuples(st.sampled_from(["$a", "$f", "$i", "$c", "$t", "$s", "$z", "$b", "$d", "$n", "$x"]), st.text() | st.integers()
              | st.lists(st.integers() | st.text())).map(lambda pair: json.dumps({"type": "x", "data": {pair[0]: pair[1]}})),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(ANYTHING)
def test_no_frame_breaks_the_reader(frame):
    for read in (decode, exact_protocol.decode):
        try:
            assert isinstance(read(frame)[0], str)
        except BadFrame:
            pass


def test_hostile_frames_are_refused():
    good = exact_protocol.encode("observation", 1, {"obs": np.zeros(4)}, binary=True)
    for bad in (
        good[:-1],
        good + b"x",
        good.replace(b"<f8", b"|O8"),
        good.replace(b"<f8", b"<f3"),
        good.replace(b"[4]", b"[9]"),
        good.replace(b"[4]", b"-444"[:3]),
        good.replace(b"EFR2", b"EFR1"),
        good.replace(b'{"$a":0}', b'{"$a":1}'),
        "[" * 100_000,
        "null",
        '{"type": 3}',
        '{"type": "step", "id": "1"}',
        '{"type": "step", "id": 1.0}',
        '{"type": "step", "id": true}',
        '{"type": "step", "id": 1, "hurry": true}',
        '{"type": "step", "id": 1, "data": {"$f": "3ff0000000000000"}}',
        '{"type": "step", "id": 1, "data": {"$f": "7ff0000000000000", "n": 1}}',
        '{"type": "step", "id": 1, "data": {"$new": 1}}',
        '{"type": "step", "id": 1, "data": {"$s": [[1]]}}',
        '{"type": "step", "id": 1, "data": {"$a": ["|b1", [1], "Ag=="]}}',
        '{"type": "step", "id": 1, "data": {"$a": ["<U1", [1], "/////w=="]}}',
        '{"type": "step", "id": 1, "data": {"$i": "12"}}',
    ):
        with pytest.raises(BadFrame):
            exact_protocol.decode(bad)


@pytest.mark.parametrize(
    "shape", [[2**40, 2**40], [2**62], [2**63], [2**200], [0, 2**70], [-1], [True], [1.0], ["4"], [1] * 40, 4, None]
)
def test_shapes_that_cannot_be_are_refused(shape):
    head = json.dumps({"arrays": [["<f8", shape]], "message": {"type": "observation", "id": 1, "data": {"$a": 0}}})
    frame = b"EFR2" + len(head).to_bytes(4, "little") + head.encode() + bytes(32)
    with pytest.raises(BadFrame):
        exact_protocol.decode(frame)
    text = json.dumps({"type": "observation", "id": 1, "data": {"$a": ["<f8", shape, "AAAAAAAAAAA="]}})
    with pytest.raises(BadFrame):
        exact_protocol.decode(text)


def repr_of(value):
    return type(value).__name__


NAN_OF_ANOTHER_SIGN = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]
VALUES = [
    None, True, 0, -1, 2**63, 10**5000, -(10**5000), 0.0, -0.0, 5e-324, float("nan"), NAN_OF_ANOTHER_SIGN, float("inf"),
    -float("inf"), "", "日本語 ﷺ 🂡", "\ud800 half", "\x00\x7f", "x" * 100_000, b"\x00\xff", (1, (2, [3])), {1, 2},
    frozenset({"a"}), {1: 2, (3, 4): "x", "$t": [1]}, {"$f": "x"}, 1 + 2j, complex(float("nan"), -0.0), np.float32(0.1),
    np.int8(-3), np.bool_(True), np.float64("nan"), np.str_("s"), np.array(["ab", "c"]), np.zeros((0, 3)), np.array(5.0), [],
    {}, [[[]]], np.array([[np.nan, -np.inf, -0.0]], np.float16), np.arange(4)[::2],
]  # fmt: skip


def same(a, b):
    """Equal to the bit, and of the same type."""
    if isinstance(a, np.ndarray | np.generic):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return repr(a) == repr(b) if isinstance(a, complex) else a == b


@pytest.mark.parametrize("binary", [True, False])
def test_values_arrive_as_they_were_sent(binary):
    for value in VALUES:
        sent = {"v": value, "nested": [{"k": (value,)}]}
        frame = exact_protocol.encode("x", 2**47, sent, binary=binary)
        got = exact_protocol.decode(frame)
        value_got = got.data["v"]
        assert same(value_got, value) and same(got.data["nested"][0]["k"][0], value), str(value)[:80]
        if isinstance(frame, str):
            json.loads(frame, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
            frame.encode("ascii")


def test_any_number_of_arrays_can_be_sent():
    arrays = [np.full(2, i) for i in range(exact_protocol.MAX_ARRAYS + 1)]
    for some in (arrays, arrays[:-1]):
        assert same(exact_protocol.decode(exact_protocol.encode("x", 1, {"v": some}, binary=True)).data["v"], some)


def test_what_cannot_be_sent_is_named():
    ring = []
    ring.append(ring)
    deep = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    for value in (object(), lambda: 1, np.array([object()]), np.zeros(2, [("a", "f4")]), ring, deep, {"a": {"b": {3j: print}}}):
        with pytest.raises(exact_protocol.NoWireForm):
            exact_protocol.encode("x", 1, {"v": value})
        if value is not ring and value is not deep:
            with pytest.raises(exact_protocol.NoWireForm):
                encode_request("x", {"v": value})
    assert exact_protocol.sendable({"good": (1,), "bad": object(), "deep": deep}) == {"good": (1,)}


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize(
    "wrap",
    [lambda v: [v], lambda v: (v,), lambda v: {"a": v}, lambda v: {1: v}, lambda v: {"$a": v}, lambda v: frozenset({(v,)})],
)
@pytest.mark.parametrize("leaf", [1, float("nan"), np.float32(1), 1j, (), np.zeros(2), np.zeros(0), 10**5000, b"x"], ids=repr_of)
def test_what_can_be_sent_can_be_read(wrap, leaf, binary):
    """Up to the deepest value that is sent at all."""
    value, sent = leaf, 0
    for _ in range(2 * MAX_DEPTH):
        try:
            value = wrap(value)
        except TypeError:
            break  # an array in a set
        try:
            frame = exact_protocol.encode("x", 1, {"v": value}, binary=binary)
        except exact_protocol.NoWireForm:
            break
        exact_protocol.decode(frame)
        sent += 1
    assert sent > 20 or isinstance(leaf, np.ndarray)


@pytest.mark.parametrize("open_, close", [("[", "]"), ('{"a":', "}")])
@pytest.mark.parametrize("levels", [1, 10, 100, MAX_DEPTH - 1, MAX_DEPTH, 500, 900, 10_000, 100_000])
def test_depth_is_limited_where_it_is_decoded(open_, close, levels):
    text = '{"type":"reset","id":1,"data":' + open_ * levels + "1" + close * levels + "}"
    wide = text.replace("1}", "1" + ',"wide":[' + ",".join(["[1]"] * 500) + "]}") if open_ != "[" else text
    for read in (decode, exact_protocol.decode):
        for frame, depth in ((text, levels + 1), (wide, levels + (3 if wide != text else 1))):
            if depth <= MAX_DEPTH:
                assert read(frame)[0] == "reset"
            else:
                with pytest.raises(BadFrame):
                    read(frame)


def test_results_take_metadata_from_either_place():
    nested = parse_result({"observation": {"n": 1, "metadata": {"k": 1}}, "reward": 1, "done": False})
    beside = parse_result({"observation": {"n": 1}, "reward": None, "done": True, "metadata": {"truncated": True}})
    assert nested.metadata == {"k": 1} and nested.reward == 1.0 and nested.observation == {"n": 1}
    assert beside.reward is None and beside.truncated and not beside.terminated
    good = {"observation": {"n": 1}, "reward": 1.0, "done": False, "metadata": {"truncated": True}}
    assert parse_result(good).reward == 1.0
    wrong = {
        "observation": [None, 1, "x", [], True],
        "reward": [True, "1.0", [1.0], {}, 10**400],
        "done": [None, "false", 0, 1, [], "true"],
        "metadata": [1, "x", [1], {"truncated": "false"}, {"truncated": 1}, {"truncated": None}],
    }
    broken = [{**good, key: value} for key, values in wrong.items() for value in values]
    broken += [{key: value for key, value in good.items() if key != missing} for missing in ("observation", "reward", "done")]
    for data in (*broken, {}, [], None, 3, "x"):
        with pytest.raises(BadFrame):
            parse_result(data)


@pytest.mark.parametrize("is_step", [True, False])
def test_exact_results_have_every_field_and_no_other(is_step):
    good = {"observation": {"n": 1}, "reward": float("nan") if is_step else None, "terminated": is_step, "truncated": is_step,
            "info": {"truncated": "an info of its own"}}  # fmt: skip
    result = exact_protocol.parse_result(good, is_step)
    assert (result.terminated, result.truncated, result.done) == (is_step,) * 3 and result.metadata == good["info"]
    wrong = {
        "observation": [None, 1, []],
        "reward": [None, True, 1, "1.0", [1.0]] if is_step else [0.0, False],
        "terminated": [None, 0, 1, "true"] + [True] * (not is_step),
        "truncated": [None, 0, 1, "false"] + [True] * (not is_step),
        "info": [None, [], "x"],
        "flag": [True],
    }
    broken = [{**good, key: value} for key, values in wrong.items() for value in values]
    broken += [{key: value for key, value in good.items() if key != missing} for missing in good]
    for data in (*broken, {}, [], None):
        with pytest.raises(BadFrame):
            exact_protocol.parse_result(data, is_step)


def test_error_codes_have_types():
    def of(code, **more):
        return wire.error_in({"code": code, "message": "m", **more}, "http://a")

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
    described = json.loads(json.dumps(space_codec.space_to_json(space)))
    assert space_codec.space_from_json(described) == space
    json.dumps(space_codec.schema(space), allow_nan=False)
    space.seed(1)
    dialect = space_codec.Dialect(space, space)
    for _ in range(20):
        value = space.sample()
        sent = space_codec.to_json(space, value)
        fields = sent if isinstance(space, spaces.Dict) else {"action": sent}
        back = dialect.action(json.loads(json.dumps(fields, allow_nan=False)))
        assert space.contains(back)
        assert space_codec.to_json(space, back) == space_codec.to_json(space, value)


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
        (spaces.Box(0, 1, (2,)), ["0.5", "0.5"]),
        (spaces.Box(0, 1, (2,)), [True, False]),
        (spaces.Box(0, 1, (2,)), [None, 0.5]),
        (spaces.Box(0, 1, (2,)), [10**400, 0.5]),
        (spaces.Box(0, 255, (1,), np.uint8), [256]),
        (spaces.Box(0, 255, (1,), np.uint8), [3.7]),
        (spaces.Box(0, 255, (1,), np.uint8), np.array([256])),
        (spaces.Box(0, 255, (1,), np.uint8), np.array([3.7])),
        (spaces.Discrete(2), 10**400),
        (spaces.Discrete(2), [1]),
        (spaces.MultiDiscrete([3, 3]), [1, 10**30]),
        (spaces.MultiBinary(2), [1, 2]),
        (spaces.Sequence(spaces.Discrete(2)), 3),
        (spaces.Text(3), 3),
        (spaces.Tuple([spaces.Discrete(2)]), 1),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 1}),
    ],
    ids=str,
)
def test_wrong_actions_are_named(space, value):
    dialect = space_codec.Dialect(spaces.Discrete(1), space)
    with pytest.raises(space_codec.BadAction):
        dialect.action(value if isinstance(space, spaces.Dict) else {"action": value})


def test_numbers_json_lacks_become_null():
    assert space_codec.jsonable({"a": np.array([1.0, np.nan]), "b": float("inf"), "c": object()}) == {
        "a": [1.0, None],
        "b": None,
        "c": None,
    }


def test_json_is_the_standard_librarys():
    values = [{}, [], "", "é\u2028\x00", 0, -1.5e300, True, None, {"a": [1, {"b": None}]}, {1: 2, None: 3}, (1, 2)]
    write = message_json.writer(str)
    for value in values:
        text = json.dumps(value, separators=(",", ":"))
        assert write(value) == text
        assert message_json.loads(text) == message_json.loads(f" {text}\n") == json.loads(text)
    assert write({"a": 1j}) == '{"a":"1j"}'
    for bad in ("", "  ", "{", "[1] x", "nul", "'a'"):
        with pytest.raises(ValueError, match="line 1"):
            message_json.loads(bad)
    with pytest.raises(RecursionError):
        message_json.loads("[" * 100_000)
