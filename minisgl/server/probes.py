"""The answers of the probes, and the second port that serves only probes (--probe-port).

The main port answers the probes in the event loop of the service. Many clients can keep that loop
busy, so the probe port has a thread, an event loop and connections of its own.
"""

import socket
import threading
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.server.config import Limits
from minisgl.server.connection import HttpServer
from minisgl.server.errors import RETRY_AFTER, RouteNotFound
from minisgl.server.lifecycle import Lifecycle, Phase
from minisgl.server.middleware import PROBE_PATHS, error_response, json_response
from minisgl.server.protocol.responses import StatusResponse

_MAX_SILENCE_S = 10.0  # each probe answers 503 if the service's event loop is blocked for longer
_LIMITS = Limits(max_connections=32, max_head_bytes=8 * 2**10, head_timeout_s=5.0)


def live(phase: Phase, hung: str | None) -> Response:
    """200 while every process runs and makes progress; otherwise 503. hung: name of a worker."""
    if hung is not None:
        return _response(f"the {hung} makes no progress")
    return _response("failed" if phase is Phase.FAILED else None)


def ready(phase: Phase, stalled: str | None) -> Response:
    """200 while the model is loaded and the server does not drain; otherwise 503.

    stalled: name of a worker.
    """
    if stalled is not None:
        return _response(f"the {stalled} makes no progress")
    return _response(None if phase is Phase.READY else phase.value)


def _response(problem: str | None) -> Response:
    if problem is None:
        return json_response(StatusResponse("ok"))
    return json_response(StatusResponse(problem), 503, {"retry-after": RETRY_AFTER})


class ProbePort:
    """The application of the probe port.

    Two threads use it: the event loop of the service writes the attributes, and the thread of the
    port reads them. This is safe without a lock, because each attribute is one reference to an
    immutable object: CPython reads and writes a reference in one step, and no answer depends on
    two attributes of the same moment.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._renewed_s = time.monotonic()
        self._hung: str | None = None
        self._stalled: str | None = None

    def renew(self, hung: str | None, stalled: str | None) -> None:
        """Record the state of the workers. The event loop of the service calls it regularly."""
        self._renewed_s, self._hung, self._stalled = time.monotonic(), hung, stalled

    def serve(self, listener: socket.socket) -> None:
        """Start the thread. It ends with the process."""
        run = HttpServer(self, _LIMITS, lambda name: None, loop="asyncio").run
        threading.Thread(target=run, args=([listener],), name="probes", daemon=True).start()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        path = scope["path"]
        if path not in PROBE_PATHS:
            text = "this port serves only /livez, /readyz and /health; use --port for other paths"
            return error_response(RouteNotFound(text), scope)
        silent_s = time.monotonic() - self._renewed_s
        if silent_s > _MAX_SILENCE_S:
            return _response(f"the API server has made no progress for {silent_s:.0f} s")
        phase = self._lifecycle.phase
        return live(phase, self._hung) if path == "/livez" else ready(phase, self._stalled)
