"""The images of a call on their way to the scheduler, and the limit on all of them."""

import array
import asyncio
import json
from typing import Any

import msgspec
import pytest

from minisgl.core import ImageRefused, Overloaded
from minisgl.message.messages import PromptImage, TokenizeResult
from minisgl.protocol.requests import CHAT
from minisgl.request.call import Call
from minisgl.request.convert import CallRequest, RequestConverter
from tests.unit.server.fakes import CONFIG, FACTS, World, start

SEES = msgspec.structs.replace(FACTS, images=True)
IMAGE = PromptImage(start=1, grid=(2, 2), digest=b"\1" * 32, pixels=bytes(300))


def request(size: int) -> CallRequest:
    """A chat with an image, whose file has this size in Base64."""
    url = "data:image/png;base64," + "A" * size
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 5}
    body["return_token_ids"] = True
    return RequestConverter(CONFIG).read(CHAT, json.dumps(body).encode(), SEES)


def packed(*ids: int) -> bytes:
    return array.array("i", ids).tobytes()


def answer(world: World, **fields: Any) -> None:
    (message,) = world.tokenizers[0].sent
    world.tokenizers[0].sent.clear()
    result = TokenizeResult(
        uid=message.uid,
        token_ids=packed(4, 7, 5),
        padded=packed(4, -9, 5),
        images=(IMAGE,),
        decode_s=0.5,
    )
    world.engine.receive(msgspec.structs.replace(result, **fields))


async def begin(world: World, size: int = 400, client: str = "a") -> "asyncio.Task[Call]":
    task = asyncio.create_task(start(world.engine, request(size), SEES, client=client))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def begin_answered(world: World) -> Call:
    """A call with its first output."""
    task = await begin(world)
    answer(world)
    for _ in range(3):
        await asyncio.sleep(0)
    world.update(world.scheduler.sent[-1].uid, "a")
    return await task


def test_scheduler_gets_the_pads_and_the_client_ids_of_the_vocabulary() -> None:
    async def main() -> None:
        world = World()
        call = await begin_answered(world)
        (add,) = world.scheduler.sent
        assert (add.token_ids, add.images) == (packed(4, -9, 5), (IMAGE,))
        (text,) = world.detokenizer.sent
        assert text.options.prompt_tail == [4, 7, 5]
        assert call.choices[0].details.prompt_ids.tolist() == [4, 7, 5]
        ((_, prompt),) = call.request.prompts
        assert prompt.images == (), "the file is not kept while the answer is made"
        world.engine.close(call)
        assert world.is_empty

    asyncio.run(main())


def test_open_images_are_bounded_by_their_files_and_then_by_their_pixels() -> None:
    async def main() -> None:
        world = World(max_image_bytes=1400)
        first = await begin_answered(world)  # 300 bytes of pixels
        second = await begin(world)  # 400 bytes of Base64
        with pytest.raises(Overloaded) as refused:
            await (await begin(world, 4))
        assert refused.value.limit == "max_image_bytes"
        world.engine.close(first)
        answer(world)
        third = await begin(world, 400)
        with pytest.raises(Overloaded):
            await (await begin(world, 4))
        for task in (second, third):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert world.engine._image_bytes == 0

    asyncio.run(main())


def test_client_holds_half_of_the_images_and_another_client_is_admitted() -> None:
    """Regression: one client held all of them, and each other client got 503."""

    async def main() -> None:
        world = World(max_image_bytes=1000)
        given = [(400, "a"), (104, "a"), (400, "b"), (204, "c"), (200, "c")]
        tasks = [await begin(world, size, client) for size, client in given]
        assert [task.done() for task in tasks] == [False, True, False, True, False]
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        refused = [error for error in found if isinstance(error, Overloaded)]
        assert [error.limit for error in refused] == ["max_image_bytes"] * 2
        assert world.engine._image_bytes == 0

    asyncio.run(main())


def test_single_call_may_exceed_the_limit_on_all_images() -> None:
    async def main() -> None:
        world = World(max_image_bytes=100)
        call = await begin_answered(world)
        world.engine.close(call)
        assert world.engine._image_bytes == 0

    asyncio.run(main())


def test_refusal_of_a_tokenizer_keeps_its_reason_and_its_place() -> None:
    async def main() -> None:
        world = World()
        task = await begin(world)
        (message,) = world.tokenizers[0].sent
        world.engine.receive(
            TokenizeResult(
                uid=message.uid,
                error="bad",
                param="there",
                refused="size",
                limit="max_image_pixels",
            )
        )
        with pytest.raises(ImageRefused) as refused:
            await task
        error = refused.value
        assert (error.message, error.reason, error.param) == ("bad", "size", "there")
        assert error.limit == "max_image_pixels"

    asyncio.run(main())


def test_request_with_an_image_is_long_for_the_pool() -> None:
    """Each of two tokenizers gets one at a time, because a small file may take seconds."""

    async def main() -> None:
        world = World(tokenizers=2)
        tasks = [await begin(world, 4) for _ in range(3)]
        assert [len(box.sent) for box in world.tokenizers] == [1, 1]
        for task in tasks:
            task.cancel()

    asyncio.run(main())
