"""One WebSocket to one server: send a frame, get the answer or an exception by the deadline, close."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from typing import TYPE_CHECKING, Any

from envfleet.errors import CapacityReached, ConnectFailed, Unauthorized
from envfleet.remote import exact_protocol, wire
from envfleet.remote.address import Endpoint
from envfleet.remote.exact_protocol import BadFrame, Closed, Message, Unsolicited
from envfleet.remote.frames import BINARY, TEXT, client_frame, missing_after, whole_payload
from envfleet.util.extras import from_extra

if TYPE_CHECKING:
    from envfleet.remote.client_config import ClientConfig

with from_extra("remote"):
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
    from websockets.protocol import State

_log = logging.getLogger("envfleet.remote.wire")
# Below INFO `websockets` writes the handshake's headers, and with them the token.
_log.setLevel(logging.INFO)


class Link(ClientConnection):  # type: ignore[misc]
    """A connection with exactly one request out at a time.

    With our server requests are numbered; each connection has its own first number. An answer with an earlier number is a
    duplicate or late, and is dropped and counted. With other servers the next answer is the one.

    The library's handshake, keep-alive and closing are used as they are. Only a data frame takes another way: straight
    to the future that waits, with no queue and no task in between, and without the library's parser where the frame
    comes in one piece. CPU of a client step: 36 us so, 74 us with the library's parser and this future, 100 us with
    the library's `send` and `recv`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answer: asyncio.Future[Message] | None = None
        self._early: Message | Exception | None = None
        self._first = self._number = int.from_bytes(os.urandom(6), "big")  # of the last request; JSON holds 53 bits
        self.dropped = 0  # answers that were not to the request that was out
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0
        self._parts: list[bytes] = []
        self._is_text = True
        self._handshake: bytearray | None = bytearray()
        self._missing = -1  # bytes the last frame lacks; 0: at the end of a frame; -1: not known, the library parses

    @property
    def is_exact(self) -> bool:
        """Both ends are ours: requests are numbered, and values arrive as they were sent."""
        return self.subprotocol in exact_protocol.SUBPROTOCOLS

    @property
    def is_clean(self) -> bool:
        """Open, and no frame came without a request."""
        return self._early is None and self.protocol.state is State.OPEN

    def frame(self, kind: str, data: Any = None) -> str | bytes:
        """The next request as it is to be sent; raises NoWireForm, and then nothing has happened."""
        if not self.is_exact:
            return wire.encode_request(kind, data)
        return exact_protocol.encode(kind, self._number + 1, data, binary=self.subprotocol == exact_protocol.BINARY)

    def data_received(self, data: bytes) -> None:
        """Called by asyncio: a whole data frame is taken at once, everything else goes to the library."""
        if self._missing == 0:
            payload = whole_payload(data)
            if payload is not None and not self._parts and len(payload) <= self.protocol.max_message_size:
                self._is_text = data[0] == TEXT
                self._deliver(payload)
                return
        if self._handshake is not None:
            self._read_handshake(data)
        elif self._missing >= 0:
            self._missing = missing_after(data, self._missing)
        super().data_received(data)

    def _read_handshake(self, data: bytes) -> None:
        """Find where the handshake's answer ends: frames begin there."""
        assert self._handshake is not None
        self._handshake += data
        end = self._handshake.find(b"\r\n\r\n")
        if end >= 0:
            self._missing = missing_after(bytes(self._handshake[end + 4 :]), 0)
            self._handshake = None

    def process_event(self, event: Any) -> None:
        """Called by the library for each frame."""
        opcode = getattr(event, "opcode", None)
        if opcode is None or opcode > 2:  # the handshake's answer, or a control frame
            super().process_event(event)
            return
        if opcode:
            self._parts, self._is_text = [event.data], opcode == 1
        else:
            self._parts.append(event.data)
        if event.fin:
            raw = bytes(self._parts[0]) if len(self._parts) == 1 else b"".join(self._parts)
            self._parts = []
            self._deliver(raw)

    def _deliver(self, raw: bytes) -> None:
        message = self._read(raw)
        answer = self._answer if self._answer is not None and not self._answer.done() else None
        asked_for = answer is not None
        if self.is_exact and isinstance(message, Message):
            number = message.number
            if number is None:
                asked_for = False  # an error that ends the session, if it is anything
            elif self._first < number <= self._number - asked_for:
                self.dropped += 1  # with nothing out, the last request is answered already, and this is it again
                return
            elif number != self._number:
                message = BadFrame(f"an answer to request {number}, which was never made")
        if not asked_for:
            self._early = self._early if self._early is not None else message
            message = self._unasked()
        if answer is None:
            return
        if isinstance(message, Exception):
            answer.set_exception(message)
        else:
            answer.set_result(message)

    def _read(self, raw: bytes) -> Message | Exception:
        try:
            frame: str | bytes = raw.decode() if self._is_text else raw
            return exact_protocol.decode(frame) if self.is_exact else wire.decode(frame)
        except UnicodeDecodeError:
            return BadFrame("text that is not UTF-8")
        except BadFrame as error:
            return error

    def _unasked(self) -> Exception:
        return Unsolicited(self._early) if isinstance(self._early, Message) else BadFrame(str(self._early))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when the socket is gone."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(self._closed())

    def _closed(self) -> Closed:
        code, reason = self.protocol.close_code, self.protocol.close_reason
        # Our own refusal of a message is in what we sent; the server's is in what we received.
        ends = (self.protocol.close_sent, self.protocol.close_rcvd)
        too_big = any(end is not None and end.code == 1009 for end in ends)
        return Closed(f"the connection closed with code {code}{f' ({reason})' if reason else ''}", too_big)

    def ask(self, frame: str | bytes, timeout_s: float) -> asyncio.Future[Message]:
        """Send what `frame` gave; the future has the answer, or TimeoutError, Closed, BadFrame or Unsolicited.

        Raises the same. After any exception, a cancellation included, the caller must `abort()`: the answer may still
        come. Nothing is drained: one request is out at a time, so what is buffered is bounded by that request.
        """
        if self._early is not None:
            raise self._unasked()
        if self.protocol.state is not State.OPEN:
            raise self._closed()
        self._number += 1
        answer: asyncio.Future[Message] = self.loop.create_future()
        self._answer = answer
        self._arm(self.loop.time() + timeout_s)
        first, payload = (TEXT, frame.encode()) if isinstance(frame, str) else (BINARY, frame)
        if not self.protocol.extensions:
            self.transport.write(client_frame(first, payload))
            return answer
        try:
            (self.protocol.send_text if first == TEXT else self.protocol.send_binary)(payload)
            self.send_data()
        except ConnectionClosed:
            raise self._closed() from None
        return answer

    def _arm(self, deadline: float) -> None:
        """Set the deadline of the answer.

        The timer is kept across requests and moved when it goes off: hardly any ever fires, and a cancelled timer for
        every request stays in the loop's heap until its deadline (63 us a step instead of 36).
        """
        self._deadline = deadline
        if self._timer is None or self._timer.when() > deadline:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_at(deadline, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._answer is None or self._answer.done():
            return
        if self.loop.time() < self._deadline:
            self._timer = self.loop.call_at(self._deadline, self._expire)
        else:
            self._answer.set_exception(TimeoutError())

    def early(self) -> Message | None:
        """What came before the first request, such as a refusal."""
        return self._early if isinstance(self._early, Message) else None

    def abort(self) -> None:
        """Drop the socket now, without a closing handshake."""
        self.transport.abort()


class _Connect(connect):  # type: ignore[misc]
    def process_redirect(self, exc: Exception) -> Exception | str:
        # A redirect would carry the token to an address the user did not name.
        return exc


async def open_link(endpoint: Endpoint, config: ClientConfig) -> Link:
    """Connect; raises ConnectFailed, Unauthorized or CapacityReached, never with a header in the text."""
    tls: ssl.SSLContext | None = None
    if endpoint.ws.startswith("wss"):
        tls = config.ssl_context or ssl.create_default_context()
    try:
        link = await _Connect(
            endpoint.ws,
            additional_headers=dict(endpoint.headers),
            subprotocols=[exact_protocol.BINARY if config.binary else exact_protocol.TEXT],
            compression="deflate" if config.compression else None,
            open_timeout=config.connect_timeout_s,
            ping_interval=config.ping_interval_s,
            ping_timeout=config.ping_timeout_s,
            close_timeout=2.0,
            max_size=config.max_message_bytes,
            max_queue=None,
            create_connection=Link,
            ssl=tls,
            # A proxy from the environment is for the outside world; asking it for this machine never works.
            proxy=None if endpoint.loopback else True,
            logger=_log,
        )
    except InvalidStatus as error:
        status = error.response.status_code
        if status in (401, 403):
            token = "it needs a (different) token; token=…, or ENVFLEET_TOKEN for commands"
            path = "" if status == 401 else ". Some servers answer so when the path of the address is wrong"
            why = f"the server answered {status}: {token}{path}"
            raise Unauthorized(endpoint.public, why) from None
        if status == 421:
            why = "it is not reached under this name: serve with --allow-host NAME, or use its address"
            raise ConnectFailed(endpoint.public, why) from None
        if status in (429, 503):  # it has more connections than it answers at all
            raise CapacityReached(endpoint.public) from None
        hint = ": is the path of the address right?" if status == 404 else ""
        raise ConnectFailed(endpoint.public, f"it answered HTTP {status} to a WebSocket request{hint}") from None
    except TimeoutError:
        raise ConnectFailed(endpoint.public, f"no answer in {config.connect_timeout_s:g} s") from None
    except ssl.SSLError as error:
        raise ConnectFailed(endpoint.public, f"TLS: {error.reason or error}") from None
    except (OSError, InvalidHandshake, EOFError) as error:
        raise ConnectFailed(endpoint.public, f"{type(error).__name__}: {str(error)[:200]}") from None
    assert isinstance(link, Link)
    return link
