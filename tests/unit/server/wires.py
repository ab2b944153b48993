"""A connection of the server, driven by the bytes that a socket would deliver."""

import asyncio
from collections.abc import Iterable
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from minisgl.server.edge.connection import limited_protocol
from minisgl.settings.config import Limits

__all__ = ["LIMITS", "MOST", "POST", "Wire", "Wired", "answers", "echo"]

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


class Wired:
    """A connection that the test feeds. `exceeded` has the names of the limits it exceeds."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.exceeded: list[str] = []
        protocol: Any = limited_protocol(limits, self.exceeded.append)
        config = uvicorn.Config(echo, log_config=None, lifespan="off", http=protocol, ws="none")
        config.load()
        self.wire = Wire()
        self.connection = protocol(config=config, server_state=ServerState(), app_state={})
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
