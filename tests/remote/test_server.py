import asyncio
import json
import threading
import urllib.error
import urllib.request

import gymnasium
import numpy as np
import pytest
from websockets.sync.client import connect

from envfleet.envs.echo import AsyncEcho, Echo
from envfleet.errors import BadArgument
from envfleet.remote import (
    AsyncEnvClient,
    BadRequest,
    CapacityReached,
    CapacityTable,
    EnvError,
    HttpEnvClient,
    MessageTooBig,
    Server,
    SessionLost,
    Unauthorized,
    serve,
)
from tests.support.our_server import OurServer
from tests.support.served_envs import Hidden, Misbehaving, Pixels
from tests.support.system import until


def get(url, body=None, headers=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers or {})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


@pytest.fixture(scope="module", params=["pipe", "thread"])
def misbehaving(request):
    with Server(Misbehaving, port=0, max_sessions=4, backend=request.param) as server:
        yield server


def test_a_served_environment_is_the_environment():
    """Same seed, same actions: what comes over the wire is bit for bit what the environment gives here."""
    env = gymnasium.make("CartPole-v1")
    with Server("CartPole-v1", port=0, max_sessions=2) as server, HttpEnvClient(server.url) as client:
        for seed in range(5):
            obs, _ = env.reset(seed=seed)
            result = client.reset(seed=seed)
            rng, done = np.random.default_rng(seed), False
            assert np.array_equal(result.observation.obs, obs)
            while not done:
                action = int(rng.integers(2))
                obs, reward, terminated, truncated, _ = env.step(action)
                result = client.step({"action": action})
                done = terminated or truncated
                assert np.array_equal(np.asarray(result.observation.obs, np.float32), obs)
                assert (result.reward, result.terminated, result.truncated) == (reward, terminated, truncated)


@pytest.mark.parametrize(
    ("env", "options"),
    [
        (Echo, {"backend": "serial"}),
        (Echo, {"backend": "thread"}),
        (Echo, {"backend": "pipe", "workers": 2}),
        (Echo, {"backend": "pipe"}),
        (AsyncEcho, {}),
    ],
    ids=["serial", "thread", "pipe-shared", "pipe", "aio"],
)
def test_every_backend_serves(env, options):
    with Server(env, port=0, max_sessions=8, **options) as server:

        async def talk(index):
            async with AsyncEnvClient(server.url) as client:
                for _ in range(3):
                    await client.reset(horizon=4, episode_id=f"e{index}")
                    for n in range(1, 5):
                        result = await client.step({"message": f"{index}:{n}"})
                        assert result.observation == {"echoed": f"{index}:{n}", "n": n}
                    assert result.terminated
                    assert await client.state() == {"episode_id": f"e{index}", "step_count": 4}

        async def everybody():
            await asyncio.gather(*(talk(i) for i in range(20)))

        asyncio.run(everybody())
        until(lambda: server.active_sessions == 0)


def test_binary_between_ours_json_for_others():
    expected = Pixels()._frame(5)
    with (
        Server(Pixels, port=0, max_sessions=2, backend="serial") as server,
        HttpEnvClient(server.url) as ours,
        HttpEnvClient(server.url, binary=False) as plain,
    ):
        for client, kind in ((ours, np.ndarray), (plain, list)):
            client.reset()
            result = client.step({"action": np.array([0.5, 0.0, 0.0], np.float32)})
            assert isinstance(result.observation.obs, kind)
            assert np.array_equal(result.observation.obs, expected)


def test_the_http_side():
    with Server("Connect4", port=0, max_sessions=2, backend="thread") as server:
        assert get(server.url + "/health")["max_sessions"] == 2
        assert get(server.url + "/metadata")["name"] == "Connect4"
        schema = get(server.url + "/schema")
        assert schema["action"]["properties"]["column"] == {"type": "integer", "minimum": 0, "maximum": 6}
        assert set(schema) == {"action", "observation", "state"}
        for _ in range(2):
            first = get(server.url + "/step", {"action": {"column": 3}})
            assert np.abs(first["observation"]["board"]).sum() == 2, "stateless: always the first move"
        assert get(server.url + "/reset", {"seed": 3, "level": "hard"})["reward"] is None
        for path, body, status in (
            ("/step", {"action": {"column": 9}}, 422),
            ("/step", {}, 422),
            ("/reset", {"seed": -1}, 422),
            ("/reset", {"level": "none"}, 500),
            ("/nowhere", None, 404),
        ):
            with pytest.raises(urllib.error.HTTPError) as error:
                get(server.url + path, body)
            assert error.value.code == status
        until(lambda: server.active_sessions == 0)


