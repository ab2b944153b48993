"""Connections of the server: checks of the bytes in front of uvicorn's protocol.

`Framer` cuts the bytes of a connection into requests that proxies and servers read alike.
`GuardedConnection` passes them to the protocol of uvicorn by the methods of `asyncio.Protocol`. The
rules are:

- A connection has one request at a time. Bytes of another request that arrive before the response
  is complete are dropped, and the connection closes after the response. Known clients do not send
  several requests at once (pipelining).
- A response may come before the end of the body, such as a 404. The rest of the body and the next
  request may then arrive together.
- A handler begins in each iteration of the event loop, so that probes wait for one handler only.
- Refused connections close one after the other. The clients of an attack open new ones at once, and
  the loop would otherwise accept, read and refuse hundreds of them in one iteration. If more than
  max_connections are open, each new one takes the place of the refused one that has waited longest.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http.client import responses
from typing import Any, ClassVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from minisgl.core import Overloaded, RequestError
from minisgl.server.edge.framer import Framer
from minisgl.server.edge.loop_queue import LoopQueue
from minisgl.server.edge.middleware import PROBE_PATHS
from minisgl.server.errors import error_reply
from minisgl.settings.config import Limits
from minisgl.utils import log_event

logger = logging.getLogger(__name__)

# Requests beyond max_connections receive a 503. The server accepts this many more connections
# to send the 503, and aborts further connections without a response.
SPARE_CONNECTIONS = 128
MAX_HELD_BYTES = 2**24  # of all incomplete heads together
_END_PAUSE_S = 0.001  # between the ends of two refused connections; a refusal takes 0.2 ms
# Keys in the state of a request: its connection, and whether this carried an earlier request.
CONNECTION, KEPT = "connection", "kept"


class Guard:
    """The limits of the connections of one server, and their common counters.

    exceeded   receives the name of each limit that a connection exceeds
    idle_s     a connection without a request closes after this time
    starts     the requests whose handler has not begun
    ends       the refused connections that have not closed
    """

    def __init__(self, limits: Limits, exceeded: Callable[[str], None], idle_s: float) -> None:
        self.limits = limits
        self.exceeded = exceeded
        self.idle_s = idle_s
        self.starts = LoopQueue[GuardedConnection]()
        self.ends = LoopQueue[GuardedConnection](_END_PAUSE_S)
        self.connections = 0
        self.held_bytes = 0

    def protocol(self) -> type[asyncio.Protocol]:
        """The class of the connections, for `uvicorn.Config(http=...)`."""
        return type("Connection", (GuardedConnection,), {"guard": self})


class GuardedConnection(asyncio.Protocol):
    """One connection of a client: passes the bytes that `Framer` has checked to uvicorn's protocol.

    A timer of head_timeout_s runs while a head, or the rest of a rejected body, is incomplete, and
    a timer of idle_s between two requests. No timer runs while a response is being sent.

    _is_idle     the timer is that of idle_s
    _responding  a request has a complete head and an incomplete response
    _answered    the response to the last request has begun
    _closes      the connection closes after the response
    _refused     the connection closes at its turn, and reads nothing more
    _counts      the connection is one of those that max_connections bounds
    _dropped     bytes that arrived between the end of a request and the end of its response
    _delayed     the bytes of a request that has not started
    """

    guard: ClassVar[Guard]
    _transport: asyncio.Transport
    _timer: asyncio.TimerHandle | None = None
    _is_idle = _responding = _answered = _closes = _refused = _counts = False
    _dropped = _held_size = 0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._state = {**app_state, CONNECTION: self, KEPT: False}  # uvicorn copies it per request
        self._inner = HttpToolsProtocol(config, server_state, self._state, _loop)
        self._framer = Framer(self.guard.limits.max_head_bytes)
        self._delayed: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._inner.connection_made(transport)
        self.guard.connections += 1
        self._counts = True
        limit = self.guard.limits.max_connections
        if self.guard.connections > limit and (refused := self.guard.ends.take_first()) is not None:
            refused.leave()
        if self.guard.connections > limit + SPARE_CONNECTIONS:
            self.guard.exceeded("max_connections")
            transport.abort()
        else:
            self._set_timer()

    def leave(self) -> None:
        """Close now. The place of this connection is free at once, also if its client is slow."""
        self._uncount()
        self._transport.abort()

    def _uncount(self) -> None:
        self.guard.connections -= self._counts
        self._counts = False

    def connection_lost(self, exc: Exception | None) -> None:
        self._uncount()
        self._stop_timer()
        if isinstance(exc, TimeoutError):  # TCP_USER_TIMEOUT of `run_api`
            self.guard.exceeded("read_timeout_s")
        self.guard.starts.remove(self)
        self.guard.ends.remove(self)
        self._count_held(0)
        self._inner.connection_lost(exc)
        self._state.clear()  # a reference to this connection

    def eof_received(self) -> None:
        self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._refused or self._transport.is_closing():
            return
        framer = self._framer
        try:
            while data:
                is_new = not framer.in_request
                if is_new and self._responding:
                    self._drop(len(data))
                    break
                part, data = framer.feed(data)
                if part and is_new:
                    self._begin(part)
                elif self._delayed:
                    self._delayed.append(part)
                elif part:
                    self._inner.data_received(part)
            self._count_held(framer.held_size)
        except RequestError as error:
            self._refuse(error)
        self._set_timer()

    def _begin(self, part: bytes) -> None:
        """Pass on a head and the start of its body, or let them wait for the heads before them."""
        self._responding, self._answered, self._dropped = True, False, 0
        self._delayed = [part]
        if self._framer.path in PROBE_PATHS:
            self._start()
            return
        self.guard.starts.add(self, self._start)
        if self._delayed:
            self._transport.pause_reading()

    def _start(self) -> None:
        request, self._delayed = b"".join(self._delayed), []
        self._transport.resume_reading()
        self._inner.data_received(request)
        self._state[KEPT] = True

    def _drop(self, size: int) -> None:
        """Drop bytes that follow a request. More than max_head_bytes of them close at once."""
        self._closes = True
        self._dropped += size
        if self._dropped > self.guard.limits.max_head_bytes:
            self.guard.exceeded("max_head_bytes")
            self._transport.abort()

    def _count_held(self, size: int) -> None:
        """Refuse to hold a head if all incomplete heads together exceed MAX_HELD_BYTES."""
        self.guard.held_bytes += size - self._held_size
        self._held_size = size
        if size and self.guard.held_bytes > max(size, MAX_HELD_BYTES):
            reason = "too many request heads are incomplete; try again later"
            raise Overloaded(reason, limit="max_head_bytes")

    def _refuse(self, error: RequestError) -> None:
        """Send the error and close. A response that has begun is cut instead."""
        if error.limit is not None:
            self.guard.exceeded(error.limit)
        self.guard.starts.remove(self)
        if not (self._answered and (self._responding or self._framer.in_request)):
            reply = error_reply(error, self._framer.path)
            log_event(logger, logging.INFO, "call refused", reason=error.message)
            headers = reply.headers | {
                "content-type": "application/json",
                "content-length": str(len(reply.body)),
                "connection": "close",
            }
            phrase = responses.get(reply.status, "")  # 529 has none
            lines = [f"HTTP/1.1 {reply.status} {phrase}"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            self._transport.write("\r\n".join([*lines, "", ""]).encode() + reply.body)
        if self._responding:  # A handler must not write behind the error.
            self._transport.close()
        else:
            self._refused = True
            self._stop_timer()
            self._transport.pause_reading()
            self.guard.ends.add(self, self._transport.close)

    def response_begins(self, message: Message) -> None:
        """Called with the start of a response before it is sent."""
        self._answered = True
        close = (b"connection", b"close")
        headers = message.get("headers", ())
        if self._closes and close not in headers:
            message["headers"] = [*headers, close]

    def response_ended(self) -> None:
        """Called when a response is complete."""
        self._responding = False
        if self._closes:
            self._transport.close()
        self._set_timer()

    def _set_timer(self) -> None:
        """Start the timer of the next head or request, or stop it during a response.

        Only a complete head stops a timer of head_timeout_s.
        """
        if self._refused or self._transport.is_closing():
            return
        is_idle = self._state[KEPT] and not self._framer.in_request and not self._held_size
        if self._responding:
            self._stop_timer()
        elif self._timer is None or (self._is_idle and not is_idle):
            self._stop_timer()
            self._is_idle = is_idle
            limit_s = self.guard.idle_s if is_idle else self.guard.limits.head_timeout_s
            expired = self._transport.close if is_idle else self._give_up
            self._timer = asyncio.get_running_loop().call_later(limit_s, expired)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self.guard.exceeded("head_timeout_s")
        self._transport.abort()


def tells_connection(app: ASGIApp) -> ASGIApp:
    """Wrap an application, so that a `GuardedConnection` learns the start and end of responses."""

    async def telling(scope: Scope, receive: Receive, send: Send) -> None:
        connection: GuardedConnection = scope["state"][CONNECTION]

        async def send_last(message: Message) -> None:
            await send(message)
            connection.response_ended()

        def tell(message: Message) -> Awaitable[None]:
            # Most messages are events of a stream: their test comes first.
            if message.get("more_body", False):
                return send(message)
            if message["type"] != "http.response.start":
                return send_last(message)
            connection.response_begins(message)
            return send(message)

        await app(scope, receive, tell)

    return telling
