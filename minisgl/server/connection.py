"""uvicorn's HTTP protocol with what it leaves open: limits on heads, idle and all connections, and
goodbyes before the end."""

import asyncio
import re
from collections import deque
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from minisgl.core import InvalidRequest
from minisgl.server.config import Limits
from minisgl.server.errors import ErrorReply, HeadTooLarge, error_reply

# Beyond max_connections requests get an answer that says so; this many more can still be heard.
_SPARE_CONNECTIONS = 128
# So many requests may wait behind one of their connection before it is no longer read.
_PIPELINED = 8
# An offer to speak another protocol, as Java's client makes one (h2c), is not taken; where the
# parser sees it, it takes the body for that protocol.
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
# The end of a part of a head, if with the next part it may be an offer.
_BEGUN = re.compile(rb"\r(\n(u[^\r\n]*\r?|\r)?)?\Z", re.IGNORECASE)
KEPT = "kept"  # in a request's state: its connection has brought others before
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


def limited_protocol(
    limits: Limits, exceeded: Callable[[str], None], leaving: Callable[[], bool]
) -> type[asyncio.Protocol]:
    """A protocol class for `uvicorn.Config(http=...)`; `exceeded` is told which limit was.

    leaving: every answer that begins now is the last one of its connection, and says so.
    """

    class LimitedProtocol(HttpToolsProtocol):
        """Counts the bytes of a head, and drops who sends none, or no end of a refused body, in
        time. While an answer is under way nobody is in a hurry.

        _head_bytes: of the head, or since it ended or some body came: trailers are headers too.
        """

        _head_bytes = 0
        _in_head = True
        _held = b""  # of the head, until more of it comes
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._unanswered: deque[RequestResponseCycle] = deque()  # they are answered in order
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
            for cycle in self._unanswered:  # uvicorn tells the last one only
                cycle.disconnected = not cycle.response_complete
                cycle.message_event.set()

        def data_received(self, data: bytes) -> None:
            most = limits.max_head_bytes
            if self._in_head:
                head, blank, body = (self._held + data).partition(b"\r\n\r\n")
                begun = None if blank else _BEGUN.search(head)
                fits = begun and self._head_bytes + len(begun[0]) < most
                self._held = begun[0] if begun and fits else b""
                head = head.removesuffix(self._held)
                data = _UPGRADE.sub(b"", head) + blank + body
                if self._timer is None and (self.cycle is None or self.cycle.response_complete):
                    self._start_timer()
            while data and not self.transport.is_closing():
                room = most - self._head_bytes
                if not room:
                    exceeded("max_head_bytes")
                    self._refuse(error_reply(HeadTooLarge(f"the head exceeds {most} bytes")))
                    return
                piece, data = data[:room], data[room:]
                self._head_bytes += len(piece)
                super().data_received(piece)

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_head:  # trailers are none: proxies look at heads
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
                self.flow.resume_reading()  # or nobody would see that the client leaves

        def on_body(self, body: bytes) -> None:
            self._head_bytes = 0
            super().on_body(body)

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._stop_timer()
            self._in_head, self._head_bytes = True, 0
            if self.cycle.response_complete:  # a late body has ended uvicorn's keep-alive timer
                self._start_timer()

        def on_response_complete(self) -> None:
            self._unanswered.popleft()
            super().on_response_complete()
            # The rest of a refused body may never end, nor a head that has begun meanwhile; a
            # pipelined request's body has not been refused.
            if (self._head_bytes or not self._in_head) and self.cycle.response_complete:
                self._start_timer()

        def send_400_response(self, msg: str) -> None:
            self._refuse(error_reply(InvalidRequest("this is not HTTP", code="invalid_http")))

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
