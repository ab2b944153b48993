"""Reads the constraint on the output from the parameters of a body.

Clients of OpenAI, vLLM and SGLang name the same constraint differently. All names become one
`CompileGrammar` for the process that compiles grammars.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from minisgl.core import GrammarKind, Unsupported
from minisgl.message.messages import CompileGrammar
from minisgl.protocol import requests
from minisgl.request.decode import reject
from minisgl.request.paths import Paths
from minisgl.structured.whitespace import is_json_whitespace, whitespace_pattern

# Limit of a constraint with its titles and descriptions. The worker removes these texts and then
# checks a lower limit.
_MAX_CHARS = 2**20

_TOP_LEVEL = ("regex", "ebnf", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
_Found = tuple[str, GrammarKind, Any]  # parameter, kind, value


class ConstraintRequest(NamedTuple):
    """The constraint of a body. param: the parameter that holds it."""

    param: str
    message: CompileGrammar


def constraint_of(
    body: requests.GenerationBody, max_whitespace: int, paths: Paths
) -> ConstraintRequest | None:
    """The constraint of this body, or None if its output is free.

    max_whitespace: the largest number of white-space characters between two tokens of JSON, for a
    body without whitespace_pattern. paths: the names of the parameters in errors.
    Raises InvalidRequest, or Unsupported for a structural tag.
    """
    top_level = _named(body, "", *_TOP_LEVEL)
    found = [*_response_format(body, paths), *_structured_outputs(body), *top_level]
    if not found:
        return None
    name, kind, value = found[0]
    param = paths[name]
    if len(found) > 1:
        raise reject(paths[found[1][0]], f"cannot be combined with {param}; set one of them")
    if kind == "json_schema" and isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError):
            raise reject(param, "must be a JSON schema") from None
    text = msgspec.json.encode(value).decode() if not isinstance(value, str) else value
    if len(text) > _MAX_CHARS:
        raise reject(param, f"must have at most {_MAX_CHARS} characters", "max_grammar_chars")
    pattern = _whitespace(body.structured_outputs, max_whitespace)
    message = CompileGrammar(kind=kind, text=text, whitespace_pattern=pattern)
    return ConstraintRequest(param, message)


def _response_format(body: requests.GenerationBody, paths: Paths) -> Iterator[_Found]:
    given, param = body.response_format, "response_format"
    if given is None or given.type == "text":
        return
    if given.type == "structural_tag":
        message = f"{paths[param]} of type structural_tag is not supported"
        raise Unsupported(message, param=paths[param])
    if given.type == "json_object":
        yield param, "json_object", {"type": "object"}
    elif given.type != "json_schema":
        raise reject(paths[f"{param}.type"], "must be one of text, json_object, json_schema")
    elif given.json_schema is None:
        raise reject(paths[f"{param}.json_schema"], "is required with type json_schema")
    else:
        yield f"{param}.json_schema.schema", "json_schema", given.json_schema.schema


def _structured_outputs(body: requests.GenerationBody) -> Iterator[_Found]:
    given, param = body.structured_outputs, "structured_outputs"
    if given is None:
        return
    if given.structural_tag is not None:
        name = f"{param}.structural_tag"
        raise Unsupported(f"{name} is not supported", param=name)
    found = list(_named(given, f"{param}.", "json", "regex", "choice", "grammar"))
    if given.json_object:
        found.append((f"{param}.json_object", "json_object", {"type": "object"}))
    if not found:
        raise reject(param, "must have one of json, regex, choice, grammar, json_object")
    yield from found


def _named(given: requests.RequestBody, prefix: str, *names: str) -> Iterator[_Found]:
    """Yield the parameters of `given` with these names.

    The part of the name after the last _ gives the kind: json, regex or choice. Every other name
    is a grammar.
    """
    kinds: dict[str, GrammarKind] = {"json": "json_schema", "regex": "regex", "choice": "choice"}
    for name in names:
        if (value := getattr(given, name)) is not None:
            yield prefix + name, kinds.get(name.rpartition("_")[2], "grammar"), value


def _whitespace(given: requests.StructuredOutputs | None, max_whitespace: int) -> str:
    if given is None or not (given.whitespace_pattern or given.disable_any_whitespace):
        return whitespace_pattern(max_whitespace)
    if given.whitespace_pattern is None:
        return ""
    param = "structured_outputs.whitespace_pattern"
    if given.disable_any_whitespace:
        raise reject(param, "cannot be combined with disable_any_whitespace")
    if not is_json_whitespace(given.whitespace_pattern):
        raise reject(param, r"must be a regex of blanks, \t, \n and \r")
    return given.whitespace_pattern
