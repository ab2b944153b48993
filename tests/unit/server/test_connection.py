"""The HTTP protocol of a connection, driven by the bytes that a socket would deliver."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from minisgl.server.config import Limits
from minisgl.server.connection import limited_protocol

MOST = 1024
POST = b"POST /path HTTP/1.1\r\nhost: x\r\n"


class Wire(asyncio.Transport):
    """Keeps the written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self._closing = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = True

    def pause_reading(self) -> None:
        """Does nothing: the test delivers the bytes."""

    def resume_reading(self) -> None:
        """Does nothing: the test delivers the bytes."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Responds with the path, the names of other headers, and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    known = {b"host", b"content-length", b"transfer-encoding", b"user-agent", b"connection", b"x"}
    names = (name + b" " for name, _ in scope["headers"] if name not in known)
    body = scope["path"].encode() + b" " + b"".join(names) + body
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def answers(parts: Iterable[bytes]) -> bytes:
    """The bytes written if these parts arrive one by one, each when the loop is idle."""

    async def feed() -> bytes:
        protocol = limited_protocol(Limits(max_head_bytes=MOST), lambda name: None, lambda: False)
        config = uvicorn.Config(echo, http=protocol, log_config=None, lifespan="off", ws="none")
        wire, made_by = Wire(), {"config": config, "server_state": ServerState(), "app_state": {}}
        connection: Any = protocol(**made_by)
        connection.connection_made(wire)
        for part in parts:
            connection.data_received(part)
            before = b"?"
            while wire.written != before:
                before = wire.written
                for _ in range(10):  # more turns of the loop than a response needs
                    await asyncio.sleep(0)
        connection.connection_lost(None)
        return wire.written

    return asyncio.run(feed())


def in_two(data: bytes) -> list[tuple[bytes, bytes]]:
    return [(data[:at], data[at:]) for at in range(1, len(data))]


@pytest.mark.parametrize("name", [b"Upgrade", b"upgrade", b"UPGRADE"])
def test_upgrade_header_is_ignored_in_any_split(name: bytes) -> None:
    """Regression: a header in two packets was not found, and the parser read the body as HTTP/2."""
    offer = name + b": h2c\r\nUser-Agent: u\r\nConnection: Upgrade, HTTP2-Settings\r\n"
    request = POST + offer + b"content-length: 4\r\n\r\nbody"
    for parts in (*in_two(request), [request[i : i + 1] for i in range(len(request))]):
        given = answers(parts)
        assert given.startswith(b"HTTP/1.1 200"), parts
        assert given.endswith(b"/path body"), parts


@pytest.mark.parametrize("start", [b"x: ", b"user-agent: "])
def test_head_in_parts_is_bounded(start: bytes) -> None:
    room = MOST - len(POST + start + b"\r\n\r\n")
    for length, status in ((room, b"200"), (room + 1, b"431")):
        head = POST + start + b"y" * length + b"\r\n\r\n"
        for size in (1, 100, MOST, 2 * MOST):
            parts = [head[i : i + size] for i in range(0, len(head), size)]
            assert answers(parts).startswith(b"HTTP/1.1 " + status), (length, size)


@pytest.mark.parametrize(
    ("kind", "body"),
    [(b"content-length: 4", b"body"), (b"transfer-encoding: chunked", b"4\r\nbody\r\n0\r\n\r\n")],
)
@pytest.mark.parametrize("short", range(5))
def test_largest_head_may_have_a_body(kind: bytes, body: bytes, short: int) -> None:
    """Regression: the first bytes of the body counted as part of the head."""
    start = POST + kind + b"\r\nx: "
    head = start + b"y" * (MOST - len(start) - 4 - short) + b"\r\n\r\n"
    for parts in ([head, body], [head + body]):
        assert answers(parts).endswith(b"/path body")


@pytest.mark.parametrize("trailer", [b"a: b\r\n", b"a"])
def test_trailers_are_bounded(trailer: bytes) -> None:
    """Regression: 20 MB of trailers took 420 MB of memory until the end of the body."""
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n"
    many = chunked + b"a: b\r\n" + trailer * 2 * MOST
    assert answers([chunked + b"a: b\r\n\r\n"]).endswith(b"/path body")
    for size in (100, len(many)):
        parts = [many[i : i + size] for i in range(0, len(many), size)]
        assert answers(parts).startswith(b"HTTP/1.1 431"), size


def test_body_may_have_any_size_and_chunks() -> None:
    body = b"y" * 5 * MOST
    whole = POST + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    chunked = (
        POST + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\ny\r\n" * len(body) + b"0\r\n\r\n"
    )
    for request in (whole, chunked):
        for size in (1000, len(request)):
            parts = [request[i : i + size] for i in range(0, len(request), size)]
            assert answers(parts).endswith(b"/path " + body)


def test_pipelined_requests_are_answered_in_order() -> None:
    paths = [b"/%d" % number for number in range(500)]
    given = answers([b"".join(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path for path in paths)])
    assert [line for line in given.split() if line.startswith(b"/")] == paths
