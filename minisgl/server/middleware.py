"""Pure ASGI layers around the app: its edge, and its limits. (A BaseHTTPMiddleware would hide
disconnects from the handlers.) uvicorn is told to bring nothing but HTTP."""

import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from minisgl.core import Overloaded, RequestError
from minisgl.server.config import Limits
from minisgl.server.errors import BodyTooLarge, ErrorReply, error_reply
from minisgl.server.metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_MAX_ID_CHARS = 128


class Edge:
    """The outermost layer: counts requests and answers, and completes each answer's headers.

    x-request-id is the client's, when it is short and printable, or ours. probes: paths that do
    not count as requests under way.
    """

    def __init__(self, app: App, metrics: Metrics, probes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._probes = probes

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None:
        request_id = _given_id(scope) or uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode()

        async def completed(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "other")
                self._metrics.on_http(route, scope["method"], message["status"])
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        weight = scope["path"] not in self._probes
        self._metrics.on_http_open(weight)
        try:
            await self._app(scope, receive, completed)
        finally:
            self._metrics.on_http_open(-weight)


def _given_id(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            if 0 < len(text) <= _MAX_ID_CHARS and text.isascii() and text.isprintable():
                return bytes(value)
    return None


async def send_reply(send: Send, reply: ErrorReply, close: bool = False) -> None:
    """An error as the whole answer."""
    headers = [(b"content-type", b"application/json")]
    headers += [(name.encode(), value.encode()) for name, value in reply.headers.items()]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.json()})


class Bounded:
    """Refuses requests above max_connections at a time, and bodies above max_body_bytes.

    A body counts by its Content-Length at once, and by what comes otherwise. always: paths that
    are answered however many requests there are.
    """

    def __init__(
        self,
        app: App,
        limits: Limits,
        always: frozenset[str],
        refused: Callable[[RequestError], None],
    ) -> None:
        self._app = app
        self._limits = limits
        self._always = always
        self._refused = refused
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None:
        if scope["path"] in self._always:
            await self._app(scope, receive, send)
            return
        error = self._refusal(scope)
        if error is not None:
            self._refused(error)
            await send_reply(send, error_reply(error), close=True)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limits.max_body_bytes:
                raise self._too_large()
            return message

        self._open += 1
        try:
            await self._app(scope, counted, send)
        finally:
            self._open -= 1

    def _refusal(self, scope: Scope) -> RequestError | None:
        if self._open >= self._limits.max_connections:
            most = "too many open connections; try again later"
            return Overloaded(most, limit="max_connections")
        declared = next((v for n, v in scope["headers"] if n == b"content-length"), b"0")
        too_large = declared.isdigit() and int(declared[:20]) > self._limits.max_body_bytes
        return self._too_large() if too_large else None

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body exceeds {self._limits.max_body_bytes} bytes")
