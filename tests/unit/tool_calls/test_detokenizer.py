"""Tool calls in the detokenizer: special tokens, reasoning, stop strings, log-probabilities."""

import json
from typing import Any

import msgspec
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

THINK, THINK_END, CALLS, ARGS, EOS = range(256, 261)
ADDED = ["<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "</s>"]
TABLE = [*(bytes([byte]) for byte in range(256)), *(text.encode() for text in ADDED)]
VOCABULARY = Vocabulary(TABLE, frozenset({CALLS, ARGS, EOS}), (THINK, THINK_END))
MISTRAL = ToolOptions(format="mistral-v11", parameters={"f": {}})
HERMES = ToolOptions(format="hermes", parameters={"f": {}})
CALL = [CALLS, *b"f", ARGS, *b'{"a": "h\xc3\xa9"}']


def updates(
    tokens: list[int], options: TextOptions, steps: list[int] | None = None
) -> list[TextUpdate]:
    """The updates of one request whose tokens arrive in steps that end at these positions."""
    detokenizer = Detokenizer(VOCABULARY, ToolCallParsers(VOCABULARY))
    detokenizer.handle(StartText(uid=1, options=options))
    borders = sorted({*(steps if steps is not None else range(len(tokens))), len(tokens)})
    found: list[TextUpdate] = []
    begin = 0
    for number, end in enumerate(borders):
        part = tokens[begin:end]
        logprobs = [
            TokenLogprobs(uid=1, position=1, logprobs=[-1.0], top_ids=[[]], top_logprobs=[[]])
            for _ in part
        ]
        output = StepOutput(
            step_id=number,
            prefill_done=[PrefillDone(uid=1, prompt_tokens=1, cached_tokens=0)] * (number == 0),
            uids=[1] * len(part),
            token_ids=part,
            logprobs=logprobs,
            finished=[Finished(uid=1, reason=FinishReason.LENGTH)] * (end == len(tokens)),
        )
        answer = detokenizer.handle(output)
        found += answer.updates if answer is not None else []
        begin = end
    return found


def text_of(found: list[TextUpdate]) -> tuple[str, str, list[tuple[str, str]]]:
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


def answer_of(found: list[TextUpdate]) -> tuple[str, str, list[tuple[str, Any]]]:
    """The same, with the values of complete arguments."""
    reasoning, text, calls = text_of(found)
    return reasoning, text, [(name, json.loads(arguments)) for name, arguments in calls]


def test_special_markers_are_seen_although_the_text_skips_them() -> None:
    for skip in (True, False):
        options = TextOptions(tools=MISTRAL, skip_special_tokens=skip)
        found = updates([*b"Hm. ", *CALL, *CALL, *b" ok"], options)
        call = ("f", {"a": "hé"})
        assert answer_of(found) == ("", "Hm. ok", [call, call])
        assert sum(update.call_failures for update in found) == 0


def test_text_that_spells_a_special_marker_is_text() -> None:
    found = updates([*b'[TOOL_CALLS]f[ARGS]{"a": 1}'], TextOptions(tools=MISTRAL))
    assert answer_of(found) == ("", '[TOOL_CALLS]f[ARGS]{"a": 1}', [])


def test_a_special_marker_without_a_call_comes_back_as_text() -> None:
    found = updates([*b"a ", CALLS, *b" b"], TextOptions(tools=MISTRAL))
    assert answer_of(found) == ("", "a [TOOL_CALLS] b", [])
    assert sum(update.call_failures for update in found) == 1


def test_calls_follow_the_reasoning_and_are_not_searched_in_it() -> None:
    tokens = [THINK, *b"<tool_call> or", CALLS, THINK_END, *b"\n\n", *CALL]
    found = updates(tokens, TextOptions(tools=MISTRAL, reasoning=True))
    assert answer_of(found) == ("<tool_call> or", "", [("f", {"a": "hé"})])


def test_a_stop_string_ends_a_call() -> None:
    tokens = [*b'<tool_call>{"name": "f", "arguments": {"a": "one STOP two"}}</tool_call>']
    found = updates(tokens, TextOptions(tools=HERMES, stop=["STOP"]))
    parts = [part for update in found for part in update.calls]
    assert "".join(part.arguments for part in parts) == '{"a": "one '
    assert found[-1].finish is FinishReason.STOP
    assert found[-1].stopped
    assert sum(update.call_failures for update in found) == 1


def test_every_token_of_a_call_has_its_log_probability() -> None:
    found = updates([*b"Hm. ", *CALL], TextOptions(tools=MISTRAL))
    assert sum(len(update.logprobs) for update in found) == 4 + len(CALL)


@given(st.lists(st.integers(0, 60)))
def test_steps_of_any_size_give_the_same_answer(steps: list[int]) -> None:
    tokens = [*b"Hm.\n", *CALL, *b"\n", *CALL, *b"\nOk"]
    one_by_one = answer_of(updates(tokens, TextOptions(tools=MISTRAL)))
    assert answer_of(updates(tokens, TextOptions(tools=MISTRAL), steps)) == one_by_one
    assert one_by_one[1:] == ("Hm.\nOk", [("f", {"a": "hé"})] * 2)


@given(st.lists(st.sampled_from([THINK, THINK_END, CALLS, ARGS, EOS, *b"a \n{}\xc3\xa9"])))
def test_text_at_the_end_is_the_text_of_the_steps(tokens: list[int]) -> None:
    tokens = [*tokens, *CALL, *tokens]
    for tools, prompt_tail in ((MISTRAL, [THINK]), (HERMES, [0xC3]), (None, [])):
        options = TextOptions(prompt_tail=prompt_tail, tools=tools, reasoning=True, token_ids=True)
        stepwise = updates(tokens, options)
        (whole,) = updates(tokens, msgspec.structs.replace(options, at_end=True))
        assert text_of([whole]) == text_of(stepwise)
        assert whole.token_ids == tokens
        last = stepwise[-1]
        assert whole.completion_tokens == last.completion_tokens
        assert whole.reasoning_tokens == last.reasoning_tokens
