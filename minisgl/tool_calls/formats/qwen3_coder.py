"""Qwen3-Coder, Qwen3.5 and later: <tool_call><function=f><parameter=k>v</parameter>...

A value is raw text between two newlines. The tool's schema gives the JSON type of the value.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from minisgl.tool_calls.grammar import CallGrammar, GrammarWriter, properties_of
from minisgl.tool_calls.parser import Calls, Format
from minisgl.tool_calls.reader import NotACall, Reader, Steps, inside_quotes
from minisgl.tool_calls.schema import property_types

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>]*")
_KEY = re.compile(r"[^\n>]*")
_MAX_SPACE = 8  # between the end of a value and the next tag
# The end of a value: </parameter> before <parameter= or </function>. A </parameter> before other
# text belongs to the value.
_VALUE_END = re.compile(
    rf"\n?{_PARAMETER_END}(?=\s{{0,{_MAX_SPACE}}}(?:{_PARAMETER}|{_FUNCTION_END}))"
)
_LAST_VALUE_END = re.compile(rf"{_VALUE_END.pattern}|\n?{_PARAMETER_END}\s*\Z")
_END_CHARS = 1 + len(_PARAMETER_END) + _MAX_SPACE + len(_PARAMETER)  # The longest _VALUE_END.
_MAY_END = re.compile(r"[\n<]")
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}


def _read(reader: Reader, calls: Calls, start: str) -> Steps[None]:
    if start == _START:
        yield from reader.space()
        yield from reader.expect(_FUNCTION)
    name = yield from reader.run(_NAME)
    yield from reader.expect(">")
    yield from reader.space()
    has_parameter = yield from reader.literal(_PARAMETER)
    if not has_parameter:
        yield from reader.expect(_FUNCTION_END)
    calls.start(name)
    schema = calls.parameters.get(name)
    before = "{"
    while has_parameter:
        key = yield from reader.run(_KEY)
        yield from reader.expect(">")
        calls.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        yield from _read_value(reader, calls, property_types(schema, key))
        yield from reader.space()
        has_parameter = yield from reader.literal(_PARAMETER)
    if before != "{":
        calls.arguments("}")
    calls.end()
    yield from reader.literal(_FUNCTION_END)
    reader.commit()
    yield from reader.space()
    if (yield from reader.literal(_END)):
        reader.commit()


def _read_value(reader: Reader, calls: Calls, types: frozenset[str]) -> Steps[None]:
    """Read a value up to its end tag. Passes on a string in pieces, other values as a whole."""
    yield from reader.literal("\n")
    if types == {"string"}:
        calls.arguments('"')
        yield from _read_text(reader, lambda text: calls.arguments(inside_quotes(text)))
        calls.arguments('"')
    else:
        parts: list[str] = []
        yield from _read_text(reader, parts.append)
        calls.arguments(to_json("".join(parts), types))


def _read_text(reader: Reader, take: Callable[[str], None]) -> Steps[None]:
    """Pass the text before the end of a value to `take` in pieces."""
    while text := (yield from reader.text()):
        found = (_LAST_VALUE_END if reader.ended else _VALUE_END).search(text)
        certain = len(text) if reader.ended else _certain(text)
        if found is not None:
            take(text[: found.start()])
            reader.skip(found.end())
            return
        reader.skip(certain)
        take(text[:certain])
        if not certain:
            yield
    raise NotACall


def _certain(text: str) -> int:
    """The length of the beginning of `text` that cannot belong to the end tag of this value."""
    for found in _MAY_END.finditer(text, max(len(text) - _END_CHARS, 0)):
        if _is_partial_end(text[found.start() :].removeprefix("\n")):
            return found.start()
    return len(text)


def _is_partial_end(text: str) -> bool:
    if len(text) <= len(_PARAMETER_END):
        return _PARAMETER_END.startswith(text)
    after = text.removeprefix(_PARAMETER_END)
    if after == text:
        return False
    tag = after.lstrip()
    return len(after) - len(tag) <= _MAX_SPACE and (
        _PARAMETER.startswith(tag) or _FUNCTION_END.startswith(tag)
    )


def to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value whose schema allows more than strings.

    types: the JSON types that the schema allows; an empty set allows any type.
    Templates write constants as Python does (True, None). Other text becomes a string.
    """
    plain = text.strip()
    constant = _CONSTANTS.get(plain.lower(), "")
    constant_type = "null" if constant == "null" else "boolean"
    if constant and (not types or constant_type in types):
        return constant
    if "string" not in types:
        try:
            msgspec.json.decode(plain)
        except (msgspec.MsgspecError, RecursionError):
            pass
        else:
            return plain
    return json.dumps(text, ensure_ascii=False)


def _write_call(writer: GrammarWriter, name: str, schema: Mapping[str, Any]) -> str:
    """Write the parameters in schema order. The text of a string is free up to its end tag."""
    parts = [writer.text(f"\n{_FUNCTION}{name}>\n")]
    for key, part, is_required in properties_of(schema):
        head, tail = writer.text(f"{_PARAMETER}{key}>\n"), writer.text(f"\n{_PARAMETER_END}\n")
        if property_types(schema, key) == {"string"}:
            choices = part.get("enum", [part["const"]] if "const" in part else [])
            if choices:
                value = f"( {' | '.join(writer.text(choice) for choice in choices)} ) {tail}"
            else:
                value = writer.rule(f"/(?s:.*)/ {tail}", "[lazy]")
        else:
            value = f"{writer.schema(part)} {tail}"
        parts.append(f"( {head} {value} ){'' if is_required else '?'}")
    return " ".join([*parts, writer.text(f"{_FUNCTION_END}\n")])


QWEN3_CODER = Format(
    name="qwen3-coder",
    starts=(_START, _FUNCTION),
    markers=(_START, _END),
    read=_read,
    probe=_FUNCTION,
    grammar=CallGrammar(start=_START, call=_write_call, separator="\n", end=_END),
)
