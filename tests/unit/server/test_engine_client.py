"""EngineView forgets every request completely, however the request ends."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine

import msgspec
import pytest

from minisgl.core import (
    DeadlineExceeded,
    EngineFailure,
    FinishReason,
    InvalidRequest,
    Overloaded,
    RequestError,
)
from minisgl.message.messages import AbortReq, AddReq, StartText, TokenizeChat, TokenizeText
from minisgl.protocol.requests import CHAT, COMPLETIONS
from minisgl.request.call import Call
from minisgl.request.convert import CallRequest, RequestConverter
from minisgl.server.answer.openai import ResponseWriter
from minisgl.server.answer.stream import events
from minisgl.server.errors import RanTooLong
from tests.unit.server.fakes import CONFIG, FACTS, World, start


def request(body: bytes = b'{"model":"m","prompt":"hi"}') -> CallRequest:
    return RequestConverter(CONFIG).read(COMPLETIONS, body, FACTS)


def run(main: Callable[[World], Coroutine[object, object, None]], **options: float) -> World:
    """Run one scenario in a new event loop."""

    async def scenario() -> World:
        world = World(**options)
        await main(world)
        return world

    return asyncio.run(scenario())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def start_tokenized(world: World, call: CallRequest) -> asyncio.Task[Call]:
    """Start `call` and answer its tokenizer messages. Its requests are then in the scheduler."""
    task = asyncio.create_task(start(world.engine, call, FACTS))
    await settle()
    world.answer()
    await settle()
    return task


def test_answered_request_leaves_nothing() -> None:
    async def main(world: World) -> None:
        task = await start_tokenized(world, request())
        (add,) = world.scheduler.sent
        assert isinstance(add, AddReq)
        world.update(add.uid, "he")
        generation = await task
        world.update(add.uid, "llo", finish=FinishReason.LENGTH)
        await generation.ended()
        assert generation.take(0) == ("hello", None)
        world.engine.close(generation)
        world.engine.close(generation)
        assert world.scheduler.sent == [add], "a finished request is not aborted"

    assert run(main).is_empty


@pytest.mark.parametrize("stage", ["tokenizing", "waiting", "decoding"])
def test_cancelled_request_leaves_nothing_and_is_aborted_once(stage: str) -> None:
    async def main(world: World) -> None:
        task = asyncio.create_task(start(world.engine, request(), FACTS))
        await settle()
        if stage != "tokenizing":
            world.answer()
            await settle()
        if stage == "decoding":
            world.update(world.scheduler.sent[0].uid, "he")
            generation = await task
            world.engine.close(generation)
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        world.answer()  # Too late.
        aborts = [m for m in world.scheduler.sent if isinstance(m, AbortReq)]
        assert len(aborts) == (stage != "tokenizing")
        for add in world.scheduler.sent[:1]:
            world.update(add.uid, "late", finish=FinishReason.ABORT)

    assert run(main).is_empty


def test_every_token_of_cut_off_reasoning_counts() -> None:
    """The last token of reasoning that is cut off may have no text. Its update has only a count."""

    async def main(world: World) -> None:
        task = await start_tokenized(world, request())
        uid = world.scheduler.sent[0].uid
        world.update(uid, reasoning="a b", reasoning_tokens=2, completion_tokens=2)
        world.update(uid, reasoning_tokens=3, completion_tokens=3, finish=FinishReason.LENGTH)
        generation = await task
        usage = json.loads(await ResponseWriter(request()).whole(generation))["usage"]
        assert usage["completion_tokens"] == 3
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 3
        world.engine.close(generation)

    assert run(main).is_empty


def test_reasoning_and_answer_that_arrive_together_leave_in_two_deltas() -> None:
    """Clients do `if delta.reasoning_content: ... else: answer += delta.content`.

    They would lose text if one delta had both.
    """
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
    call = RequestConverter(CONFIG).read(CHAT, json.dumps(body).encode(), FACTS)

    async def main(world: World) -> None:
        generation = world.open(1)
        uid = generation.choices[0].uid
        world.update(uid, reasoning="thought", token_ids=[5])
        world.update(uid, "answer", token_ids=[6], finish=FinishReason.STOP)
        pieces = [piece async for piece in events(generation, ResponseWriter(call))]
        chunks = [json.loads(x[6:]) for x in b"".join(pieces).split(b"\n\n")[:-2]]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["delta"] for choice in choices[1:-1]] == [
            {"reasoning_content": "thought"},
            {"content": "answer"},
        ]
        ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
        assert ids == [5, 6]
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
        world.engine.close(generation)

    assert run(main).is_empty


def test_stop_string_aborts_the_request_in_the_scheduler() -> None:
    async def main(world: World) -> None:
        task = await start_tokenized(world, request())
        uid = world.scheduler.sent[0].uid
        world.update(uid, "x", finish=FinishReason.STOP, stopped=True)
        generation = await task
        world.engine.close(generation)
        assert world.scheduler.sent[1:] == [AbortReq(uid=uid, reason=FinishReason.STOP)]

    assert run(main).is_empty


def test_tokenizer_error_is_a_400_and_leaves_nothing() -> None:
    async def main(world: World) -> None:
        task = asyncio.create_task(start(world.engine, request(), FACTS))
        await settle()
        world.answer(error="the chat template refused this chat")
        with pytest.raises(InvalidRequest, match="refused"):
            await task
        assert world.scheduler.sent == []

    assert run(main).is_empty


def test_failed_engine_ends_every_call() -> None:
    """No call may wait forever when the receiver of the messages fails."""

    async def main(world: World) -> None:
        tasks = [asyncio.create_task(start(world.engine, request(), FACTS)) for _ in range(3)]
        await settle()
        world.answer()
        tasks.append(asyncio.create_task(start(world.engine, request(), FACTS)))
        await settle()
        world.engine.fail_all(EngineFailure("gone"))
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, RequestError)
        world.answer()

    assert run(main).is_empty


def test_queue_is_bounded_until_the_first_output() -> None:
    async def main(world: World) -> None:
        first = world.open(2)
        with pytest.raises(Overloaded):
            world.open(1)
        world.update(first.choices[0].uid, "x")
        second = world.open(1)
        world.engine.close(first)
        world.engine.close(second)

    assert run(main, max_queued_reqs=2).is_empty


def test_text_options_are_sent_before_their_request() -> None:
    """The detokenizer lets a step wait for the text options of the requests in it."""

    async def main(world: World) -> None:
        sent: list[StartText | AddReq] = []
        world.engine._to_detokenizer = world.engine._to_scheduler = sent.append
        body = b'{"model":"m","prompt":[[1,2],[3,4,5]],"n":2,"stop":"x"}'
        task = asyncio.create_task(start(world.engine, request(body), FACTS))
        await settle()
        assert [type(message) for message in sent] == [StartText, StartText, AddReq] * 2
        starts, adds = [*sent[:2], *sent[3:5]], sent[2::3]
        uids = [uid for add in adds for uid in range(add.uid, add.uid + add.count)]
        assert [message.uid for message in starts] == uids
        assert [message.options.prompt_tail for message in starts] == [[1, 2]] * 2 + [[3, 4, 5]] * 2
        assert all(message.options.stop == ["x"] for message in starts)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert run(main).is_empty


@pytest.mark.parametrize("seed", [b"", b',"seed":9223372036854775807'])
def test_the_choices_of_a_prompt_are_one_message_with_a_seed(seed: bytes) -> None:
    """The scheduler derives a seed for each choice (tests/unit/scheduler/test_clients.py)."""

    async def main(world: World) -> None:
        body = b'{"model":"m","prompt":"hi","n":3%b}' % seed
        task = await start_tokenized(world, request(body))
        (add,) = world.scheduler.sent
        assert add.count == 3
        assert -(2**63) <= add.sampling.seed < 2**63
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert run(main).is_empty


def test_idle_stream_gets_a_comment_and_a_busy_one_does_not() -> None:
    async def main(world: World) -> None:
        call = request(b'{"model":"m","prompt":"hi","stream":true}')
        generation = world.open(1)
        stream = events(generation, ResponseWriter(call))
        world.engine.send_keep_alives()
        assert await anext(stream) == ResponseWriter.keep_alive
        world.engine.send_keep_alives()
        world.update(generation.choices[0].uid, "he")
        assert b'"text":"he"' in await anext(stream)
        world.finish(generation.choices[0].uid)
        assert b"[DONE]" in await anext(stream)
        world.engine.close(generation)

    assert run(main).is_empty


def test_queued_prompt_tokens_are_bounded_but_a_single_prompt_is_not() -> None:
    async def main(world: World) -> None:
        first = asyncio.create_task(start(world.engine, request(), FACTS))
        await settle()
        world.answer(b"\1\0\0\0" * 9)  # More than the limit, but nothing else is queued.
        await settle()
        assert world.engine.queues["default", "default"].tokens == 9
        second = asyncio.create_task(start(world.engine, request(), FACTS))
        await settle()
        world.answer()
        with pytest.raises(Overloaded):
            await second
        world.finish(world.scheduler.sent[0].uid)
        world.engine.close(await first)

    assert run(main, max_queued_tokens=4).is_empty


def test_prediction_is_tokenized_cut_and_counted() -> None:
    """A prompt of 90 tokens leaves room for ten of the 30 tokens of the prediction."""
    facts = msgspec.structs.replace(FACTS, drafts=True, kv_capacity_tokens=100)
    body = b"""{"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2,
        "prediction": {"type": "content", "content": "expected"}}"""
    call = RequestConverter(CONFIG).read(CHAT, body, facts)

    async def main(world: World) -> None:
        task = asyncio.create_task(start(world.engine, call, facts))
        await settle()
        assert isinstance(world.tokenizers[0].sent[0], TokenizeChat)
        world.answer(b"\1\0\0\0" * 90)
        await settle()
        text = world.tokenizers[0].sent[0]
        assert isinstance(text, TokenizeText)
        assert (text.text, text.add_special) == ("expected", False)
        world.answer(b"\2\0\0\0" * 30)
        await settle()
        (add,) = world.scheduler.sent
        assert add.prediction == b"\2\0\0\0" * 10
        assert world.engine.queues["default", "default"].tokens == 100
        assert world.engine.loads["default"].tokens == 90 + 2 * 10 + 10
        for uid, accepted in ((add.uid, 6), (add.uid + 1, 4)):
            world.update(
                uid,
                completion_tokens=8,
                prediction_tokens=10,
                accepted_prediction_tokens=accepted,
                finish=FinishReason.LENGTH,
            )
        generation = await task
        usage = json.loads(await ResponseWriter(call).whole(generation))["usage"]
        assert usage["completion_tokens_details"] == {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 10,
            "rejected_prediction_tokens": 10,
        }
        world.engine.close(generation)

    assert run(main).is_empty


@pytest.mark.parametrize("prompt", [b'[1,2,3,4,5],"n":2', b"[[1,2],[3,4],[5,6]]"])
def test_call_with_several_choices_is_not_refused_for_its_own_tokens(prompt: bytes) -> None:
    """Regression: the first prompt of a call filled the queue, so the call was always refused."""

    async def main(world: World) -> None:
        body = b'{"model":"m","prompt":%s}' % prompt
        call = asyncio.create_task(start(world.engine, request(body), FACTS))
        await settle()
        for add in list(world.scheduler.sent):
            world.finish(add.uid)
        world.engine.close(await call)

    assert run(main, max_queued_tokens=4).is_empty


@pytest.mark.parametrize("tokenized", [False, True])
def test_request_that_waits_too_long_is_refused(tokenized: bool) -> None:
    async def main(world: World) -> None:
        waiting = asyncio.create_task(start(world.engine, request(), FACTS))
        await settle()
        if tokenized:
            world.answer()
            await settle()
        world.engine.end_overdue(time.monotonic() + 4)
        await settle()
        assert not waiting.done()
        world.engine.end_overdue(time.monotonic() + 6)
        with pytest.raises(DeadlineExceeded) as refused:
            await waiting
        assert refused.value.limit == "max_wait_s"
        world.answer()

    assert run(main, max_wait_s=5.0).is_empty


def test_request_that_runs_too_long_is_ended_and_aborted() -> None:
    async def main(world: World) -> None:
        running = await start_tokenized(world, request())
        uid = world.scheduler.sent[-1].uid
        world.update(uid, "x")
        generation = await running
        world.engine.end_overdue(generation.started_s + 4)
        assert generation.error is None
        world.engine.end_overdue(generation.started_s + 6)
        assert isinstance(generation.error, RanTooLong)
        assert isinstance(world.scheduler.sent[-1], AbortReq)
        world.engine.close(generation)

    assert run(main, max_total_s=5.0).is_empty
