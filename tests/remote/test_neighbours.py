"""One client's message never harms another's session, and no message leaves a traceback in the server's log."""

import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from envfleet.remote import CapacityTable, EnvError, HttpEnvClient, Server, exact_protocol
from envfleet.remote.frames import TEXT, client_frame
from envfleet.remote.message_json import MAX_DEPTH
from tests.support.our_server import OurServer
from tests.support.served_envs import Unsendable


def nested(levels, kind="object"):
    if kind == "list":
        return '{"type":"reset","id":ID,"data":{"o":' + "[" * levels + "1" + "]" * levels + "}}"
    return '{"type":"reset","id":ID,"data":{"o":' + '{"a":' * levels + "1" + "}" * levels + "}}"


LEVELS = [10, 50, MAX_DEPTH - 2, MAX_DEPTH - 1, 200, 400, 500, 700, 900, 940, 1000, 3000, 10_000]


def reset(data):
    return '{"type":"reset","id":ID,"data":' + data + "}"


def step(data):
    return '{"type":"step","id":ID,"data":' + data + "}"


HOSTILE = [
    reset('{"o":' + "9" * 4000 + "}"),
    reset('{"o":' + "9" * 100_000 + "}"),
    reset('{"o":1e400}'),
    reset('{"' + "k" * 1_000_000 + '":1}'),
    reset('{"seed":' + "9" * 4000 + "}"),
    reset('{"seed":1e308}'),
    step('{"action":' + "9" * 4000 + "}"),
    step('{"action":1e999}'),
    step('{"action":NaN}'),
    step('{"action":-Infinity}'),
    step('{"action":"\\ud800"}'),
    step('{"' + "\\ud800" * 1000 + '":1}'),
    step("{" + ",".join(f'"k{i}":1' for i in range(20_000)) + "}"),
    step("[" + ",".join(["[]"] * 20_000) + "]"),
    step('{"action":{"$a":["<f8",[1099511627776,1099511627776],""]}}'),
    step('{"action":{"$a":["<f8",[0,4611686018427387904],""]}}'),
    step('{"action":{"$i":"0x' + "f" * 100_000 + '"}}'),
    step('{"action":{"$f":"7ff8000000000000"}}'),
    step('{"action":{"$d":[[{"$t":[{"$t":[]}]},1]]}}'),
    step('{"envfleet.multiagent.agent_env":"empty"}'),
    '{"type":"\\ud800","id":ID}',
]


def binary_bomb():
    head = json.dumps({"arrays": [["<f8", [2**40, 2**40]]], "message": {"type": "step", "id": 1, "data": {"action": {"$a": 0}}}})
    return b"EFR2" + struct.pack("<I", len(head)) + head.encode()


