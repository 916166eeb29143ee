"""uvicorn's WebSocket protocol with a short way for frames that come in one piece.

uvicorn stops reading after every message and starts again when the application takes it: two calls to the system
a step. Sessions send one request at a time, so here reading is stopped only when messages pile up.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from envfleet.remote.frames import BINARY, TEXT, missing_after, server_frame, whole_payload

_PILE = 32  # messages a client may send ahead before it is not read any more


class LeanWebSocket(WebSocketsSansIOProtocol):  # type: ignore[misc]
    """The long way is uvicorn's; the short one is taken only between whole frames of an open connection."""

    _missing = -1
    _greeted = False
    read_paused: bool
    frames: list[bytes]

    def data_received(self, data: bytes) -> None:
        """Called by asyncio (and once by uvicorn, with the handshake's request)."""
        if self._missing == 0 and self._take(data):
            return
        if not self._greeted:
            self._greeted = True
            end = data.find(b"\r\n\r\n")
            self._missing = missing_after(data[end + 4 :], 0) if end >= 0 else -1
        elif self._missing >= 0:
            self._missing = missing_after(data, self._missing)
        super().data_received(data)

    def _take(self, data: bytes) -> bool:
        payload = whole_payload(data, masked=True)
        if payload is None or self.frames or not self._open or len(payload) > self.config.ws_max_size:
            return False
        if data[0] == TEXT:
            try:
                self.queue.put_nowait({"type": "websocket.receive", "text": payload.decode()})
            except UnicodeDecodeError:
                return False
        else:
            self.queue.put_nowait({"type": "websocket.receive", "bytes": payload})
        if not self.read_paused and self.queue.qsize() >= _PILE:
            self.read_paused = True
            self.transport.pause_reading()
        return True

    def send_receive_event_to_app(self) -> None:
        """Called by uvicorn with a whole message. It logs a traceback for text that is none; closing says it all."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(1007)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    @property
    def _open(self) -> bool:
        return bool(
            self.handshake_complete
            and not self.close_sent
            and not self.disconnected
            and not self.conn.extensions
            and self.conn.state is State.OPEN
        )

    async def send(self, message: Any) -> None:
        """Called by the application."""
        if message["type"] != "websocket.send" or not self._open or not self.writable.is_set():
            await super().send(message)
            if message["type"] == "websocket.http.response.body":
                self.handshake_complete = True  # uvicorn forgets, and complains of it in the log
        elif (text := message.get("text")) is not None:
            self.transport.write(server_frame(TEXT, text.encode()))
        else:
            self.transport.write(server_frame(BINARY, message["bytes"]))
