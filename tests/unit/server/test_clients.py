"""Several keys: names, queues of their own, turns in the tokenizer, and the cost of one call."""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.core import ConfigError, InvalidRequest, Overloaded
from minisgl.message.messages import TokenizeResult, TokenizeText, TokenLogprob
from minisgl.protocol import responses
from minisgl.protocol.requests import COMPLETIONS
from minisgl.request.convert import RequestConverter
from minisgl.request.decode import parse_body
from minisgl.request.fit import fit_prompts
from minisgl.request.question import Question
from minisgl.server.answer.openai import ResponseWriter
from minisgl.server.answer.stream import events
from minisgl.server.observe.lifecycle import Phase
from minisgl.server.observe.metrics import Metrics
from minisgl.settings.keys import key_hashes
from tests.unit.server.fakes import CONFIG, FACTS, World, start
from tests.unit.server.test_engine_client import request, run, settle

# --- names of keys --------------------------------------------------------------------------------


def test_a_line_of_a_key_file_may_name_its_client(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        "plain\nteam-a: one\nteam-a:\ttwo\n\n  b_2.x:  three words \nwith:colon\na b:c\n"
    )
    keys = ["plain", "one", "two", "three words", "with:colon", "a b:c"]
    clients = ["default", "team-a", "team-a", "b_2.x", "default", "default"]
    hashes = key_hashes(keys, None)
    assert key_hashes([], str(path)) == dict(zip(hashes, clients, strict=True))


@pytest.mark.parametrize("line", ["a b: key", "-a: key", f"{'n' * 64}: key", ": key"])
def test_a_line_with_a_wrong_name_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"good\n{line}\n")
    with pytest.raises(ConfigError, match="line 2 "):
        key_hashes([], str(path))


def test_one_key_with_two_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("a: same\nb: same\n")
    with pytest.raises(ConfigError, match="a and b have the same key"):
        key_hashes([], str(path))


# --- queues of each client ------------------------------------------------------------------------


def test_a_full_queue_of_one_client_does_not_refuse_another_one() -> None:
    async def main(world: World) -> None:
        engine = world.engine
        full = world.open(2, client="hostile")
        with pytest.raises(Overloaded) as error:
            world.open(1, client="hostile")
        assert error.value.limit == "max_queued_reqs"
        engine.close(world.open(2, client="other"))
        engine.close(full)

    assert run(main, max_queued_reqs=2).is_empty


def test_open_requests_of_a_client_are_bounded_until_they_end() -> None:
    async def main(world: World) -> None:
        engine = world.engine
        call = world.open(2, client="a")
        for choice in call.choices:
            world.update(choice.uid, "x")  # running: no longer in the queue
        with pytest.raises(Overloaded) as error:
            world.open(1, client="a")
        assert error.value.limit == "max_key_reqs"
        world.finish(call.choices[0].uid)
        engine.close(world.open(1, client="a"))
        engine.close(call)
        with pytest.raises(InvalidRequest) as refusal:
            world.open(3, client="a")
        assert refusal.value.limit == "max_key_reqs"

    assert run(main, max_key_reqs=2).is_empty


def test_open_tokens_of_a_client_are_bounded() -> None:
    async def main(world: World) -> None:
        body = b'{"model":"m","prompt":[1,2,3],"max_tokens":7}'

        def call(client: str) -> asyncio.Task[Any]:
            return asyncio.create_task(start(world.engine, request(body), FACTS, "", client))

        first = call("a")
        await settle()
        with pytest.raises(Overloaded) as error:
            await call("a")
        assert error.value.limit == "max_key_tokens"
        other = call("b")
        await settle()
        assert [add.client for add in world.scheduler.sent] == ["a", "b"]
        for task in (first, other):
            task.cancel()
        await asyncio.gather(first, other, return_exceptions=True)

    assert run(main, max_key_tokens=15).is_empty


# --- turns in the tokenizer -----------------------------------------------------------------------


