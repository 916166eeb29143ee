"""Our short way with frames against the library's long one."""

from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from envfleet.remote.frames import BINARY, TEXT, client_frame, missing_after, server_frame, whole_payload

payloads = st.one_of(st.binary(max_size=300), st.sampled_from([b"x" * n for n in (125, 126, 127, 65535, 65536, 70000)]))


def server_bytes(opcode, payload, fin=True):
    return Frame(opcode, payload, fin).serialize(mask=False)


@given(payloads, st.booleans())
@settings(deadline=None)
def test_the_library_reads_what_we_write(payload, text):
    server = ServerProtocol(state=State.OPEN, max_size=None)
    server.receive_data(client_frame(TEXT if text else BINARY, payload))
    (event,) = server.events_received()
    assert bytes(event.data) == payload and event.opcode == (Opcode.TEXT if text else Opcode.BINARY)
    client = ClientProtocol(parse_uri("ws://x/"), state=State.OPEN, max_size=None)
    client.receive_data(server_frame(TEXT if text else BINARY, payload))
    (event,) = client.events_received()
    assert bytes(event.data) == payload and event.opcode == (Opcode.TEXT if text else Opcode.BINARY)


@given(payloads)
@settings(deadline=None)
def test_we_read_what_the_library_writes(payload):
    data = server_bytes(Opcode.BINARY, payload)
    assert whole_payload(data) == (payload if len(payload) < 65536 else None)
    assert whole_payload(data[:-1]) is None and whole_payload(data + b"\x81") is None
    assert whole_payload(server_bytes(Opcode.BINARY, payload, fin=False)) is None
    assert whole_payload(server_bytes(Opcode.PING, payload[:100])) is None
    masked = Frame(Opcode.TEXT, payload).serialize(mask=True)
    assert whole_payload(masked) is None and whole_payload(data, masked=True) is None
    assert whole_payload(masked, masked=True) == (payload if len(payload) < 65536 else None)
    assert missing_after(masked, 0) == 0 and missing_after(masked[:-1], 0) in (1, -1)


@given(st.lists(payloads, min_size=1, max_size=5), st.data())
@settings(deadline=None)
def test_the_end_of_a_frame_is_known_or_admitted_unknown(messages, data):
    """Chopped anywhere: when we say a frame ended here, the library's parser says so too."""
    stream = b"".join(server_bytes(Opcode.BINARY, message) for message in messages)
    ends, at = {0}, 0
    for message in messages:
        at += len(server_bytes(Opcode.BINARY, message))
        ends.add(at)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    missing, position = 0, 0
    for cut in [*cuts, len(stream)]:
        missing = missing_after(stream[position:cut], missing) if missing >= 0 else -1
        position = cut
        if missing == 0:
            assert position in ends
        elif missing > 0:
            assert position + missing in ends
    parser = ClientProtocol(parse_uri("ws://x/"), state=State.OPEN, max_size=None)
    parser.receive_data(stream)
    assert len(parser.events_received()) == len(messages)
