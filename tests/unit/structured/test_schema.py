"""The checks of a schema before llguidance reads it."""

import json
import re
from typing import Any

import pytest

from minisgl.core import InvalidRequest
from minisgl.structured.schema import MAX_ENUM_ENTRIES, check_regex, check_schema


def nested(levels: int) -> dict[str, Any]:
    """A schema of lists in lists. Each level is one nested object."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels - 1):
        schema = {"type": "array", "items": schema}
    return schema


def test_titles_and_descriptions_are_removed_only_where_they_are_keywords() -> None:
    schema = {
        "title": "T",
        "description": "D",
        "properties": {"title": {"type": "string", "$comment": "c"}, "description": True},
        "const": {"title": "kept", "description": ["kept"]},
        "enum": [{"title": "kept"}],
        "default": {"title": "kept"},
        "$defs": {"description": {"description": "D", "type": "null"}},
    }
    assert check_schema(json.dumps(schema)) == {
        "properties": {"title": {"type": "string"}, "description": True},
        "const": {"title": "kept", "description": ["kept"]},
        "enum": [{"title": "kept"}],
        "default": {"title": "kept"},
        "$defs": {"description": {"type": "null"}},
    }


def test_order_of_properties_is_kept() -> None:
    schema = {"properties": {"b": True, "a": True, "c": True}}
    assert list(check_schema(json.dumps(schema))["properties"]) == ["b", "a", "c"]


def test_neutral_unique_items_is_removed() -> None:
    assert check_schema('{"type":"array","uniqueItems":false}') == {"type": "array"}
    assert check_schema('{"type":"array","uniqueItems":true}')["uniqueItems"] is True


def test_true_is_a_schema() -> None:
    assert check_schema("true") == {}


def test_depth_limit() -> None:
    assert check_schema(json.dumps(nested(64))) == nested(64)
    with pytest.raises(InvalidRequest, match="nest at most 64") as caught:
        check_schema(json.dumps(nested(66)))
    assert caught.value.limit == "max_grammar_depth"


def test_enum_entries_count_over_the_whole_schema() -> None:
    half = {"enum": list(range(MAX_ENUM_ENTRIES // 2))}
    assert check_schema(json.dumps({"anyOf": [half, half]}))
    with pytest.raises(InvalidRequest, match="at most 10000 entries") as caught:
        check_schema(json.dumps({"anyOf": [half, half, {"enum": [1]}]}))
    assert caught.value.limit == "max_enum_entries"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([], "an object or true"),
        ({"x-guidance": {"lenient": True}}, "/x-guidance: is not supported"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "/$schema: drafts before"),
        (
            {
                "$schema": "http://json-schema.org/draft-04/schema#",
                "properties": {"a/b": {"if": 1}},
            },
            "/properties/a~1b/if: is not a keyword of the draft",
        ),
        (
            {"$schema": "https://json-schema.org/draft/2019-09/schema", "prefixItems": [True]},
            "/prefixItems: is not a keyword of the draft",
        ),
        ({"items": {"divisibleBy": 3}}, "/items/divisibleBy: is not a keyword"),
        ({"properties": {"a": {"const": 2**53 + 1}}}, "/properties/a/const: has a number"),
        ({"enum": [{"deep": [1e300]}]}, "/enum: has a number"),
        ({"maximum": 2**53 + 3}, "/maximum: needs more than 53 bits"),
        ({"minimum": 2**53 + 1}, "/minimum: needs more than 53 bits"),
        ({"minProperties": 2}, "/minProperties: must be at most 1 above"),
        ({"anyOf": [True, {"minProperties": 3, "required": ["a"]}]}, "/anyOf/1/minProperties:"),
        ({"items": {"pattern": "[a[b]]"}}, r"/items/pattern: has '[' inside of [...]"),
        ({"patternProperties": {"a++": True}}, "/patternProperties/a++: has the possessive"),
    ],
)
def test_refused_with_pointer(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"$schema": "http://json-schema.org/draft-07/schema#", "if": True, "contains": {}},
        {"properties": {"if": {"type": "string"}, "divisibleBy": {"type": "integer"}}},
        {"maximum": 2**63 - 1, "minimum": -(2**63)},
        {"maximum": 2**53 + 1},  # read as 2**53, which is a stricter bound
        {"minProperties": 2, "required": ["a"]},
        {"pattern": r"^[\[\]a-z&-]+$"},
        {"pattern": r"^[]a]\++$"},
        {"enum": [2**53, -1.5, "x", None]},
    ],
)
def test_kept(schema: dict[str, Any]) -> None:
    assert check_schema(json.dumps(schema)) == schema


@pytest.mark.parametrize(
    "pattern", ["[a&&b]", "[a--b]", "[a~~b]", "[[:alpha:]]", "a*+", "a?+", "a{2}+"]
)
def test_regex_syntax_of_rust_alone_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest):
        check_regex(pattern)


@pytest.mark.parametrize(
    "pattern", [r"[a\[b]", "a&&b--", r"\++", "[^]]x", "[*+]+", r"a\?+", "[]]+"]
)
def test_same_regex_syntax_in_all_languages(pattern: str) -> None:
    check_regex(pattern)
