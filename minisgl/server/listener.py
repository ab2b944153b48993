"""Accepts the connections of one socket, makes room for new ones, and shares the event loop.

A connection costs the server a file, some memory, and time of the event loop. Clients without a key
may open connections and send any bytes, so that each of these costs has a limit here. The limits
hold for all connections together, because a client may open many.
"""

import abc
import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable

# Bytes of all connections that are received and not yet parsed, such as incomplete heads.
_MAX_HELD_BYTES = 64 * 2**20
# Turns in one pass of the event loop. A turn starts one request (about 0.4 ms with its refusal) or
# parses one part of a body.
_TURNS = 4
_ACCEPTS = 64  # connections that are accepted in one pass


class Connection(asyncio.Protocol, abc.ABC):
    """The protocol of a connection, with the methods that the listener calls."""

    @property
    @abc.abstractmethod
    def held_bytes(self) -> int:
        """The number of received bytes that are not yet parsed."""

    @abc.abstractmethod
    def take_turn(self) -> bool:
        """Parse a bounded number of bytes. Returns True if the connection needs another turn."""


class Listener:
    """The connections of one listening socket, at most `capacity`.

    A new connection above the capacity replaces the connection that has been idle for the longest
    time. A client that holds many connections therefore cannot keep others from connecting. Idle
    connections have no request: a TLS handshake or a head is incomplete, or the client sends none.

    _open    all connections, including those in a TLS handshake
    _idle    the function that ends each idle connection, in the order in which they became idle
    _turns   connections with bytes to parse, in the order of arrival
    """

    def __init__(
        self,
        listener: socket.socket,
        capacity: int,
        make: Callable[["Listener"], Connection],
        exceeded: Callable[[str], None],
        context: ssl.SSLContext | None,
        handshake_s: float,
    ) -> None:
        """make: makes the protocol of a connection. exceeded: receives the name of a limit."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._capacity = capacity
        self._make = make
        self._exceeded = exceeded
        self._context = context
        self._handshake_s = handshake_s if context else None
        self._open: set[Connection] = set()
        self._idle: dict[Connection, Callable[[], object]] = {}
        self._turns: deque[Connection] = deque()
        self._scheduled = False
        self._held_bytes = 0
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept_some)

    def close(self) -> None:
        """Accept no more connections. The open connections stay."""
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _accept_some(self) -> None:
        """Accept connections. The event loop calls this in each pass while some wait."""
        for _ in range(_TURNS if self._context else _ACCEPTS):  # A TLS handshake takes about 1 ms.
            if not self._accept():
                return

    def _accept(self) -> bool:
        """Accept one connection. Returns False if none waits."""
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return False
        except ConnectionAbortedError:  # The client has disconnected.
            return True
        except OSError:  # The system has no more files or memory.
            self._end_oldest("max_connections")
            return False
        if len(self._open) >= self._capacity:
            self._end_oldest("max_connections")
        if len(self._open) >= self._capacity:  # None is idle.
            accepted.close()
            return True
        accepted.setblocking(False)
        connection = self._make(self)
        opening = self._loop.connect_accepted_socket(
            lambda: connection,
            accepted,
            ssl=self._context,
            ssl_handshake_timeout=self._handshake_s,
        )
        task = self._loop.create_task(opening)
        self.add(connection, task.cancel)

        def on_opened(task: asyncio.Task[object]) -> None:
            if task.cancelled() or task.exception() is not None:
                self.forget(connection)

        task.add_done_callback(on_opened)
        return True

    def add(self, connection: Connection, end: Callable[[], object]) -> None:
        """Count a new connection. `end` closes it at once."""
        self._open.add(connection)
        self._idle[connection] = end

    def idle(self, connection: Connection, end: Callable[[], object]) -> None:
        """The connection has no request from now on. `end` closes it at once."""
        if connection in self._open:
            self._idle.pop(connection, None)
            self._idle[connection] = end

    def busy(self, connection: Connection) -> None:
        """The connection has a request, which new connections do not end."""
        self._idle.pop(connection, None)

    def forget(self, connection: Connection) -> None:
        """The connection has ended, or ends at once."""
        if connection in self._open:
            self._open.remove(connection)
            self._idle.pop(connection, None)
            self._held_bytes -= connection.held_bytes

    def received(self, connection: Connection, count: int, is_probe: bool) -> None:
        """Give the connection, which has received `count` bytes, a turn. Probes come first."""
        self._held_bytes += count
        while self._held_bytes > _MAX_HELD_BYTES and self._idle:
            self._end_oldest("max_head_bytes")
        if is_probe:
            self._turns.appendleft(connection)
        else:
            self._turns.append(connection)
        self._schedule()

    def _schedule(self) -> None:
        if self._turns and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._take_turns)

    def _take_turns(self) -> None:
        self._scheduled = False
        try:
            for _ in range(min(_TURNS, len(self._turns))):
                connection = self._turns.popleft()
                if connection in self._open:
                    self._held_bytes -= connection.held_bytes
                    again = connection.take_turn()
                    self._held_bytes += connection.held_bytes
                    if again:
                        self._turns.append(connection)
        finally:
            self._schedule()

    def _end_oldest(self, limit: str) -> None:
        if self._idle:
            connection = next(iter(self._idle))
            end = self._idle[connection]
            self._exceeded(limit)
            self.forget(connection)
            end()
