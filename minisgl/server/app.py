"""Builds the FastAPI application: routes, error responses, OpenAPI document and middleware.

    client -> RequestContextMiddleware   request id, HTTP metrics
           -> CORSMiddleware             only with --allow-origin
           -> GateMiddleware             a path with a final newline: 404
                                         keys: 401 and 403
                                         Host, Origin, Content-Type: 403 and 415
                                         limits of connections and body bytes
           -> FastAPI                    routes

The middleware wraps the application from outside, so that the response to an unexpected exception
passes through it as well. All layers are plain ASGI. No layer buffers a response or hides a
disconnect.
"""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

import minisgl
from minisgl.core import RequestError
from minisgl.request.convert import RequestConverter
from minisgl.server import about, routes
from minisgl.server.context import Service
from minisgl.server.edge.auth import check_key
from minisgl.server.edge.middleware import GateMiddleware, RequestContextMiddleware, error_response
from minisgl.server.edge.origins import check_headers
from minisgl.server.errors import MethodNotAllowed, RouteNotFound
from minisgl.server.openapi import openapi_document
from minisgl.utils import near_names

_ROUTES = [
    route
    for router in (routes.router, about.router)
    for route in router.routes
    if isinstance(route, APIRoute)
]
_MAX_PATH_CHARS = 128  # in an error message


def build_app(service: Service) -> ASGIApp:
    """The ASGI application of one service, with all its middleware."""
    config = service.config
    checks = (_check_path, partial(check_key, config), partial(check_headers, config))
    guarded: ASGIApp = GateMiddleware(_routed_app(service), checks, config.limits)
    if config.allowed_origins:  # Outside of the gate, because a browser's preflight carries no key.
        guarded = CORSMiddleware(
            guarded,
            config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return RequestContextMiddleware(guarded, service.engine.metrics, service.lifecycle, _route_of)


def _route_of(path: str) -> str:
    """The pattern of the route that has this path; "other" without one."""
    return next((one.path for one in _ROUTES if one.path_regex.fullmatch(path)), "other")


def _check_path(scope: Scope) -> None:
    """Refuse a path with a final newline.

    The pattern of a route ends in `$`, which a newline may follow. The path "/abort\\n" would reach
    the admin route /abort, but `check_key` would not see it as an admin path.
    """
    if scope["path"].endswith("\n"):
        raise RouteNotFound("no path ends with a newline; /docs lists all paths")


class _DocumentedApp(FastAPI):
    """FastAPI, with a document that describes the bodies that msgspec decodes.

    The first call of `openapi` takes 30 ms. It is no part of the start, because most servers never
    receive a request for /openapi.json.
    """

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            # A route for GET and HEAD has one operation id for both methods. FastAPI warns about
            # the duplicate id, which is intended here.
            with warnings.catch_warnings(action="ignore"):
                document = super().openapi()
            has_keys = bool(self.state.service.config.api_key_hashes)
            self.openapi_schema = openapi_document(document, self.state.converter, has_keys)
        return self.openapi_schema


def _routed_app(service: Service) -> FastAPI:
    """FastAPI with our routes."""
    app = _DocumentedApp(
        title="minisgl",
        version=minisgl.__version__,
        # `routes` serves /openapi.json and /docs without files from other hosts.
        openapi_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        exception_handlers=dict.fromkeys((RequestError, HTTPException, Exception), _on_error),
    )
    app.state.service = service
    app.state.converter = RequestConverter(service.config)
    app.include_router(routes.router)
    app.include_router(about.router)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    """Handle every exception: return the response with the error body."""
    headers: Mapping[str, str] = {}
    if isinstance(error, HTTPException):  # The router raises it for 404 and 405.
        headers = error.headers or {}
        path = request.scope["path"][:_MAX_PATH_CHARS]
        call = f"{request.method} {path}"
        if error.status_code == 405:
            error = MethodNotAllowed(f"{call} is not allowed; use {headers.get('Allow')}")
        elif path == "/v1/embeddings":
            reason = "this server has no embeddings, because its models only generate text"
            error = RouteNotFound(f"{call} does not exist: {reason}")
        else:
            paths = [route.path for route in _ROUTES]
            near = near_names(path, [path for path in paths if "{" not in path])
            error = RouteNotFound(f"{call} does not exist{near or ';'} /docs lists all paths")
    return error_response(error, request.scope, **headers)
