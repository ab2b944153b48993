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
import ssl
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from minisgl.core import InvalidRequest, Overloaded, RequestError
from minisgl.server.config import Limits
from minisgl.server.errors import HeadTooLarge, error_reply
from minisgl.utils import log_event

logger = logging.getLogger(__name__)

# Requests beyond max_connections receive a 503. The server accepts this many more connections
# to send the 503, and aborts further connections without a response.
SPARE_CONNECTIONS = 128
MAX_HEADERS = 100
# A body may have one chunk for each 64 bytes, and this many more. A chunk takes about 2 us, so a
# body of chunks of one byte would hold the event loop for seconds.
MAX_SMALL_CHUNKS = 1024
MAX_HELD_BYTES = 2**24  # of all unfinished heads together; their parsed headers take as much again
# A TLS connection takes 50 KiB, and up to 110 KiB more after a large head: 160 MiB in all.
MAX_TLS_CONNECTIONS = 1024
# CONNECT is refused: the parser would take all bytes after its head for another protocol.
_REQUEST_LINE = re.compile(rb"(?!CONNECT )[A-Z]{1,32} [/Hh*][^\r\n]* HTTP/1\.[01]\r\n")
KEPT = "kept"  # key in the state of a request: its connection carried an earlier request


def _invalid(reason: str = "the request is not valid HTTP") -> InvalidRequest:
    return InvalidRequest(reason, code="invalid_http")


