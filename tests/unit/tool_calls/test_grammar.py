"""Grammars: a random answer that follows the grammar of a format is read as calls that validate."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from minisgl.core import InvalidRequest
from minisgl.demo import model_path
from minisgl.request.tools import TYPED_FORMATS
from minisgl.structured.library import load_tokenizer
from minisgl.tokenizer.tokenizer import load_vocabulary
from minisgl.tool_calls.formats import FORMATS, ToolGrammarWriter
from minisgl.tool_calls.grammar import ToolGrammar, WrittenGrammar
from tests.unit.tool_calls.answers import TEXT_FORMATS, parse

TEXT = {"type": "string", "maxLength": 4}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": TEXT,
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "unit": {"type": "string", "enum": ["C", "F"]},
            "exact": {"type": "boolean"},
            "at": {"type": "object", "properties": {"x": TEXT}, "additionalProperties": False},
        },
        "required": ["unit", "exact"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "sum": {
        "type": "object",
        "properties": {"values": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/N"}}},
        "required": ["values"],
        "additionalProperties": False,
        "$defs": {"N": {"type": "integer", "maximum": 9}},
    },
}
EOS = 0  # <|endoftext|> of the demo tokenizer
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo tokenizer without its tokens for calls, so that markers are text."""
    found = json.loads((model_path() / "tokenizer.json").read_text())
    found["added_tokens"] = [t for t in found["added_tokens"] if "tool_" not in t["content"]]
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(json.dumps(found))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> LLTokenizer:
    return load_tokenizer(str(folder), (EOS,))


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def write(name: str, token_ids: dict[str, int] | None = None, **request: Any) -> WrittenGrammar:
    values = {"must_call": True, "parallel": True, "tools": list(SCHEMAS.items()), **request}
    tool_grammar = ToolGrammar(format=name, **values)
    return FORMATS[name].write(tool_grammar, token_ids or {})


