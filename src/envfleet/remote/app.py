"""The ASGI application of a server: which requests are accepted, which get a session, and when it ends."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from envfleet.remote import exact_protocol
from envfleet.remote.idle_sessions import Sessions
from envfleet.remote.request_gate import Gate
from envfleet.remote.session import Frame, Over, Session, error_frame
from envfleet.remote.session_host import FleetHost

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HANDOVER_WAIT_S = 5.0  # how long a new client waits for an idle session's environment to close
LAST_MESSAGE_S = 2.0  # how long a client whose session is ended may take to read why


class App:
    """The ASGI application: WebSocket sessions here, everything else in `envfleet.remote.endpoints`."""

    def __init__(self, host: FleetHost, about: dict[str, Any]) -> None:
        from envfleet.remote.endpoints import http_app

        self.host, self.about = host, about
        self.config = config = host.config
        self.gate = Gate(config.host, config.allow_hosts, config.allow_origins)
        self.sessions = Sessions(config)
        self._releasing: set[asyncio.Task[None]] = set()
        self._http = http_app(self)
        self._reaper: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] == "websocket" and scope["path"].rstrip("/") == "/ws":
            await self._websocket(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await _refuse_request(scope, send, 404, "sessions are at /ws")
        elif scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._http(scope, receive, send)

    def allowed(self, headers: Any) -> bool:
        """Whether these request headers carry the token, if one is asked for."""
        if self.config.token is None:
            return True
        given = next((value for name, value in headers if name.lower() == b"authorization"), b"")
        return hmac.compare_digest(given, b"Bearer " + self.config.token.encode())

    @staticmethod
    def local_address(scope: Scope) -> str | None:
        """The address of this machine that a connection came in on."""
        server = scope.get("server")
        return str(server[0]).lower().removeprefix("::ffff:") if server else None  # IPv4 on a socket of both kinds

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.host.start()
        except Exception as error:
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
            return
        self._reaper = asyncio.ensure_future(self.sessions.reap())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._reaper.cancel()
        self.host.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _websocket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        refusal = self.gate.refusal(scope["headers"], self.local_address(scope))
        if refusal is None and not self.allowed(scope["headers"]):
            refusal = 403, "a token is needed"
        if refusal is not None:
            await _refuse_request(scope, send, *refusal)
            return
        protocol = next((name for name in exact_protocol.SUBPROTOCOLS if name in scope.get("subprotocols", ())), None)
        slot = self.host.take()
        if slot is None:
            slot = await self._slot_of_idle()
        try:
            await send({"type": "websocket.accept", "subprotocol": protocol})
            if slot is None:
                await self._refuse(send)
                return
            await self._serve(Session(self.host, slot, protocol), receive, send)
        except (OSError, RuntimeError, asyncio.CancelledError):
            pass  # the client disconnected (uvicorn raises either of the first two), or the server is closing
        finally:
            if slot is not None:
                # Not awaited by the connection: the slot is free when its running step is over, not before.
                self.release(slot)

    def release(self, slot: int) -> None:
        """Give a slot back as soon as its running step is over."""
        task = asyncio.ensure_future(self.host.release(slot))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _slot_of_idle(self) -> int | None:
        """The slot of an idle session, for a client that has just connected; None when all are in use."""
        idle = self.sessions.make_room()
        if idle is None:
            return None
        try:
            async with asyncio.timeout(HANDOVER_WAIT_S):
                await idle.gone.wait()
                while (slot := self.host.take()) is None and self._releasing:
                    await asyncio.wait(self._releasing, return_when=asyncio.FIRST_COMPLETED)
                return slot
        except TimeoutError:
            return None  # its environment takes long to close: a later try finds it free

    async def _refuse(self, send: Send) -> None:
        most = self.config.max_sessions
        message = f"Server at capacity: {most}/{most} sessions active. Cannot accept new connections."
        frame = error_frame("CAPACITY_REACHED", message, active_sessions=most, max_sessions=most)
        await send({"type": "websocket.send", "text": frame})
        await send({"type": "websocket.close", "code": 1000})

    async def _serve(self, session: Session, receive: Receive, send: Send) -> None:
        live = self.sessions.enter(lambda: session.in_episode)
        try:
            while True:
                message = await receive()
                if message["type"] != "websocket.receive":
                    return
                live.busy = True
                frame = message.get("text")
                reply = await session.answer(frame if frame is not None else message["bytes"])
                self.sessions.used(live)
                if reply is not None:
                    await send(_outgoing(reply))
        except Over as over:
            if over.frame is not None:
                await send(_outgoing(over.frame))
            await send({"type": "websocket.close", "code": 1000})
        except asyncio.CancelledError:
            if live.reason is None:
                raise
            async with asyncio.timeout(LAST_MESSAGE_S):  # it may not be reading either
                await send(_outgoing(error_frame("SESSION_ERROR", f"the session was ended: {live.reason}")))
                await send({"type": "websocket.close", "code": 1000})
        finally:
            self.sessions.leave(live)
            asyncio.get_running_loop().call_soon(live.gone.set)  # once its slot is being released


async def _refuse_request(scope: Scope, send: Send, status: int, why: str) -> None:
    """Answer a WebSocket request with an HTTP error."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})  # before accept: HTTP 403
        return
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": why.encode()})


def _outgoing(frame: Frame) -> dict[str, Any]:
    return {"type": "websocket.send", ("text" if isinstance(frame, str) else "bytes"): frame}
