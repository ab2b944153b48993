"""Optional parts of answers of the Responses API, and their way back in a later request."""

from typing import Any

import pytest
from openai.types.responses import Response

from minisgl.core import FinishReason, InvalidRequest, RequestError, Unsupported
from minisgl.message.messages import TokenLogprob
from minisgl.protocol.requests import INPUT_TOKENS, RESPONSES
from minisgl.request.convert import RequestConverter
from minisgl.request.sealed import seal, unseal
from tests.unit.server.fakes import CONFIG
from tests.unit.server.test_api_requests import KNOWS, chat_of, responses, user
from tests.unit.server.test_api_streams import RESPONSE_EVENT, run

ENCRYPTED = {"include": ["reasoning.encrypted_content"]}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
THOUGHTS = [
    {"text": "", "reasoning": "h\u00e9", "calls": []},
    {"text": "", "reasoning": "m", "calls": []},
]
SPOKEN = {"text": "five", "reasoning": "", "calls": []}


def answered(*updates: dict[str, Any], **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The events of a stream, and the whole answer. OpenAI's types accept both."""
    found, whole = run(RESPONSES, [*updates], [True] * len(updates), FinishReason.STOP, **body)
    for _, event in found:
        RESPONSE_EVENT.validate_python(event)
    Response.model_validate(whole)
    return [event for _, event in found], whole


def test_a_summary_has_the_whole_reasoning_in_its_own_events() -> None:
    """Clients such as Vercel's SDK read no other reasoning."""
    events, whole = answered(*THOUGHTS, SPOKEN, reasoning={"summary": "auto"})
    (item,) = (item for item in whole["output"] if item["type"] == "reasoning")
    assert item["summary"] == [{"type": "summary_text", "text": "h\u00e9m"}]
    assert item["content"] == []
    assert [event["type"] for event in events if "summary_index" in event] == [
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
    ]
    streamed = events[-1]["response"]["output"][0]
    assert {**streamed, "id": item["id"]} == item
    assert whole["reasoning"] == {"summary": "auto"}


@pytest.mark.parametrize("summary", [None, "detailed"])
@pytest.mark.parametrize("kept", ["encrypted_content", "summary", "content"])
def test_reasoning_survives_a_tool_loop(summary: str | None, kept: str) -> None:
    """A client sends an item back with the fields that it knows."""
    asked = {"reasoning": {"summary": summary}} if summary else {}
    _, whole = answered(*THOUGHTS, SPOKEN, **asked, **ENCRYPTED)
    item = whole["output"][0]
    assert unseal(item["encrypted_content"]) == "h\u00e9m"
    if not item[kept]:
        assert kept == ("content" if summary else "summary")
        return
    sent = {"type": "reasoning", "id": item["id"], "summary": [], kept: item[kept]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    chat = chat_of(responses(input=[user("a"), sent, call]))
    assert chat[1]["reasoning_content"] == "h\u00e9m"


def test_encrypted_content_is_only_in_answers_that_include_it() -> None:
    _, whole = answered(*THOUGHTS, SPOKEN)
    assert "encrypted_content" not in whole["output"][0]


def test_encrypted_content_of_another_server_is_refused_unless_the_text_is_there() -> None:
    item = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"}
    for foreign in ("gAAAAAB", "minisgl-\u00e9", "minisgl-A", "minisgl-_w=="):
        with pytest.raises(InvalidRequest, match="leave this item out") as refused:
            responses(input=[user("a"), item | {"encrypted_content": foreign}])
        assert refused.value.param == "input[1].encrypted_content"
    text = {"summary": [{"type": "summary_text", "text": "hm"}]}
    assert chat_of(responses(input=[user("a"), item | text]))[1]["reasoning_content"] == "hm"
    assert unseal(seal("")) == ""


def entry(text: str) -> TokenLogprob:
    return TokenLogprob(text.encode(), -0.5, 0, [(text.encode(), -0.5)])


def test_log_probabilities_are_those_of_the_text() -> None:
    """The reasoning and its tags have none. A token may be withheld and come with a later text."""
    updates = [
        {"text": "", "reasoning": "five", "calls": [], "logprobs": [entry("<t>"), entry("five")]},
        {"text": "\nfi", "reasoning": "", "calls": [], "logprobs": [entry("</t>"), entry("\nfi")]},
        {"text": "", "reasoning": "", "calls": [], "logprobs": [entry("ve")]},
        {"text": "ve!", "reasoning": "", "calls": [], "logprobs": [entry("!")]},
    ]
    events, whole = answered(*updates, **LOGPROBS)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [[e["token"] for e in event["logprobs"]] for event in deltas] == [["\nfi"], ["ve", "!"]]
    found = [event["logprobs"] for event in events if event["type"] == "response.output_text.done"]
    (content,) = whole["output"][1]["content"]
    assert [one["token"] for one in content["logprobs"]] == ["\nfi", "ve", "!"]
    assert found == [content["logprobs"]]
    assert content["logprobs"][0]["top_logprobs"][0]["logprob"] == -0.5
    assert whole["top_logprobs"] == 1


def test_top_logprobs_need_the_word_in_include() -> None:
    with pytest.raises(
        InvalidRequest, match=r"only with message\.output_text\.logprobs in include"
    ):
        responses(input="a", top_logprobs=2)
    assert responses(input="a", **LOGPROBS).sampling.logprobs == 1
    assert responses(input="a").sampling.logprobs is None


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "f"},
        {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}, {"type": "mcp", "server_label": "s"}],
        },
    ],
)
def test_the_tool_choice_is_echoed_as_sent(choice: Any) -> None:
    _, whole = answered(SPOKEN, tool_choice=choice)
    assert whole["tool_choice"] == choice


def test_a_reference_to_an_item_is_refused_with_the_way_to_send_it() -> None:
    with pytest.raises(Unsupported, match="with store set to false") as refused:
        responses(input=[user("a"), {"type": "item_reference", "id": "msg_1"}])
    assert refused.value.param == "input[1]"


def test_input_tokens_has_the_prompt_of_the_request() -> None:
    body = (
        b'{"model": "m", "input": "hi", "instructions": "be brief", "reasoning": {"effort": "low"}}'
    )
    prompt, name = RequestConverter(CONFIG).read_prompt(INPUT_TOKENS, body, KNOWS)
    asked = responses(input="hi", instructions="be brief", reasoning={"effort": "low"})
    assert (name, prompt) == asked.prompts[0]
    with pytest.raises(RequestError, match="max_output_tokens"):
        RequestConverter(CONFIG).read_prompt(
            INPUT_TOKENS, body[:-1] + b', "max_output_tokens": 1}', KNOWS
        )
