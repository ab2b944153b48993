"""The routes. Each handler: read, validate, run, shape; every error becomes one nested body."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import minisgl
from minisgl.core import Cancelled, RequestError
from minisgl.server.auth import OPEN_PATHS, Auth
from minisgl.server.errors import (
    ErrorReply,
    MethodNotAllowed,
    RouteNotFound,
    error_reply,
)
from minisgl.server.generate import read_body, start, unless_disconnected
from minisgl.server.lifecycle import Phase
from minisgl.server.metrics import Now
from minisgl.server.middleware import App, Bounded, Edge
from minisgl.server.openapi import document
from minisgl.server.params import CHAT, COMPLETIONS, GENERATE
from minisgl.server.requests import RequestReader
from minisgl.server.routes import add_admin_routes, add_token_routes
from minisgl.server.service import Service
from minisgl.server.shapes import Shape
from minisgl.server.stream import EventStream, finished
from minisgl.utils import log_event

logger = logging.getLogger(__name__)


def build_app(service: Service) -> App:
    """The ASGI app of one service."""
    app = FastAPI(
        title="minisgl",
        version=minisgl.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    limits = service.config.limits
    reader = RequestReader(service.config)
    metrics = service.client.metrics

    def refused(error: RequestError) -> None:
        metrics.on_refused(error, service.lifecycle.phase)

    _add_error_handlers(app, limits.retry_after_s, refused)
    _add_probes(app, service)
    _add_metrics(app, service)
    _add_models(app, service, reader)
    add_token_routes(app, service, reader)
    add_admin_routes(app, service)
    described = document(reader.table, bool(service.config.api_key_hashes))
    app.openapi = lambda: described  # type: ignore[method-assign]

    def generating(route: str) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            return await _generate(service, reader, route, request)

        return handler

    app.post("/v1/chat/completions", response_model=None)(generating(CHAT))
    app.post("/v1/completions", response_model=None)(generating(COMPLETIONS))
    app.post("/generate", response_model=None)(generating(GENERATE))
    # Around the app and not by add_middleware, so that the answer to a bug has its id too.
    config = service.config
    bounded = Bounded(app, limits, OPEN_PATHS, refused)
    guarded: App = Auth(bounded, config.api_key_hashes, config.admin_key_hashes)
    if config.allowed_origins:  # outside, since a browser's preflight carries no key
        guarded = CORSMiddleware(
            guarded,
            config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return Edge(guarded, metrics, OPEN_PATHS)


async def _generate(
    service: Service, reader: RequestReader, route: str, request: Request
) -> Response:
    """Chat and completions, streaming and not: one path until the answer is written."""
    raw, facts = await read_body(service.lifecycle, request)
    call = reader.read(route, raw, facts)
    shape = Shape(call)
    client = service.client
    request_id = str(request.scope["state"].get("request_id", ""))
    generation = await unless_disconnected(request.receive, start(client, call, facts, request_id))
    if call.stream:
        return EventStream(client, call, shape, generation)
    try:
        await unless_disconnected(request.receive, finished(generation))
        return _json(200, shape.whole(generation))
    finally:
        client.close(generation)


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


def _error_response(reply: ErrorReply) -> Response:
    return _json(reply.status, reply.json(), reply.headers)


def _add_error_handlers(
    app: FastAPI, retry_after_s: int, refused: Callable[[RequestError], None]
) -> None:
    async def on_request_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, Cancelled | RequestError):
            raise error
        refused(error)
        reply = error_reply(error, retry_after_s)
        log_event(
            logger,
            logging.INFO,
            "call refused",
            request_id=request.scope["state"].get("request_id"),
            status=reply.status,
            reason=type(error).__name__,
        )
        return _error_response(reply)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known: RequestError
        if error.status_code == 405:
            known = MethodNotAllowed(f"{request.method} is not allowed here")
        elif error.status_code == 404:
            known = RouteNotFound("there is no such path")
        else:
            known = RequestError(str(error.detail))
        reply = error_reply(known, retry_after_s)
        status = error.status_code
        return _error_response(
            reply._replace(status=status, headers={**reply.headers, **(error.headers or {})})
        )

    async def on_bug(request: Request, error: Exception) -> Response:
        # uvicorn logs the traceback; here is the request that it belongs to.
        log_event(
            logger,
            logging.ERROR,
            "request failed",
            request_id=request.scope["state"].get("request_id"),
            path=request.scope["path"],
        )
        return _error_response(error_reply(error, retry_after_s))

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)


def _add_probes(app: FastAPI, service: Service) -> None:
    async def live() -> Response:
        if service.stuck():
            return _json(503, b'{"status":"the scheduler makes no progress"}')
        if service.lifecycle.phase is Phase.FAILED:
            return _json(503, b'{"status":"failed"}')
        return _json(200, b'{"status":"ok"}')

    async def ready() -> Response:
        phase = service.lifecycle.phase
        if phase is Phase.READY and not service.stuck():
            return _json(200, b'{"status":"ok"}')
        return _json(503, b'{"status":"%s"}' % phase.value.encode(), {"retry-after": "1"})

    for path, handler in (("/livez", live), ("/readyz", ready), ("/health", ready)):
        app.api_route(path, methods=["GET", "HEAD"], response_model=None)(handler)


def _add_metrics(app: FastAPI, service: Service) -> None:
    async def scrape(request: Request) -> Response:
        client = service.client
        now = Now(service.lifecycle.phase, service.stuck(), client.open_choices)
        body, kind = client.metrics.render(request.headers.get("accept", ""), now)
        return Response(body, headers={"content-type": kind})

    app.get("/metrics", response_model=None)(scrape)


def _add_models(app: FastAPI, service: Service, reader: RequestReader) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        facts = service.lifecycle.facts
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "minisgl",
            "max_model_len": facts.max_seq_len if facts else None,
        }

    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in service.config.served_names]}

    async def model(model_id: str) -> dict[str, Any]:
        reader.table.model("model", model_id)
        return card(model_id)

    app.get("/v1/models")(models)
    app.get("/v1/models/{model_id:path}")(model)
