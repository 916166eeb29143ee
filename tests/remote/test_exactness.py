"""What a local fleet gives, a remote one gives: bit for bit, whatever JSON thinks of it."""

import hashlib
import json
import struct
import urllib.request
from functools import partial

import numpy as np
import pytest
from websockets.sync.client import connect

import envfleet as ef
from envfleet.envs.echo import Echo
from envfleet.remote import CapacityTable, HttpEnvClient, OpenEnvGymnasiumWrapper, Server
from envfleet.remote.result import StepResult
from envfleet.remote.space_members import from_json
from tests.support.served_envs import NUMBERS, TEXTS, Everything

COLUMNS = ("reward", "terminated", "truncated", "episode", "step", "length", "ep_return", "scored", "status")


def fingerprint(value) -> str:
    """Of a value with its types and its bits: NaN equals itself here, and 0.0 is not -0.0."""

    def feed(value):
        if isinstance(value, np.ndarray | np.generic):
            kind = f"{type(value).__name__}{value.dtype}{value.shape}"
            parts = [feed(inner) for inner in value.tolist()] if value.dtype == object else [value.tobytes()]
            return repr((kind, parts)).encode()
        if isinstance(value, dict):
            return repr([(feed(key), feed(inner)) for key, inner in value.items()]).encode()
        if isinstance(value, list | tuple):
            return repr((type(value).__name__, [feed(inner) for inner in value])).encode()
        if isinstance(value, float):
            return struct.pack(">d", value)
        if isinstance(value, complex):
            return struct.pack(">dd", value.real, value.imag)
        if isinstance(value, int) and not isinstance(value, bool):
            return hex(value).encode()
        return f"{type(value).__name__}{value!r}".encode()

    return hashlib.sha256(feed(value)).hexdigest()


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "text"])
@pytest.mark.parametrize("backend", ["pipe", "thread"])
def test_row_for_row_what_a_local_fleet_gives(binary, backend):
    with (
        Server(Everything, port=0, max_sessions=4, backend=backend, num_workers=2) as server,
        ef.make(Everything, 2, backend="serial") as local,
        ef.make([server.url], num_envs=2, env_kwargs={"binary": binary, "capacity": CapacityTable()}) as remote,
    ):
        assert remote.single_observation_space == local.single_observation_space
        rng = np.random.default_rng(1)
        mine, theirs = remote.reset(seed=1), local.reset(seed=1)
        for turn in range(24):
            for name in COLUMNS:
                assert fingerprint(getattr(mine, name)) == fingerprint(getattr(theirs, name)), (turn, name)
            for part in ("obs", "final_obs"):
                a, b = getattr(mine, part), getattr(theirs, part)
                for key in b:
                    assert fingerprint(a[key]) == fingerprint(b[key]), (turn, part, key)
            for slot in range(2):
                for part in ("info", "final_info"):
                    a, b = getattr(mine, part)[slot], getattr(theirs, part)[slot]
                    assert set(a or {}) == set(b or {}), (turn, part)
                    for key in b or {}:
                        assert fingerprint(a[key]) == fingerprint(b[key]), (turn, part, key)
            pushed = rng.uniform(-1, 1, (2, 2)).astype(np.float32)
            action = {"say": [TEXTS[turn % len(TEXTS)][:50], "x"], "push": pushed}
            mine, theirs = remote.step(action), local.step(action)
        assert not remote.faults and not local.faults


def test_plain_clients_get_plain_json():
    """NaN is null there, half a character an escape, and what JSON lacks is left out: never an error, never a zero."""
    with Server(Everything, port=0, max_sessions=2, backend="serial") as server:
        with connect(server.url.replace("http", "ws") + "/ws", max_size=None) as socket:
            socket.send('{"type": "reset"}')
            json.loads(socket.recv())
            for n in range(1, 6):
                socket.send(json.dumps({"type": "step", "data": {"say": "", "push": [0.0, 0.5]}}))
                text = socket.recv()
                data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
                if data["type"] == "error":  # an integer of 5,000 digits
                    assert data["data"]["kind"] == "unsendable"
                    socket.send('{"type": "reset"}')
                    json.loads(socket.recv())
                    continue
                finite = np.isfinite(NUMBERS[n])
                assert (data["data"]["reward"] is not None) == finite
        for body in ({}, {"start": 5}):
            request = urllib.request.Request(server.url + "/reset", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=10) as response:
                assert json.load(response)["observation"]["text"] == TEXTS[body.get("start", 0)]


def test_text_is_not_cut_and_has_no_holes():
    with Server(partial(Echo, max_length=2**21), port=0, max_sessions=2, backend="serial") as server:
        with HttpEnvClient(server.url) as client:
            client.reset(horizon=100)
            for text in (*TEXTS, "語" * 10**6):
                assert client.step({"message": text}).observation.echoed == text
        for mode in ("raw_text", "json"):
            env = OpenEnvGymnasiumWrapper(server.url, mode, "text", text_length=16)
            env.reset()
            for text in (*TEXTS, "語" * 5000):
                obs, *_, info = env.step(text)
                assert (obs["echoed"] if isinstance(obs, dict) else obs) == text and info["text"] == text
                env.reset()
            env.close()
        env = OpenEnvGymnasiumWrapper(server.url, "text", "text", text_length=8)
        env.reset()
        assert bytes(env.step("\ud800é")[0]).rstrip(b"\0") == "\ud800é".encode(errors="surrogatepass")
        env.close()


def test_a_null_reward_is_what_it_is_said_to_be():
    class Silent:
        def reset(self, **kwargs):
            return StepResult({"n": 0})

        def step(self, action):
            return StepResult({"n": 1}, None)

        def close(self):
            pass

    schema = {"action": {"properties": {"a": {"type": "string"}}}, "observation": {"properties": {"n": {"type": "integer"}}}}
    for null, seen in ((0.0, 0.0), (float("nan"), float("nan")), (-1.0, -1.0)):
        env = OpenEnvGymnasiumWrapper(Silent(), "json", "text", schema=schema, null_reward=null)
        env.reset()
        assert fingerprint(env.step("x")[1]) == fingerprint(seen)


def test_an_observation_may_leave_its_bounds_but_not_its_type():
    from gymnasium import spaces

    box = spaces.Box(0, 1, (2,), np.float32)
    outside = np.array([5.0, np.nan], np.float32)
    assert fingerprint(from_json(box, outside, "o", observed=True)) == fingerprint(outside)
    assert from_json(spaces.Discrete(3), 7, "o", observed=True) == 7
    for space, value in ((box, outside.astype(np.float64)), (box, [None, 1.0]), (spaces.Discrete(3), 2**63)):
        with pytest.raises(ef.BadArgument):
            from_json(space, value, "o", observed=True)
