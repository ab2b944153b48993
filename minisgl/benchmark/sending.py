"""Sends the requests of a load over HTTP: a fixed number at a time, or each when it is due."""

import asyncio
import time
from collections.abc import Sequence

from minisgl.benchmark.client import Answer, StreamingClient
from minisgl.benchmark.trace import Turns
from minisgl.utils.startup import Progress


async def closed_loop(
    client: StreamingClient, bodies: Sequence[bytes], concurrency: int, bar: Progress
) -> list[Answer]:
    """Send the requests, `concurrency` at a time. Returns the answers in the order of `bodies`."""
    answers: list[Answer | None] = [None] * len(bodies)
    indexes = iter(range(len(bodies)))

    async def work() -> None:
        for index in indexes:
            answers[index] = await client.post(bodies[index])
            bar.update()

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return [answer for answer in answers if answer is not None]


async def open_loop(
    client: StreamingClient, bodies: Sequence[bytes], turns: Turns, bar: Progress
) -> list[Answer]:
    """Send each request when it is due: at its arrival time, or after those that it waits for.

    Returns the answers in the order of `bodies`. A failed request ends its turn as others do.
    """
    begin_s = time.perf_counter()
    answers: dict[int, Answer] = {}

    async def work(index: int, due_s: float) -> None:
        await asyncio.sleep(begin_s + due_s - time.perf_counter())
        answers[index] = await client.post(bodies[index])
        bar.update()
        for next_s, follower in turns.ended(index, time.perf_counter() - begin_s):
            group.create_task(work(follower, next_s))

    async with asyncio.TaskGroup() as group:
        for due_s, index in turns.first:
            group.create_task(work(index, due_s))
    return [answers[index] for index in range(len(bodies))]
