"""The texts that each kind of constraint allows, and the reasons for each refusal."""

import json
import re
from typing import Any

import pytest
from llguidance import LLTokenizer

from minisgl.core import GrammarKind, InvalidRequest
from minisgl.message.messages import CompileGrammar
from minisgl.structured import source
from minisgl.structured.source import GrammarCompiler
from minisgl.structured.whitespace import is_json_whitespace, whitespace_pattern
from tests.unit.structured.matching import follows

LIST = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
            "required": ["value"],
            "additionalProperties": False,
        }
    },
}


def of_schema(schema: Any, whitespace: int = 8) -> CompileGrammar:
    return CompileGrammar(
        kind="json_schema",
        text=json.dumps(schema),
        whitespace_pattern=whitespace_pattern(whitespace),
    )


def check(
    tokenizer: LLTokenizer,
    compiler: GrammarCompiler,
    request: CompileGrammar,
    right: list[str],
    wrong: list[str],
) -> None:
    checked = compiler.check(request).source
    assert {text: follows(tokenizer, checked, text) for text in (*right, *wrong)} == {
        **dict.fromkeys(right, True),
        **dict.fromkeys(wrong, False),
    }


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("regex", "[0-9]{4}-[a-c]+", ["2026-abc"], ["2026-", "2026-d", " 2026-a"]),
        ("regex", "(a*)*b", ["b", "aaab"], ["a", "ba"]),
        ("choice", '["yes","no","y\\"\\\\e"]', ["yes", "no", 'y"\\e'], ["y", "yesno", '"yes"']),
        ("grammar", 'start: "x" /[0-9]+/ "y"', ["x1y", "x22y"], ["xy", "1"]),
        ("grammar", 'root ::= "a" num+\nnum ::= [0-9]', ["a1", "a12"], ["a", "1"]),
        ("json_object", '{"type":"object"}', ['{"a":[1]}', "{}"], ["[]", "1", '"a"']),
    ],
)
def test_kinds(
    tokenizer: LLTokenizer,
    compiler: GrammarCompiler,
    kind: GrammarKind,
    text: str,
    right: list[str],
    wrong: list[str],
) -> None:
    check(tokenizer, compiler, CompileGrammar(kind=kind, text=text), right, wrong)


def test_recursive_schema_is_enforced(tokenizer: LLTokenizer, compiler: GrammarCompiler) -> None:
    right = ['{"value":1}', '{"value":1,"next":{"value":2,"next":{"value":3}}}']
    wrong = ['{"next":{"value":1}}', '{"value":1,"next":{"value":"x"}}', '{"value":1,"next":{}}']
    check(tokenizer, compiler, of_schema(LIST), right, wrong)


@pytest.mark.parametrize(
    "further", [{}, {"pattern": "^20"}, {"allOf": [{"minLength": 9}]}], ids=str
)
def test_a_date_time_is_one_that_libraries_read(
    tokenizer: LLTokenizer, compiler: GrammarCompiler, further: dict[str, Any]
) -> None:
    """Models once wrote a second with hundreds of digits, and lower-case letters."""
    schema = {"type": "string", "format": "date-time", **further}
    begin = "2026-11-27T15:04:05"
    right = [f'"{begin}{end}"' for end in ("Z", "+01:00", ".5Z", ".123456789Z", ".25-08:30")]
    wrong = [
        f'"{begin}{end}"' for end in ("", "z", ".Z", ".1234567890Z", ".1", ".1234567890+01:00")
    ]
    wrong += [json.dumps(begin.replace("T", "t") + "Z"), '"2026-11-27 15:04:05Z"']
    check(tokenizer, compiler, of_schema(schema), right, wrong)