def send_what_is_no_text(port, whole):
    """A text frame that is not UTF-8, in one piece or in two; gives the code the server closes with."""
    with socket.create_connection(("127.0.0.1", int(port)), timeout=10) as line:
        line.sendall(
            f"GET /ws HTTP/1.1\r\nHost: localhost:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        assert b"101" in line.recv(4096)
        frame = client_frame(TEXT, b'{"type": "\xff"}')
        line.sendall(frame if whole else client_frame(0x01, frame[6:]) + client_frame(0x80, b"\xff"))
        return int.from_bytes(line.recv(4096)[2:4], "big")


def attack(url, text, protocol):
    """Send one hostile message in a session of its own; gives the reply's type (or how the session ended)."""
    address = url.replace("http", "ws") + "/ws"
    with connect(address, subprotocols=[protocol] if protocol else None, max_size=None, compression=None) as session:
        frame = (
            text if isinstance(text, bytes) else text.replace('"id":ID,', '"id":1,' if protocol else "").replace(',"id":ID', "")
        )
        session.send(frame)
        try:
            return exact_protocol.decode(session.recv(timeout=20)).kind
        except ConnectionClosed as error:
            return f"closed {error.rcvd.code if error.rcvd else None}"


@pytest.mark.parametrize("backend", ["pipe", "thread"])
def test_innocent_neighbours_of_deep_and_huge_messages(backend, tmp_path):
    """The review's s_deep2, at every depth, over both protocols, while four neighbours step as fast as they can."""
    log = tmp_path / "log"
    with OurServer("CartPole-v1", "--max-sessions", "64", "--workers", "2", "--backend", backend, log=log) as server:
        stop, failures, steps = threading.Event(), [], []

        def innocent(seed):
            try:
                with HttpEnvClient(server.url, capacity=CapacityTable(), message_timeout_s=30) as client:
                    count = 0
                    while not stop.is_set():
                        result = client.reset(seed=seed)
                        while not result.done and not stop.is_set():
                            result = client.step({"action": count % 2})
                            count += 1
                    steps.append(count)
            except BaseException as error:
                failures.append(error)

        neighbours = [threading.Thread(target=innocent, args=(seed,)) for seed in range(4)]
        for thread in neighbours:
            thread.start()
        try:
            for protocol in (None, exact_protocol.BINARY, exact_protocol.TEXT):
                for levels in LEVELS:
                    for kind in ("object", "list"):
                        reply = attack(server.url, nested(levels, kind), protocol)
                        assert reply == ("observation" if levels + 2 <= MAX_DEPTH else "error"), (levels, kind, protocol)
                for text in HOSTILE:
                    assert attack(server.url, text, protocol) in ("error", "observation"), text[:80]
                assert attack(server.url, binary_bomb(), protocol) == "error"
            assert [send_what_is_no_text(server.port, whole) for whole in (True, False)] == [1007, 1007]
            deep = json.dumps({"seed": 1})[:-1] + ', "o": ' + "[" * 700 + "]" * 700 + "}"
            request = urllib.request.Request(server.url + "/reset", deep.encode())
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=10)
            assert refused.value.code == 422
        finally:
            stop.set()
            for thread in neighbours:
                thread.join(30)
        assert failures == [] and len(steps) == 4 and min(steps) > 20
        deadline = time.monotonic() + 20
        while server.live():
            assert time.monotonic() < deadline, "a session was never given back"
            threading.Event().wait(0.01)
        assert server.stop() == 0
    said = log.read_text()
    assert "Traceback" not in said, said[-2000:]


def test_a_request_that_comes_twice_is_answered_once():
    with Server("Echo", port=0, max_sessions=2, backend="serial") as server:
        address = server.url.replace("http", "ws") + "/ws"
        with connect(address, subprotocols=[exact_protocol.TEXT]) as session:
            for text in (exact_protocol.encode("reset", 7), exact_protocol.encode("step", 8, {"message": "a"})):
                session.send(text)
                session.send(text)
                assert exact_protocol.decode(session.recv()).number in (7, 8)
            session.send(exact_protocol.encode("state", 9))
            state = exact_protocol.decode(session.recv())
            assert (state.number, state.data["step_count"]) == (9, 1), "the second of two requests was not made"
            session.send(exact_protocol.encode("step", 11, {"message": "b"}))
            told = exact_protocol.decode(session.recv())
            assert told.kind == "error" and told.number is None and told.data["code"] == "SESSION_ERROR"
            with pytest.raises(ConnectionClosed):
                session.recv()
        with connect(address, subprotocols=[exact_protocol.TEXT]) as session:
            for text in ('{"type":"reset"}', '{"type":"reset","id":1,"hurry":true}', '{"type":"reset","id":"1"}'):
                session.send(text)
                assert exact_protocol.decode(session.recv()).data["code"] == "INVALID_JSON"
            session.send(exact_protocol.encode("reset", 1))
            assert exact_protocol.decode(session.recv()).number == 1
            session.send("no frame")
            told = exact_protocol.decode(session.recv())
            assert (told.number, told.data["code"]) == (None, "INVALID_JSON"), "it is no answer to an earlier request"


def test_what_cannot_be_sent_ends_its_episode_only():
    with Server(Unsendable, port=0, max_sessions=4, backend="thread") as server:
        with HttpEnvClient(server.url, capacity=CapacityTable()) as client:
            client.reset()
            result = client.step(0)
            assert result.metadata == {"fine": (1,)} and np.array_equal(result.observation.obs, [1.0])
            assert client.step(2).metadata == {"fine": (1,)}, "and what is nested too deep"
            with pytest.raises(EnvError):
                client.step(1)  # a ring: no local fleet takes it either
            client.reset()
            assert client.step(0).metadata == {"fine": (1,)}
        with connect(server.url.replace("http", "ws") + "/ws") as session:
            for action in (0, 1, 2):
                session.send('{"type": "reset"}')
                assert json.loads(session.recv())["type"] == "observation"
                session.send(json.dumps({"type": "step", "data": {"action": action}}))
                reply = json.loads(session.recv())
                assert reply["type"] == "observation" or reply["data"]["reset_needed"]
