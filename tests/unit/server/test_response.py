"""Answers have the fields of the structs that describe them."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from minisgl.core import FinishReason
from minisgl.message.messages import TokenLogprob
from minisgl.protocol import responses
from minisgl.protocol.requests import CHAT, COMPLETIONS
from minisgl.request.choice import Details
from minisgl.request.convert import RequestConverter
from minisgl.server.answer.openai import ResponseWriter
from minisgl.server.answer.stream import events
from tests.unit.server.fakes import CONFIG, FACTS, World

RICH = {"return_token_ids": True, "stream_options": {"include_usage": True}, "stream": True}
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "logprobs": True},
    COMPLETIONS: {"prompt": "hi", "logprobs": 1},
}
WHOLE = {CHAT: responses.ChatCompletion, COMPLETIONS: responses.TextCompletion}
EVENT = {CHAT: responses.ChatCompletionChunk, COMPLETIONS: responses.TextCompletionChunk}
TOKEN = TokenLogprob(token_bytes=b"he", logprob=-0.5, offset=0, top=[(b"\xff", float("-inf"))])


def generation_of(world: World, **first: Any) -> Any:
    """A generation that has received two outputs, the second of which ended it."""
    generation = world.open(1)
    uid = generation.choices[0].uid
    generation.choices[0].details = Details(prompt_ids=[1, 2])
    world.update(uid, "he", token_ids=[7], logprobs=[TOKEN], **first)
    world.update(uid, "llo", token_ids=[8], completion_tokens=2, finish=FinishReason.STOP)
    return generation


def writer_of(route: str, **more: Any) -> ResponseWriter:
    body = {"model": "m", **PROMPTS[route], **RICH, **more}
    return ResponseWriter(RequestConverter(CONFIG).read(route, json.dumps(body).encode(), FACTS))


@pytest.mark.parametrize("route", WHOLE)
def test_whole_answer_has_the_fields_of_its_struct(route: str) -> None:
    async def main() -> None:
        world = World()
        generation = generation_of(world, reasoning="hm")
        body = await writer_of(route).whole(generation)
        answer = msgspec.json.decode(body, type=WHOLE[route])
        assert msgspec.json.encode(answer) == body, "the struct has each field"
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        assert choice.token_ids == [7, 8]
        assert choice.logprobs is not None
        world.engine.close(generation)

    asyncio.run(main())


def test_an_answer_has_the_ids_of_each_prompt_once() -> None:
    """Regression: an answer with 1,024 choices had the ids of its prompt 1,024 times."""

    async def main() -> None:
        more = {"prompt": ["hi", "ho"], "n": 3, "logprobs": None}
        for stream in (False, True):
            world = World()
            call = world.open(6)
            for choice in call.choices:
                choice.details = Details(prompt_ids=[1, 2])
                world.update(choice.uid, "he", token_ids=[7], finish=FinishReason.STOP)
            writer = writer_of(COMPLETIONS, **more)
            parts = [piece async for piece in events(call, writer)] if stream else []
            answer = b"".join(parts) or await writer.whole(call)
            assert answer.count(b'"prompt_token_ids":[1,2]') == 2
            assert answer.count(b'"token_ids":[7]') == 6
            world.engine.close(call)

    asyncio.run(main())


@pytest.mark.parametrize("route", EVENT)
def test_each_event_has_the_fields_of_its_struct(route: str) -> None:
    async def main() -> None:
        world = World()
        generation = generation_of(world, reasoning="hm")
        stream = b"".join([piece async for piece in events(generation, writer_of(route))])
        *blocks, done, rest = stream.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        chunks = []
        for block in blocks:
            data = block.removeprefix(b"data: ")
            chunks.append(msgspec.json.decode(data, type=EVENT[route]))
            assert msgspec.to_builtins(chunks[-1]) == json.loads(data), "the struct has each field"
        reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"], "only the last one has it"
        ids = [c.token_ids for chunk in chunks for c in chunk.choices if c.token_ids]
        assert ids == [[7, 8]]
        assert chunks[-1].usage is not None
        world.engine.close(generation)

    asyncio.run(main())


@pytest.mark.parametrize("route", EVENT)
def test_text_chunk_equals_the_encoded_struct(route: str) -> None:
    """text_chunk joins bytes; the encoder must give the same bytes."""
    writer = writer_of(route)
    data = writer.text_chunk(3, 'a"\n\u20ac').removeprefix(b"data: ").removesuffix(b"\n\n")
    chunk = msgspec.json.decode(data, type=EVENT[route])
    assert msgspec.json.encode(chunk) == data
    (choice,) = chunk.choices
    assert choice.index == 3
    assert (choice.delta.content if route == CHAT else choice.text) == 'a"\n\u20ac'
