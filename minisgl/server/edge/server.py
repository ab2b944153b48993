"""The server of uvicorn with guarded connections, and the bound of its TLS connections."""

import asyncio
import contextlib
import socket
import ssl
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from minisgl.server.edge.guard import SPARE_CONNECTIONS, Guard, tells_connection
from minisgl.server.edge.open_files import log_loop_error
from minisgl.settings.config import Limits

# A TLS connection takes 50 KiB, and up to 110 KiB more after a large head: 160 MiB in all.
MAX_TLS_CONNECTIONS = 1024
_DAY_S = 24 * 60 * 60


class HttpServer(uvicorn.Server):
    """A uvicorn server with a `Guard`. The process of the server handles signals."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        exceeded: Callable[[str], None],
        idle_s: float = 5.0,
        **options: Any,
    ) -> None:
        """exceeded, idle_s: see `Guard`. options: further options of uvicorn."""
        config = uvicorn.Config(
            tells_connection(app),
            http=Guard(limits, exceeded, idle_s).protocol(),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_DAY_S,  # The guard closes idle connections long before.
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
        """exceeded: see `Guard`."""
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
