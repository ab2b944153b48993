"""The tokenizer pool: which process gets a tokenize request, and when."""

import asyncio
from collections.abc import Callable

from minisgl.core import DeadlineExceeded
from minisgl.message.messages import (
    SourceImage,
    TokenizeChat,
    TokenizeResult,
    TokenizeText,
    ToTokenizer,
)
from minisgl.request.call import Call
from minisgl.request.question import Answer, Question
from minisgl.server.pools.tokenizers import TokenizerPool
from tests.unit.server.fakes import FACTS, World, start
from tests.unit.server.test_engine_client import request, run, settle


def test_requests_go_to_the_least_busy_tokenizer() -> None:
    async def main(world: World) -> None:
        tasks = [asyncio.create_task(start(world.engine, request(), FACTS)) for _ in range(4)]
        await settle()
        assert [len(box.sent) for box in world.tokenizers] == [2, 2]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        world.answer()

    assert run(main, tokenizers=2).is_empty


def test_requests_of_ended_calls_do_not_reach_a_tokenizer() -> None:
    """Regression: 300 prompts of clients that had disconnected delayed the next call by 9 s."""

    async def main(world: World) -> None:
        engine, (box,) = world.engine, world.tokenizers
        calls = [world.open(1) for _ in range(50)]

        def ask(text: str, call: Call) -> asyncio.Task[Answer]:
            return asyncio.create_task(engine.ask(call, Question(TokenizeText(text=text))))

        long = [ask("x" * 50_000, call) for call in calls[:-2]]
        await settle()
        late, last = ask("y", calls[-2]), ask("z", calls[-1])
        await settle()
        assert [len(message.text) for message in box.sent] == [50_000, 50_000]
        engine.end(calls[-2], DeadlineExceeded("late"))
        for task in long:
            task.cancel()
        ends = await asyncio.gather(*long, late, return_exceptions=True)
        assert {type(end) for end in ends} == {asyncio.CancelledError, DeadlineExceeded}
        engine.receive(TokenizeResult(uid=box.sent.pop(0).uid))
        assert [message.text[0] for message in box.sent] == ["x", "z"]
        world.answer()
        assert (await last).token_ids == b"\1\0\0\0"
        for call in calls:
            engine.close(call)

    assert run(main).is_empty


def test_request_that_ends_as_a_process_becomes_free_is_not_sent() -> None:
    """The callback that removes the request runs only in the next iteration of the event loop."""

    async def main() -> None:
        sent: list[ToTokenizer] = []

        def send(message: ToTokenizer) -> int:
            sent.append(message)
            return 2**16

        pool = TokenizerPool([send])
        texts = ("busy", "ended", "next")
        _, ended, _ = (pool.submit(TokenizeText(text=text), "a") for text in texts)
        ended.cancel()
        (busy,) = sent
        assert isinstance(busy, TokenizeText)
        pool.receive(TokenizeResult(uid=busy.uid))
        assert [message.text for message in sent if isinstance(message, TokenizeText)] == [
            "busy",
            "next",
        ]

    asyncio.run(main())


def test_all_processes_decode_images_and_the_last_one_has_no_long_text() -> None:
    """Regression: with two processes, only one decoded images."""

    async def main() -> None:
        sent: list[list[ToTokenizer]] = [[], []]

        def sender(box: list[ToTokenizer]) -> Callable[[ToTokenizer], int]:
            return lambda message: box.append(message) or 100  # type: ignore[func-returns-value]

        pool = TokenizerPool([sender(box) for box in sent])
        image = SourceImage(data=b"A" * 8, media_type="image/png", path="here")
        for client in ("a", "b", "c"):
            pool.submit(TokenizeChat(messages_json=b"[]", images=(image,)), client)
        assert [len(box) for box in sent] == [1, 1]
        for client in ("a", "b"):
            pool.submit(TokenizeText(text="x" * (2**16 + 1)), client)
        assert [len(box) for box in sent] == [2, 1]

    asyncio.run(main())


def test_a_process_has_one_chat_with_images_and_texts_pass_it() -> None:
    """Regression: texts waited in the pool until the images of all chats before were decoded."""

    async def main() -> None:
        sent: list[ToTokenizer] = []

        def send(message: ToTokenizer) -> int:
            sent.append(message)
            return 100

        pool = TokenizerPool([send])
        image = SourceImage(data=b"A" * 8, media_type="image/png", path="here")
        chat = TokenizeChat(messages_json=b"[]", images=(image,))
        for client in ("a", "a", "b"):
            pool.submit(chat, client)
        pool.submit(TokenizeText(text="text"), "a")
        kinds = [type(message) for message in sent]
        assert kinds == [TokenizeChat, TokenizeText]
        pool.receive(TokenizeResult(uid=sent[0].uid))  # type: ignore[union-attr]
        assert [type(message) for message in sent[2:]] == [TokenizeChat]

    asyncio.run(main())
