"""The connection to a worker on another machine: strangers, interrupts, many messages. A socket pair stands for the network."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from envfleet.workers.ray_worker import RayWorker, _bound
from envfleet.workers.stream import TO_PARENT, StreamParentChannel, _Codes, prove

KEY = b"k" * 32


@pytest.fixture
def ends() -> Any:
    """The parent's end, and the socket of a worker."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        ours = socket.create_connection(door.getsockname())
        theirs, _ = door.accept()
    channel = StreamParentChannel(KEY)
    channel.connect(ours)
    yield channel, theirs
    theirs.close()
    channel.close()


def message(number: int, data: bytes) -> bytes:
    """A frame of one message, as a worker sends it."""
    return _Codes(KEY, TO_PARENT).packed(number.to_bytes(8, "little") + b"\x03" + data)


def test_those_who_say_nothing_keep_the_parent_out_of_no_worker() -> None:
    worker = RayWorker()
    worker._key, worker._door = KEY, _bound("127.0.0.1", None)
    address = worker._door.getsockname()
    strangers = [socket.create_connection(address) for _ in range(3)]
    strangers[1].sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
    let_in: list[socket.socket] = []
    thread = threading.Thread(target=lambda: let_in.append(worker._let_in()), daemon=True)
    thread.start()
    with socket.create_connection(address) as parent:
        assert prove(parent, KEY, is_parent=True, timeout_s=5.0)
        thread.join(5.0)
        assert let_in[0].getpeername() == parent.getsockname()
    for one in (*strangers, *let_in, worker._door):
        one.close()


@pytest.mark.parametrize("name", ["checked", "of"])
def test_what_an_interrupted_read_has_taken_is_found_without_anything_new(ends: Any, name: str, monkeypatch: Any) -> None:
    channel, theirs = ends
    theirs.sendall(message(1, b"one") + message(2, b"two"))
    with monkeypatch.context() as patched:
        patched.setattr(_Codes, name, lambda *_: exec("raise KeyboardInterrupt"))
        with pytest.raises(KeyboardInterrupt):
            channel.wait(5.0)
    found = []
    while channel.has_message:
        found.append(channel.take())
    assert found == [b"one", b"two"] and not channel.eof


def test_many_messages_at_once_are_no_attack_but_a_frame_without_end_is(ends: Any) -> None:
    channel, theirs = ends
    codes = _Codes(KEY, TO_PARENT)

    def send(flags: bytes, first: int) -> None:
        numbers = range(first, first + 20_000)
        data = b"".join(codes.packed(number.to_bytes(8, "little") + flags) for number in numbers)
        sender = threading.Thread(target=theirs.sendall, args=(data,), daemon=True)
        sender.start()
        while len(channel._inbox) < len(numbers) and not channel.eof:
            channel.pump()

    send(b"\x03", 1)
    assert not channel.eof and len(channel._inbox) == 20_000
    while channel.take() is not None:
        continue
    send(b"\x00", 20_001)
    assert channel.eof
