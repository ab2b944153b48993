"""Chats of LLM: tools, reasoning and the path of the server's converter."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from minisgl.core import FinishReason, InvalidRequest, SamplingParams
from minisgl.llm import LLM, Completion
from minisgl.llm.results import ToolCall

GREEDY = SamplingParams(temperature=0.0, max_tokens=90)
SPELL = [{"role": "user", "content": "Spell the word planet."}]
ASKED = [{"role": "user", "content": "Weather in Rome?"}]
CITY = {"type": "string", "maxLength": 8}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": CITY},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_pages=128, max_seq_len=512) as llm:
        yield llm


def one(found: Completion | list[Completion]) -> Completion:
    assert isinstance(found, Completion)
    return found


@pytest.mark.parametrize("stop", [(), "zz"])
def test_a_required_call_follows_the_schema_of_its_tool(llm: LLM, stop: Any) -> None:
    """With a stop string the text comes at each token, otherwise at the end."""
    found = one(
        llm.chat(ASKED, GREEDY, stop=stop, tools=[WEATHER], tool_choice="required", progress=False)
    )
    (call,) = found.tool_calls
    assert isinstance(call, ToolCall)
    assert call.name == "get_weather"
    assert call.id
    assert [*json.loads(call.arguments)] == ["city"]
    assert (found.text, found.finish_reason) == ("", FinishReason.STOP)


def test_the_next_turn_of_a_chat_may_have_a_call_and_its_result(llm: LLM) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    called = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}
    called["tool_calls"][0]["function"] = function  # type: ignore[index]
    chat = [*ASKED, called, {"role": "tool", "tool_call_id": "c", "content": "sunny"}]
    found = one(llm.chat(chat, GREEDY, tools=[WEATHER], progress=False))
    assert found.error is None
    assert found.prompt_tokens > len(llm.tokenizer.encode_chat(ASKED))


@pytest.mark.parametrize("stop", [(), "zz"])
def test_the_reasoning_of_a_chat_is_apart_from_its_text(
    llm: LLM, stop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo model does not think, so two tokens of its answer stand for the marks."""
    plain = one(llm.chat(SPELL, GREEDY, progress=False))
    assert plain.text == "p-l-a-n-e-t"
    pieces = [llm.tokenizer.vocabulary.decode([each]) for each in plain.token_ids]
    marks = plain.token_ids[0], plain.token_ids[pieces.index("n")]
    thinking = dataclasses.replace(llm.tokenizer.vocabulary, think_ids=marks)
    monkeypatch.setattr(llm.tokenizer, "vocabulary", thinking)
    found = one(llm.chat(SPELL, GREEDY, stop=stop, progress=False))
    assert (found.reasoning, found.text) == ("-l-a-", "-e-t")
    assert found.token_ids == plain.token_ids
    text = one(llm.generate(llm.tokenizer.render_chat(SPELL), GREEDY, progress=False))
    assert text.text == plain.text


def test_log_probabilities_of_a_chat_are_those_of_its_tokens(llm: LLM) -> None:
    asked = SamplingParams(temperature=0.0, max_tokens=24, logprobs=1)
    found = one(llm.chat(SPELL, asked, progress=False))
    assert [each.token_id for each in found.logprobs] == found.token_ids
    assert all(each.top[0].token_id == each.token_id for each in found.logprobs)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "regex": "a"}, "regex"),
        ({"template_options": {"a": object()}}, "template_options"),
    ],
)
def test_a_refusal_names_the_argument(llm: LLM, arguments: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.chat(ASKED, GREEDY, progress=False, **arguments)
    assert caught.value.param == param


def test_steps_after_a_stop_string_add_no_log_probabilities(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks in other processes compute further steps before the abort arrives.

    Regression: their log-probabilities ended the call with a KeyError.
    """
    asked = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    expected = one(llm.chat(SPELL, asked, stop="n", progress=False))
    step = llm.worker.step
    monkeypatch.setattr(llm.worker, "step", lambda: [*step(), *step(), *step()])
    found = one(llm.chat(SPELL, asked, stop="n", progress=False))
    assert dataclasses.replace(found, cached_tokens=0) == dataclasses.replace(
        expected, cached_tokens=0
    )
