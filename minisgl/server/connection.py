"""HTTP connections of the server: uvicorn's protocol, hardened against hostile clients.

A connection has one request at a time. The server reads the next request after the response.
Bytes that arrive earlier are dropped, and the connection then closes with the response: clients
that send several requests at once (pipelining) do not exist in practice.

`HttpConnection` overrides methods of `HttpToolsProtocol`, which are not a public API of uvicorn:
pyproject.toml pins the versions that it was tested with.
"""

import asyncio
import contextlib
import re
import resource
import socket
from collections.abc import Callable, Iterator

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from minisgl.core import InvalidRequest, RequestError
from minisgl.server.config import Limits, ServerConfig
from minisgl.server.errors import HeadTooLarge, error_reply
from minisgl.server.listener import Connection, Listener
from minisgl.server.metrics import Metrics
from minisgl.server.middleware import ProbesOnly

# Requests beyond max_connections receive a 503 on these connections.
SPARE_CONNECTIONS = 128
_PROBE_CONNECTIONS = 32  # connections of the probe port
OTHER_FILES = 100 + _PROBE_CONNECTIONS  # open files besides the connections of the main port
MAX_HEADERS = 100
# Bytes of a chunked body in one turn. Each chunk takes about 0.3 us, however small it is.
_PART_BYTES = 8 * 2**10
# Longer than proxies keep an idle connection. The proxy must close it first, because only the proxy
# knows that it is about to send a request on the connection.
_IDLE_CONNECTION_S = 75
# The start of a request line, maybe incomplete. Some clients send a line end behind a body.
_START = re.compile(rb"\r?\n?(?:[A-Z]{1,32} |[A-Z]{0,32}\Z)")
_REQUEST_LINE = re.compile(rb"(?:\r\n)?[^\r\n]* HTTP/1\.[01]\r\n")
_PROBE = re.compile(rb"(?:GET|HEAD) /(?:livez|readyz|health)[ ?]")
# A header that offers another protocol, such as h2c from Java's client. The server removes it
# before parsing, because the parser would read the body as that protocol.
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
KEPT = "kept"  # key in the state of a request: its connection carried an earlier request
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class _Excess(Exception):
    """Bytes behind a chunked body begin another request."""


def _invalid(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, code="invalid_http")


