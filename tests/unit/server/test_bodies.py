"""The bound of all incomplete bodies together."""

import asyncio
from collections.abc import Iterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from minisgl.core import Overloaded
from minisgl.server.edge.middleware import GateMiddleware
from minisgl.settings.config import Limits

SCOPE: Scope = {"type": "http", "path": "/v1/completions", "headers": []}


def parts(*sizes: int, complete: bool) -> Iterator[Message]:
    """Messages with so many bytes of a body."""
    for number, size in enumerate(sizes, 1):
        more = not complete or number < len(sizes)
        yield {"type": "http.request", "body": b"u" * size, "more_body": more}


class Bodies:
    """Reads bodies through a GateMiddleware whose limit is 150 bytes."""

    def __init__(self) -> None:
        limits = Limits(max_bodies_bytes=150)
        self.gate = GateMiddleware(self.handler, (), limits)
        self.release = asyncio.Event()

    async def handler(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the parts, then stay open until `release` is set."""
        for _ in range(scope["parts"]):
            await receive()
        await self.release.wait()

    async def send(self, *sizes: int, complete: bool) -> asyncio.Task[None]:
        """Start a request with a body of these parts, and let its handler read them."""
        messages = parts(*sizes, complete=complete)

        async def receive() -> Message:
            return next(messages)

        async def discard(message: Message) -> None:
            pass

        scope = SCOPE | {"parts": len(sizes)}
        task = asyncio.ensure_future(self.gate(scope, receive, discard))
        for _ in range(10):
            await asyncio.sleep(0)
        return task


def test_incomplete_bodies_count_together_and_complete_ones_do_not() -> None:
    async def run() -> None:
        bodies = Bodies()
        tasks = [await bodies.send(90, complete=False)]
        tasks += [await bodies.send(100, complete=True), await bodies.send(59, 50, complete=True)]
        tasks += [await bodies.send(60, complete=False)]
        refused = await bodies.send(1, complete=False)
        with pytest.raises(Overloaded, match="too many request bodies are incomplete"):
            await refused
        assert not any(task.done() for task in tasks)
        bodies.release.set()
        await asyncio.gather(*tasks)
        large = await bodies.send(151, complete=False)
        await large  # a single body may be larger

    asyncio.run(run())
