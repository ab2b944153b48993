"""Hostile grammars, which the bounded process accepts or refuses within its CPU time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import GrammarKind
from minisgl.demo import model_path
from minisgl.message.messages import CompileGrammar
from minisgl.structured.service import GrammarService
from minisgl.structured.source import GrammarCompiler

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}


def lists(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def patterns(count: int) -> dict[str, Any]:
    """By itself, this schema of 1.5 KB occupies llguidance for minutes and takes gigabytes."""
    return {"allOf": [{"type": "string", "pattern": f"a.{{{10 + i}}}"} for i in range(count)]}


def tree(depth: int) -> dict[str, Any]:
    """Each definition refers twice to the one before it: 2 ** depth paths."""
    names = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, depth)}
    return {"$ref": f"#/$defs/d{depth - 1}", "$defs": {"d0": {"type": "integer"}, **names}}


def chain(count: int) -> dict[str, Any]:
    """Each definition is a list of the one before it. llguidance recurses once for each."""
    names: dict[str, Any] = {"d0": {"type": "integer"}}
    for i in range(1, count):
        names[f"d{i}"] = {"type": "array", "items": {"$ref": f"#/$defs/d{i - 1}"}}
    return {"$ref": f"#/$defs/d{count - 1}", "$defs": names}


# Each grammar with the part of the refusal; None: it is enforced. The check of an enforced one
# takes a tenth of the CPU time that ends it, or less, because CPU time grows with the load.
HOSTILE: list[tuple[GrammarKind, Any, str | None]] = [
    ("json_schema", lists(300), "nest at most 64"),
    ("regex", "(a*)*b", None),
    ("json_schema", {"enum": [f"v{i}" for i in range(10**6)]}, ""),
    ("json_schema", {"enum": [{"k": i} for i in range(9_000)]}, "to compile"),
    ("choice", json.dumps([f"v{i}" for i in range(10**6)]), "at most 262144"),
    ("regex", ".{100000}", None),
    ("regex", "((a{1,100}){1,100}){1,100}", None),
    ("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text"),
    ("json_schema", {"$ref": "#/$defs/node", "$defs": {"node": NODE}}, None),
    ("regex", "(a|b)" * 2_500, None),
    ("regex", "(a|b)*a(a|b){30}", None),
    ("json_schema", patterns(30), "to compile"),
    ("json_schema", tree(30), None),
    ("json_schema", {"properties": {f"p{i}": True for i in range(9_000)}}, "to compile"),
    ("json_schema", {"type": "array", "minItems": 10**9}, None),
    ("json_schema", {"type": "string", "maxLength": 10**9}, None),
    ("grammar", "(" * 5_000, "neither valid Lark nor valid GBNF"),
    ("json_schema", {"minimum": 10**400}, "a number has more than 300 digits"),
    ("json_schema", {"default": -(10**400)}, "a number has more than 300 digits"),
    ("json_schema", '{"default": NaN}', "the schema is not JSON"),
    ("json_schema", chain(300), "refers too deeply"),
    ("grammar", "", "No 'root' rule found"),
    ("grammar", "root ::= b", "Rule 'b' not found"),
    ("grammar", 'root ::= "\\', "neither valid Lark nor valid GBNF"),
    ("grammar", 'root ::= "a"{\u00b2}', "neither valid Lark nor valid GBNF"),
    ("grammar", "start: " + "(" * 5_000 + '"a"' + ")" * 5_000, ""),
    ("grammar", "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000, "nested too deeply"),
    ("grammar", 'start: s\ns: s s s | "a" | ""', None),
]


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    service = GrammarService(str(model_path()), (7, 8))
    yield service
    service.close()


def request(kind: GrammarKind, value: Any) -> CompileGrammar:
    text = value if isinstance(value, str) else json.dumps(value)
    return CompileGrammar(uid=5, kind=kind, text=text)


@pytest.mark.parametrize(("kind", "value", "refusal"), HOSTILE)
def test_hostile_grammar_is_enforced_or_refused(
    service: GrammarService, kind: GrammarKind, value: Any, refusal: str | None
) -> None:
    result = service.compile(request(kind, value))
    if refusal is None:
        assert result.error is None
        assert result.grammar is not None
    else:
        assert result.error is not None
        assert refusal in result.error
    assert (result.uid, result.internal) == (5, False)
    assert service.compile(request("regex", "[0-9]+")).error is None, "the next grammar compiles"


def test_error_of_the_compiler_ends_only_its_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(GrammarCompiler, "check", lambda self, request: 1 // 0)
    broken = GrammarService(str(model_path()), (7, 8))
    for _ in range(2):
        result = broken.compile(request("regex", "a"))
        assert (result.error, result.internal) == ("the grammar could not be checked", True)
        assert "ZeroDivisionError" in caplog.text, "the log has the traceback"
    broken.close()


def test_result_has_the_ids_of_thinking(service: GrammarService) -> None:
    grammar = service.compile(request("regex", "a")).grammar
    assert grammar is not None
    assert (grammar.think_start, grammar.think_end) == (7, 8)


def test_model_without_a_usable_tokenizer_refuses_by_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    service = GrammarService(str(tmp_path), (7, 8))
    assert "does not support structured output" in str(service.compile(request("regex", "a")).error)