def _tokenize_order(tokenizers: int, calls: list[tuple[str, str]]) -> list[str]:
    """The first characters of the texts of (client, text), in the order of service.

    Each process works on one text after the other, and the last process is the fastest.
    """
    order: list[str] = []

    async def main(world: World) -> None:
        engine = world.engine
        opened = [world.open(1, client=name) for name, _ in calls]
        tasks = [
            asyncio.create_task(engine.ask(call, Question(TokenizeText(text=text))))
            for call, (_, text) in zip(opened, calls, strict=True)
        ]
        await settle()
        while not all(task.done() for task in tasks):
            box = next(box for box in reversed(world.tokenizers) if box.sent)
            message = box.sent.pop(0)
            order.append(message.text[0])
            engine.receive(TokenizeResult(uid=message.uid))
            await settle()
        for call in opened:
            engine.close(call)

    assert run(main, tokenizers=tokenizers).is_empty
    return order


LONG = 131_000


def test_the_tokenizer_serves_clients_in_turn() -> None:
    """A short text waits for one long text of another client, not for 16."""
    calls = [("hostile", name * LONG) for name in "abcdefghijklmnop"] + [("other", "hi")]
    assert _tokenize_order(1, calls) == ["a", "h", *"bcdefghijklmnop"]


def test_one_of_several_tokenizers_takes_no_long_text() -> None:
    """Even a short text of the same client passes the long ones."""
    calls = [("same", name * LONG) for name in "abcd"] + [("same", "hi")]
    assert _tokenize_order(2, calls)[0] == "h"


# --- the cost of one call -------------------------------------------------------------------------


def fitted(limit: int, **body: Any) -> tuple[list[int | None], int]:
    """max_tokens of each prompt, and the number of tokens of the call."""
    call = request(json.dumps({"model": "m", **body}).encode())
    prompts, tokens = fit_prompts(call, iter(()), None, FACTS, limit)
    return [prompt.sampling.max_tokens for prompt in prompts], tokens


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": [1, 2, 3], "max_tokens": 5}, 3 + 5),
        ({"prompt": [[1, 2], [3]], "max_tokens": 5, "n": 4}, 3 + 2 * 4 * 5),
        ({"prompt": [1, 2, 3], "max_tokens": 5, "logprobs": 20}, 3 + 5 * 22),
        # The prompt is scored once, not n times.
        ({"prompt": [1, 2, 3], "max_tokens": 5, "logprobs": 2, "n": 7, "echo": True}, 12 + 7 * 20),
    ],
)
def test_tokens_choices_and_log_probabilities_count(body: dict[str, Any], tokens: int) -> None:
    assert fitted(tokens, **body) == ([5] * len(fitted(tokens, **body)[0]), tokens)
    with pytest.raises(InvalidRequest) as error:
        fitted(tokens - 1, **body)
    assert error.value.limit == "max_call_tokens"


def test_a_call_without_max_tokens_gets_the_room_that_is_left() -> None:
    assert fitted(3 + 4 * 6, prompt=[1, 2, 3], n=4) == ([6], 3 + 4 * 6)
    with pytest.raises(InvalidRequest):
        fitted(3, prompt=[1, 2, 3], n=4)


def test_a_scored_prompt_is_sent_and_reported_once() -> None:
    async def main(world: World) -> None:
        body = b'{"model":"m","prompt":[1,2,3],"n":16,"echo":true,"logprobs":1,"max_tokens":1}'
        task = asyncio.create_task(start(world.engine, request(body), FACTS))
        await settle()
        world.answer()  # the text of the echo
        await settle()
        (add,) = world.scheduler.sent
        assert (add.count, len(add.token_ids)) == (16, 12)
        scored = [bool(message.options.prompt_ids) for message in world.detokenizer.sent]
        assert scored == [True] + [False] * 15
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert run(main).is_empty


# --- the event loop -------------------------------------------------------------------------------


