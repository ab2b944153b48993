"""The limits that hold for all connections of a listener together, with connections of the test."""

import asyncio
import socket
from collections.abc import Iterator

import pytest

from minisgl.server import listener as module
from minisgl.server.listener import Connection, Listener


class Fake(Connection):
    """A connection whose bytes each take one turn. `log` receives its name at each turn."""

    def __init__(self, name: str = "", log: list[str] | None = None) -> None:
        self.name, self.log = name, [] if log is None else log
        self.held = 0
        self.ended = False

    @property
    def held_bytes(self) -> int:
        return self.held

    def take_turn(self) -> bool:
        self.log.append(self.name)
        self.held -= 1
        return self.held > 0

    def end(self) -> None:
        self.ended = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def started(server: socket.socket, capacity: int = 8) -> tuple[Listener, list[Fake], list[str]]:
    """A listener, the connections that it makes, and the names of exceeded limits."""
    made: list[Fake] = []
    exceeded: list[str] = []

    def make(owner: Listener) -> Connection:
        made.append(Fake())
        return made[-1]

    return Listener(server, capacity, make, exceeded.append, None, 1.0), made, exceeded


def test_connections_take_turns_and_probes_come_first(server: socket.socket) -> None:
    """A connection with many bytes does not delay a connection with few of them."""

    async def run() -> None:
        listener, _, _ = started(server)
        log: list[str] = []
        for name, count in (("a", 50), ("b", 2), ("probe", 1)):
            connection = Fake(name, log)
            listener.add(connection, connection.end)
            connection.held = count
            listener.received(connection, count, name == "probe")
        passes = []
        while len(log) < 53:
            before = len(log)
            await asyncio.sleep(0)
            passes.append(len(log) - before)
        assert log[:6] == ["probe", "a", "b", "a", "b", "a"]
        assert max(passes) <= module._TURNS
        assert listener._held_bytes == 0
        listener.close()

    asyncio.run(run())


def test_held_bytes_are_bounded_by_ending_the_longest_idle(server: socket.socket) -> None:
    """4,224 incomplete heads of 64 KiB are more than the bound, and the newest head fits."""

    async def run() -> None:
        listener, _, exceeded = started(server)
        heads = [Fake() for _ in range(4224)]
        for head in heads:
            listener.add(head, head.end)
            head.held = 2**16
            listener.received(head, 2**16, False)
            assert listener._held_bytes <= module._MAX_HELD_BYTES
        kept = module._MAX_HELD_BYTES // 2**16
        assert [head.ended for head in heads] == [True] * (4224 - kept) + [False] * kept
        assert exceeded == ["max_head_bytes"] * (4224 - kept)
        listener.close()

    asyncio.run(run())


def test_new_connection_replaces_the_longest_idle_and_no_busy_one(server: socket.socket) -> None:
    async def run() -> None:
        listener, made, exceeded = started(server, capacity=3)
        clients = []

        async def connect() -> None:
            clients.append(socket.create_connection(server.getsockname()))
            while len(made) < len(clients) or not hasattr(made[-1], "transport"):
                await asyncio.sleep(0.001)
            listener.idle(made[-1], made[-1].end)

        for _ in range(3):
            await connect()
        listener.busy(made[0])
        listener.idle(made[1], made[1].end)  # It has ended a request, so the third is idle longer.
        await connect()
        await connect()
        assert [connection.ended for connection in made] == [False, True, True, False, False]
        assert exceeded == ["max_connections"] * 2
        for client, connection in zip(clients, made, strict=True):
            connection.transport.abort()
            client.close()
        listener.close()

    asyncio.run(run())


def test_connection_is_refused_when_all_have_requests(server: socket.socket) -> None:
    async def run() -> None:
        listener, made, _ = started(server, capacity=1)
        busy = Fake()
        listener.add(busy, busy.end)
        listener.busy(busy)
        with socket.create_connection(server.getsockname()) as client:
            client.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
        assert not made
        assert not busy.ended
        listener.close()

    asyncio.run(run())