def test_white_space_is_bounded(tokenizer: LLTokenizer, compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    eight = '{"a":' + " " * 8 + "1}"
    nine = '{"a":' + " " * 9 + "1}"
    check(tokenizer, compiler, of_schema(schema), ['{"a":1}', eight, '{\n\t"a": 1 }'], [nine])
    check(tokenizer, compiler, of_schema(schema, 0), ['{"a":1}'], ['{"a": 1}', eight])


def test_escaped_key_does_not_evade_the_schema_of_a_property(
    tokenizer: LLTokenizer, compiler: GrammarCompiler
) -> None:
    """llguidance by itself accepts a known key that is written with an escape as another key."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wrong = ['{"\\u0061": "x"}', '{"a": "x"}', '{"b": 1, "\\u0061": "x"}']
    check(tokenizer, compiler, of_schema(schema), ['{"a":1}', '{"b":"\\n"}'], wrong)


@pytest.mark.parametrize(
    ("schema", "pointer", "reason"),
    [
        (
            {"properties": {"a": {"uniqueItems": True}}},
            "/properties/a/uniqueItems",
            "Unimplemented",
        ),
        ({"not": {}}, "/not", "Unimplemented keys"),
        ({"anyOf": [True, {"format": "isbn", "type": "string"}]}, "/anyOf/1/format", "isbn"),
        (
            {"$defs": {"a": {"pattern": "(?=x)", "type": "string"}}, "$ref": "#/$defs/a"},
            "/$defs/a/pattern",
            "look-around",
        ),
        ({"items": {"oneOf": [{"type": "number"}, {"type": "integer"}]}}, "/items/oneOf", "oneOf"),
        ({"properties": {"a": {"type": "int"}}}, "/properties/a/type", "Invalid type"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "", "no text matches"),
        (False, "", "must be an object or true"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "", ""),
    ],
)
def test_refused_schema_names_pointer_and_reason(
    compiler: GrammarCompiler, schema: Any, pointer: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiler.check(of_schema(schema))
    message = caught.value.message
    assert message.startswith(pointer), message
    assert reason in message
    assert "coerce" not in message


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a(?=b)"),
        ("regex", "(unclosed"),
        ("grammar", "start: missing"),
        ("grammar", "no grammar at all"),
        ("grammar", 'root ::= "unclosed'),
        ("json_schema", "{"),
    ],
)
def test_faulty_text_is_refused(compiler: GrammarCompiler, kind: GrammarKind, text: str) -> None:
    with pytest.raises(InvalidRequest):
        compiler.check(CompileGrammar(kind=kind, text=text))


@pytest.mark.parametrize("kind", [MemoryError, RecursionError])
def test_a_limit_of_the_process_is_no_fault_of_the_grammar(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    """Regression: a lack of memory gave an invalid grammar without a reason."""

    def exceed(text: str) -> str:
        raise kind

    monkeypatch.setattr(source, "any_to_lark", exceed)
    with pytest.raises(kind):
        compiler.check(CompileGrammar(kind="grammar", text='start: "a"'))


def test_text_over_the_limit_is_refused(compiler: GrammarCompiler) -> None:
    schema = {"description": "x" * 300_000, "type": "integer"}
    assert compiler.check(of_schema(schema))
    long = {"properties": {"x" * 300_000: True}}
    for request in (of_schema(long), CompileGrammar(kind="regex", text="a" * 300_000)):
        with pytest.raises(InvalidRequest, match="at most 262144") as caught:
            compiler.check(request)
        assert caught.value.limit == "max_grammar_chars"


@pytest.mark.parametrize("pattern", [" ?", "[ \\n]{0,4}", r"[\x20\x0A]*", r"( |\t)+", "\n"])
def test_patterns_of_white_space(pattern: str) -> None:
    assert is_json_whitespace(pattern)
    assert re.fullmatch(pattern, " ") or re.fullmatch(pattern, "\n")


@pytest.mark.parametrize(
    "pattern", ["x", r"\s", ".", "[^a]", r"\x21", "[ -~]", "{", " {2}1", " " * 300]
)
def test_patterns_that_may_match_other_text(pattern: str) -> None:
    assert not is_json_whitespace(pattern)
