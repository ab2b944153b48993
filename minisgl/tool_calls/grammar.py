"""Writes the grammar of an answer with tool calls, in llguidance's dialect of Lark.

The JSON schemas of the arguments are compiled beside the Lark grammar, which refers to them by
name.
"""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import msgspec

from minisgl.tool_calls.schema import ParameterTypes, parameter_types, properties_of


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
    tools: the schema of the arguments of each tool, by its name.
    """

    def __init__(
        self, token_ids: Mapping[str, int], tools: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self.rules: list[str] = []
        self.schemas: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # by the identity of the schema
        self._token_ids = token_ids
        self._tools = tools

    @cached_property
    def types(self) -> ParameterTypes:
        """The types of the parameters, as the parser of the answer knows them."""
        return parameter_types(self._tools)

    def text(self, text: str) -> str:
        """An expression for this text; "" for none. A marker is written as its token."""
        if text in self._token_ids:
            return f"<[{self._token_ids[text]}]>"
        return json.dumps(text) if text else ""

    def schema(self, schema: Any) -> str:
        """An expression for a JSON value that follows this schema. An object is written once."""
        name = self._names.setdefault(id(schema), f"arguments_{len(self.schemas)}")
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


def listed_parameters(
    writer: GrammarWriter,
    schema: Mapping[str, Any],
    separator: str,
    write: Callable[[str, Any], str],
) -> str:
    """Return the expression of the parameters of a call in schema order, with text between them.

    An optional parameter may be left out. write: returns the expression of a parameter from its
    name and its schema.
    """
    # Rules for the last parameters: `after_another` if another parameter stands before them,
    # `first` if none does.
    after_another = first = '""'
    for key, part, is_required in reversed(properties_of(schema)):
        written = write(key, part)
        with_it = f"{written} {after_another}"
        first = writer.rule(with_it if is_required else f"{with_it} | {first}")
        optional = "" if is_required else "?"
        between = writer.text(separator)
        after_another = writer.rule(f"( {between} {written} ){optional} {after_another}")
    return first
