"""Who is let in, how long one may be silent, and who makes room for whom."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from envfleet.errors import BadArgument
from envfleet.remote import CapacityReached, CapacityTable, ConnectFailed, HttpEnvClient, Server, SessionLost
from envfleet.remote.idle_sessions import Sessions
from envfleet.remote.request_gate import Gate, refused_body
from envfleet.remote.server_config import ServerConfig
from envfleet.remote.uvicorn_protocols import SilentConnections
from tests.support.our_server import OurServer
from tests.support.system import until

OURS = ["localhost", "LOCALHOST:1", "127.0.0.1", "127.9.9.9:80", "[::1]:8000", "10.0.0.5", "10.0.0.5:77", "lab.example"]
FOREIGN = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "localhost@evil.example",
    "evil.example#localhost", "evil.example/localhost", "2130706433", "0x7f.1", "127.1", "", "[::2]", "[", "localhost:x", "a:b:c",
    "notlocalhost", "localhost.", "xn--localhost", "10.0.0.50",
]  # fmt: skip


def test_names_and_origins():
    gate = Gate("10.0.0.5", ["lab.example"], ["https://page.example"])
    for host in OURS:
        assert gate.refusal([(b"host", host.encode())], None) is None, host
    for host in FOREIGN:
        assert gate.refusal([(b"Host", host.encode())], None)[0] == 421, host
    assert gate.refusal([], None)[0] == 421 and gate.refusal([(b"host", b"localhost")] * 2, None)[0] == 421
    assert gate.refusal([(b"host", b"192.168.7.7")], "192.168.7.7") is None, "the address the connection came in on"
    good = (b"host", b"localhost")
    for origin in ("http://localhost:3000", "https://127.0.0.1", "http://[::1]:9", "https://page.example", "http://10.0.0.5"):
        assert gate.refusal([good, (b"origin", origin.encode())], None) is None, origin
    foreign = [f"http://{host}" for host in FOREIGN]
    for origin in (*foreign, "null", "", "file://", "ftp://localhost", "localhost", "http://page.example", "\xff"):
        assert gate.refusal([good, (b"Origin", origin.encode("latin-1"))], None)[0] == 403, origin
    both = [good, (b"origin", b"http://localhost"), (b"origin", b"https://evil.example")]
    assert gate.refusal(both, None)[0] == 403
    assert Gate("x", ["*"], ["*"]).refusal([(b"host", b"e.x"), (b"origin", b"null")], None) is None


def test_bodies_that_any_page_may_post():
    def refused(**headers):
        return refused_body([(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]) is not None

    assert refused(content_type="text/plain") and refused(content_type="Text/Plain; charset=utf-8")
    assert refused(content_type="multipart/form-data; boundary=x")
    assert refused(content_type="application/x-www-form-urlencoded", origin="http://localhost")
    assert refused(content_type="application/x-www-form-urlencoded", sec_fetch_site="same-site")
    assert refused(sec_fetch_mode="no-cors")
    assert not refused(content_type="application/json", origin="http://localhost")
    assert not refused(content_type="application/x-www-form-urlencoded") and not refused()


def status_of(url, body=None, **headers):
    request = urllib.request.Request(url, body, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


def handshake(server, **headers):
    """The status of a WebSocket request with these headers."""
    lines = {"Host": f"127.0.0.1:{server.port}", "Upgrade": "websocket", "Connection": "Upgrade",
             "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version": "13"}  # fmt: skip
    lines.update({name.replace("_", "-"): value for name, value in headers.items()})
    with socket.create_connection(("127.0.0.1", int(server.port)), timeout=10) as sock:
        sock.sendall(("GET /ws HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n").encode())
        return int(sock.recv(4096).split()[1])


def test_a_client_is_told_that_it_uses_the_wrong_name():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            line, _ = listening.accept()
            with line:
                line.recv(65536)
                line.sendall(b"HTTP/1.1 421 Misdirected Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ConnectFailed, match="allow-host"), HttpEnvClient(url, capacity=CapacityTable()) as client:
            client.reset()
        thread.join()


def test_a_page_from_elsewhere_cannot_drive_the_server(capfd):
    with Server("Echo", port=0, max_sessions=4, backend="serial") as server:
        assert handshake(server) == 101 and handshake(server, Origin=f"http://localhost:{server.port}") == 101
        assert handshake(server, Origin="http://evil.example") == 403
        assert handshake(server, Origin="null") == 403
        assert handshake(server, Host="evil.example") == 421
        body = b'{"seed": 1}'
        assert status_of(server.url + "/reset", body, Content_Type="application/json") == 200
        assert status_of(server.url + "/reset", body, Content_Type="text/plain") == 415
        assert status_of(server.url + "/reset", body, Content_Type="application/json", Origin="http://evil.example") == 403
        assert status_of(server.url + "/step", body, Content_Type="application/json", Host="evil.example") == 421
        assert status_of(server.url + "/schema", Host="evil.example") == 421
        assert status_of(server.url + "/health", Host="load-balancer.example") == 200
        with HttpEnvClient(server.url, capacity=CapacityTable()) as client:
            assert client.reset().observation.n == 0
        until(lambda: server.active_sessions == 0)
    assert "ERROR" not in capfd.readouterr().err


def test_who_is_let_in_can_be_told():
    options = ["--allow-host", "env.example", "--allow-origin", "https://lab.example"]
    with OurServer("Echo", "--backend", "serial", *options) as server:
        assert handshake(server, Host="env.example:1", Origin="https://lab.example") == 101
        assert handshake(server, Host="env.example", Origin="https://evil.example") == 403
        assert server.stop() == 0
    with pytest.raises(BadArgument, match="lists"):
        Server("Echo", allow_hosts="localhost")


def health(server):
    with urllib.request.urlopen(server.url + "/health", timeout=10) as response:
        return json.load(response)


def closed(sock):
    sock.settimeout(10)
    try:
        return sock.recv(65536) == b"" or closed(sock)
    except ConnectionResetError:
        return True


def test_silent_connections_are_closed_and_keep_nobody_out(tmp_path):
    """2,000 that say nothing: health and schema are answered at once, sessions open, and in the end they are gone."""
    count = 2000
    log = tmp_path / "log"
    with OurServer("Echo", "--backend", "serial", "--request-timeout-s", "3", log=log) as server:
        begun = time.monotonic()
        silent = [socket.create_connection(("127.0.0.1", int(server.port)), timeout=10) for _ in range(count)]
        halves = [b"", b"GET", b"GET /health HTTP/1.1\r\nHost: lo", b"POST /reset HTTP/1.1\r\nHost: localhost\r\n"
                  b"Content-Type: application/json\r\nContent-Length: 10\r\n\r\n{"]  # fmt: skip
        for i, sock in enumerate(silent[-200:]):
            sock.sendall(halves[i % 4])
        for _ in range(5):
            assert health(server)["status"] == "healthy" and status_of(server.url + "/schema") == 200
        with HttpEnvClient(server.url, capacity=CapacityTable()) as client:
            client.reset()
            assert client.step({"message": "in spite of them"}).observation.n == 1
        assert all(map(closed, silent))
        assert time.monotonic() - begun < 20
        for sock in silent:
            sock.close()
        assert health(server)["active_sessions"] == 0
        assert server.stop() == 0
    assert "Traceback" not in log.read_text(), log.read_text()[-2000:]


def test_a_connection_that_is_used_is_not_silent():
    """Keep-alive, pipelined and slow requests live on past the limit for silence."""
    with Server("Echo", port=0, max_sessions=2, backend="serial", request_timeout_s=0.3) as server:
        ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            end = time.monotonic() + 0.7
            while time.monotonic() < end:
                sock.sendall(ask + ask)
                got = b""
                while got.count(b"healthy") < 2:
                    got += sock.recv(65536)
                threading.Event().wait(0.05)
            assert closed(sock), "and when it says nothing any more, it is closed too"
        with HttpEnvClient(server.url, capacity=CapacityTable()) as client:
            client.reset()
            threading.Event().wait(0.5)
            assert client.step({"message": "a session is not a request"}).observation.n == 1


def test_beyond_a_number_the_oldest_silent_ones_go_first():
    class Line:
        def __init__(self, loop):
            self.loop, self.aborted = loop, False
            self.transport = self

        def abort(self):
            self.aborted = True

    class Clock:
        def __init__(self):
            self.now, self.calls = 0.0, []

        def time(self):
            return self.now

        def call_later(self, delay, call, *args):
            self.calls.append((self.now + delay, call, args))
            return object()

        def run_to(self, now):
            self.now = now
            due, self.calls = [c for c in self.calls if c[0] <= now], [c for c in self.calls if c[0] > now]
            for _, call, args in due:
                call(*args)

    clock = Clock()
    silent = SilentConnections(30.0, most=3)
    lines = [Line(clock) for _ in range(6)]
    for line in lines:
        silent.expect(line, clock.now)
    clock.run_to(0.5)
    assert not any(line.aborted for line in lines), "who has only just come may still be about to ask"
    silent.satisfied(lines[1])
    clock.run_to(2.0)
    assert [line.aborted for line in lines] == [True, False, True, False, False, False] and silent.closed == 2
    for now in (10.0, 20.0, 29.0, 31.0):
        clock.run_to(now)
    assert [line.aborted for line in lines] == [True, False, True, True, True, True]


def test_sessions_of_idle_clients_go_to_those_who_wait():
    options = {"max_sessions": 2, "backend": "thread", "handover_s": 0.2, "episode_idle_s": 30.0}
    with Server("Echo", port=0, **options) as server:
        with (
            HttpEnvClient(server.url, capacity=CapacityTable()) as playing,
            HttpEnvClient(server.url, capacity=CapacityTable()) as finished,
            HttpEnvClient(server.url, capacity=CapacityTable(), capacity_timeout_s=20) as waiting,
        ):
            playing.reset(horizon=5)
            finished.reset(horizon=1)
            assert finished.step({"message": "the end"}).done
            assert waiting.reset(horizon=5).observation.n == 0, "the one between episodes made room"
            assert playing.step({"message": "thinking is not idling"}).observation.n == 1
            assert not finished._client._link.is_clean or finished.connected
            with (
                pytest.raises(CapacityReached),
                HttpEnvClient(server.url, capacity=CapacityTable(), capacity_timeout_s=0.5) as other,
            ):
                other.reset()
            assert waiting.step({"message": "mine"}).observation.n == 1
            waiting.close()
            assert finished.reset().observation.n == 0, "it comes back by itself, at its next reset"
            assert finished.stats.renewed == 1 and server.app.sessions.handed_over == 1


def test_a_session_that_is_silent_in_an_episode_has_a_longer_limit_and_is_told():
    options = {"max_sessions": 1, "backend": "thread", "handover_s": 0.0, "episode_idle_s": 0.5}
    with Server("Echo", port=0, **options) as server:
        address = server.url.replace("http", "ws") + "/ws"
        with HttpEnvClient(server.url, capacity=CapacityTable()) as idle:
            idle.reset(horizon=5)
            with HttpEnvClient(server.url, capacity=CapacityTable(), capacity_timeout_s=20) as waiting:
                waiting.reset(horizon=5)
                with pytest.raises(SessionLost, match="while others wait"):
                    idle.step({"message": "too late"})
        until(lambda: server.active_sessions == 0)
        with connect(address) as silent:  # an official client that has not even said hello
            with connect(address) as other:
                other.send('{"type": "reset"}')
                assert json.loads(other.recv())["type"] == "observation"
                told = json.loads(silent.recv())
                assert told["data"]["code"] == "SESSION_ERROR" and "while others wait" in told["data"]["message"]


def test_a_client_that_does_not_read_gives_its_session_back():
    with Server("Echo", port=0, max_sessions=1, backend="thread", handover_s=0.1, episode_idle_s=0.1) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(
                f"GET /ws HTTP/1.1\r\nHost: localhost:{server.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
            )
            assert b"101" in sock.recv(4096)
            sock.sendall(b"\x81\x90")  # and half of a frame's header
            with HttpEnvClient(server.url, capacity=CapacityTable(), capacity_timeout_s=20) as client:
                assert client.reset().observation.n == 0


def test_which_session_makes_room():
    async def run():
        now = [0.0]
        sessions = Sessions(ServerConfig(idle_timeout_s=300, handover_s=5, episode_idle_s=120), clock=lambda: now[0])
        ends = []

        async def hold(in_episode):
            live = sessions.enter(lambda: in_episode)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ends.append(live)
            finally:
                sessions.leave(live)

        tasks = [asyncio.ensure_future(hold(flag)) for flag in (True, False, False)]
        await asyncio.sleep(0)
        playing, first, second = sorted(sessions._live, key=lambda live: (not live.in_episode(), id(live)))
        assert sessions.make_room() is None
        now[0] = 6.0
        sessions.used(first)
        assert sessions.make_room() is second
        second_again = sessions.make_room()
        assert second_again is None, "one is ended once, and the others are not idle"
        now[0] = 130.0
        first.busy = True
        assert sessions.make_room() is playing, "a step that runs is not idle, however long"
        await asyncio.gather(*tasks[:1], return_exceptions=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_official_clients_need_no_origin():
    with Server("Echo", port=0, max_sessions=1, backend="serial") as server:
        with connect(server.url.replace("http", "ws") + "/ws", origin=None) as client:
            client.send('{"type": "state"}')
            assert json.loads(client.recv())["type"] == "state"
        with pytest.raises(InvalidStatus):
            connect(server.url.replace("http", "ws") + "/ws", origin="https://evil.example")
