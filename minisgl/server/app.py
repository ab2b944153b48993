"""The routes. Each handler: read, validate, run, shape; every error becomes one nested body."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from minisgl.core import RequestError
from minisgl.server.auth import Auth
from minisgl.server.errors import RETRY_AFTER, MethodNotAllowed, RouteNotFound
from minisgl.server.handler import read_call, start, unless_disconnected
from minisgl.server.lifecycle import Phase
from minisgl.server.middleware import (
    LimitMiddleware,
    RequestContextMiddleware,
    answer,
    error_answer,
)
from minisgl.server.openapi import document
from minisgl.server.params import CHAT, COMPLETIONS, GENERATE
from minisgl.server.requests import RequestReader
from minisgl.server.response import ResponseWriter
from minisgl.server.routes import admin_routes, token_routes
from minisgl.server.service import Service
from minisgl.server.stream import EventStream
from minisgl.utils import log_event

logger = logging.getLogger(__name__)


def build_app(service: Service) -> ASGIApp:
    """The ASGI app of one service."""
    config, metrics = service.config, service.client.metrics
    reader = RequestReader(config)

    def refused(error: RequestError) -> None:
        metrics.on_refused(error, service.lifecycle.phase)

    async def described(request: Request) -> Response:
        return answer(document(reader.table, bool(config.api_key_hashes)))

    routes = [
        _generating(service, reader, "/v1/chat/completions", CHAT),
        _generating(service, reader, "/v1/completions", COMPLETIONS),
        _generating(service, reader, "/generate", GENERATE),
        *token_routes(service, reader),
        *admin_routes(service),
        *_model_routes(service, reader),
        *_probes(service),
        Route("/openapi.json", described),
    ]
    for route in routes:  # `$` lets a newline follow: /abort%0A is no admin route to `Auth`
        route.path_regex = re.compile(rf"(?:{route.path_regex.pattern})\Z")
    app = Starlette(routes=routes, exception_handlers=_error_handlers(refused))
    app.router.redirect_slashes = False
    # Around the app and not as its middleware, so that the answer to a bug has its id too.
    bounded = LimitMiddleware(app, config.limits, refused)
    guarded: ASGIApp = Auth(bounded, config.api_key_hashes, config.admin_key_hashes)
    if config.allowed_origins:  # outside, since a browser's preflight carries no key
        guarded = CORSMiddleware(
            guarded,
            config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return RequestContextMiddleware(guarded, metrics)


def _generating(service: Service, reader: RequestReader, path: str, route: str) -> Route:
    """Chat and completions, streaming and not: one path until the answer is written."""

    async def handler(request: Request) -> Response | EventStream:
        raw, facts = await read_call(service, request)
        call = reader.read(route, raw, facts)
        del raw  # or it would stay for as long as the answer takes
        shape = ResponseWriter(call)
        client = service.client
        request_id = str(request.scope["state"].get("request_id", ""))
        begun = start(client, call, facts, request_id)
        generation = await unless_disconnected(request.receive, begun)
        if call.stream:
            return EventStream(client, shape, generation)
        try:
            ended = asyncio.ensure_future(generation.until(generation.finished))
            await unless_disconnected(request.receive, ended)
            return Response(shape.whole(generation), media_type="application/json")
        finally:
            client.close(generation)

    return Route(path, handler, methods=["POST"])


def _error_handlers(
    refused: Callable[[RequestError], None],
) -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    async def on_error(request: Request, error: Exception) -> Response:
        headers: Mapping[str, str] = {}
        if isinstance(error, HTTPException):  # of the router
            headers, path_is_known = error.headers or {}, error.status_code == 405
            wrong_method = MethodNotAllowed(f"{request.method} is not allowed here")
            error = wrong_method if path_is_known else RouteNotFound("there is no such path")
        elif isinstance(error, RequestError):
            refused(error)
        reply = error_answer(error, **headers)
        is_ours = not isinstance(error, RequestError)  # uvicorn logs its traceback
        log_event(
            logger,
            logging.ERROR if is_ours else logging.INFO,
            "request failed" if is_ours else "call refused",
            request_id=request.scope["state"].get("request_id"),
            status=reply.status_code,
            reason=type(error).__name__,
        )
        return reply

    return dict.fromkeys((RequestError, HTTPException, Exception), on_error)


def _probes(service: Service) -> list[Route]:
    async def live(request: Request) -> Response:
        if service.stuck():
            return answer({"status": "the scheduler makes no progress"}, 503)
        failed = service.lifecycle.phase is Phase.FAILED
        return answer({"status": "failed"}, 503) if failed else answer({"status": "ok"})

    async def ready(request: Request) -> Response:
        phase = service.lifecycle.phase
        stalled = service.stalled()
        if phase is Phase.READY and not stalled:
            return answer({"status": "ok"})
        status = "the scheduler makes no progress" if stalled else phase.value
        return answer({"status": status}, 503, {"retry-after": RETRY_AFTER})

    async def scrape(request: Request) -> Response:
        client = service.client
        accept, phase = request.headers.get("accept", ""), service.lifecycle.phase
        body, kind = client.metrics.render(accept, phase, service.stalled(), client.open_choices)
        return Response(body, headers={"content-type": kind})

    paths = {"/livez": live, "/readyz": ready, "/health": ready, "/metrics": scrape}
    return [Route(path, handler) for path, handler in paths.items()]


def _model_routes(service: Service, reader: RequestReader) -> list[Route]:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        facts = service.lifecycle.facts
        length = facts.max_seq_len if facts else None
        head = {"id": name, "object": "model", "created": created}
        return {**head, "owned_by": "minisgl", "max_model_len": length}

    async def models(request: Request) -> Response:
        cards = [card(name) for name in service.config.served_names]
        return answer({"object": "list", "data": cards})

    async def model(request: Request) -> Response:
        return answer(card(reader.table.model("model", request.path_params["model_id"])))

    return [Route("/v1/models", models), Route("/v1/models/{model_id:path}", model)]
