"""The answers of the probes, and the second port that serves only probes (--probe-port).

The main port answers the probes in the event loop of the service. Many clients can keep that loop
busy, so the probe port has a thread, an event loop and connections of its own.
"""

import socket
import threading
import time

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.protocol.responses import StatusResponse
from minisgl.server.edge.guard import SPARE_CONNECTIONS
from minisgl.server.edge.middleware import PROBE_PATHS, error_response, json_response
from minisgl.server.edge.server import HttpServer
from minisgl.server.errors import RETRY_AFTER, RouteNotFound
from minisgl.server.observe.lifecycle import Lifecycle, Phase
from minisgl.settings.config import Limits

_MAX_SILENCE_S = 10.0  # each probe answers 503 if the service's event loop is blocked for longer
_LIMITS = Limits(max_connections=32, max_head_bytes=8 * 2**10, head_timeout_s=5.0)
MOST_PROBE_CONNECTIONS = _LIMITS.max_connections + SPARE_CONNECTIONS


def answer(lifecycle: Lifecycle, path: str) -> Response:
    """The answer of a probe.

    /livez: 200 while every process runs and makes progress; otherwise 503. Other paths: 200 while
    the model is loaded and the server does not drain; otherwise 503.
    """
    is_live = path == "/livez"
    worker = lifecycle.hung if is_live else lifecycle.stalled
    phase = lifecycle.phase
    silent_s = time.monotonic() - lifecycle.renewed_s
    if silent_s > _MAX_SILENCE_S:
        problem = f"the API server has made no progress for {silent_s:.0f} s"
    elif worker is not None:
        problem = f"the {worker} makes no progress"
    elif phase is Phase.READY or (is_live and phase is not Phase.FAILED):
        return json_response(StatusResponse("ok"))
    else:
        problem = phase.value
    return json_response(StatusResponse(problem), 503, {"retry-after": RETRY_AFTER})


def serve_probes(lifecycle: Lifecycle, listener: socket.socket) -> None:
    """Start the thread of the probe port. It ends with the process.

    Two threads use the lifecycle: the event loop of the service writes it, and the thread of the
    port reads it. This is safe without a lock, because each attribute is one reference to an
    immutable object: CPython reads and writes a reference in one step, and no answer depends on
    two attributes of the same moment.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBE_PATHS:
            response = answer(lifecycle, scope["path"])
        else:
            text = "this port serves only /livez, /readyz and /health; use --port for other paths"
            response = error_response(RouteNotFound(text), scope)
        await response(scope, receive, send)

    # asyncio accepts as many connections at once as the backlog has, before it refuses any.
    server = HttpServer(
        app, _LIMITS, lambda name: None, loop="asyncio", backlog=_LIMITS.max_connections
    )
    threading.Thread(target=server.run, args=([listener],), name="probes", daemon=True).start()
