"""The HTTP side of a server: health, metadata, schema, and the stateless reset and step of the protocol."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from envfleet.errors import FaultError
from envfleet.remote.message_json import TooDeep, load_bytes
from envfleet.remote.request_gate import refused_body
from envfleet.remote.session import reset_arguments, result_data
from envfleet.remote.space_members import BadAction
from envfleet.util.extras import from_extra

if TYPE_CHECKING:
    from envfleet.remote.app import App

with from_extra("remote"):
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route


_READING_MORE = 64  # bodies that may be read at once beyond the number of sessions: each holds memory


class AsciiResponse(JSONResponse):  # type: ignore[misc]
    """JSON in ASCII: a lone surrogate, which UTF-8 cannot encode, is sent as an escape."""

    def render(self, content: Any) -> bytes:
        """The body."""
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")


class _Refused(Exception):
    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.response = AsciiResponse(body, status)


def http_app(app: App) -> Any:
    """The Starlette application with the routes."""
    endpoints = _Endpoints(app)
    documents = {"/metadata": app.about, "/schema": app.host.dialect.schemas(), "/state": {"episode_id": None, "step_count": 0}}
    routes = [Route("/health", endpoints.health)]
    routes += [Route(path, endpoints.showing(content)) for path, content in documents.items()]
    routes += [Route(path, getattr(endpoints, path[1:]), methods=["POST"]) for path in ("/reset", "/step")]
    return Starlette(routes=routes)


class _Endpoints:
    def __init__(self, app: App) -> None:
        self._app = app
        self._host, self._config = app.host, app.config
        self._reading = 0  # bodies

    async def health(self, request: Request) -> Response:
        """Open to everyone, for load balancers: whether it is alive, and how full."""
        body = {
            "status": "healthy",
            "active_sessions": self._host.active,
            "max_sessions": self._config.max_sessions,
            "at_capacity": self._host.free == 0,
        }
        return AsciiResponse(body)

    def showing(self, content: Any) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that always answers the same."""

        async def show(request: Request) -> Response:
            return self._guard(request) or AsciiResponse(content)

        return show

    async def reset(self, request: Request) -> Response:
        """Reset a temporary environment, as the protocol defines: sessions are on /ws."""
        return self._guard(request) or await self._throw_away(request, is_step=False)

    async def step(self, request: Request) -> Response:
        """One step of a temporary environment that was reset just before."""
        return self._guard(request) or await self._throw_away(request, is_step=True)

    def _guard(self, request: Request) -> Response | None:
        headers = request.headers.raw
        refusal = self._app.gate.refusal(headers, self._app.local_address(request.scope))
        if refusal is not None:
            return AsciiResponse({"detail": refusal[1]}, refusal[0])
        if request.method == "POST" and (why := refused_body(headers)) is not None:
            return AsciiResponse({"detail": why}, 415)
        if self._app.allowed(headers):
            return None
        return AsciiResponse({"detail": "a token is needed"}, 401, {"WWW-Authenticate": "Bearer"})

    async def _throw_away(self, request: Request, is_step: bool) -> Response:
        try:
            body = await self._body(request)
            if is_step and "action" not in body:
                raise BadAction("the body needs 'action'")
            action = self._host.dialect.action(body["action"]) if is_step else None
            seed, _, options = reset_arguments({} if is_step else body)
            slot = self._host.take()
            if slot is None:
                raise _Refused(503, {"code": "CAPACITY_REACHED", "detail": "every session is taken"})
            try:
                row = await self._host.reset(slot, seed, options, fresh=True)
                if is_step:
                    row = await self._host.step(slot, action)
            finally:
                self._app.release(slot)
            return AsciiResponse({"metadata": None, **result_data(self._host.dialect, row, row.reward if is_step else None)})
        except _Refused as refused:
            return refused.response
        except BadAction as error:
            return AsciiResponse({"detail": [{"type": "value_error", "msg": str(error)}]}, 422)
        except ClientDisconnect:
            return AsciiResponse({"detail": "the request was cut short"}, 400)  # the client is gone: not read
        except FaultError as error:
            return AsciiResponse({"detail": error.fault.cause}, 500)
        except (ValueError, RecursionError, OverflowError) as error:
            return AsciiResponse({"detail": f"the result cannot be sent: {type(error).__name__}"}, 500)

    async def _body(self, request: Request) -> dict[str, Any]:
        if self._reading >= self._config.max_sessions + _READING_MORE:
            raise _Refused(503, {"code": "CAPACITY_REACHED", "detail": "too many requests at once"})
        self._reading += 1
        try:
            raw = bytearray()
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > self._config.max_message_bytes:
                    raise _Refused(413, {"detail": f"over {self._config.max_message_bytes} bytes"})
        finally:
            self._reading -= 1
        try:
            body = load_bytes(raw) if raw else {}
        except (ValueError, RecursionError) as error:
            raise BadAction(str(error) if isinstance(error, TooDeep) else "the body is not JSON") from None
        if not isinstance(body, dict):
            raise BadAction("the body is an object")
        return body
