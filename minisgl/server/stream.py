"""How texts leave while they come: as server-sent events."""

import asyncio
import logging
from collections.abc import AsyncIterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.core import Cancelled
from minisgl.server.engine_client import ChoiceDelta, EngineClient, Generation
from minisgl.server.errors import error_reply
from minisgl.server.handler import unless_disconnected
from minisgl.server.response import DONE, ResponseWriter, sse

logger = logging.getLogger(__name__)

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise hold events back
)
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: proxies see traffic, clients see nothing


async def events(generation: Generation, shape: ResponseWriter) -> AsyncIterator[bytes]:
    """All events of a stream. What came in one wake-up leaves as one piece."""
    running = list(generation.choices)
    begun: set[int] = set()
    while running:
        await generation.news()
        parts = []
        for choice in running:
            text, extras = choice.take()
            first = None
            if choice.opened and choice.index not in begun:
                begun.add(choice.index)
                first = generation
                text = generation.echo(choice) + text
                parts.append(shape.first_chunk(choice, generation))
            if extras is not None or (first and shape.request.text.token_ids):
                parts.append(shape.rich_chunk(choice, text, extras or ChoiceDelta(), first))
            elif text:
                parts.append(shape.text_chunk(choice.index, text))
            if choice.error is not None:
                yield b"".join(parts) + sse(error_reply(choice.error).body) + DONE
                return
            if choice.finish is not None:
                parts.append(shape.last_chunk(choice))
        running = [choice for choice in running if choice.finish is None]
        if not running:
            if shape.request.include_usage:
                parts.append(shape.usage_chunk(generation))
            parts.append(DONE)
        piece = b"".join(parts)
        if piece:
            yield piece
        elif generation.beat:
            yield KEEP_ALIVE
        generation.beat = False


class EventStream(Response):
    """An ASGI answer: sends the events, and closes the generation whatever ends the stream.

    A Response by its type only, which is how FastAPI tells that there is nothing left to encode.
    """

    def __init__(self, client: EngineClient, shape: ResponseWriter, generation: Generation) -> None:
        self.client = client
        self.shape = shape
        self.generation = generation
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, asyncio.ensure_future(self._send(send)))
        except (Cancelled, asyncio.CancelledError):  # the latter once the server has drained
            logger.debug("client gone request_id=%s", self.generation.request_id)
        finally:
            self.client.close(self.generation)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS]})
        try:
            async for event in events(self.generation, self.shape):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        # The status line has gone, so the stream itself must say it; uvicorn logs the traceback.
        except Exception as error:
            body = sse(error_reply(error).body) + DONE
            await send({"type": "http.response.body", "body": body, "more_body": False})
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})
