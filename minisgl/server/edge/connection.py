"""HTTP connections of the server: uvicorn's protocol with limits for hostile clients.

A connection has one request at a time. The server reads the next request after the response. If
bytes of another request arrive before the response is complete, the server drops them and closes
the connection after the response. Known clients do not send several requests at once (pipelining).
A response may come before the end of the body, such as a 404. The rest of the body and the next
request may then arrive together.

The protocol overrides methods of `HttpToolsProtocol`, which are not a public API of uvicorn:
pyproject.toml pins the versions that it was tested with.
"""

import asyncio
import contextlib
import logging
import re
import socket
import ssl
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from minisgl.core import InvalidRequest, Overloaded, RequestError
from minisgl.server.edge.middleware import PROBE_PATHS
from minisgl.server.edge.open_files import log_loop_error
from minisgl.server.errors import HeadTooLarge, error_reply
from minisgl.settings.config import Limits
from minisgl.utils import log_event

logger = logging.getLogger(__name__)

# Requests beyond max_connections receive a 503. The server accepts this many more connections
# to send the 503, and aborts further connections without a response.
SPARE_CONNECTIONS = 128
MAX_HEADERS = 100
# A body may have one chunk for each 64 bytes, and this many more. A chunk takes about 2 us, so a
# body of chunks of one byte would hold the event loop for seconds.
MAX_SMALL_CHUNKS = 1024
MAX_HELD_BYTES = 2**24  # of all unfinished heads together
# A TLS connection takes 50 KiB, and up to 110 KiB more after a large head: 160 MiB in all.
MAX_TLS_CONNECTIONS = 1024
# The start of a request line, which may be incomplete.
_START = re.compile(rb"\r?\n?(?:[A-Z]{1,32} |[A-Z]{0,32}\Z)")
# CONNECT is refused: the parser would take all bytes after its head for another protocol.
_REQUEST_LINE = re.compile(rb"\r?\n?(?!CONNECT )[A-Z]{1,32} [/Hh*][^\r\n]* HTTP/1\.([01])\r\n")
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_SINGLE = re.compile(rb"\r\n(host|authorization):", re.IGNORECASE)
# A header that offers another protocol, such as h2c from Java's client. The server removes it
# before parsing, because the parser would read the body as that protocol.
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
KEPT = "kept"  # key in the state of a request: its connection carried an earlier request


def check_head(head: bytes) -> None:
    """Refuse a complete head that proxies and servers read differently. Raises RequestError."""
    if head.count(b"\n") > MAX_HEADERS + 2:  # the request line and the empty line
        reason = f"the request has more than {MAX_HEADERS} headers"
        raise HeadTooLarge(reason, limit="max_headers")
    line = _REQUEST_LINE.match(head)
    if line is None:
        raise _invalid("the request line must be METHOD PATH HTTP/1.1 or METHOD PATH HTTP/1.0")
    if line[1] == b"0" and _CHUNKED.search(head):
        # A proxy that speaks HTTP/1.0 does not know the header, and takes the body for a request.
        raise _invalid("a body of HTTP/1.0 cannot have chunks; send Content-Length, or HTTP/1.1")
    names = [name.lower() for name in _SINGLE.findall(head)]
    if len(names) != len(set(names)) or (b"host" not in names and line[1] == b"1"):
        raise _invalid("a request must have exactly one Host and at most one Authorization header")


def _invalid(reason: str = "the request is not valid HTTP") -> InvalidRequest:
    return InvalidRequest(reason, code="invalid_http")


class _StartQueue:
    """Starts the handler of one request in each iteration of the event loop, in order of arrival.

    Between two handlers, the loop accepts and reads other connections, so that hundreds of
    connections with requests do not delay a probe by hundreds of handlers.
    """

    def __init__(self) -> None:
        self._starts: OrderedDict[object, Callable[[], None]] = OrderedDict()
        self._has_started = False  # True if this iteration of the loop has started a handler

    def add(self, connection: object, start: Callable[[], None]) -> None:
        """Call `start` at once, or in a later iteration if another request comes first."""
        if self._has_started:
            self._starts[connection] = start
        else:
            self._has_started = True
            asyncio.get_running_loop().call_soon(self._start_next)
            start()

    def remove(self, connection: object) -> None:
        """Drop the request of a lost connection."""
        self._starts.pop(connection, None)

    def _start_next(self) -> None:
        self._has_started = bool(self._starts)
        if self._has_started:
            asyncio.get_running_loop().call_soon(self._start_next)
            _, start = self._starts.popitem(last=False)
            start()


