"""Sends the answer to one request as a stream of server-sent events."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.core import Cancelled
from minisgl.request.call import Call
from minisgl.server.answer.disconnect import unless_disconnected
from minisgl.server.answer.messages import MessagesWriter
from minisgl.server.answer.openai import ResponseWriter
from minisgl.server.answer.responses import ResponsesWriter
from minisgl.server.engine import EngineView
from minisgl.utils import log_event

logger = logging.getLogger(__name__)

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # keeps nginx from collecting events before it forwards them
)
_LARGE_TOKENS = 512  # tokens with log-probabilities that take up to 10 ms to encode


Writer: TypeAlias = ResponseWriter | MessagesWriter | ResponsesWriter


async def events(call: Call, writer: Writer) -> AsyncIterator[bytes]:
    """Yield the events of a stream. Each wake-up of the call yields all events that are ready."""
    running = list(call.choices)
    begun: set[int] = set()
    while running:
        was_beating = await call.output()
        parts = []
        for choice in [*running]:
            # An echo of the prompt waits in a choice until the first output.
            text, details = call.take(choice.index) if choice.prefill_done else ("", None)
            # More output may arrive while a thread encodes this output. The next round takes it.
            finish, error = choice.finish, choice.error
            if choice.prefill_done and choice.index not in begun:
                begun.add(choice.index)
                parts.append(writer.first_chunk(choice, details))
            if details is not None:
                if len(details.prompt_logprobs) + len(details.logprobs) < _LARGE_TOKENS:
                    parts.append(writer.details_chunk(choice, text, details))
                else:
                    write = writer.details_chunk
                    parts.append(await asyncio.to_thread(write, choice, text, details))
            elif text:
                parts.append(writer.text_chunk(choice.index, text))
            if error is not None:
                yield b"".join(parts) + writer.error_chunk(error)
                return
            if finish is not None:
                parts.append(writer.last_chunk(choice))
                running.remove(choice)
        if not running:
            parts.append(writer.end_chunk(call))
        piece = b"".join(parts)
        if piece:
            yield piece
        elif was_beating:
            yield writer.keep_alive


@dataclass(eq=False)
class EventStream(Response):
    """Sends the events of a call, and closes the call at the end of the stream.

    It derives from Response so that FastAPI does not encode it.
    """

    engine: EngineView
    writer: Writer
    call: Call
    background: None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, asyncio.ensure_future(self._send(send)))
        except (Cancelled, asyncio.CancelledError):  # CancelledError at the end of a drain
            log_event(logger, logging.DEBUG, "client gone", request_id=self.call.caller.request_id)
        finally:
            self.engine.close(self.call)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS]})
        try:
            async for event in events(self.call, self.writer):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        # The status line has been sent, so an event reports the error. uvicorn logs the traceback.
        except Exception as error:
            body = self.writer.error_chunk(error)
            await send({"type": "http.response.body", "body": body, "more_body": False})
            raise
        await send({"type": "http.response.body", "body": b"", "more_body": False})
