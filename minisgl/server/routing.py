"""Used by all routes: exact matching of paths, and the dependency of the handlers.

A handler asks for the `CallContext` by an annotation, and FastAPI passes it in:

    @router.get("/server_info")
    async def server_info(call: CallDep) -> Response: ...

Bodies are not declared in signatures: `CallContext` reads the raw bytes and msgspec decodes them.
The dependency is a coroutine, because FastAPI runs plain functions in a thread.
"""

import asyncio
from collections.abc import Awaitable
from typing import Annotated, Any, Protocol, TypeVar

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Scope

from minisgl.core import Cancelled, DeadlineExceeded, ModelFacts
from minisgl.message.messages import SchedulerStats
from minisgl.server.config import ServerConfig
from minisgl.server.connection import KEPT
from minisgl.server.convert import RequestConverter
from minisgl.server.engine_client import EngineClient
from minisgl.server.errors import NotReady
from minisgl.server.handler import unless_disconnected
from minisgl.server.lifecycle import Lifecycle

T = TypeVar("T")


class ExactRoute(APIRoute):
    """A route that matches its path to the last character, and HEAD wherever it takes GET.

    The `$` in Starlette's pattern also matches before a final newline, so that the path
    "/abort\\n" would reach the admin route /abort without being an admin path to `Auth`.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.methods is not None and "GET" in self.methods:
            self.methods.add("HEAD")

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["path"].endswith("\n"):
            return Match.NONE, {}
        return super().matches(scope)


class Service(Protocol):
    """The process that the routes belong to: the API server, or a test double."""

    config: ServerConfig
    client: EngineClient
    lifecycle: Lifecycle
    stats: SchedulerStats | None

    def stuck(self) -> bool:
        """True while a worker process is hung."""

    def stalled(self) -> bool:
        """True while a process is hung or the scheduler makes no progress."""


class CallContext:
    """One HTTP call: its request, its id, and the objects that its handler uses."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.request_id = str(request.scope["state"].get("request_id", ""))
        self.service: Service = request.app.state.service
        self.converter: RequestConverter = request.app.state.converter
        self.client = self.service.client

    async def read(self) -> tuple[bytes, ModelFacts]:
        """The body of a call of the model, and the model's facts.

        Raises NotReady when the server accepts no calls, or stops to accept them meanwhile.
        """
        kept = self.request.scope["state"].get(KEPT, False)
        self.service.lifecycle.require_accepting(kept)
        return await self.read_body(), self.service.lifecycle.require_accepting(kept)

    async def read_body(self) -> bytes:
        """The raw body. Raises DeadlineExceeded when it is incomplete after max_wait_s."""
        max_wait_s = self.client.limits.max_wait_s
        try:
            async with asyncio.timeout(max_wait_s):
                # request.body() would keep the bytes until the response has been sent.
                return b"".join([part async for part in self.request.stream()])
        except ClientDisconnect:
            raise Cancelled("the client closed the connection") from None
        except asyncio.CancelledError:
            # uvicorn cancels the handler at the end of a drain, and would answer in plain text.
            raise NotReady("the server is shutting down") from None
        except TimeoutError:
            late = f"the body did not arrive within {max_wait_s:g} s"
            raise DeadlineExceeded(late, limit="max_wait_s") from None

    async def unless_disconnected(self, work: Awaitable[T]) -> T:
        """The result of `work`. Raises Cancelled when the client disconnects before it is there."""
        return await unless_disconnected(self.request.receive, work)


async def _call(request: Request) -> CallContext:
    return CallContext(request)


CallDep = Annotated[CallContext, Depends(_call)]
