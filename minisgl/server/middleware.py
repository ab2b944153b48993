"""ASGI middleware around the application: request ids and counting, and limits.

The layers are pure ASGI, since a BaseHTTPMiddleware would hide disconnects from the handlers. All
scopes are HTTP: uvicorn runs without WebSockets and lifespan.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.core import Overloaded, RequestError
from minisgl.server.config import Limits
from minisgl.server.errors import BodyTooLarge, error_reply
from minisgl.server.metrics import Metrics

_MAX_ID_CHARS = 128
# These paths need no key, are never refused for a limit, and do not count as requests.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/health", "/metrics"})


def json_response(body: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with this body as JSON. code: the HTTP status."""
    return Response(msgspec.json.encode(body), code, headers, "application/json")


def error_response(error: BaseException, path: str, **headers: str) -> Response:
    """The response to an error of a request to this path, with further headers."""
    reply = error_reply(error, path)
    return Response(reply.body, reply.status, {**reply.headers, **headers}, "application/json")


@dataclass(eq=False, slots=True)
class RequestContextMiddleware:
    """The outermost layer: counts requests and responses, and adds x-request-id to each response.

    The id is the x-request-id of the request if that is short and printable. Otherwise the server
    makes a new id.
    """

    _app: ASGIApp
    _metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None:
        request_id = Headers(scope=scope).get("x-request-id", "")
        fits = 0 < len(request_id) <= _MAX_ID_CHARS and request_id.isascii()
        if not (fits and request_id.isprintable()):
            request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.on_http(route, scope["method"], message["status"])
                header = (b"x-request-id", request_id.encode())
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        change = scope["path"] not in OPEN_PATHS
        self._metrics.on_http_open(change)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._metrics.on_http_open(-change)


@dataclass(eq=False, slots=True)
class LimitMiddleware:
    """Refuses concurrent requests above max_connections, and bodies above max_body_bytes.

    A Content-Length above the limit is refused at once; other bodies are counted as they arrive.

    _partial_bytes: bytes of all incomplete bodies. A body is refused if they exceed
    max_bodies_bytes, unless it is the only one.
    """

    _app: ASGIApp
    _limits: Limits
    _refused: Callable[[RequestError], None]
    _open: int = 0
    _partial_bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        error = self._refusal(scope)
        if error is not None:
            self._refused(error)
            await error_response(error, scope["path"], connection="close")(scope, receive, send)
            return
        received = partial = 0

        async def counted() -> Message:
            nonlocal received, partial
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limits.max_body_bytes:
                raise self._too_large()
            before, partial = partial, received if message.get("more_body") else 0
            self._partial_bytes += partial - before
            if partial and self._partial_bytes > max(partial, self._limits.max_bodies_bytes):
                reason = "too many request bodies are incomplete; try again later"
                raise Overloaded(reason, limit="max_bodies_bytes")
            return message

        self._open += 1
        try:
            await self._app(scope, counted, send)
        finally:
            self._open -= 1
            self._partial_bytes -= partial

    def _refusal(self, scope: Scope) -> RequestError | None:
        if self._open >= self._limits.max_connections:
            reason = "too many open connections; try again later"
            return Overloaded(reason, limit="max_connections")
        declared = Headers(scope=scope).get("content-length", "0")
        too_large = declared.isdecimal() and int(declared[:20]) > self._limits.max_body_bytes
        return self._too_large() if too_large else None

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body exceeds {self._limits.max_body_bytes} bytes")
