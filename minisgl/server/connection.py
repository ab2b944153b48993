"""Hardening of uvicorn's HTTP protocol.

It adds limits on request heads, on idle connections and on the number of connections, and closes
connections during a drain. It overrides methods of `HttpToolsProtocol`, which are not a public API
of uvicorn: pyproject.toml pins the versions that it was tested with.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.core import InvalidRequest
from minisgl.server.config import Limits
from minisgl.server.errors import ErrorReply, HeadTooLarge, error_reply

# Requests beyond max_connections receive a 503. The server accepts this many more connections
# to send the 503, and aborts further connections without a response.
_SPARE_CONNECTIONS = 128
# Number of pipelined requests on one connection before the server stops reading from it.
_PIPELINED = 8
# A header that offers another protocol, such as h2c from Java's client. The server removes it
# before parsing, because the parser would read the body as that protocol.
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
# Matches the end of a received part of a head if the next part may complete it to such a header.
_PARTIAL_UPGRADE = re.compile(rb"\r(\n(u[^\r\n]*\r?|\r)?)?\Z", re.IGNORECASE)
KEPT = "kept"  # key in the state of a request: its connection carried an earlier request
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


def limited_protocol(
    limits: Limits, exceeded: Callable[[str], None], leaving: Callable[[], bool]
) -> type[asyncio.Protocol]:
    """Make a protocol class for `uvicorn.Config(http=...)`.

    exceeded: receives the name of each limit that a connection exceeds.
    leaving: returns True during a drain; a response that begins then closes its connection.
    """

    class LimitedProtocol(HttpToolsProtocol):
        """Closes a connection that does not complete its request head, or the rest of a rejected
        body, within head_timeout_s, and refuses a head above max_head_bytes. The timer is off
        while a response is being sent.

        _head_bytes: number of received bytes of the head. After the head: number of bytes since
        the last part of the body, which bounds the trailers.
        """

        _head_bytes = 0
        _in_head = True
        _held = b""  # end of the received head that may begin an upgrade header
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._unanswered: deque[RequestResponseCycle] = deque()  # in the order of arrival
            if len(self.connections) > limits.max_connections + _SPARE_CONNECTIONS:
                exceeded("max_connections")
                transport.abort()
                return
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            if isinstance(exc, TimeoutError):  # TCP_USER_TIMEOUT of `run_api`
                exceeded("read_timeout_s")
            super().connection_lost(exc)
            for cycle in self._unanswered:  # uvicorn notifies only the last request
                cycle.disconnected = not cycle.response_complete
                cycle.message_event.set()

        def data_received(self, data: bytes) -> None:
            max_bytes = limits.max_head_bytes
            if self._in_head:
                head, blank, body = (self._held + data).partition(b"\r\n\r\n")
                partial = None if blank else _PARTIAL_UPGRADE.search(head)
                fits = partial and self._head_bytes + len(partial[0]) < max_bytes
                self._held = partial[0] if partial and fits else b""
                head = head.removesuffix(self._held)
                data = _UPGRADE.sub(b"", head) + blank + body
                if self._timer is None and (self.cycle is None or self.cycle.response_complete):
                    self._start_timer()
            while data and not self.transport.is_closing():
                room = max_bytes - self._head_bytes
                if not room:
                    exceeded("max_head_bytes")
                    self._refuse(error_reply(HeadTooLarge(f"the head exceeds {max_bytes} bytes")))
                    return
                piece, data = data[:room], data[room:]
                self._head_bytes += len(piece)
                super().data_received(piece)

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_head:  # ignore trailers, which proxies do not check
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head, self._head_bytes = False, 0
            self._stop_timer()
            self.scope["state"][KEPT] = self.cycle is not None
            super().on_headers_complete()
            if leaving() and self.cycle is not None:
                self.cycle.keep_alive = False
            self._unanswered.append(self.cycle)
            if 1 < len(self._unanswered) <= _PIPELINED:
                self.flow.resume_reading()  # otherwise uvicorn does not notice a disconnect

        def on_body(self, body: bytes) -> None:
            self._head_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._stop_timer()
            self._in_head, self._head_bytes = True, 0
            # If the response was complete before the body, the rest of the body has stopped
            # uvicorn's keep-alive timer. This timer replaces it.
            if self.cycle.response_complete:
                self._start_timer()

        def on_response_complete(self) -> None:
            self._unanswered.popleft()
            super().on_response_complete()
            # The rest of a rejected body, or a head that has begun meanwhile, may never end. The
            # body of a pipelined request is not rejected, and its response is not complete.
            if (self._head_bytes or not self._in_head) and self.cycle.response_complete:
                self._start_timer()

        def send_400_response(self, msg: str) -> None:
            self._refuse(
                error_reply(InvalidRequest("the request is not valid HTTP", code="invalid_http"))
            )

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(limits.head_timeout_s, self._give_up)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            exceeded("head_timeout_s")
            self.transport.abort()

        def _refuse(self, reply: ErrorReply) -> None:
            if self.transport.is_closing():
                return
            head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            start = head % (reply.status, _REASONS[reply.status], len(reply.body))
            self.transport.write(start + b"connection: close\r\n\r\n" + reply.body)
            self.transport.close()

    return LimitedProtocol