def limited_protocol(limits: Limits, exceeded: Callable[[str], None]) -> type[asyncio.Protocol]:
    """Make a protocol class for `uvicorn.Config(http=...)`.

    exceeded: receives the name of each limit that a connection exceeds.
    """

    queue = _StartQueue()
    held_bytes = 0  # of all connections

    class HttpConnection(HttpToolsProtocol):
        """Holds the bytes of a head until it is complete, and then parses head and body.

        A timer of head_timeout_s runs while a head, or the rest of a rejected body, is incomplete.
        It is off while a response is being sent.

        _held_size    length of `_held`, as counted in held_bytes
        _searched     length of the part of `_held` in which no head ends
        _in_head      the parser reads a head
        _in_request   the parser reads a head or a body
        _surplus      number of bytes since the last part of the body: chunk extensions and
                      trailers, and bytes that arrive before the response is complete
        _small_chunks chunks of the body beyond one for each 64 bytes
        _body_left    number of bytes of the body that have not arrived; 0 if it has chunks
        _tail         the last 3 bytes of the body that have arrived
        """

        _held_size = _searched = _surplus = _body_left = 0
        _tail = b""
        _small_chunks = 0.0
        _in_head = _in_request = False
        _timer: asyncio.TimerHandle | None = None

        @property
        def _responding(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._held = bytearray()
            if len(self.connections) > limits.max_connections + SPARE_CONNECTIONS:
                exceeded("max_connections")
                transport.abort()
                return
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            if isinstance(exc, TimeoutError):  # TCP_USER_TIMEOUT of `run_api`
                exceeded("read_timeout_s")
            queue.remove(self)
            self._count_held(0)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._unset_keepalive_if_required()
            if self.transport.is_closing():
                return
            try:
                if self._in_request:
                    self._read_body(data)
                elif self._responding:
                    self._drop(len(data))
                else:
                    self._read_head(data)
            except RequestError as error:
                self._refuse(error)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                # The parser wraps the error of a callback.
                reason = error.__context__
                if self._responding and not self._in_request:
                    self._drop(len(data))
                else:
                    self._refuse(reason if isinstance(reason, RequestError) else _invalid())

        def _read_head(self, data: bytes) -> None:
            """Parse the head once it is complete, and then the bytes that follow the head."""
            if self._timer is None:
                self._start_timer()
            held = self._held
            held += data
            blank = held.find(b"\r\n\r\n", self._searched)
            size = len(held) + 1 if blank < 0 else blank + 4
            self._searched = max(0, len(held) - 3)
            if size > limits.max_head_bytes:
                raise HeadTooLarge(f"the head exceeds {limits.max_head_bytes} bytes")
            if not _START.match(held):
                raise _invalid()
            if blank < 0:
                self._count_held(len(held))
            else:
                self._count_held(0)
                head, rest = bytes(held[:size]), bytes(held[size:])
                check_head(head)
                held.clear()
                self._searched = 0
                self._in_head = self._in_request = True
                self._parse(_UPGRADE.sub(b"", head))
                if rest:
                    self.data_received(rest)

        def _read_body(self, data: bytes) -> None:
            """Parse the body up to its end, and receive the other bytes as the next request.

            A body in chunks ends with an empty line. The parser does not report where the body ends
            in `data`. After the response, this method therefore gives the parser one part at a
            time, each up to the next empty line.
            """
            begin, known = 0, len(self._tail)
            text = self._tail + data
            self._tail = text[-3:]
            while self._in_request and begin < len(data):
                end = len(data)
                if self._body_left:
                    end = min(end, begin + self._body_left)
                    self._body_left -= end - begin
                elif not self._responding:
                    blank = text.find(b"\r\n\r\n", begin and begin + known)
                    end = end if blank < 0 else blank + 4 - known
                self._parse(data[begin:end])
                begin = end
            if begin < len(data):
                self.data_received(data[begin:])

        def _count_held(self, size: int) -> None:
            """Refuse to hold a head if all unfinished heads together exceed MAX_HELD_BYTES."""
            nonlocal held_bytes
            held_bytes += size - self._held_size
            self._held_size = size
            if size and held_bytes > max(size, MAX_HELD_BYTES):
                reason = "too many request heads are incomplete; try again later"
                raise Overloaded(reason, limit="max_head_bytes")

        def _parse(self, data: bytes) -> None:
            max_bytes = limits.max_head_bytes
            for start in range(0, len(data), max_bytes):
                part = data[start : start + max_bytes]
                self._surplus += len(part)
                self.parser.feed_data(part)
                if self._surplus > max_bytes:
                    raise HeadTooLarge(f"chunk extensions or trailers exceed {max_bytes} bytes")
            if self._responding:
                # Set the event once for all chunks in `data`, because a chunk may have one byte.
                self.cycle.message_event.set()
                if len(self.cycle.body) > HIGH_WATER_LIMIT:
                    self.flow.pause_reading()

        def _drop(self, size: int) -> None:
            """Drop bytes that follow a request. The connection closes after the response.

            More than max_head_bytes of such bytes close the connection at once.
            """
            self.cycle.keep_alive = False
            self._surplus += size
            if self._surplus > limits.max_head_bytes:
                exceeded("max_head_bytes")
                self.transport.abort()

        def on_message_begin(self) -> None:
            if not self._in_head:
                raise _invalid(
                    "the bytes after the body begin another request; send it after the response"
                )
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_head:  # ignore trailers, which proxies do not check
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._in_head, self._surplus, self._small_chunks = False, 0, 0.0
            self._body_left, self._tail = int(dict(self.headers).get(b"content-length", 0)), b""
            self._stop_timer()
            self.scope["state"][KEPT] = self.cycle is not None
            super().on_headers_complete()

        def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
            start = partial(super()._start_asgi_task, cycle, app)
            if cycle.scope["path"] in PROBE_PATHS:
                start()
            else:
                queue.add(self, start)

        def on_body(self, body: bytes) -> None:
            self._small_chunks = max(0.0, self._small_chunks + 1 - len(body) / 64)
            if self._small_chunks > MAX_SMALL_CHUNKS:
                reason = "the body has too many small chunks; send chunks of 64 bytes or more"
                raise InvalidRequest(reason, code="invalid_http", limit="max_small_chunks")
            self._surplus = 0
            if self._responding:
                self.cycle.body += body

        def on_message_complete(self) -> None:
            self._in_request = False
            super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._in_request:  # The rest of a rejected body may never arrive.
                self._start_timer()

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(limits.head_timeout_s, self._give_up)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            exceeded("head_timeout_s")
            self.transport.abort()

        def _refuse(self, error: RequestError) -> None:
            """Send the error and close. A response that has begun is cut instead."""
            if error.limit is not None:
                exceeded(error.limit)
            if not (self._responding and self.cycle.response_started):
                reply = error_reply(error)
                log_event(logger, logging.INFO, "call refused", reason=error.message)
                head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(reply.body)
                start = STATUS_LINE[reply.status] + head + b"connection: close\r\n\r\n"
                self.transport.write(start + reply.body)
            self.transport.close()

    return HttpConnection


class HttpServer(uvicorn.Server):
    """A uvicorn server with `limited_protocol`. The process of the server handles signals."""

    def __init__(
        self, app: ASGIApp, limits: Limits, exceeded: Callable[[str], None], **options: Any
    ) -> None:
        """options: further options of uvicorn."""
        config = uvicorn.Config(
            app,
            http=limited_protocol(limits, exceeded),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            **options,
        )
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(log_loop_error)
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class TlsContext(ssl.SSLContext):
    """Refuses a TLS connection while too many others are open.

    uvicorn counts a connection after its handshake. An unfinished handshake takes an open file and
    60 KiB of memory too.
    """

    def __init__(self, _: int, limits: Limits, exceeded: Callable[[str], None]) -> None:
        """exceeded: see `limited_protocol`."""
        self._most = min(limits.max_connections + SPARE_CONNECTIONS, MAX_TLS_CONNECTIONS)
        self._exceeded = exceeded
        self._open: weakref.WeakSet[ssl.SSLObject] = weakref.WeakSet()

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        if len(self._open) >= self._most:
            self._exceeded("max_connections")
            raise ConnectionAbortedError("too many TLS connections")  # closes this connection
        opened = super().wrap_bio(*arguments, **options)
        self._open.add(opened)
        return opened
