"""`LoopQueue`: spreads the work of many connections over iterations of the event loop."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Connection = TypeVar("Connection", bound=Hashable)


class LoopQueue(Generic[Connection]):
    """Calls one function of a connection after the other, in order of arrival.

    Between two calls, the loop accepts and reads other connections, so that hundreds of connections
    do not delay a probe by hundreds of calls.
    """

    def __init__(self, pause_s: float = 0.0) -> None:
        """pause_s: time between two calls. 0: one call in each iteration of the event loop."""
        self._pause_s = pause_s
        self._waiting: OrderedDict[Connection, Callable[[], None]] = OrderedDict()
        self._pauses = False

    def add(self, connection: Connection, function: Callable[[], None]) -> None:
        """Call the function at once, or later if the last call was less than the pause ago."""
        if self._pauses:
            self._waiting[connection] = function
        else:
            self._pause()
            function()

    def remove(self, connection: Connection) -> None:
        """Drop the function of a connection that has closed."""
        self._waiting.pop(connection, None)

    def take_first(self) -> Connection | None:
        """Return the connection that has waited longest, and drop its function."""
        return self._waiting.popitem(last=False)[0] if self._waiting else None

    def _pause(self) -> None:
        self._pauses = True
        loop = asyncio.get_running_loop()
        if self._pause_s:
            loop.call_later(self._pause_s, self._call_next)
        else:
            loop.call_soon(self._call_next)

    def _call_next(self) -> None:
        self._pauses = False
        if self._waiting:
            self._pause()
            _, function = self._waiting.popitem(last=False)
            function()