def test_a_raising_environment_ends_its_episode_only(misbehaving):
    with HttpEnvClient(misbehaving.url) as client, HttpEnvClient(misbehaving.url) as other:
        other.reset()
        client.reset()
        with pytest.raises(EnvError, match="asked to raise"):
            client.step(1)
        with pytest.raises(EnvError, match="reset"):
            client.step(0)
        with pytest.raises(EnvError, match="asked to fail in reset"):
            client.reset(fail=True)
        client.reset()
        assert client.step(0).observation.obs[0] == 1
        assert other.step(0).observation.obs[0] == 1


def test_a_slow_environment_blocks_nobody(misbehaving):
    with HttpEnvClient(misbehaving.url) as slow, HttpEnvClient(misbehaving.url) as other:
        slow.reset()
        other.reset()
        finished = threading.Event()
        thread = threading.Thread(target=lambda: (slow.step(5), finished.set()))
        thread.start()
        steps = 0
        while not finished.is_set():
            if other.step(0).done:
                other.reset()
            steps += not finished.is_set()
        thread.join()
        assert steps >= 3, "the other session stood still"


def test_a_crash_and_a_hang_are_survived():
    with Server(Misbehaving, port=0, max_sessions=4, step_timeout_s=1.5) as server:
        with HttpEnvClient(server.url) as client, HttpEnvClient(server.url) as other:
            other.reset()
            first = client.reset().observation.obs[1]
            with pytest.raises(EnvError, match="exit"):
                client.step(3)
            second = client.reset().observation.obs[1]
            assert first != second, "a new process"
            with pytest.raises(EnvError, match="step_timeout_s"):
                client.step(2)
            client.reset()
            assert client.step(0).observation.obs[0] == 1
            assert other.step(0).observation.obs[0] == 1
        until(lambda: server.active_sessions == 0)


def test_nan_and_truncation_cross_the_wire(misbehaving):
    with HttpEnvClient(misbehaving.url) as ours, HttpEnvClient(misbehaving.url, binary=False) as plain:
        ours.reset()
        plain.reset()
        mine, theirs = ours.step(4), plain.step(4)
        for result in (mine, theirs):
            assert np.isnan(result.observation.obs[2]) and np.isnan(result.reward)
        with connect(misbehaving.url.replace("http", "ws") + "/ws") as other:  # OpenEnv has null for it
            other.send('{"type": "reset"}')
            other.recv()
            other.send('{"type": "step", "data": {"action": 4}}')
            data = json.loads(other.recv())["data"]
            assert data["observation"]["obs"][2] is None and data["reward"] is None
        for _ in range(4):
            result = ours.step(0)
        assert result.truncated and not result.terminated
        with pytest.raises(EnvError, match="over"):
            ours.step(0)


def test_a_session_gets_a_fresh_environment():
    with Server(Hidden, port=0, max_sessions=1, backend="thread") as server:
        for _ in range(2):
            with HttpEnvClient(server.url) as client:
                assert client.reset().observation.obs == 0
                client.step(0)
                assert client.reset().observation.obs == 1, "within a session it is the same one"


def test_capacity_is_refused_as_the_protocol_says():
    with Server("Echo", port=0, max_sessions=1, backend="thread") as server:
        with connect(server.url.replace("http", "ws") + "/ws") as first:
            first.send('{"type": "state"}')
            assert json.loads(first.recv()) == {"type": "state", "data": {"episode_id": None, "step_count": 0}}
            with connect(server.url.replace("http", "ws") + "/ws") as second:
                data = json.loads(second.recv())["data"]
                assert (data["code"], data["active_sessions"], data["max_sessions"]) == ("CAPACITY_REACHED", 1, 1)
            with pytest.raises(CapacityReached), HttpEnvClient(server.url, capacity_timeout_s=0.1) as third:
                third.reset()
            assert get(server.url + "/health")["at_capacity"]
        with HttpEnvClient(server.url) as fourth:
            assert fourth.reset().observation.n == 0


def test_idle_sessions_are_ended():
    with (
        Server("Echo", port=0, max_sessions=1, backend="thread", idle_timeout_s=0.2) as server,
        HttpEnvClient(server.url) as client,
    ):
        client.reset()
        until(lambda: server.active_sessions == 0)
        with pytest.raises(SessionLost, match=r"no message for 0\.2 s"):
            client.step({"message": "hello?"})
        assert client.reset().observation.n == 0


def test_only_the_right_token_is_let_in(tmp_path):
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    with OurServer("Echo", "--backend", "thread", "--token-file", str(file)) as server:
        assert "s3cret" not in server.line and "token needed" in server.line
        for wrong in ({}, {"token": "other"}):
            with pytest.raises(Unauthorized) as error, HttpEnvClient(server.url, **wrong) as client:
                client.reset()
            assert "other" not in str(error.value)
        with HttpEnvClient(server.url, token="s3cret") as client:
            client.reset()
            assert client.step("a bare value asks for the schema").observation.n == 1
        assert get(server.url + "/health")["status"] == "healthy"
        with pytest.raises(urllib.error.HTTPError):
            get(server.url + "/schema")
        assert get(server.url + "/schema", headers={"Authorization": "Bearer s3cret"})
        assert server.stop() == 0


