"""The types and definitions of a tool's parameters: references, sharing, and bounded work."""

import json
from typing import Any

import msgspec
import pytest

from minisgl.demo import model_path
from minisgl.message.messages import CompileGrammar, GrammarResult
from minisgl.structured.service import GrammarService
from minisgl.tokenizer.tokenizer import load_vocabulary
from minisgl.tool_calls.formats import ToolGrammarWriter
from minisgl.tool_calls.grammar import ToolGrammar
from minisgl.tool_calls.schema import MAX_NODES, parameter_types, properties_of

TEXT, NUMBER = {"type": "string"}, {"type": "number"}


def types_of(part: Any, **root: Any) -> list[str] | None:
    return parameter_types({"f": {"properties": {"a": part}, **root}})["f"].get("a")


@pytest.mark.parametrize(
    ("part", "types"),
    [
        (TEXT, ["string"]),
        ({"type": ["null", "integer", 5]}, ["integer", "null"]),
        ({"enum": [1, "x", None, {}, True]}, ["boolean", "integer", "null", "object", "string"]),
        ({"const": False}, ["boolean"]),
        ({"anyOf": [{"$ref": "#/$defs/T"}, {"$ref": "#/$defs/T"}, NUMBER]}, ["number", "string"]),
        ({"oneOf": [TEXT, {}]}, None),
        ({"$ref": "#/$defs/none"}, None),
        ({"$ref": "#/$defs/again"}, None),
        (5, None),
    ],
)
def test_types_of_a_parameter(part: Any, types: list[str] | None) -> None:
    definitions = {"T": TEXT, "again": {"anyOf": [TEXT, {"$ref": "#/$defs/again"}]}}
    assert types_of(part, **{"$defs": definitions}) == types


@pytest.mark.parametrize("count", [8, 1000])
def test_references_to_itself_are_followed_once(count: int) -> None:
    """Regression: k references took k ** 8 steps, so 8 of them took 12 s."""
    assert types_of({"anyOf": [{"$ref": "#/properties/a"}] * count}) is None


def test_number_of_nodes_is_bounded_over_all_tools() -> None:
    tools = {f"f{i}": {"properties": {f"p{j}": TEXT for j in range(1000)}} for i in range(6)}
    found = parameter_types(tools)
    assert sum(map(len, found.values())) == MAX_NODES
    assert list(found) == list(tools), "the parser needs the names of all tools"
    assert types_of({"enum": ["x"] * MAX_NODES}) is None


def schemas_of(**schema: Any) -> list[Any]:
    return [parameter.schema for parameter in properties_of(schema)]


def test_parameter_has_the_definitions_that_it_refers_to() -> None:
    node = {"anyOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/node"}]}
    definitions = {"node": node, "leaf": TEXT, "a/b c": NUMBER, "other": {"enum": [0] * 1000}}
    tree, odd, plain = schemas_of(
        properties={
            "tree": {"items": {"$ref": "#/$defs/node"}},
            "odd": {"$ref": "#/$defs/a~1b%20c"},
            "plain": TEXT,
        },
        **{"$defs": definitions},
    )
    assert tree["$defs"] == {"leaf": TEXT, "node": node}
    assert odd["$defs"] == {"a/b c": NUMBER}
    assert plain == TEXT


@pytest.mark.parametrize("reference", ["#", "#anchor", "#/$defs/unknown", "other.json#/$defs/leaf"])
def test_reference_of_another_form_brings_all_definitions(reference: str) -> None:
    definitions = {"leaf": TEXT, "number": NUMBER}
    [found] = schemas_of(properties={"a": {"$ref": reference}}, definitions=definitions)
    assert found == {"definitions": definitions, "$ref": reference}


def test_equal_parameters_share_one_schema() -> None:
    shared = {"$ref": "#/$defs/leaf"}
    first, second = schemas_of(properties={"a": shared, "b": {**shared}}, **{"$defs": {"leaf": {}}})
    assert first is second


def compiled(service: GrammarService, format: str, schema: Any) -> GrammarResult:
    tools = ToolGrammar(format=format, tools=[("f", schema)], must_call=True, parallel=False)
    text = msgspec.json.encode(tools).decode()
    return service.compile(CompileGrammar(uid=1, kind="tool_calls", text=text))


@pytest.fixture(scope="module")
def service() -> Any:
    vocabulary = load_vocabulary(model_path())
    service = GrammarService(str(model_path()), (-1, -1), ToolGrammarWriter(vocabulary))
    yield service
    service.close()


@pytest.mark.parametrize("format", ["pythonic", "qwen3-coder", "hermes"])
def test_definitions_are_written_where_they_are_needed(
    service: GrammarService, format: str
) -> None:
    """Each parameter had a copy of all definitions, and this tool was refused as too large."""
    definitions = {f"d{i}": {"enum": [i, f"{i}" * 1000]} for i in range(40)}
    properties = {f"p{i}": {"$ref": f"#/$defs/d{i}"} for i in range(40)}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    result = compiled(service, format, schema)
    assert result.error is None
    assert len(result.grammar.source) < 2 * len(json.dumps(schema))


@pytest.mark.parametrize("format", ["pythonic", "qwen3-coder"])
@pytest.mark.parametrize("size", [10, 1000])
def test_quadratic_definitions_are_refused_within_the_bounds(
    service: GrammarService, format: str, size: int
) -> None:
    """Regression: a body of 247 KB took 1.6 GB, outside of the bounded process."""
    definitions = {f"d{i}": {"enum": [f"{i}" + "x" * (200_000 // size)]} for i in range(size)}
    every = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions]}
    properties = {f"p{i}": {"anyOf": [every, {"const": i}]} for i in range(1000)}
    result = compiled(service, format, {"properties": properties, "$defs": definitions})
    assert result.limit in ("max_grammar_chars", "max_grammar_seconds")
    small = compiled(service, format, {"properties": {"a": TEXT}})
    assert small.error is None


def test_tool_that_refers_to_itself_is_checked_within_the_bounds(service: GrammarService) -> None:
    again = {"anyOf": [{"$ref": "#/properties/a"}] * 40}
    result = compiled(service, "qwen3-coder", {"properties": {"a": again}})
    assert not result.internal
    assert compiled(service, "qwen3-coder", {"properties": {"a": TEXT}}).error is None
