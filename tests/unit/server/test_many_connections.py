"""Limits of all connections of a server together, and the order of their requests."""

import asyncio
import contextlib
import ssl
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from minisgl.server.edge.guard import MAX_HELD_BYTES, SPARE_CONNECTIONS
from minisgl.server.edge.server import TlsContext
from minisgl.settings.config import Limits
from tests.unit.server.test_connection import Clock
from tests.unit.server.wires import LIMITS, Wire, connections, echo


def test_connections_above_the_limit_are_aborted() -> None:
    async def count() -> tuple[list[bool], list[str]]:
        exceeded: list[str] = []
        connect = connections(echo, Limits(max_connections=2), exceeded.append)
        wires = [Wire() for _ in range(SPARE_CONNECTIONS + 4)]
        made = [connect() for _ in wires]
        for connection, wire in zip(made, wires, strict=True):
            connection.connection_made(wire)
        closing = [wire.is_closing() for wire in wires]
        for connection in made:
            connection.connection_lost(None)
        return closing, exceeded

    closing, exceeded = asyncio.run(count())
    assert closing == [False] * (SPARE_CONNECTIONS + 2) + [True, True]
    assert exceeded == ["max_connections"] * 2


def test_unfinished_tls_handshakes_are_bounded() -> None:
    """Regression: uvicorn counts a connection after its handshake, so 900 handshakes did not
    count, and took all files of the process."""
    exceeded: list[str] = []
    limits = Limits(max_connections=2 - SPARE_CONNECTIONS)
    context = TlsContext(ssl.PROTOCOL_TLS_SERVER, limits, exceeded.append)

    def begin() -> ssl.SSLObject:
        return context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)

    handshakes = [begin(), begin()]
    with pytest.raises(ConnectionAbortedError):
        begin()
    assert exceeded == ["max_connections"]
    handshakes.pop()
    begin()


class Opened:
    """Connections to one server. `served` has the paths in the order in which handlers began."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.served: list[str] = []
        self.exceeded: list[str] = []
        self._open = connections(self, limits, self.exceeded.append)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.served.append(scope["path"])
        await echo(scope, receive, send)

    def request(self, path: str) -> Any:
        """Open a connection and deliver a request of this path on it."""
        return self.deliver(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path.encode())

    def deliver(self, data: bytes) -> Any:
        """Open a connection and deliver these bytes on it."""
        connection = self._open()
        connection.connection_made(Wire())
        connection.data_received(data)
        return connection


def test_one_handler_begins_in_each_iteration_of_the_loop_and_probes_at_once() -> None:
    """Regression: 200 connections with requests delayed a probe by 200 handlers, for seconds."""

    async def main() -> None:
        opened = Opened()
        connections = [opened.request(f"/{number}") for number in range(200)]
        most = 0
        for _ in range(300):
            before = len(opened.served)
            await asyncio.sleep(0)
            most = max(most, len(opened.served) - before)
            if len(opened.served) == 50:
                connections[60].connection_lost(None)
                connections.append(opened.request("/livez"))
        for connection in connections:
            connection.connection_lost(None)
        expected = [f"/{number}" for number in range(200) if number != 60]
        place = opened.served.index("/livez")
        assert place <= 52, "at most the handlers of one iteration began before the probe"
        assert [path for path in opened.served if path != "/livez"] == expected
        assert most <= 2, "a probe and another request"

    asyncio.run(main())


def test_refused_connections_close_one_after_the_other() -> None:
    """Regression: 700 clients of refused heads opened new connections at once, and a probe waited
    until the loop had accepted, read and refused all of them."""

    async def main(clock: Clock) -> None:
        opened = Opened()
        connections = [opened.deliver(b"no HTTP\r\n\r\n") for _ in range(5)]
        wires = [each._transport for each in connections]
        assert all(wire.written.startswith(b"HTTP/1.1 400") for wire in wires)
        written = wires[1].written
        connections[1].data_received(b"more")
        connections[3].connection_lost(None)
        closed = []
        for _ in range(4):
            closed.append([wire.is_closing() for wire in wires])
            await clock.move(0.001)
        lost = wires.index(connections[3]._transport)
        assert [sum(each) - each[lost] for each in closed] == [1, 2, 3, 4]
        assert wires[1].written == written
        for each in connections:
            each.connection_lost(None)

    with contextlib.closing(Clock()) as clock:
        clock.run_until_complete(main(clock))


def test_refused_connections_keep_no_other_client_off() -> None:
    """Regression: of 2,500 refused connections at once, 324 took the place of other clients."""

    async def main() -> None:
        opened = Opened(Limits(max_connections=2))
        count = SPARE_CONNECTIONS + 10
        refused = [opened.deliver(b"no HTTP\r\n\r\n") for _ in range(count)]
        wires = [each._transport for each in refused]
        assert all(wire.written.startswith(b"HTTP/1.1 400") for wire in wires)
        assert [wire.is_closing() for wire in wires] == [True] * (count - 1) + [False]
        client = opened.request("/served")
        assert not client._transport.is_closing()
        assert not opened.exceeded
        for each in [*refused, client]:
            each.connection_lost(None)
        held = [opened.deliver(b"GET /") for _ in range(SPARE_CONNECTIONS + 2)]
        assert not opened.exceeded
        opened.deliver(b"GET /")
        assert opened.exceeded == ["max_connections"]
        for each in held:
            each.connection_lost(None)

    asyncio.run(main())


def test_unfinished_heads_of_all_connections_hold_16_mib_at_most() -> None:
    """Regression: 300 TLS connections with unfinished heads of 64 KiB held 263 MiB."""

    async def main() -> None:
        opened = Opened(Limits())
        start = b"GET / HTTP/1.1\r\nhost: x\r\nx: "
        head = start + b"y" * (2**15 - len(start))
        connections = [opened.deliver(head) for _ in range(MAX_HELD_BYTES // 2**15)]
        assert not opened.exceeded
        refused = opened.deliver(head)
        assert refused._transport.written.startswith(b"HTTP/1.1 503")
        assert b"\r\nretry-after: 1\r\n" in refused._transport.written
        messages = opened.deliver(head.replace(b"GET /", b"POST /v1/messages", 1))
        assert messages._transport.written.startswith(b"HTTP/1.1 529 \r\n")
        assert opened.exceeded == ["max_head_bytes"] * 2
        for connection in (refused, messages, connections.pop()):
            connection.connection_lost(None)
        connections += [opened.deliver(head), opened.request("/whole")]
        assert opened.exceeded == ["max_head_bytes"] * 2
        for connection in connections:
            connection.connection_lost(None)
        assert opened.deliver(head)._transport.written == b""

    asyncio.run(main())
