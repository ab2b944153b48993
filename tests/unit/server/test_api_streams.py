"""Streams of Responses and Messages: the order of events, and their equality with whole answers.

Random outputs are split into random updates. The types and accumulators of the openai and anthropic
packages read the events, and a state machine per API checks their order.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from minisgl.core import Cancelled, FinishReason
from minisgl.message.messages import ToolCallDelta
from minisgl.protocol.requests import MESSAGES, RESPONSES
from minisgl.request.convert import RequestConverter
from minisgl.server.answer.messages import MessagesWriter
from minisgl.server.answer.responses import ResponsesWriter
from minisgl.server.answer.stream import events
from tests.examples import examples
from tests.unit.server.fakes import CONFIG, FACTS, World

KNOWS = msgspec.structs.replace(FACTS, tool_format="hermes")
BODIES: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "hi", "tools": [{"type": "function", "name": "f"}]},
    MESSAGES: {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    },
}
WRITERS: dict[str, Callable[[Any], Any]] = {RESPONSES: ResponsesWriter, MESSAGES: MessagesWriter}
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

# One part of an output: reasoning, text, a call (its name), or a piece of the call's arguments.
Part = tuple[str, str]
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5)
ARGUMENTS = ('{"a": ', '"é\\n", "b": {}', "}")


@st.composite
def outputs(draw: st.DrawFn) -> list[Part]:
    """Parts in the order in which a model may write them. The arguments of a call are JSON."""
    parts: list[Part] = []
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", "call"]), max_size=5)):
        if kind == "call":
            parts.append(("call", draw(st.sampled_from(["f", "g"]))))
            parts += [("arguments", piece) for piece in ARGUMENTS]
        else:
            parts += [(kind, piece) for piece in draw(st.lists(texts, min_size=1, max_size=3))]
    return parts


def updates(parts: list[Part], cuts: set[int]) -> Iterator[dict[str, Any]]:
    """The parts as the fields of updates. cuts: indices of parts with which an update begins."""
    update: dict[str, Any] = {"text": "", "reasoning": "", "calls": []}
    calls = 0
    for index, (kind, value) in enumerate(parts):
        if index in cuts:
            yield update
            update = {"text": "", "reasoning": "", "calls": []}
        if kind == "call":
            calls += 1
            update["calls"].append(ToolCallDelta(calls - 1, "", f"call_{calls}", value))
        elif kind == "arguments":
            update["calls"].append(ToolCallDelta(calls - 1, value))
        else:
            update[kind] += value
    yield update


def request_of(route: str, **more: Any) -> Any:
    body = {"model": "m", "stream": True, **BODIES[route], **more}
    return RequestConverter(CONFIG).read(route, json.dumps(body).encode(), KNOWS)


def run(
    route: str,
    given_updates: list[dict[str, Any]],
    wakes: list[bool],
    finish: FinishReason | None,
    **more: Any,
) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]:
    """The events of a stream with their names, and the whole answer for the same updates.

    wakes: whether the stream reads after each update. finish None: an operator aborts the call.
    """

    async def main() -> tuple[bytes, bytes]:
        world = World()
        stream, whole = world.open(1, "one"), world.open(1, "two")
        writer, pieces = WRITERS[route](request_of(route, **more)), []

        async def read() -> None:
            async for piece in events(stream, writer):
                pieces.append(piece)

        reader = asyncio.ensure_future(read())
        for update, wake in zip(given_updates, wakes, strict=False):
            for generation in (stream, whole):
                world.update(generation.choices[0].uid, **update)
            for _ in range(4 * wake):
                await asyncio.sleep(0)
        if finish is None:
            world.engine.end(stream, Cancelled("this request was aborted by an operator"))
        else:
            for generation in (stream, whole):
                world.finish(generation.choices[0].uid, finish)
        await reader
        body = b"{}"
        if finish is not None:
            body = await WRITERS[route](request_of(route, **more)).whole(whole)
        for generation in (stream, whole):
            world.engine.close(generation)
        return b"".join(pieces), body

    raw, body = asyncio.run(main())
    *blocks, rest = raw.decode().split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    for name, event in found:
        assert name == event["type"]
    return found, json.loads(body)


def joined(parts: list[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, text, and the calls with their arguments."""
    reasoning = "".join(value for kind, value in parts if kind == "reasoning")
    text = "".join(value for kind, value in parts if kind == "text")
    calls = [(value, "".join(ARGUMENTS)) for kind, value in parts if kind == "call"]
    return reasoning, text, calls


