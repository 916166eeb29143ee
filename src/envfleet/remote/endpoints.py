"""The HTTP side of a server: health, metadata, schema, and the stateless reset and step of the protocol."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from envfleet.errors import BackendMissing, FaultError
from envfleet.remote.codec import BadAction
from envfleet.remote.session import reset_arguments, result_data

if TYPE_CHECKING:
    from envfleet.remote.server import App

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ImportError as missing:  # pragma: no cover - depends on the installation
    raise BackendMissing("starlette", extra="remote") from missing


class _Refused(Exception):
    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.response = JSONResponse(body, status)


def http_app(app: App) -> Any:
    """The Starlette application with the routes."""
    endpoints = _Endpoints(app)
    routes = [
        Route("/health", endpoints.health),
        Route("/metadata", endpoints.metadata),
        Route("/schema", endpoints.schema),
        Route("/state", endpoints.state),
        Route("/reset", endpoints.reset, methods=["POST"]),
        Route("/step", endpoints.step, methods=["POST"]),
    ]
    return Starlette(routes=routes)


class _Endpoints:
    def __init__(self, app: App) -> None:
        self._app = app
        self._host, self._config = app.host, app.config
        self._schemas = self._host.dialect.schemas()

    async def health(self, request: Request) -> Response:
        """Open to everyone, because load balancers ask it: alive, and how full."""
        active = self._config.max_sessions - self._host.free - self._host.lost
        full = self._host.free == 0
        body = {
            "status": "healthy",
            "active_sessions": active,
            "max_sessions": self._config.max_sessions,
            "at_capacity": full,
            "refused_sessions": self._app.refused,
            "lost_sessions": self._host.lost,
        }
        return JSONResponse(body)

    async def metadata(self, request: Request) -> Response:
        return self._guard(request) or JSONResponse(self._app.about)

    async def schema(self, request: Request) -> Response:
        return self._guard(request) or JSONResponse(self._schemas)

    async def state(self, request: Request) -> Response:
        return self._guard(request) or JSONResponse({"episode_id": None, "step_count": 0})

    async def reset(self, request: Request) -> Response:
        """A throw-away environment, as the protocol has it: sessions live on /ws."""
        return self._guard(request) or await self._throw_away(request, None)

    async def step(self, request: Request) -> Response:
        """One step of a throw-away environment that was reset just before."""
        return self._guard(request) or await self._throw_away(request, "action")

    def _guard(self, request: Request) -> Response | None:
        if self._app.allowed(request.headers.raw):
            return None
        return JSONResponse({"detail": "a token is needed"}, 401, {"WWW-Authenticate": "Bearer"})

    async def _throw_away(self, request: Request, needs: str | None) -> Response:
        try:
            body = await self._body(request)
            if needs is not None and needs not in body:
                raise BadAction(f"the body needs {needs!r}")
            action = self._host.dialect.action(body[needs]) if needs is not None else None
            seed, _, options = reset_arguments({} if needs is not None else body)
            seat = self._host.take()
            if seat is None:
                raise _Refused(503, {"code": "CAPACITY_REACHED", "detail": "every session is taken"})
            try:
                row = await self._host.reset(seat, seed, options, fresh=True)
                if needs is not None:
                    row = await self._host.step(seat, action)
            finally:
                task = asyncio.ensure_future(self._host.release(seat))
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
            reward = row.reward if needs is not None else None
            return JSONResponse({"metadata": None, **result_data(self._host.dialect, row, reward, binary=False)})
        except _Refused as refused:
            return refused.response
        except BadAction as error:
            return JSONResponse({"detail": [{"type": "value_error", "msg": str(error)}]}, 422)
        except FaultError as error:
            return JSONResponse({"detail": error.fault.cause}, 500)

    async def _body(self, request: Request) -> dict[str, Any]:
        raw = bytearray()
        async for chunk in request.stream():
            raw += chunk
            if len(raw) > self._config.max_message_bytes:
                raise _Refused(413, {"detail": f"over {self._config.max_message_bytes} bytes"})
        try:
            body = json.loads(raw) if raw else {}
        except (ValueError, RecursionError):
            raise BadAction("the body is not JSON") from None
        if not isinstance(body, dict):
            raise BadAction("the body is an object")
        return body
