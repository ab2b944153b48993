"""Writes the grammar of an answer with tool calls, in llguidance's dialect of Lark.

A format describes its calls as a `CallGrammar`. The JSON schemas of the arguments are compiled
beside the Lark grammar, which refers to them by name.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec


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


# Writes the expression of a call to the tool with this name and this schema of its arguments.
WriteCall = Callable[[GrammarWriter, str, Mapping[str, Any]], str]


class CallGrammar(NamedTuple):
    """The texts around and between the calls of a format.

    call       a call without the texts around it.
    start      the marker before each call, or before the list of calls; "": none.
    opening    text between `start` and the first call of a list.
    separator  text between two calls. Without is_list, it stands between `end` and `start`.
    end        text after each call, or after the list of calls.
    is_list    `start` and `end` stand around all calls, and not around each of them.
    """

    call: WriteCall
    start: str = ""
    opening: str = ""
    separator: str = ""
    end: str = ""
    is_list: bool = False


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


class WrittenGrammar(NamedTuple):
    """A Lark grammar with the schemas that it names.

    trigger: the output is free up to this token, and the grammar describes the output after it. -1:
    the grammar describes the whole output.
    """

    lark: str
    schemas: Mapping[str, Any]
    trigger: int


def write_grammar(
    grammar: CallGrammar, bare: str, request: ToolGrammar, token_ids: Mapping[str, int]
) -> WrittenGrammar:
    """Write the grammar of an answer. bare, token_ids: as in Format and GrammarWriter."""
    writer = GrammarWriter(token_ids)
    call = writer.rule(
        " | ".join(f"( {grammar.call(writer, name, schema)} )" for name, schema in request.tools)
    )
    start, end = writer.text(grammar.start), writer.text(grammar.end)
    separator = writer.text(grammar.separator)
    if grammar.is_list:
        after_start = f"{writer.text(grammar.opening)} {call}"
        further, last = f"{separator} {call}", end
    else:
        after_start, further, last = f"{call} {end}", f"{separator} {start} {call} {end}", ""
    repeated = f"( {further} )*" if request.parallel else ""
    after_start = f"{after_start} {repeated} {last}"
    trigger = -1
    if request.must_call:
        body = f"{start} {after_start}"
    elif request.answer is not None:
        body = f"{start} {after_start} | {writer.schema(request.answer)}"
    elif grammar.start in token_ids:
        trigger, body = token_ids[grammar.start], after_start
    elif bare:
        body = f"{start} {after_start} | TEXT?"
        writer.rules.append(f"TEXT: /\\s*[^\\{bare}\\s](?s:.*)/")
    else:
        before = writer.rule(f"/(?s:.*)/ {start}", "[lazy]")
        body = f"{before} {after_start} | /(?s:.*)/"
    return WrittenGrammar("\n".join([f"start: {body}", *writer.rules]), writer.schemas, trigger)


def json_call(key: str, before: str = "", after: str = "") -> WriteCall:
    """A call that is written as {"name": ..., key: {...}} between two texts."""

    def write(writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
        head = writer.text(f'{before}{{"name": {json.dumps(name)}, "{key}": ')
        return f"{head} {writer.schema(schema)} {writer.text('}' + after)}"

    return write


def properties_of(schema: Mapping[str, Any]) -> Sequence[tuple[str, dict[str, Any], bool]]:
    """Return (name, schema, is_required) of each parameter. `$defs` are copied to each schema."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = schema.get("required", ())
    return [
        (name, {**shared, **part} if isinstance(part, dict) else part, name in required)
        for name, part in schema.get("properties", {}).items()
    ]
