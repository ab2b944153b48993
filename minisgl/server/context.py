"""The context of one HTTP request. A route asks for it by an annotation, and FastAPI passes it in:

    @router.get("/server_info")
    async def server_info(context: ContextDep) -> Response: ...

Bodies are not declared in signatures: `CallContext` reads the raw bytes and msgspec decodes them.
"""

import asyncio
from typing import Annotated, Protocol

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from minisgl import core
from minisgl.core import ModelFacts
from minisgl.message import messages
from minisgl.request.call import Caller
from minisgl.request.convert import RequestConverter
from minisgl.request.sessions import session_key, session_name
from minisgl.server.edge.guard import KEPT
from minisgl.server.engine import EngineView
from minisgl.server.errors import NotReady, RendersOnly
from minisgl.server.observe.lifecycle import Lifecycle
from minisgl.settings.config import DEFAULT_CLIENT, ServerConfig


class Service(Protocol):
    """The process that the routes belong to: the API server, or a test double."""

    config: ServerConfig
    engine: EngineView
    lifecycle: Lifecycle
    stats: messages.SchedulerStats | None


class CallContext:
    """One HTTP call: its request, its id, and the objects that its handler uses."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.request_id = str(request.scope["state"].get("request_id", ""))
        self.client_name = str(request.scope["state"].get("client", DEFAULT_CLIENT))
        self.log: dict[str, object] = request.scope["state"]["log"]
        self.service: Service = request.app.state.service
        self.converter: RequestConverter = request.app.state.converter
        self.engine = self.service.engine

    def allowed_priority(self, wanted: int | None) -> int:
        """The priority of a request. Raises InvalidRequest if its key may not use the number.

        A server without keys allows every number.
        """
        config = self.service.config
        if not config.api_key_hashes:
            return wanted or 0
        lowest = config.lowest_priorities.get(self.client_name, 0)
        if wanted is not None and wanted < lowest:
            message = f"priority must be at least {lowest} with this API key"
            raise core.InvalidRequest(message, param="priority")
        return max(lowest, 0) if wanted is None else wanted

    def caller(self, priority: int = 0, session: str = "") -> Caller:
        """The sender of the request, for a call with this priority.

        session: the name in the body, as for `session_name`.
        """
        name = session_name(self.request.headers, session)
        key = session_key(self.client_name, name)
        return Caller(self.request_id, self.client_name, priority, key, self.log)

    def require_engine(self) -> None:
        """Raise RendersOnly if the server has no engine."""
        if self.service.config.render_only:
            raise RendersOnly(
                f"this server only renders prompts; send {self.request.scope['path']} to a server "
                "without --render-only"
            )

    async def read(self) -> tuple[bytes, ModelFacts]:
        """Read the body of a call that needs the model. Returns it with the facts of the model.

        Raises NotReady if the server accepts no calls, or stops accepting them before the body is
        complete.
        """
        kept = self.request.scope["state"].get(KEPT, False)
        self.service.lifecycle.require_accepting(kept)
        return await self.read_body(), self.service.lifecycle.require_accepting(kept)

    async def read_body(self) -> bytes:
        """The raw body. Raises DeadlineExceeded when it is incomplete after max_wait_s."""
        max_wait_s = self.engine.limits.max_wait_s
        try:
            async with asyncio.timeout(max_wait_s):
                # request.body() would keep the bytes until the response has been sent.
                return b"".join([part async for part in self.request.stream()])
        except ClientDisconnect:
            raise core.Cancelled("the client closed the connection") from None
        except asyncio.CancelledError:
            # uvicorn cancels the handler at the end of a drain, and would answer in plain text.
            raise NotReady("the server is shutting down") from None
        except TimeoutError:
            message = f"the body did not arrive within {max_wait_s:g} s"
            raise core.DeadlineExceeded(message, limit="max_wait_s") from None


async def _call(request: Request) -> CallContext:  # FastAPI runs plain functions in a thread.
    return CallContext(request)


ContextDep = Annotated[CallContext, Depends(_call)]
