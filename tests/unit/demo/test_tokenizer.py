"""The shipped tokenizer and how samples are encoded for training."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from demo.batches import SHORT_ROW_TOKENS
from demo.generate import training_sample, with_system
from demo.lexicon import Lexicon
from demo.sample import Call, Draw, Exchange, Sample, Tool
from demo.tasks import TOOL_TASKS
from demo.template import TOOL_TOKENS
from demo.vocabulary import (
    SPECIAL_TOKENS,
    TURN_END,
    VOCABULARY_SIZE,
    Encoder,
    load_tokenizer,
    train_tokenizer,
)
from minisgl.demo import model_path
from minisgl.tokenizer.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def shipped() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(model_path())


@pytest.mark.parametrize(
    "text",
    ["hello", "  two  spaces\n\n", "12345 x 7", "Grüße 你好 🙂", "'stone' don't", '{"a": [1, 2]}'],
)
def test_text_survives_a_round_trip(shipped: PreTrainedTokenizerFast, text: str) -> None:
    ids = shipped(text).input_ids
    assert shipped.decode(ids) == text
    assert max(ids) < VOCABULARY_SIZE


def test_nothing_is_put_before_a_text(shipped: PreTrainedTokenizerFast) -> None:
    assert shipped.bos_token is None
    assert shipped("a").input_ids == shipped("a", add_special_tokens=False).input_ids
    assert shipped.eos_token == TURN_END


def test_special_tokens_are_single_ids(shipped: PreTrainedTokenizerFast) -> None:
    for token in SPECIAL_TOKENS:
        assert shipped(token).input_ids == [shipped.convert_tokens_to_ids(token)]


def test_digits_stand_alone(shipped: PreTrainedTokenizerFast) -> None:
    assert shipped.tokenize("4821") == ["4", "8", "2", "1"]


def test_tool_tokens_are_single_ids_that_a_decoder_keeps(shipped: PreTrainedTokenizerFast) -> None:
    for token in TOOL_TOKENS:
        ids = shipped(token).input_ids
        assert ids == [shipped.convert_tokens_to_ids(token)]
        assert shipped.decode(ids, skip_special_tokens=True) == token


@pytest.mark.parametrize("task", [None, *TOOL_TASKS])
def test_training_and_chat_template_agree(
    shipped: PreTrainedTokenizerFast, task: str | None
) -> None:
    """transformers and minisgl render and encode a prompt as the training does."""
    rng, lexicon, encoder = random.Random(1), Lexicon(), Encoder(load_tokenizer())
    served = TextTokenizer(model_path())
    compared = 0
    while compared < 100:
        if task is None:
            sample = training_sample(rng, lexicon)
        else:
            sample = with_system(rng, TOOL_TASKS[task](Draw(rng, lexicon, held_out=False)))
        if any(exchange.by_letter for exchange in sample.exchanges):
            continue
        tools = sample.schemas() or None
        prompt = shipped.apply_chat_template(
            sample.messages(), tools=tools, add_generation_prompt=True, tokenize=False
        )
        calls = "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in sample.calls
        )
        ids = shipped(prompt + (calls or sample.answer) + TURN_END).input_ids
        assert ids == encoder.encode(sample)[0]
        prompt_ids = served.encode_chat(sample.messages(), {"tools": tools})
        assert prompt_ids == ids[: len(prompt_ids)]
        compared += 1


def test_a_chat_without_tools_is_plain_chatml(shipped: PreTrainedTokenizerFast) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b "},
        {"role": "user", "content": "c"},
    ]
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat)
    no_tools: tuple[list[Any] | None, ...] = (None, [])
    for tools in no_tools:
        text = shipped.apply_chat_template(chat, tools=tools, tokenize=False)
        assert text == expected
        assert (
            TextTokenizer(model_path()).render_chat(
                chat, {"tools": tools, "add_generation_prompt": False}
            )
            == expected
        )


def test_tools_of_any_schema_and_several_results_are_rendered() -> None:
    function = {
        "name": 'say "é"',
        "parameters": {
            "type": "object",
            "properties": {
                "items": {"type": "array", "items": {"type": "string"}},
                "either": {"type": ["string", "null"]},
                "free": {"description": "no type"},
            },
        },
    }
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": function},
        {"type": "function", "name": "flat"},
    ]
    call = {"type": "function", "id": "0", "function": {"name": "flat", "arguments": {"a": "é"}}}
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Well.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "0", "content": "1"},
        {"role": "tool", "tool_call_id": "0", "content": "2"},
    ]
    text = TextTokenizer(model_path()).render_chat(chat, {"tools": tools})
    rendered = '<tool_call>\n{"name": "flat", "arguments": {"a": "é"}}\n</tool_call>'
    assert text.startswith(
        "<|im_start|>system\nBe brief.\n\n# Tools\n\n<tools>\n"
        '{"name": "say \\"é\\"", "parameters": '
        '{"items": "array", "either": ["string", "null"], "free": "any"}}\n'
        '{"name": "flat", "parameters": {}}\n</tools>\n\n'
    )
    assert text.endswith(
        "<|im_start|>user\na<|im_end|>\n"
        f"<|im_start|>assistant\nWell.\n{rendered}\n{rendered}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    theirs = PreTrainedTokenizerFast.from_pretrained(model_path()).apply_chat_template(
        chat, tools=tools, tokenize=False, add_generation_prompt=True
    )
    assert text == theirs


def test_tool_conversations_fit_a_row_of_the_training() -> None:
    rng, lexicon, encoder = random.Random(2), Lexicon(), Encoder(load_tokenizer())
    draw = Draw(rng, lexicon, held_out=False)
    for generator in TOOL_TASKS.values():
        lengths = [len(encoder.encode(generator(draw))[0]) for _ in range(300)]
        assert sum(length <= SHORT_ROW_TOKENS for length in lengths) >= 295


def test_calls_and_answers_of_a_tool_round_are_produced() -> None:
    tokenizer = load_tokenizer()
    exchange = Exchange(
        "Add 1 and 2.", "The result is 3.", calls=(Call("add", {"a": 1, "b": 2}),), results=("3",)
    )
    tool = Tool("add", "Add two numbers.", {"a": "integer", "b": "integer"})
    sample = Sample("tool-result", (exchange,), frozenset(), tools=(tool,))
    ids, produced = Encoder(tokenizer).encode(sample)
    answers = [i for i, is_answer in zip(ids, produced, strict=True) if is_answer]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    text = tokenizer.decode(answers, skip_special_tokens=False)
    assert text == f"{call}{TURN_END}The result is 3.{TURN_END}"


def test_only_answers_and_their_end_are_produced() -> None:
    tokenizer = load_tokenizer()
    exchanges = (Exchange("Spell cat", "c-a-t"), Exchange("Reverse cat", "tac", by_letter=True))
    sample = Sample("spelling", exchanges, frozenset(), system="Be brief.")
    ids, produced = Encoder(tokenizer).encode(sample)
    answers = [i for i, is_answer in zip(ids, produced, strict=True) if is_answer]
    text = tokenizer.decode(answers, skip_special_tokens=False)
    assert text == f"c-a-t{TURN_END}tac{TURN_END}"
    assert [tokenizer.id_to_token(i) for i in answers[-4:]] == ["t", "a", "c", TURN_END]


@pytest.mark.proof
def test_the_shipped_tokenizer_is_the_trained_one() -> None:
    assert train_tokenizer().to_str() == load_tokenizer().to_str()
