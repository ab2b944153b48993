"""Builds the FastAPI application: routes, error responses, OpenAPI document and middleware.

    client -> RequestContextMiddleware   request id, HTTP metrics
           -> CORSMiddleware             only with --allow-origin
           -> Auth                       401 and 403
           -> Guard                      403 and 415: Host, Origin, Content-Type
           -> LimitMiddleware            connections and body bytes
           -> FastAPI                    routes

The middleware wraps the application from outside, so that the response to an unexpected exception
passes through it as well. All layers are plain ASGI. No layer buffers a response or hides a
disconnect.
"""

import logging
import warnings
from collections.abc import Mapping

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

import minisgl
from minisgl.core import RequestError
from minisgl.server.auth import Auth
from minisgl.server.config import DEFAULT_CLIENT
from minisgl.server.convert import RequestConverter
from minisgl.server.errors import MethodNotAllowed, RouteNotFound
from minisgl.server.guard import Guard
from minisgl.server.handler import Service
from minisgl.server.middleware import LimitMiddleware, RequestContextMiddleware, error_response
from minisgl.server.openapi import openapi_document
from minisgl.server.routes import router
from minisgl.utils import log_event

logger = logging.getLogger(__name__)


def build_app(service: Service) -> ASGIApp:
    """The ASGI application of one service, with all its middleware."""
    config, metrics = service.config, service.client.metrics

    def on_refused(error: RequestError) -> None:
        metrics.on_refused(error, service.lifecycle.phase)

    limited = LimitMiddleware(_routed_app(service), config.limits, on_refused)
    guarded: ASGIApp = Auth(Guard(limited, config), config.api_key_hashes, config.admin_key_hashes)
    if config.allowed_origins:  # Outside of Auth, because a browser's preflight carries no key.
        guarded = CORSMiddleware(
            guarded,
            config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return RequestContextMiddleware(guarded, metrics)


def _routed_app(service: Service) -> FastAPI:
    """FastAPI with our routes. Its document describes the bodies that msgspec decodes."""
    app = FastAPI(
        title="minisgl",
        version=minisgl.__version__,
        # `routes` serves /openapi.json and /docs without files from other hosts.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        exception_handlers=dict.fromkeys((RequestError, HTTPException, Exception), _on_error),
    )
    app.state.service = service
    app.state.converter = converter = RequestConverter(service.config)
    app.include_router(router)
    # A route for GET and HEAD has one operation id for both methods. FastAPI warns about the
    # duplicate id, which is intended here.
    with warnings.catch_warnings(action="ignore"):
        document = app.openapi()
    has_keys = bool(service.config.api_key_hashes)
    app.openapi_schema = openapi_document(document, converter, has_keys)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    """Handle every exception: log the error and return the response with the error body."""
    headers: Mapping[str, str] = {}
    if isinstance(error, HTTPException):  # The router raises it for 404 and 405.
        headers = error.headers or {}
        if error.status_code == 405:
            error = MethodNotAllowed(f"{request.method} is not allowed here")
        else:
            error = RouteNotFound("there is no such path")
    elif isinstance(error, RequestError):
        service = request.app.state.service
        client = request.scope["state"].get("client", DEFAULT_CLIENT)
        service.client.metrics.on_refused(error, service.lifecycle.phase, client)
    response = error_response(error, request.scope["path"], **headers)
    is_bug = not isinstance(error, RequestError)  # uvicorn logs the traceback of a bug.
    log_event(
        logger,
        logging.ERROR if is_bug else logging.INFO,
        "request failed" if is_bug else "call refused",
        request_id=request.scope["state"].get("request_id"),
        key=request.scope["state"].get("client", DEFAULT_CLIENT),
        status=response.status_code,
        reason=type(error).__name__,
    )
    return response