def matcher_of(tokenizer: LLTokenizer, written: WrittenGrammar) -> LLMatcher:
    options = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    schemas = [
        {"name": name, "json_schema": {**schema, "x-guidance": options}}
        for name, schema in written.schemas.items()
    ]
    source = json.dumps({"grammars": [{"lark_grammar": written.lark}, *schemas]})
    matcher = LLMatcher(tokenizer, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(tokenizer: LLTokenizer, written: WrittenGrammar, ids: list[int]) -> bool:
    matcher = matcher_of(tokenizer, written)
    return bool(matcher.consume_tokens(ids)) and matcher.is_accepting()


def random_answer(
    matcher: LLMatcher, vocabulary: tokenizers.Tokenizer, draws: random.Random
) -> str | None:
    """An answer whose tokens are drawn evenly from the permitted ones; None if it is too long."""
    matcher = matcher.deep_copy()
    ids: list[int] = []
    while len(ids) < MAX_TOKENS:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        assert not matcher.is_error(), matcher.get_error()
        if EOS in allowed and (len(allowed) == 1 or draws.random() < 0.5):
            return vocabulary.decode(ids, skip_special_tokens=False)
        token = int(draws.choice([i for i in allowed if i != EOS]))
        assert matcher.consume_token(token)
        ids.append(token)
    return None


def is_plain(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the bounds of strings, which raw texts cannot have."""
    properties = {
        key: {k: v for k, v in part.items() if k != "maxLength"}
        for key, part in schema["properties"].items()
    }
    return {**schema, "properties": properties}


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_random_answers_under_required_are_calls_that_validate(
    name: str, parallel: bool, tokenizer: LLTokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    matcher = matcher_of(tokenizer, write(name, parallel=parallel))
    draws = random.Random(0)
    complete = 0
    for _ in range(40):
        text = random_answer(matcher, vocabulary, draws)
        if text is None or "�" in text:  # too long, or bytes that are no character
            continue
        complete += 1
        answer = parse(name, [text], SCHEMAS)
        assert answer.names, text
        assert (answer.content, answer.failures) == ("", 0), text
        assert parallel or len(answer.names) == 1
        for called, arguments in answer.calls:
            schema = is_plain(SCHEMAS[called]) if name in TYPED_FORMATS else SCHEMAS[called]
            jsonschema.validate(arguments, schema)
    assert complete >= 10


CALLS = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3": '{"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "now", "arguments": {}}]',
    "mistral-v11": "[TOOL_CALLS]now[ARGS]{}",
    "qwen3-coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "glm": "<tool_call>now\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "gemma4": "<|tool_call>call:now{}<tool_call|>",
    "pythonic": "[now()]",
}


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_a_free_answer_may_be_text_or_a_valid_call(
    name: str, tokenizer: LLTokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    written = write(name, must_call=False)
    assert written.trigger == -1

    def accepted(text: str) -> bool:
        return accepts(tokenizer, written, vocabulary.encode(text, add_special_tokens=False).ids)

    assert accepted("Hello there.\n\n1 < 2")
    assert accepted("")
    assert accepted(CALLS[name])
    assert not accepted(CALLS[name].replace("now", "never"))
    if not FORMATS[name].bare:
        assert accepted("Let me see.\n" + CALLS[name])
        assert not accepted("Let me see.\n" + CALLS[name].replace("now", "never"))


@pytest.mark.parametrize(
    "name", ["gemma4", "glm", "hermes", "minimax", "mistral", "mistral-v11", "qwen3-coder"]
)
def test_a_start_that_is_one_token_triggers_the_grammar(
    name: str, tokenizer: LLTokenizer, vocabulary: tokenizers.Tokenizer
) -> None:
    start = FORMATS[name].starts[0]
    written = write(name, {start: 7}, must_call=False)
    assert written.trigger == 7
    rest = CALLS[name].removeprefix(start)
    ids = vocabulary.encode(rest, add_special_tokens=False).ids
    assert accepts(tokenizer, written, ids)
    required = write(name, {start: 7})
    assert required.trigger == -1
    assert accepts(tokenizer, required, [7, *ids])
    assert not accepts(tokenizer, required, ids)


def test_markers_that_are_tokens_are_written_as_tokens() -> None:
    """The demo tokenizer has a token for each marker of hermes, as that of Qwen3."""
    tokenizer = load_tokenizer(str(model_path()), (EOS,))
    vocabulary = tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))
    tokens = {marker: vocabulary.token_to_id(marker) for marker in ("<tool_call>", "</tool_call>")}
    ids = vocabulary.encode(CALLS["hermes"], add_special_tokens=False).ids
    assert (ids[0], ids[-1]) == tuple(tokens.values())
    assert accepts(tokenizer, write("hermes", tokens), ids)
    assert accepts(tokenizer, write("hermes", tokens, must_call=False), ids[1:])
    assert not accepts(tokenizer, write("hermes", tokens), ids[:-1])


@pytest.mark.parametrize("name", ["pythonic", "qwen3-coder"])
@pytest.mark.parametrize(
    "schema", [{"properties": [1]}, {"properties": None}, {"required": 5, "properties": {"a": {}}}]
)
def test_properties_and_required_of_a_wrong_type_are_refused(name: str, schema: Any) -> None:
    tools = ToolGrammar(format=name, tools=[("f", schema)], must_call=True, parallel=True)
    write_tools = ToolGrammarWriter(load_vocabulary(model_path()))
    with pytest.raises(InvalidRequest, match="must be an"):
        write_tools(msgspec.json.encode(tools).decode())


@pytest.mark.parametrize("values", [{"enum": [{}]}, {"enum": 5}, {"const": 1}])
def test_values_of_raw_text_must_be_strings(values: dict[str, Any]) -> None:
    schema = {"properties": {"a": {"type": "string", **values}}}
    tools = ToolGrammar(format="qwen3-coder", tools=[("f", schema)], must_call=True, parallel=True)
    with pytest.raises(InvalidRequest, match="only strings"):
        FORMATS["qwen3-coder"].write(tools, {})
