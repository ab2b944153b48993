"""Writes the grammar of an answer with tool calls, in llguidance's dialect of Lark.

The JSON schemas of the arguments are compiled beside the Lark grammar, which refers to them by
name.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from minisgl.core import InvalidRequest


class WrittenGrammar(msgspec.Struct, frozen=True):
    """A Lark grammar with the schemas that it names.

    trigger: the output is free up to this token, and the grammar describes the output after it. -1:
    the grammar describes the whole output.
    """

    lark: str
    schemas: Mapping[str, Any]
    trigger: int


class GrammarWriter:
    """Collects the rules of one grammar and the schemas that it refers to.

    token_ids: the markers that are one token of the vocabulary.
    """

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self.schemas: dict[str, Any] = {}
        self._token_ids = token_ids

    def text(self, text: str) -> str:
        """An expression for this text; "" for none. A marker is written as its token."""
        if text in self._token_ids:
            return f"<[{self._token_ids[text]}]>"
        return json.dumps(text) if text else ""

    def schema(self, schema: Any) -> str:
        """An expression for a JSON value that follows this schema."""
        name = f"arguments_{len(self.schemas)}"
        self.schemas[name] = schema
        return f"@{name}"

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name. options: such as [lazy]."""
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def written(self, body: str, trigger: int = -1) -> WrittenGrammar:
        """Return the grammar whose start rule has this body."""
        return WrittenGrammar("\n".join([f"start: {body}", *self.rules]), self.schemas, trigger)


class ToolGrammar(msgspec.Struct, frozen=True):
    """The tools, the number of calls and the free part of an answer.

    format     name of the call format.
    tools      each tool that may be called, with the schema of its arguments.
    must_call  the answer is at least one call, and nothing else.
    parallel   the answer may have more than one call.
    answer     schema of an answer without calls; None: any text.
    """

    format: str
    tools: list[tuple[str, dict[str, Any]]]
    must_call: bool
    parallel: bool
    answer: dict[str, Any] | bool | None = None


def properties_of(schema: Mapping[str, Any]) -> Sequence[tuple[str, dict[str, Any], bool]]:
    """Return (name, schema, is_required) of each parameter. `$defs` are copied to each schema.

    Raises InvalidRequest if `properties` is no object or `required` is no list.
    """
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    for key, value, kind in (("properties", properties, dict), ("required", required, list)):
        if not isinstance(value, kind):
            name = "an object" if kind is dict else "an array"
            raise InvalidRequest(f"/{key}: must be {name}")
    return [
        (name, {**shared, **part} if isinstance(part, dict) else part, name in required)
        for name, part in properties.items()
    ]
