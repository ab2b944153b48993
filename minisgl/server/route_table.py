"""`RouteTable`: the routes of the HTTP API, with the facts that its OpenAPI document has of each.

routes = RouteTable()

@routes.get("/v1/models/{model_id:path}", tag="models")
async def get_model(context: CallContext, model_id: str) -> Response: ...
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minisgl.server.context import CallContext

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])


class ApiRoute(Route):
    """A route, whose handler takes a CallContext and the parameters of the path.

    tag: the group in the OpenAPI document; "": the document does not have the route.
    description: the docstring of the handler.
    """

    def __init__(self, path: str, handler: Handler, methods: list[str], name: str, tag: str):
        async def respond(request: Request) -> Response:
            return await handler(CallContext(request), **request.path_params)

        super().__init__(path, respond, methods=methods, name=name or handler.__name__)
        self.tag = tag
        self.description = inspect.getdoc(handler) or ""

    def operation(self) -> dict[str, Any]:
        """The operation of the OpenAPI document, without its request body and its responses."""
        found: dict[str, Any] = {
            "tags": [self.tag],
            "summary": _title(self.name),
            "description": self.description,
            "operationId": self.name,
        }
        if self.param_convertors:
            found["parameters"] = [
                {
                    "name": name,
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "title": _title(name)},
                }
                for name in self.param_convertors
            ]
        return found


class RouteTable:
    """The routes in the order of their decorators, in which a path is looked up."""

    def __init__(self) -> None:
        self.routes: list[ApiRoute] = []

    def get(self, path: str, name: str = "", tag: str = "") -> Callable[[Handler], Handler]:
        """Serve GET and HEAD of a path by the decorated handler. name: "": that of the handler."""
        return self._add(path, ["GET"], name, tag)

    def post(self, path: str, tag: str) -> Callable[[Handler], Handler]:
        """Serve POST of a path by the decorated handler."""
        return self._add(path, ["POST"], "", tag)

    def _add(
        self, path: str, methods: list[str], name: str, tag: str
    ) -> Callable[[Handler], Handler]:
        def decorate(handler: Handler) -> Handler:
            self.routes.append(ApiRoute(path, handler, methods, name, tag))
            return handler

        return decorate


def _title(name: str) -> str:
    return name.replace("_", " ").title()