LISTS = b",".join([b"[]"] * (2**16 - 3))
OBJECTS = b",".join([b"{}"] * (2**16 - 3))
FIELDS = b",".join(b'"%d":0' % i for i in range(2**16 - 1))


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (b'{"a":[' + LISTS + b"%s]}", b",[]"),
        (b'{"a":[' + OBJECTS + b"%s]}", b",{}"),
        (b"{" + FIELDS + b"%s}", b',"a":0'),
        (b'{"a":[' + b"1," * 2**19 + b"1%s]}", b",1"),
        (b'{"a":"\\"' + b"[" * 2**16 + b'","b":[' + LISTS[3:] + b"%s]}", b",[]"),
    ],
)
def test_a_body_has_at_most_65536_lists_and_fields_and_524288_values(
    body: bytes, more: bytes
) -> None:
    """The counts bound the time of the event loop. The last body needs a count without strings."""
    parse_body(body % b"")
    with pytest.raises(InvalidRequest) as error:
        parse_body(body % more)
    assert error.value.limit == "max_body_values"


@pytest.mark.parametrize("text", ["[" * 2**18, '{":,\\' * 2**16, "," * 2**21, 'a\\"[' * 2**16])
def test_characters_in_a_text_are_no_values(text: str) -> None:
    body = {"prompt": text, "n": [1, {"a": "b"}]}
    assert parse_body(msgspec.json.encode(body)) == body


def _scored(count: int, top: int) -> list[TokenLogprob]:
    tops = [(b"t%d" % i, -float(i)) for i in range(top)]
    return [TokenLogprob(b"x", -1.0, index, tops) for index in range(count)]


@pytest.mark.parametrize("stream", [False, True])
def test_other_calls_are_served_while_a_large_answer_is_encoded(stream: bool) -> None:
    """Other tasks run at least once for each choice."""
    tokens, top, n = 4000, 20, 2

    async def main(world: World) -> None:
        body = {"model": "m", "prompt": "hi", "logprobs": top, "n": n, "stream": stream}
        call = RequestConverter(CONFIG).read(COMPLETIONS, json.dumps(body).encode(), FACTS)
        generation = world.open(n)
        for choice in generation.choices:
            world.update(choice.uid, "x" * tokens, logprobs=_scored(tokens, top))
            world.finish(choice.uid)
        turns = itertools.count()

        async def count_turns() -> None:
            while True:
                next(turns)
                await asyncio.sleep(0)

        counter = asyncio.create_task(count_turns())
        writer = ResponseWriter(call)
        if stream:
            sent = b"".join([event async for event in events(generation, writer)])
            chunks = [json.loads(line[6:]) for line in sent.split(b"\n\n")[:-2]]
            found = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
            assert sum(len(each["tokens"]) for each in found) == n * tokens
        else:
            answer = msgspec.json.decode(
                await writer.whole(generation), type=responses.TextCompletion
            )
            for whole in answer.choices:
                assert whole.logprobs is not None
                assert whole.logprobs.text_offset == list(range(tokens))
                assert len(whole.logprobs.top_logprobs) == tokens
        counter.cancel()
        assert next(turns) >= n
        world.engine.close(generation)

    assert run(main).is_empty


# --- metrics --------------------------------------------------------------------------------------


def test_series_of_keys_are_bounded() -> None:
    metrics = Metrics("m", clients=[f"team-{i:03}" for i in range(200)])
    for i in range(200):
        metrics.on_refused(Overloaded("full"), Phase.READY, f"team-{i:03}")
    body, _ = metrics.render("", Phase.READY, False, {"team-001": 2, "team-199": 3})
    families = {f.name: f for f in text_string_to_metric_families(body.decode())}
    rejected = {s.labels["key"]: s.value for s in families["minisgl_key_rejected"].samples}
    assert len(rejected) == 65
    assert rejected["team-000"] == 1
    assert rejected["other"] == 200 - 63
    is_open = {s.labels["key"]: s.value for s in families["minisgl_key_requests_open"].samples}
    assert (is_open["team-001"], is_open["other"], is_open["default"]) == (2, 3, 0)