class HttpConnection(HttpToolsProtocol, Connection):
    """Receives a whole head before it parses it, and closes when the client is too slow.

    A timer of head_timeout_s runs while a head, or the rest of a rejected body, is incomplete. It
    is off while a response is being sent.

    _received   received bytes that are not yet parsed
    _searched   length of the part of `_received` in which no head ends
    _left       bytes of the body still to come; None: the body is chunked; 0: no body is incomplete
    _overhead   bytes since the last part of the body: chunk extensions and trailers, or bytes that
                arrived before the response was complete
    """

    def __init__(
        self,
        owner: Listener,
        config: uvicorn.Config,
        state: ServerState,
        limits: Limits,
        metrics: Metrics,
        leaving: Callable[[], bool],
    ) -> None:
        """leaving: True during a drain; a response that begins then closes its connection."""
        super().__init__(config, state, {})
        self._owner = owner
        self._limits = limits
        self._metrics = metrics
        self._leaving = leaving
        self._received = bytearray()
        self._searched = 0
        self._left: int | None = 0
        self._overhead = 0
        self._expects_head = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held_bytes(self) -> int:
        return len(self._received)

    @property
    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._owner.idle(self, transport.abort)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if isinstance(exc, TimeoutError):  # TCP_USER_TIMEOUT of `run_api`
            self._metrics.on_limit("read_timeout_s")
        self._owner.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._timer is None and not self._responding:
            self._start_timer()
        self._received += data
        self.transport.pause_reading()  # until the turn of this connection
        self._owner.received(self, len(data), _PROBE.match(data) is not None)

    def take_turn(self) -> bool:
        """Parse one head or one part of a body. Returns True if further bytes can be parsed."""
        again = True
        if self._left != 0:
            self._parse_body()
        elif not self._responding:
            again = self._parse_head()
        if self._left == 0 and self._responding:
            self._drop_excess()
        if self.transport.is_closing():
            return False
        if again and self._received:
            return True
        # Reading goes on during the response, because a paused transport reports no disconnect.
        if not self.flow.read_paused:
            self.transport.resume_reading()
        return False

    def _parse_head(self) -> bool:
        """Parse the head if it is complete, and return True if it is."""
        most = self._limits.max_head_bytes
        end = self._received.find(b"\r\n\r\n", self._searched) + 4
        head = bytes(self._received[:end]) if end > 3 else b""
        if not head:
            self._searched = max(0, len(self._received) - 3)
        if (len(head) or len(self._received) + 1) > most:
            self._refuse(HeadTooLarge(f"the head exceeds {most} bytes"))
        elif head.count(b"\n") > MAX_HEADERS + 2:  # the request line and the blank line
            reason = f"the request has more than {MAX_HEADERS} headers"
            self._refuse(HeadTooLarge(reason, limit="max_headers"))
        elif self._received and not _START.match(self._received):
            self._refuse(_invalid("the request is not valid HTTP"))
        elif head and not _REQUEST_LINE.match(head):
            self._refuse(_invalid("the request line must end with HTTP/1.1 or HTTP/1.0"))
        elif head:
            del self._received[:end]
            self._searched = self._overhead = 0
            self._expects_head = True
            self._feed(_UPGRADE.sub(b"", head))
        return bool(head)

    def _parse_body(self) -> None:
        room = self._left
        if room is None:
            room = min(_PART_BYTES, self._limits.max_head_bytes - self._overhead)
        else:
            self._left = max(0, room - len(self._received))
        part = bytes(self._received[:room])
        del self._received[:room]
        self._overhead += len(part)
        self._feed(part)
        self.cycle.message_event.set()
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        if self._overhead >= self._limits.max_head_bytes:
            most = self._limits.max_head_bytes
            self._refuse(HeadTooLarge(f"chunk extensions or trailers exceed {most} bytes"))

    def _drop_excess(self) -> None:
        self._overhead += len(self._received)
        if bytes(self._received[:3]) not in (b"", b"\r\n"):
            self.cycle.keep_alive = False
        self._received.clear()
        if self._overhead > self._limits.max_head_bytes:
            self._metrics.on_limit("max_head_bytes")
            self.transport.abort()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__
            if not isinstance(cause, _Excess):
                invalid = _invalid("the request is not valid HTTP")
                self._refuse(cause if isinstance(cause, InvalidRequest) else invalid)
            elif self._responding:
                self.cycle.keep_alive = False
            else:
                self.transport.close()

    def on_message_begin(self) -> None:
        if not self._expects_head:
            raise _Excess
        self._expects_head = False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._left == 0:  # ignore trailers, which proxies do not check
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_head()
        self._stop_timer()
        self.scope["state"][KEPT] = self.cycle is not None
        self._left = int(dict(self.headers).get(b"content-length", b"0")) or None
        super().on_headers_complete()
        self._owner.busy(self)
        if self._leaving():
            self.cycle.keep_alive = False

    def _check_head(self) -> None:
        """Refuse heads that proxies and servers read differently. Raises InvalidRequest."""
        names = [name for name, _ in self.headers]
        needs_host = self.parser.get_http_version() == "1.1"
        if not needs_host <= names.count(b"host") <= 1:
            raise _invalid("a request must have exactly one Host header")
        if names.count(b"authorization") > 1:
            raise _invalid("a request must have at most one Authorization header")

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        if not self.cycle.response_complete:
            self.cycle.body += body

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._left = 0
        if self.cycle.response_complete:
            # The rest of the body has stopped uvicorn's keep-alive timer. This timer replaces it.
            self._stop_timer()
            self._start_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._owner.idle(self, self.transport.abort)
        if self._left != 0:  # The rest of a rejected body may never arrive.
            self._start_timer()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._limits.head_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._metrics.on_limit("head_timeout_s")
        self.transport.abort()

    def _refuse(self, error: RequestError) -> None:
        """Answer and close. A response that has begun is cut instead."""
        if self.transport.is_closing():
            return
        if error.limit is not None:
            self._metrics.on_limit(error.limit)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            reply = error_reply(error)
            self._metrics.on_http("invalid", "other", reply.status)
            head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            start = head % (reply.status, _REASONS[reply.status], len(reply.body))
            self.transport.write(start + b"connection: close\r\n\r\n" + reply.body)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Serves the application on a listener, and the probes also on a second one.

    It installs no signal handlers, because `ApiServer` handles the signals.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        metrics: Metrics,
        leaving: Callable[[], bool],
        *sockets: socket.socket,
    ) -> None:
        """leaving: see `HttpConnection`. sockets: of --port and, if given, of --probe-port."""
        self._limits = config.limits
        self._metrics = metrics
        self._leaving = leaving
        self._sockets = sockets
        self._listeners: list[Listener] = []
        certificate = config.ssl_certfile, config.ssl_keyfile
        self._app = app
        super().__init__(self._uvicorn_config(app, *certificate))

    @staticmethod
    def _uvicorn_config(
        app: ASGIApp, certfile: str | None = None, keyfile: str | None = None
    ) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            http=HttpConnection,
            ws="none",
            loop="uvloop",
            ssl_certfile=certfile,
            ssl_keyfile=keyfile,
            timeout_keep_alive=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=3,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        listener, *probe_listeners = self._sockets
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        capacity = min(self._limits.max_connections + SPARE_CONNECTIONS, files - OTHER_FILES)
        self._listen(listener, capacity, self.config)
        for probe_listener in probe_listeners:
            probes = self._uvicorn_config(ProbesOnly(self._app))
            self._listen(probe_listener, _PROBE_CONNECTIONS, probes)

    def _listen(self, listener: socket.socket, capacity: int, config: uvicorn.Config) -> None:
        if not config.loaded:
            config.load()
        limits, metrics, timeout_s = self._limits, self._metrics, self._limits.head_timeout_s

        def make(owner: Listener) -> HttpConnection:
            return HttpConnection(owner, config, self.server_state, limits, metrics, self._leaving)

        made = Listener(listener, capacity, make, metrics.on_limit, config.ssl, timeout_s)
        self._listeners.append(made)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self._listeners:
            listener.close()
        await super().shutdown(sockets=[])