class ResponsesOrder:
    """The order of the events of one answer of the Responses API."""

    def __init__(self) -> None:
        self.state = "new"
        self.items = 0
        self.kind = ""
        self.sent = ""

    def event(self, number: int, event: dict[str, Any]) -> None:
        assert event["sequence_number"] == number
        name = event["type"].removeprefix("response.")
        if "output_index" in event:
            assert event["output_index"] == self.items
        steps = {
            ("new", "created"): "created",
            ("created", "in_progress"): "between",
            ("between", "output_item.added"): "item",
            ("item", "content_part.added"): "part",
            ("part", "output_text.delta"): "part",
            ("part", "reasoning_text.delta"): "part",
            ("item", "function_call_arguments.delta"): "item",
            ("part", "output_text.done"): "text done",
            ("part", "reasoning_text.done"): "text done",
            ("item", "function_call_arguments.done"): "part done",
            ("text done", "content_part.done"): "part done",
            ("part done", "output_item.done"): "between",
            ("between", "completed"): "end",
            ("between", "incomplete"): "end",
        }
        if name == "failed":
            assert self.state not in ("new", "end")
            self.state = "end"
            return
        assert (self.state, name) in steps, f"{name} after {self.state}"
        self.state = steps[self.state, name]
        if name == "output_item.added":
            self.kind, self.sent = event["item"]["type"], ""
        if name.endswith(".delta"):
            self.sent += event["delta"]
        if name.endswith("_text.done"):
            assert event["text"] == self.sent
        if name == "function_call_arguments.done":
            assert event["arguments"] == self.sent
        if name == "output_item.done":
            self.items += 1
        starts = {"message": "output_text", "reasoning": "reasoning_text"}
        if name.endswith("_text.delta"):
            assert name.startswith(starts[self.kind])


class MessagesOrder:
    """The order of the events of one answer of the Messages API."""

    def __init__(self) -> None:
        self.state = "new"
        self.blocks = 0
        self.kind = ""

    def event(self, number: int, event: dict[str, Any]) -> None:
        steps = {
            ("new", "message_start"): "between",
            ("between", "content_block_start"): "block",
            ("block", "content_block_delta"): "block",
            ("block", "content_block_stop"): "between",
            ("between", "message_delta"): "stopped",
            ("stopped", "message_stop"): "end",
        }
        name = event["type"]
        if name == "error":
            assert self.state not in ("new", "end")
            self.state = "end"
            return
        assert (self.state, name) in steps, f"{name} after {self.state}"
        self.state = steps[self.state, name]
        if "index" in event:
            assert event["index"] == self.blocks
        if name == "content_block_start":
            self.kind = event["content_block"]["type"]
        if name == "content_block_delta":
            kinds = {"text": "text", "thinking": "thinking", "tool_use": "input_json"}
            assert event["delta"]["type"] == kinds[self.kind] + "_delta"
        self.blocks += name == "content_block_stop"


def check_responses(found: list[tuple[str, Any]], whole: Any, parts: list[Part]) -> None:
    state: Any = ResponseStreamState(text_format=omit, input_tools=omit)
    for _, event in found:
        state.handle_event(RESPONSE_EVENT.validate_python(event, strict=True))
    last = found[-1][1]
    if last["type"] == "response.failed":
        assert last["response"]["error"]["message"] == "this request was aborted by an operator"
        return
    Response.model_validate(whole, strict=True)
    for response in (last["response"], whole):
        assert content_of_response(response) == joined(parts)
    deltas = [event for _, event in found if event["type"].endswith(".delta")]
    sent = {
        kind: "".join(e["delta"] for e in deltas if kind in e["type"])
        for kind in ("reasoning_text", "output_text")
    }
    assert (sent["reasoning_text"], sent["output_text"]) == joined(parts)[:2]
    assert last["response"]["usage"] == whole["usage"]
    if last["type"] == "response.completed":
        ours = Response.model_validate(last["response"]).model_dump()["output"]
        assert [strip(one) for one in state._completed_response.model_dump()["output"]] == [
            strip(one) for one in ours
        ], "the client accumulates the same answer"


def strip(item: dict[str, Any]) -> dict[str, Any]:
    """Without the fields that the client adds when it parses."""
    content = item.get("content")
    kept = {k: v for k, v in item.items() if k not in ("content", "parsed_arguments") and v}
    if content:
        kept["content"] = [{k: v for k, v in part.items() if k != "parsed"} for part in content]
    return kept


