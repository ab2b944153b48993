"""A connection of the server, driven by the bytes that a socket would deliver."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.server.edge.server import HttpServer
from minisgl.settings.config import Limits

__all__ = ["LIMITS", "MOST", "POST", "Wire", "Wired", "answers", "connections", "echo"]

MOST = 1024
LIMITS = Limits(max_head_bytes=MOST)
POST = b"POST /path HTTP/1.1\r\nhost: x\r\n"


class Wire(asyncio.Transport):
    """Keeps the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False
        self._closing = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = self.aborted = True

    def pause_reading(self) -> None:
        """Does nothing: the test delivers the bytes."""

    def resume_reading(self) -> None:
        """Does nothing: the test delivers the bytes."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Responds with the path, the names of other headers, and the body. /early: reads no body."""
    body, more = b"", scope["path"] != "/early"
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    known = {
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"user-agent",
        b"connection",
        b"upgrade",
        b"x",
    }
    names = (name + b" " for name, _ in scope["headers"] if name not in known)
    body = scope["path"].encode() + b" " + b"".join(names) + body
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def connections(
    app: ASGIApp, limits: Limits, exceeded: Callable[[str], None], idle_s: float = 5.0
) -> Callable[[], Any]:
    """Returns a function that makes the connections of one server, as uvicorn makes them."""
    server = HttpServer(app, limits, exceeded, idle_s)
    server.config.load()
    made: Any = server.config.http_protocol_class
    return lambda: made(config=server.config, server_state=server.server_state, app_state={})


class Wired:
    """A connection that the test feeds. `exceeded` has the names of the limits it exceeds."""

    def __init__(self, limits: Limits = LIMITS, app: ASGIApp = echo, idle_s: float = 5.0) -> None:
        self.exceeded: list[str] = []
        self.wire = Wire()
        self.connection = connections(app, limits, self.exceeded.append, idle_s)()
        self.connection.connection_made(self.wire)

    async def receive(self, part: bytes) -> None:
        """Deliver these bytes, and give the loop more turns than a response needs."""
        self.connection.data_received(part)
        for _ in range(10):
            await asyncio.sleep(0)

    def close(self) -> None:
        self.connection.connection_lost(None)


def answers(parts: Iterable[bytes]) -> bytes:
    """The bytes written if these parts arrive one by one, each when the loop is idle."""

    async def feed() -> bytes:
        wired = Wired()
        for part in parts:
            if not wired.wire.is_closing():
                await wired.receive(part)
        wired.close()
        return wired.wire.written

    return asyncio.run(feed())
