"""ASGI middleware around the application: request ids, request metrics, log lines and limits.

The layers are pure ASGI, since a BaseHTTPMiddleware would hide disconnects from the handlers. All
scopes are HTTP: uvicorn runs without WebSockets and lifespan.
"""

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.core import Overloaded, RequestError
from minisgl.server.errors import BodyTooLarge, error_reply
from minisgl.server.observe.lifecycle import Lifecycle
from minisgl.server.observe.metrics import Metrics
from minisgl.settings.config import DEFAULT_CLIENT, Limits
from minisgl.utils import log_event

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[ -~]{1,128}")  # short, printable ASCII
_MAX_PATH_CHARS = 128  # in a log line
PROBE_PATHS = frozenset({"/livez", "/readyz", "/health"})
# These paths need no key, are never refused for a limit, and do not count as requests.
OPEN_PATHS = PROBE_PATHS | {"/ping", "/metrics"}


def json_response(body: Any, code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with this body as JSON. code: the HTTP status."""
    return Response(msgspec.json.encode(body), code, headers, "application/json")


def error_response(error: BaseException, scope: Scope, **headers: str) -> Response:
    """The response to an error of the request of this scope, with further headers.

    The log line of the request names the error.
    """
    scope.setdefault("state", {})["error"] = error
    reply = error_reply(error, scope["path"])
    return Response(reply.body, reply.status, {**reply.headers, **headers}, "application/json")


@dataclass(eq=False, slots=True)
class RequestContextMiddleware:
    """The outermost layer: counts and logs requests, and adds x-request-id to each response.

    The id is the x-request-id of the request if that is short and printable. Otherwise the server
    makes a new id. Each request has one log line, at its end, except on OPEN_PATHS. A handler adds
    fields to the line in the dict `log` of the state.

    A response that begins during a drain closes its connection.

    _route_of: the pattern of the route of a path. Requests that a layer before the router refuses
    count under this route.
    """

    _app: ASGIApp
    _metrics: Metrics
    _lifecycle: Lifecycle
    _route_of: Callable[[str], str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None:
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, client=DEFAULT_CLIENT, log={})
        started_s, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                route = scope.get("route")
                pattern = self._route_of(scope["path"]) if route is None else route.path
                self._metrics.on_http(pattern, scope["method"], status)
                if isinstance(error := state.get("error"), RequestError):
                    self._metrics.on_refused(error, self._lifecycle.phase, state["client"])
                header = (b"x-request-id", request_id.encode())
                closes = [(b"connection", b"close")] if self._lifecycle.leaving else []
                message["headers"] = [*message.get("headers", ()), header, *closes]
            await send(message)

        is_counted = scope["path"] not in OPEN_PATHS
        self._metrics.open_http += is_counted
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._metrics.open_http -= is_counted
            if is_counted:
                _log_call(scope, status, time.monotonic() - started_s)


def _log_call(scope: Scope, status: int, duration_s: float) -> None:
    """Write the log line of one request. status: 0 if no response has begun."""
    state = scope["state"]
    error, fields = state.get("error"), state["log"]
    level, event = logging.INFO, "call ended"
    if error is not None:
        fields = {"reason": type(error).__name__, "param": getattr(error, "param", None)} | fields
        if not isinstance(error, RequestError):  # a bug; uvicorn logs its traceback
            level, event = logging.ERROR, "call failed"
        elif "finish" not in fields:  # the engine has not seen the call
            event = "call refused"
    log_event(
        logger,
        level,
        event,
        request_id=state["request_id"],
        key=state["client"],
        method=scope["method"],
        path=scope["path"][:_MAX_PATH_CHARS],
        status=status,
        duration_s=round(duration_s, 3),
        **fields,
    )


@dataclass(eq=False, slots=True)
class GateMiddleware:
    """Refuses a request that a check refuses, and a request over a limit.

    The limits are max_connections for concurrent requests, and max_body_bytes for a body. A
    Content-Length above the limit is refused at once; other bodies are counted as they arrive.

    _checks: raise RequestError for a request that they refuse. They run in this order.
    _partial_bytes: bytes of all incomplete bodies. If they exceed max_bodies_bytes, the body that
    receives more bytes is refused, unless it is the only incomplete body.
    """

    _app: ASGIApp
    _checks: Sequence[Callable[[Scope], None]]
    _limits: Limits
    _open: int = 0
    _partial_bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send, /) -> None:
        is_limited = scope["path"] not in OPEN_PATHS
        try:
            for check in self._checks:
                check(scope)
            if is_limited:
                self._check_limits(scope)
        except RequestError as error:
            headers = {} if error.limit is None else {"connection": "close"}
            await error_response(error, scope, **headers)(scope, receive, send)
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

        self._open += is_limited
        try:
            await self._app(scope, counted, send)
        finally:
            self._open -= is_limited
            self._partial_bytes -= partial

    def _check_limits(self, scope: Scope) -> None:
        if self._open >= self._limits.max_connections:
            reason = "too many open connections; try again later"
            raise Overloaded(reason, limit="max_connections")
        # The parser refuses numbers of 2**64 and more, but not zeros before a number.
        declared = Headers(scope=scope).get("content-length", "0")
        if int(declared[-20:]) > self._limits.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body exceeds {self._limits.max_body_bytes} bytes")