GARBAGE = [
    "not json",
    "[]",
    "3",
    '{"type": "dance"}',
    '{"type": ["step"]}',
    '{"type": "reset", "data": [1]}',
    '{"type": "reset", "data": {"seed": -1}}',
    '{"type": "reset", "data": {"seed": 1e99}}',
    '{"type": "step", "data": {"action": 0}}',
    '{"type": "step"}',
    "[" * 50_000,
    b"\x80\x04\x95pickle",
    b"EFR1\xff\xff\xff\xff",
]


def test_garbage_is_answered_and_bounded():
    with Server("CartPole-v1", port=0, max_sessions=2, backend="thread", max_message_bytes=100_000) as server:
        address = server.url.replace("http", "ws") + "/ws"
        with connect(address) as bad:
            codes = set()
            for message in GARBAGE:
                bad.send(message)
                reply = json.loads(bad.recv())
                assert reply["type"] == "error"
                codes.add(reply["data"]["code"])
            assert codes == {"INVALID_JSON", "UNKNOWN_TYPE", "VALIDATION_ERROR", "EXECUTION_ERROR"}
            bad.send('{"type": "reset"}')
            assert json.loads(bad.recv())["type"] == "observation"
            bad.send('{"type": "step", "data": {"action": 7}}')
            assert json.loads(bad.recv())["data"]["code"] == "VALIDATION_ERROR"
            for _ in range(99):
                bad.send("x")
            last = [json.loads(bad.recv())["data"]["code"] for _ in range(99)][-1]
            assert last == "SESSION_ERROR"
        with HttpEnvClient(server.url) as client:
            client.reset()
            with pytest.raises(MessageTooBig):
                client.step({"action": "x" * 200_000})
            client.reset()
            with pytest.raises(BadRequest):
                client.step({"action": "x"})
            assert client.step({"action": 1}).reward == 1.0
        until(lambda: server.active_sessions == 0)


async def play_cartpole(url, table, episodes):
    async with AsyncEnvClient(url, capacity=table) as client:
        for _ in range(episodes):
            result = await client.reset()
            while not result.done:
                result = await client.step({"action": 0})


async def attack(url, count):
    """Connects, garbage and aborts, many at a time."""
    address = url.replace("http://", "")
    host, port = address.split(":")
    gate = asyncio.Semaphore(64)

    async def one(i):
        async with gate:
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                handshake = (
                    f"GET /ws HTTP/1.1\r\nHost: {address}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
                )
                writer.write([handshake.encode(), b"\x00\xff garbage\r\n\r\n", b"", handshake.encode()[:40]][i % 4])
                if i % 4 == 0:
                    await asyncio.wait_for(reader.read(64), 5)
                    writer.write(b"\xff" * 50)
                writer.transport.abort()
            except (TimeoutError, OSError):
                pass

    await asyncio.gather(*(one(i) for i in range(count)))


def under_attack(connects, clients, episodes):
    import psutil

    with OurServer("CartPole-v1", "--max-sessions", str(clients), "--workers", "2") as server:
        process = psutil.Process(server.process.pid)

        async def everything():
            table = CapacityTable()
            await asyncio.gather(
                attack(server.url, connects), *(play_cartpole(server.url, table, episodes) for _ in range(clients))
            )

        asyncio.run(everything())
        middle = process.memory_info().rss
        asyncio.run(everything())
        grown = (process.memory_info().rss - middle) / 2**20
        assert grown < 30, f"memory grew by {grown:.0f} MiB over {connects} connects"
        until(lambda: get(server.url + "/health")["active_sessions"] == 0)
        assert server.stop() == 0


def test_it_serves_on_under_attack():
    under_attack(connects=600, clients=16, episodes=2)


@pytest.mark.full
def test_it_serves_64_under_ten_thousand_connects():
    under_attack(connects=10_000, clients=64, episodes=10)


def test_what_cannot_be_served_is_refused_early():
    with pytest.raises(BadArgument, match="max_sessions"):
        Server("Echo", max_sessions=0)
    with pytest.raises(BadArgument, match="server options"):
        Server("Echo", sessions=3)
    with pytest.raises(BadArgument, match="aio"):
        Server("AsyncEcho", backend="thread")
    with pytest.raises(BadArgument, match="unknown environment"):
        Server("NoSuchEnv-v0")
    with Server("Echo", port=0, backend="serial") as server, pytest.raises(BadArgument, match="port=0"):
        serve("Echo", port=server.port)


def test_nothing_is_left_after_close():
    before = {thread.name for thread in threading.enumerate()}
    server = Server("Echo", port=0, max_sessions=2).start()
    with HttpEnvClient(server.url) as client:
        client.reset()
    server.close()
    server.close()
    until(lambda: {t.name for t in threading.enumerate() if t.name.startswith("envfleet")} <= before)
