"""Grammars of Harmony, whose markers are tokens: calls and final messages that validate."""

import random
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import tokenizers
from llguidance import LLTokenizer

from minisgl.demo import model_path
from minisgl.structured.library import load_tokenizer
from minisgl.tokenizer.vocab import Vocabulary
from minisgl.tool_calls.formats import FORMATS, ToolGrammarWriter
from minisgl.tool_calls.formats.harmony import MARKERS
from minisgl.tool_calls.grammar import ToolGrammar, WrittenGrammar
from tests.unit.tool_calls.answers import parse
from tests.unit.tool_calls.test_grammar import EOS, SCHEMAS, accepts, matcher_of, random_answer

ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
THOUGHT = "<|channel|>analysis<|message|>Hm {\n<|end|><|start|>assistant"
COMMENT = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo tokenizer with the markers as special tokens."""
    tokenizer = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    tokenizer.add_special_tokens(list(MARKERS))
    folder: Path = tmp_path_factory.mktemp("harmony")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> LLTokenizer:
    return load_tokenizer(str(folder), (EOS,))


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def write(vocabulary: tokenizers.Tokenizer, **request: Any) -> WrittenGrammar:
    values = {"must_call": True, "parallel": True, "tools": list(SCHEMAS.items()), **request}
    ids = {marker: vocabulary.token_to_id(marker) for marker in MARKERS}
    return FORMATS["harmony"].write(ToolGrammar(format="harmony", **values), ids)


class Accepts:
    def __init__(self, tokenizer: LLTokenizer, vocabulary: Any, written: WrittenGrammar) -> None:
        self.parts = tokenizer, vocabulary, written

    def __call__(self, text: str) -> bool:
        tokenizer, vocabulary, written = self.parts
        ids = vocabulary.encode(text, add_special_tokens=False).ids
        return accepts(tokenizer, written, ids)


def test_a_required_call_follows_free_reasoning(
    tokenizer: LLTokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    accepted = Accepts(tokenizer, vocabulary, write(vocabulary))
    for before in ("", THOUGHT, THOUGHT + COMMENT + THOUGHT):
        assert accepted(before + CALL)
        assert not accepted(before)
        assert not accepted(before + CALL.replace("now", "never"))
        assert not accepted(before + CALL.replace("{}", '{"a": 1}'))
        assert not accepted(before + "<|channel|>final<|message|>no")
    assert not accepted("no")


def test_a_final_message_follows_its_schema(
    tokenizer: LLTokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    final = '<|channel|>final<|message|>{"ok":true}'
    for tools in ([], list(SCHEMAS.items())):
        written = write(vocabulary, must_call=False, tools=tools, answer=ANSWER)
        accepted = Accepts(tokenizer, vocabulary, written)
        assert accepted(final)
        assert accepted(THOUGHT + final)
        assert not accepted(final.replace("true", "1"))
        assert not accepted('{"ok":true}')
        assert accepted(THOUGHT + CALL) == bool(tools)


def test_a_free_final_message_or_a_strict_call(
    tokenizer: LLTokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    accepted = Accepts(tokenizer, vocabulary, write(vocabulary, must_call=False))
    for text in ("Hello {", ""):
        assert accepted(THOUGHT + "<|channel|>final<|message|>" + text)
    assert accepted(COMMENT + CALL)
    assert not accepted(CALL.replace("{}", '{"a": 1}'))


def test_random_answers_under_required_are_calls_that_validate(
    tokenizer: LLTokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    matcher = matcher_of(tokenizer, write(vocabulary))
    start = vocabulary.encode(CALL[: CALL.index("now")], add_special_tokens=False).ids
    assert matcher.consume_tokens(start)
    draws = random.Random(0)
    complete = 0
    for _ in range(60):
        text = random_answer(matcher, vocabulary, draws)
        if text is None or "�" in text:
            continue
        complete += 1
        answer = parse("harmony", [CALL[: CALL.index("now")] + text], SCHEMAS)
        assert (answer.content, answer.failures, len(answer.names)) == ("", 0, 1), text
        for called, arguments in answer.calls:
            jsonschema.validate(arguments, SCHEMAS[called])
    assert complete >= 15


def test_markers_of_the_vocabulary_are_written_as_tokens(folder: Path) -> None:
    vocabulary = Vocabulary.of(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    wanted = ToolGrammar(format="harmony", tools=[], must_call=False, parallel=True, answer=ANSWER)
    text = msgspec.json.encode(wanted).decode()
    written = ToolGrammarWriter(vocabulary)(text)
    assert written.trigger == -1
    assert not any(marker in written.lark for marker in MARKERS)
    assert written.lark.count("<[") == 6