def content_of_response(response: Any) -> tuple[str, str, list[tuple[str, str]]]:
    items = response["output"]
    texts = {
        kind: "".join(part["text"] for i in items if i["type"] == kind for part in i["content"])
        for kind in ("reasoning", "message")
    }
    calls = [(i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]
    return texts["reasoning"], texts["message"], calls


def check_messages(found: list[tuple[str, Any]], whole: Any, parts: list[Part]) -> None:
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for _, event in found:
        if event["type"] == "error":
            assert event["error"]["message"] == "this request was aborted by an operator"
            return
        typed = MESSAGE_EVENT.validate_python(event, strict=True)
        snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=buffers)
    for message in (snapshot.to_dict(), Message.model_validate(whole, strict=True).to_dict()):
        blocks: Any = message["content"]
        reasoning = "".join(b["thinking"] for b in blocks if b["type"] == "thinking")
        text = "".join(b["text"] for b in blocks if b["type"] == "text")
        calls = [(b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        expected = joined(parts)
        assert (reasoning, text) == expected[:2]
        assert calls == [(name, json.loads(arguments)) for name, arguments in expected[2]]
    assert snapshot.stop_reason == whole["stop_reason"]
    assert snapshot.usage.output_tokens == whole["usage"]["output_tokens"]


CHECKS = {RESPONSES: (ResponsesOrder, check_responses), MESSAGES: (MessagesOrder, check_messages)}


@pytest.mark.parametrize("route", CHECKS)
@settings(max_examples=examples(150))
@given(
    outputs(),
    st.sets(st.integers(0, 30)),
    st.lists(st.booleans(), min_size=31, max_size=31),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, None]),
)
def test_events_are_in_order_and_give_the_whole_answer(
    route: str,
    parts: list[Part],
    cuts: set[int],
    wakes: list[bool],
    finish: FinishReason | None,
) -> None:
    found, whole = run(route, list(updates(parts, cuts)), wakes, finish)
    make_order, check = CHECKS[route]
    order = make_order()
    for number, (_, event) in enumerate(found):
        order.event(number, event)
    assert order.state == "end"
    check(found, whole, parts)


@pytest.mark.parametrize("route", CHECKS)
def test_blocks_are_closed_before_the_next_one_begins(route: str) -> None:
    parts = [("reasoning", "r"), ("text", "a"), ("call", "f"), ("arguments", "{}"), ("text", "b")]
    given_updates = list(updates(parts, set(range(5))))
    found, _ = run(route, given_updates, [True] * 9, FinishReason.STOP)
    kinds = [
        (event.get("item") or event.get("content_block"))["type"]
        for name, event in found
        if name in ("response.output_item.added", "content_block_start")
    ]
    assert [kind for kind, _ in groupby(kinds)] == kinds
    assert len(kinds) == 4


def test_stop_reasons_of_messages() -> None:
    call = ToolCallDelta(0, "", "call_1", "f")
    cases: list[tuple[dict[str, Any], FinishReason, tuple[str, str | None]]] = [
        ({"text": "a"}, FinishReason.STOP, ("end_turn", None)),
        ({"text": "a"}, FinishReason.LENGTH, ("max_tokens", None)),
        ({"calls": [call]}, FinishReason.STOP, ("tool_use", None)),
        ({"calls": [call]}, FinishReason.LENGTH, ("max_tokens", None)),
    ]
    for update, finish, expected in cases:
        found, whole = run(MESSAGES, [update], [True], finish)
        delta = found[-2][1]["delta"]
        assert (delta["stop_reason"], delta["stop_sequence"]) == expected
        assert (whole["stop_reason"], whole["stop_sequence"]) == expected


def test_arguments_that_were_cut_are_an_empty_object() -> None:
    calls = [ToolCallDelta(0, "", "call_1", "f"), ToolCallDelta(0, '{"a": [1')]
    found, whole = run(MESSAGES, [{"calls": calls}], [True], FinishReason.LENGTH)
    assert whole["content"][0]["input"] == {}
    pieces = [e["delta"]["partial_json"] for n, e in found if n == "content_block_delta"]
    assert pieces == ['{"a": [1']


@pytest.mark.parametrize("route", CHECKS)
def test_the_limit_of_tokens_makes_an_answer_incomplete(route: str) -> None:
    found, whole = run(route, [{"text": "a"}], [True], FinishReason.LENGTH)
    if route == RESPONSES:
        assert found[-1][0] == "response.incomplete"
        assert whole["status"] == whole["output"][0]["status"] == "incomplete"
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    else:
        assert whole["stop_reason"] == "max_tokens"
