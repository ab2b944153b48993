"""Harmony: its messages become reasoning, content and calls, the same for every split in steps."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core import FinishReason
from minisgl.message.messages import (
    Finished,
    PrefillDone,
    StartText,
    StepOutput,
    TextOptions,
    TextUpdate,
    TokenLogprobs,
    ToolOptions,
)
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.vocab import Vocabulary
from minisgl.tool_calls.formats import ToolCallParsers
from minisgl.tool_calls.formats.harmony import MARKERS
from tests.unit.tool_calls.answers import load_template, parse

TABLE = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in MARKERS)]
IDS = {text: 256 + index for index, text in enumerate(MARKERS)}
VOCABULARY = Vocabulary(TABLE, frozenset(IDS.values()))
TOOLS = ToolOptions(format="harmony", parameters={"f": {}, "g": {}})
NO_TOOLS = ToolOptions(format="harmony", parameters={})
PUBLISHED = Path(__file__).parents[2] / "data" / "templates" / "openai-gpt-oss-20b.jinja"


def tokens_of(text: str) -> list[int]:
    """One token for each marker, and one for each byte of all other text."""
    ids: list[int] = []
    while text:
        marker = next((marker for marker in MARKERS if text.startswith(marker)), "")
        if marker:
            ids.append(IDS[marker])
        else:
            ids += text[0].encode()
        text = text[len(marker) or 1 :]
    return ids


# The tokenizer of gpt-oss has one token for the role.
PROMPT = tokens_of("<|end|><|start|>asst")
THOUGHT = "<|channel|>analysis<|message|>Hé, so: <think> {}\n<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "hé"}'
FINAL = "<|channel|>final<|message|>\nDone: ok <|not a marker|> "


def updates(
    text: str,
    options: TextOptions,
    steps: list[int] | None = None,
    reason: FinishReason = FinishReason.STOP,
) -> list[TextUpdate]:
    """The updates of an answer whose tokens arrive in steps that end at these positions.

    With STOP, a last token ends the answer, as <|return|> and <|call|> do.
    """
    tokens = tokens_of(text) + [IDS["<|return|>"]] * (reason is FinishReason.STOP)
    detokenizer = Detokenizer(VOCABULARY, ToolCallParsers(VOCABULARY))
    detokenizer.handle(StartText(uid=1, options=options))
    borders = sorted({*(steps if steps is not None else range(len(tokens))), len(tokens)})
    found: list[TextUpdate] = []
    for number, (begin, end) in enumerate(itertools.pairwise([0, *borders])):
        part = tokens[begin:end]
        output = StepOutput(
            step_id=number,
            prefill_done=[PrefillDone(uid=1, prompt_tokens=1, cached_tokens=0)] * (number == 0),
            uids=[1] * len(part),
            token_ids=part,
            logprobs=[
                TokenLogprobs(uid=1, position=1, logprobs=[-1.0], top_ids=[[]], top_logprobs=[[]])
                for _ in part
            ],
            finished=[Finished(uid=1, reason=reason)] * (end == len(tokens)),
        )
        answer = detokenizer.handle(output)
        found += answer.updates if answer is not None else []
    return found


def options_of(**changes: Any) -> TextOptions:
    return TextOptions(**{"prompt_tail": PROMPT, "reasoning": True, "tools": TOOLS, **changes})


def answer_of(found: list[TextUpdate]) -> tuple[str, str, list[tuple[str, str]]]:
    """The reasoning, the content, and the calls with the text of their arguments."""
    names: list[str] = []
    arguments: list[str] = []
    for update in found:
        for part in update.calls:
            if part.id:
                names.append(part.name)
                arguments.append("")
            arguments[part.index] += part.arguments
    texts = ["".join(getattr(u, kind) for u in found) for kind in ("reasoning", "text")]
    return texts[0], texts[1], list(zip(names, arguments, strict=True))


def test_channels_become_reasoning_content_and_calls() -> None:
    found = updates(THOUGHT + CALL, options_of())
    assert answer_of(found) == ("Hé, so: <think> {}\n", "", [("f", '{"a": "hé"}')])
    found = updates(THOUGHT + FINAL, options_of())
    assert answer_of(found) == ("Hé, so: <think> {}\n", "\nDone: ok <|not a marker|> ", [])
    assert found[-1].finish is FinishReason.STOP
    assert sum(update.call_failures for update in found) == 0


@pytest.mark.parametrize(
    "header",
    [
        " to=functions.f<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>commentary to=functions.f code<|message|>",
        "<|channel|>analysis to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=f <|constrain|>json<|message|>",
        "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
    ],
)
def test_the_recipient_may_stand_in_every_part_of_a_header(header: str) -> None:
    assert answer_of(updates(header + "{}", options_of())) == ("", "", [("f", "{}")])


def test_comments_are_content_and_tools_of_the_model_are_reasoning() -> None:
    comment = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    python = "<|channel|>commentary to=python code<|message|>1 + 1<|end|><|start|>assistant"
    found = answer_of(updates(comment + python + THOUGHT + CALL, options_of()))
    assert found == ("1 + 1Hé, so: <think> {}\n", "I look.", [("f", '{"a": "hé"}')])


def test_several_calls_have_indices_in_order() -> None:
    second = "<|call|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>[1]"
    found = updates(CALL + second, options_of())
    assert answer_of(found) == ("", "", [("f", '{"a": "hé"}'), ("g", "[1]")])
    ids = [part.id for update in found for part in update.calls if part.id]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("end", range(1, len(tokens_of(THOUGHT + CALL))))
def test_an_answer_that_is_cut_keeps_its_reason(end: int) -> None:
    """Headers that are cut are left out; arguments that are cut count as a failure."""
    whole = tokens_of(THOUGHT + CALL)
    text = b"".join(TABLE[token] for token in whole[:end])
    if text != text.decode(errors="ignore").encode():
        pytest.skip("the cut divides a character")
    found = updates(text.decode(), options_of(), reason=FinishReason.LENGTH)
    reasoning, content, calls = answer_of(found)
    assert "Hé, so: <think> {}\n".startswith(reasoning)
    assert content == ""
    assert found[-1].finish is FinishReason.LENGTH
    is_cut = bool(calls) and calls[0][1] != '{"a": "hé"}'
    assert sum(update.call_failures for update in found) == is_cut


def test_text_without_a_header_is_content() -> None:
    for text in ("Hello", "to", " t", "to= or not to=", "", "a <b> \n"):
        for reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert answer_of(updates(text, options_of(), reason=reason))[1] == text


def test_without_tools_a_message_to_a_function_is_content() -> None:
    found = answer_of(updates(THOUGHT + CALL, options_of(tools=NO_TOOLS)))
    assert found == ("Hé, so: <think> {}\n", '{"a": "hé"}', [])


def test_reasoning_that_is_not_separate_is_content() -> None:
    found = answer_of(updates(THOUGHT + FINAL, options_of(reasoning=False)))
    assert found == ("", "Hé, so: <think> {}\n\nDone: ok <|not a marker|> ", [])


def test_stop_strings_do_not_match_headers() -> None:
    options = options_of(stop=["final", "assistant", "ok"])
    found = updates(THOUGHT + FINAL, options)
    assert answer_of(found) == ("Hé, so: <think> {}\n", "\nDone: ", [])
    assert found[-1].stop_string == "ok"


def test_log_probabilities_belong_to_the_text_of_messages() -> None:
    found = updates(THOUGHT + FINAL, options_of())
    entries = [entry for update in found for entry in update.logprobs]
    text = "Hé, so: <think> {}\n" + "\nDone: ok <|not a marker|> "
    assert b"".join(entry.token_bytes for entry in entries) == text.encode() + b"<|return|>"
    assert found[-1].completion_tokens == len(tokens_of(THOUGHT + FINAL)) + 1
    assert found[-1].reasoning_tokens == len("Hé, so: <think> {}\n".encode())


def test_an_answer_that_continues_a_message_has_no_header() -> None:
    for prompt in ("<|start|>assistant<|channel|>final<|message|>Well", "a long end of a message"):
        options = options_of(prompt_tail=tokens_of(prompt)[-8:])
        assert answer_of(updates(" to=x", options)) == ("", " to=x", [])
    options = options_of(prompt_tail=tokens_of("<|start|>assistant<|channel|>analysis<|message|>"))
    found = updates("Hm.<|end|><|start|>assistant" + FINAL, options)
    assert answer_of(found) == ("Hm.", "\nDone: ok <|not a marker|> ", [])


pieces = st.sampled_from(
    [*MARKERS, "analysis", "final", " to=functions.f", "to=", "assistant", "é"]
)


@given(st.lists(st.integers(0, 200)))
def test_steps_of_any_size_give_the_same_answer(steps: list[int]) -> None:
    text = THOUGHT + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + CALL
    whole = answer_of(updates(text, options_of()))
    assert answer_of(updates(text, options_of(), steps)) == whole
    assert whole[1:] == ("I look.", [("f", '{"a": "hé"}')])


@given(st.lists(pieces | st.text(max_size=5), max_size=12), st.lists(st.integers(0, 80)))
def test_any_answer_is_the_same_for_every_split(parts: list[str], steps: list[int]) -> None:
    text = "".join(parts).encode("utf-8", "replace").decode()
    one_by_one = answer_of(updates(text, options_of()))
    assert answer_of(updates(text, options_of(), steps)) == one_by_one
    assert answer_of(updates(text, options_of(at_end=True))) == one_by_one
    shown = one_by_one[0] + one_by_one[1] + "".join(text for _, text in one_by_one[2])
    assert not any(marker in shown for marker in MARKERS)


def test_the_published_template_renders_effort_date_tools_and_history() -> None:
    template = load_template(PUBLISHED)
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "the city"},
            "days": {"type": "integer"},
        },
        "required": ["city"],
    }
    tools = [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"city": "Rom"}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call], "thinking": "I ask."},
        {"role": "tool", "content": "sun", "tool_call_id": "1"},
    ]
    text = template.render(messages, {"tools": tools, "reasoning_effort": "high"})
    assert text.startswith("<|start|>system<|message|>You are ChatGPT")
    for part in (
        "\nKnowledge cutoff: 2024-06\nCurrent date: ",
        "\n\nReasoning: high\n\n# Valid channels: analysis, commentary, final.",
        "<|start|>developer<|message|># Instructions\n\nBe kind.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n// d\ntype f = (_: {\n// the city\ncity: string,\ndays?: number,"
        "\n}) => any;\n\n} // namespace functions<|end|>",
    ):
        assert part in text
    assert text.endswith(
        "<|start|>user<|message|>Weather?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>I ask.<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"city": "Rom"}'
        '<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>"sun"<|end|>'
        "<|start|>assistant"
    )
    answer = text[text.rindex(" to=functions.f<|channel|>") : text.index("<|start|>functions.f")]
    assert parse("harmony", [answer], {"f": schema}).calls == [("f", {"city": "Rom"})]
    assert "Reasoning: medium" in template.render(messages[1:2], {})


def test_the_arguments_of_a_call_are_as_written() -> None:
    text = '{"a":1 ,\n "b": "\\u00e9"} '
    ((_, arguments),) = answer_of(updates(CALL[: CALL.index("{")] + text, options_of()))[2]
    assert arguments == text
    assert json.loads(arguments) == {"a": 1, "b": "é"}


def test_arguments_that_are_nested_too_deeply_are_a_failed_call() -> None:
    arguments = '{"a": ' + "[" * 2000
    answer = parse("harmony", [CALL[: CALL.index("{")] + arguments], {"f": {}})
    assert (answer.arguments, answer.failures) == ([arguments], 1)
