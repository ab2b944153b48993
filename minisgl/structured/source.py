"""Turns the grammar of a request into llguidance's serialised form, and checks that it compiles."""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import llguidance
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from minisgl.core import Grammar, GrammarKind, InvalidRequest
from minisgl.message.messages import CompileGrammar
from minisgl.structured.library import open_matcher
from minisgl.structured.schema import MAX_CHARS, check_regex, check_schema, children, refusal

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# The escapes of strings in the output. The list lacks \u, because \u could spell a key of
# `properties` in a second way, and llguidance would not enforce the schema of that key's value.
_ESCAPES = 'nrbtf\\"'
_SEARCHED_CHARS = 2**17  # of the schemas that are compiled to find the pointer of a fault
_MAX_REASON_CHARS = 500
# The beginnings of remarks that llguidance appends to its reasons.
_REMARKS = (" Enable 'coerce_one_of'", " while processing json-schema:")


class NamedSchemas(Protocol):
    """A Lark grammar that refers to JSON schemas by their names. trigger: as in core.Grammar."""

    @property
    def lark(self) -> str: ...

    @property
    def schemas(self) -> Mapping[str, Any]: ...

    @property
    def trigger(self) -> int: ...


WriteTools = Callable[[str], NamedSchemas]


class GrammarCompiler:
    """Checks the grammars of requests with the tokenizer of one model.

    GrammarCompiler(tokenizer).check(CompileGrammar(kind="regex", text="[0-9]{4}")).source

    write_tools: writes the grammar of a request of the kind tool_calls.
    think_ids: the ids that open and close thinking; -1: the model does not think.
    """

    def __init__(
        self,
        tokenizer: LLTokenizer,
        write_tools: WriteTools | None = None,
        think_ids: tuple[int, int] = (-1, -1),
    ) -> None:
        self._tokenizer = tokenizer
        self._think_start, self._think_end = think_ids
        self._write_tools = write_tools

    def check(self, request: CompileGrammar) -> Grammar:
        """Return the grammar in the form that the scheduler compiles, after a trial compilation.

        Raises InvalidRequest. Its message begins with the JSON pointer of the fault in a schema.
        """
        options = _json_options(request)
        schema, trigger = None, -1
        if request.kind in ("json_schema", "json_object"):
            schema = check_schema(request.text)
            text = json.dumps(schema, ensure_ascii=False)
            _check_chars(text, "the schema without titles and descriptions")
            source = LLMatcher.grammar_from_json_schema(text, overrides=options)
        elif request.kind == "tool_calls":
            assert self._write_tools is not None, "only a server compiles tool calls; this is a bug"
            written = self._write_tools(request.text)
            source, trigger = _with_schemas(written, options), written.trigger
            _check_chars(source, "the grammar of the tool calls")
        else:
            _check_chars(request.text, "the constraint")
            source = _plain_source(request)
        if error := self._error(source, request.kind):
            pointer = "" if schema is None else self._locate(schema, error, options)
            raise refusal(pointer, error)
        return Grammar(
            source=source,
            kind=request.kind,
            think_start=self._think_start,
            think_end=self._think_end,
            trigger=trigger,
        )

    def _error(self, source: str, kind: GrammarKind) -> str:
        """Return the reason why a grammar does not compile or has no first token, or ""."""
        matcher = open_matcher(self._tokenizer, source, kind)
        reason = " ".join(matcher.get_error().split())[:_MAX_REASON_CHARS]
        if reason.startswith("NoExtension"):
            return "no text matches this grammar"
        for remark in _REMARKS:
            reason = reason.partition(remark)[0]
        return reason or "; ".join(matcher.get_grammar_warnings())

    def _locate(self, schema: dict[str, Any], error: str, options: "JsonCompileOptions") -> str:
        """The pointer of the smallest part of the schema that has the same error by itself.

        The search compiles at most _SEARCHED_CHARS. Beyond that, the pointer is less exact.
        """
        shared = {key: schema[key] for key in ("$defs", "definitions", "$schema") if key in schema}
        left = _SEARCHED_CHARS

        def same(part: dict[str, Any]) -> bool:
            nonlocal left
            text = json.dumps({**shared, **part})
            left -= len(text)
            if left < 0:
                return False
            source = LLMatcher.grammar_from_json_schema(text, overrides=options)
            return self._error(source, "json_schema") == error

        pointer, part = "", schema
        while found := next((c for c in children(part) if same(c[1])), None):
            pointer, part = pointer + found[0], found[1]
        for key in part:
            if not same({k: v for k, v in part.items() if k != key}) and left >= 0:
                return f"{pointer}/{key}"
        return pointer


def _json_options(request: CompileGrammar) -> "JsonCompileOptions":
    """The options of llguidance's JSON compiler. They override the options in a schema."""
    options: JsonCompileOptions = {
        "coerce_one_of": False,
        "item_separator": ",",
        "json_allow_general_unicode_escapes": False,
        "json_allowed_escapes": _ESCAPES,
        "key_separator": ":",
        "lenient": False,
    }
    if request.whitespace_pattern:
        return {**options, "whitespace_pattern": request.whitespace_pattern}
    return {**options, "whitespace_flexible": False}


def _check_chars(text: str, name: str) -> None:
    if len(text) > MAX_CHARS:
        message = f"{name} has {len(text)} characters; at most {MAX_CHARS} are accepted"
        raise InvalidRequest(message, limit="max_grammar_chars")


def _with_schemas(written: NamedSchemas, options: "JsonCompileOptions") -> str:
    """Return the source of a Lark grammar and its schemas."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": written.lark}]
    for name, schema in written.schemas.items():
        checked = {**check_schema(json.dumps(schema)), "x-guidance": options}
        grammars.append({"name": name, "json_schema": checked})
    return json.dumps({"grammars": grammars})


def _plain_source(request: CompileGrammar) -> str:
    if request.kind == "regex":
        check_regex(request.text)
        return LLMatcher.grammar_from_regex(request.text)
    if request.kind == "choice":
        return llguidance.grammar_from("choice", request.text)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(request.text))
    except (MemoryError, RecursionError):  # limits of this process; its errors name them
        raise
    except (IndexError, ValueError):
        reason = "an escape or a count is wrong"
    # The converter raises the class Exception for a rule that is missing.
    except Exception as error:  # noqa: BLE001
        reason = str(error)[:_MAX_REASON_CHARS]
    raise InvalidRequest(f"the grammar is neither valid Lark nor valid GBNF: {reason}")