def limited_protocol(limits: Limits, exceeded: Callable[[str], None]) -> type[asyncio.Protocol]:
    """Make a protocol class for `uvicorn.Config(http=...)`.

    exceeded: receives the name of each limit that a connection exceeds.
    """

    held_bytes = 0  # of all connections

    class HttpConnection(HttpToolsProtocol):
        """Checks the limits while the parser reads the bytes of a connection.

        Each connection has one timer, that of uvicorn. It runs for head_timeout_s while a head, or
        the rest of a rejected body, is incomplete. It is off while a response is being sent.
        Between two requests it ends an idle connection.

        _in_head      the parser reads a head
        _in_request   the parser reads a head or a body
        _head         the bytes of the head that have arrived
        _held_size    length of `_head`, as counted in held_bytes
        _surplus      in a head: number of its bytes. In a body: number of bytes since its last
                      part, such as chunk extensions and trailers. After a request: number of
                      bytes that arrive before the response is complete
        _small_chunks chunks of the body beyond one for each 64 bytes
        """

        _held_size = _surplus = 0
        _small_chunks = 0.0
        _in_head = _in_request = False

        @property
        def _responding(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        @property
        def _drops(self) -> bool:
            """The request is complete and the response is not. Further bytes are dropped."""
            return self._responding and not self._in_request

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._head = bytearray()
            if len(self.connections) > limits.max_connections + SPARE_CONNECTIONS:
                exceeded("max_connections")
                transport.abort()
                return
            self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unset_keepalive_if_required()
            if isinstance(exc, TimeoutError):  # TCP_USER_TIMEOUT of `run_api`
                exceeded("read_timeout_s")
            self._count_held(0)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            try:
                while data and not self.transport.is_closing():
                    size = limits.max_head_bytes - self._surplus
                    part, data = data[:size], data[size:]
                    self._surplus += len(part)
                    if self._drops:
                        self.cycle.keep_alive = False
                    else:
                        data = self._parse(part) + data
                    if self._surplus >= limits.max_head_bytes:
                        reason = "the head, or chunk extensions and trailers, exceed"
                        raise HeadTooLarge(f"{reason} {limits.max_head_bytes} bytes")
            except RequestError as error:
                self._refuse(error)

        def _parse(self, part: bytes) -> bytes:
            """Parse bytes of a request. Returns the bytes that must be parsed again."""
            again = b""
            self._head += part
            try:
                self.parser.feed_data(part)
            except httptools.HttpParserUpgrade as offer:
                again = self._head_without_offer() + part[offer.args[0] :]
                # A parser reads nothing after a head that closes its connection.
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError as error:
                if not self._drops:
                    reason = error.__context__  # the error of a callback
                    raise (reason if isinstance(reason, RequestError) else _invalid()) from None
            if not self._in_head:
                self._head.clear()
            self._count_held(len(self._head))
            return again

        def _head_without_offer(self) -> bytes:
            """The head without the header that offers another protocol, such as h2c.

            Java's client sends such an offer with each request, and the parser stops after it.
            """
            self._surplus = 0
            kept = [b"%s: %s\r\n" % (n, value) for n, value in self.headers if n != b"upgrade"]
            return self._request_line + b"".join(kept) + b"\r\n"

        @property
        def _request_line(self) -> bytes:
            version = self.parser.get_http_version().encode()
            return b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)

        def _count_held(self, size: int) -> None:
            """Refuse to hold a head if all unfinished heads together exceed MAX_HELD_BYTES."""
            nonlocal held_bytes
            held_bytes += size - self._held_size
            self._held_size = size
            if size and held_bytes > max(size, MAX_HELD_BYTES):
                reason = "too many request heads are incomplete; try again later"
                raise Overloaded(reason, limit="max_head_bytes")

        def on_message_begin(self) -> None:
            if self._responding:
                self.cycle.keep_alive = False
                raise _invalid("another request begins before the response is complete")
            super().on_message_begin()
            self._in_head = self._in_request = True
            if self.cycle is not None:
                self._start_timer()

        def on_header(self, name: bytes, value: bytes) -> None:
            if not self._in_head:
                return  # ignore trailers, which proxies do not check
            if len(self.headers) == MAX_HEADERS:
                reason = f"the request has more than {MAX_HEADERS} headers"
                raise HeadTooLarge(reason, limit="max_headers")
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            """Refuse a head that proxies and servers read differently, or begin the request."""
            line = self._request_line
            # The parser also accepts other white space. The value of a header may be equal to the
            # line.
            copies = sum(value.endswith(line[:-2]) for _, value in self.headers)
            if not _REQUEST_LINE.fullmatch(line) or self._head.count(line) <= copies:
                raise _invalid(
                    "the request line must be METHOD PATH HTTP/1.1 or METHOD PATH HTTP/1.0"
                )
            names = [name for name, _ in self.headers]
            hosts = names.count(b"host")
            least_hosts = 1 if self.parser.get_http_version() == "1.1" else 0
            if not least_hosts <= hosts <= 1 or names.count(b"authorization") > 1:
                raise _invalid(
                    "a request must have exactly one Host and at most one Authorization header"
                )
            if self.parser.should_upgrade():
                return
            self._in_head, self._surplus, self._small_chunks = False, 0, 0.0
            self._unset_keepalive_if_required()
            self.scope["state"][KEPT] = self.cycle is not None
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._surplus = 0
            self._small_chunks = max(0.0, self._small_chunks + 1 - len(body) / 64)
            if self._small_chunks > MAX_SMALL_CHUNKS:
                reason = "the body has too many small chunks; send chunks of 64 bytes or more"
                raise InvalidRequest(reason, code="invalid_http", limit="max_small_chunks")
            super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.parser.should_upgrade():
                self._in_request, self._surplus = False, 0
                super().on_message_complete()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._in_request:  # The rest of a rejected body may never arrive.
                self._start_timer()

        def _start_timer(self) -> None:
            self._unset_keepalive_if_required()
            wait_s = limits.head_timeout_s
            self.timeout_keep_alive_task = self.loop.call_later(wait_s, self._give_up)

        def _give_up(self) -> None:
            exceeded("head_timeout_s")
            self.transport.abort()

        def _refuse(self, error: RequestError) -> None:
            """Send the error and close. The response to a complete request is cut instead."""
            if error.limit is not None:
                exceeded(error.limit)
            if not self._responding or (self._in_request and not self.cycle.response_started):
                reply = error_reply(error)
                log_event(logger, logging.INFO, "call refused", reason=error.message)
                head = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(reply.body)
                start = STATUS_LINE[reply.status] + head + b"connection: close\r\n\r\n"
                self.transport.write(start + reply.body)
            if self._drops:
                self.transport.abort()  # A client may read its response slowly or never.
            else:
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
