"""`unless_disconnected`: a disconnect cancels the work of a handler, and nothing else does."""

import asyncio

import pytest

from minisgl.core import Cancelled
from minisgl.server.answer.disconnect import unless_disconnected
from tests.unit.server.fakes import FACTS, World, start
from tests.unit.server.test_engine_client import request, run, settle


def test_disconnect_cancels_the_work() -> None:
    async def main(world: World) -> None:
        gone = asyncio.Event()

        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        work = start(world.engine, request(), FACTS)
        task = asyncio.create_task(unless_disconnected(receive, work))
        await settle()
        gone.set()
        with pytest.raises(Cancelled):
            await task
        world.answer()

    assert run(main).is_empty


def test_each_call_of_a_burst_is_submitted_before_the_next_begins() -> None:
    async def main(world: World) -> None:
        begun: list[int] = []

        async def receive() -> dict[str, str]:
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def call() -> None:
            begun.append(len(world.scheduler.sent))
            body = request(b'{"model":"m","prompt":[1,2]}')
            await unless_disconnected(receive, start(world.engine, body, FACTS))

        tasks = [asyncio.create_task(call()) for _ in range(3)]
        await settle()
        assert begun == [0, 1, 2]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert run(main).is_empty


@pytest.mark.parametrize("fault", [TimeoutError, ValueError])
def test_an_error_of_the_work_is_no_disconnect(fault: type[Exception]) -> None:
    async def main(world: World) -> None:
        async def receive() -> dict[str, str]:
            await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            await asyncio.sleep(0)
            raise fault

        with pytest.raises(fault):
            await unless_disconnected(receive, work())

    assert run(main).is_empty


def test_a_failing_receive_counts_as_a_disconnect() -> None:
    async def main(world: World) -> None:
        async def receive() -> dict[str, str]:
            raise OSError

        with pytest.raises(Cancelled):
            await unless_disconnected(receive, start(world.engine, request(), FACTS))
        world.answer()

    assert run(main).is_empty
